"""Loading a policy and its tokenizer, with one clear line for whatever is wrong with them."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import get_session, snapshot_download, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from slipstream.config import DEVICE, NO_DEVICE, Config, ConfigError, LoraConfig, ModelConfig

ADAPTER = "adapter_config.json"
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
HUB_TIMEOUT_S = 5.0
AGAIN = "fetch or save the model again"
UNREADABLE = (  # what transformers raises for a configuration that makes no model
    TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError, StrictDataclassError,
)  # fmt: skip
STORED = {"BF16": torch.bfloat16, "F16": torch.float16}  # by the name that safetensors has for it


def dtype_name(config: Config) -> str:
    """The number format that both sides compute in: "auto" is bfloat16, but float32 if one of them is a CPU."""
    if config.model.dtype != "auto":
        return config.model.dtype
    named = {device.partition(":")[0] for device in (config.generator.device, config.trainer.device)}
    on_gpus = torch.cuda.is_available() and "cpu" not in named
    return "bfloat16" if on_gpus or config.sync.link == "single_copy" else "float32"  # which is for GPUs alone


def dtype_of(config: Config) -> torch.dtype:
    """That number format, in which weights are published, too."""
    dtype: torch.dtype = getattr(torch, dtype_name(config))
    return dtype


def load_model(model: ModelConfig, lora: LoraConfig, *, device: torch.device, dtype: torch.dtype) -> Any:
    """The causal language model at `model.path`, with fresh adapters if `lora.rank` is set. Raises `ConfigError`."""
    if lora.rank and lora.base == "4bit":
        loaded = load_causal_lm(model.path, device=device, dtype=dtype, **_four_bits(device, dtype))
    else:
        loaded = load_causal_lm(model.path, device=device, dtype=dtype)
    if lora.rank == 0:
        return loaded
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    targets: Any = lora.targets or "all-linear"
    experts = expert_parameters(loaded)
    if experts and not lora.targets:  # where peft counts experts and routers as linear layers, too
        head = loaded.get_output_embeddings()
        targets = [name for name, m in loaded.named_modules() if isinstance(m, nn.Linear) and m is not head]
    if lora.experts and not experts:
        raise ConfigError("lora.experts = true, but the model has no experts that can be adapted; set it to false")
    try:
        return get_peft_model(
            loaded,
            PeftLora(
                r=lora.rank, lora_alpha=lora.alpha, target_modules=targets,
                target_parameters=experts if lora.experts else [],
                task_type="CAUSAL_LM",
            ),
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"lora.targets = {lora.targets}: {_first_line(error)}") from None


def _four_bits(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """How to load weights as 4-bit NormalFloats that are computed with in `dtype` (QLoRA, Dettmers et al. 2023,
    arXiv:2305.14314). Raises `ConfigError` without bitsandbytes."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError('lora.base = "4bit" needs bitsandbytes: pip install bitsandbytes')
    from transformers import BitsAndBytesConfig

    kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": kind, "device_map": {"": device}}


def load_causal_lm(
    path: str, *, device: torch.device, dtype: torch.dtype, option: str = "model.path", **options: Any
) -> Any:
    """A model by local directory (an adapter's directory included) or name on the Hub. Raises `ConfigError`."""
    from transformers import AutoModelForCausalLM

    return load_pretrained(AutoModelForCausalLM, path, device=device, dtype=dtype, option=option, **options)


def load_pretrained(
    kind: Any, path: str, *, device: torch.device, dtype: torch.dtype, option: str, **options: Any
) -> Any:
    """The model at `path` as transformers' class `kind` loads it, with every tensor from the files.

    Raises `ConfigError`, also for missing, unexpected and misshapen tensors and values that are not finite.
    """
    _quiet()
    check_path(path, option)
    adapter = adapter_at(path)
    base = adapter["base_model_name_or_path"] if adapter else path
    with naming_damage(path, option):
        # Misshapen tensors are let through, so that `_refuse_other_tensors` names them.
        model, found = kind.from_pretrained(
            base, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        _refuse_other_tensors(found)
        if adapter:
            _refuse_other_tensors(model.load_adapter(path).to_dict())
        model = model if "device_map" in options else model.to(device)
        if name := first_not_finite(model.state_dict()):
            raise ValueError(f"{name} holds values that are not finite; {AGAIN}")
    return model


@contextmanager
def naming_damage(path: str, option: str) -> Iterator[None]:
    """Raise `ConfigError` for what transformers raises while it reads the files at `path`, which `option` names."""
    try:
        yield
    except ConfigError:
        raise
    except SafetensorError as error:
        raise ConfigError(f"{option} = {path!r} has damaged files ({error}); fetch or save them again") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} = {path!r}: {_first_line(error)}") from None
    except UNREADABLE as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"{option} = {path!r} is no model by its config.json: {type(error).__name__}: {said}"
        ) from None
    except RuntimeError as error:
        if not (names := _unconverted(error)):
            raise
        raise ConfigError(
            f"{option} = {path!r}: {_some(names)} can't be made of the files, which lack or misshape its tensors; "
            f"{AGAIN}"
        ) from None


def _refuse_other_tensors(found: Mapping[str, Any]) -> None:
    """Raise `ValueError` that names the tensors by which files and model differ, as transformers found them."""
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"the files lack {_some(missing)}, which its configuration asks for; fetch or save the model again"
        )
    if misshapen := sorted(found["mismatched_keys"]):
        name, stored, asked = misshapen[0]
        more = f" (and {len(misshapen) - 1} more)" if misshapen[1:] else ""
        raise ValueError(f"{name}{more} is {list(stored)} in the files and {list(asked)} by its configuration; {AGAIN}")
    if unexpected := sorted(found["unexpected_keys"]):
        raise ValueError(f"the files hold {_some(unexpected)}, which its configuration has no place for; {AGAIN}")


def _unconverted(error: RuntimeError) -> list[str]:
    """Parameters that transformers could not make of the tensors in the files; only its log names them."""
    step = error.__traceback__
    while "above report" in str(error) and step:
        if info := step.tb_frame.f_locals.get("loading_info"):
            return sorted(getattr(info, "conversion_errors", ())) or ["parameters"]
        step = step.tb_next
    return []


def _some(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more tensors" if names[1:] else "")


@torch.no_grad()
def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with a value that is not finite, or None.

    Each tensor is read once, and a device is waited for once. Formats of 8 bits and less are left out.
    """
    floats = {n: t for n, t in tensors.items() if t.is_floating_point() and t.element_size() > 1 and t.numel()}
    named = {t.data_ptr(): (n, t) for n, t in reversed(floats.items())}  # tied weights once, by their first name
    if not named:
        return None
    # Both extremes of a tensor with a NaN are NaN.
    finite = torch.stack([torch.stack(t.aminmax()).double() for _, t in named.values()]).isfinite().all(1).tolist()
    return next((name for (name, _), fine in zip(named.values(), finite, strict=True) if not fine), None)


def stored_dtype(path: str) -> torch.dtype:
    """The format that all weights of a model are stored in, or float32 unless it is one of 16 bits.

    Loaded in that format they stay in their files, which all processes of a host map, until they are used.
    """
    try:
        folder = Path(path)
        if not folder.is_dir():
            folder = Path(snapshot_download(path, allow_patterns=[*WEIGHTS]))
        names: set[str] = set()
        for file in (file for pattern in WEIGHTS for file in folder.glob(pattern)):
            with safe_open(file, "pt") as tensors:
                names |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, ValueError, SafetensorError):  # loading the model will say what is wrong
        return torch.float32
    return STORED.get(names.pop(), torch.float32) if len(names) == 1 else torch.float32


def load_tokenizer(path: str) -> Any:
    """The tokenizer that belongs to the model at `path`. Raises `ConfigError`."""
    from transformers import AutoTokenizer

    _quiet()
    check_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path = {path!r}: no tokenizer can be loaded: {_first_line(error)}") from None
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):  # what transformers makes of no files
        raise ConfigError(
            f"model.path = {path!r} has no tokenizer files (tokenizer.json); save the model's tokenizer there, too"
        )
    _refuse_other_tokenizer(tokenizer, path)
    return tokenizer


def _refuse_other_tokenizer(tokenizer: Any, path: str) -> None:
    """Raise `ConfigError` for a tokenizer with more tokens than the model at `path` has; added ones are not counted,
    since Gemma's has one for images where the model reads none."""
    if (size := model_sizes(path).get("vocab_size")) and tokenizer.vocab_size > size:
        raise ConfigError(
            f"model.path = {path!r}: the tokenizer has {tokenizer.vocab_size} tokens and the model {size}; save the "
            "model's own tokenizer there"
        )


def check_path(path: str, option: str = "model.path") -> None:
    """Refuse what can be neither a local model nor a Hub name, before anything heavy is imported."""
    local = Path(path)
    if local.is_dir():
        if not (local / "config.json").exists() and not (local / ADAPTER).exists():
            raise ConfigError(f"{option} = {path!r} has no config.json; give a directory that a model was saved to")
    elif local.exists():
        raise ConfigError(f"{option} = {path!r} is a file; give the directory that the model was saved to")
    elif path.startswith(("/", "./", "../", "~")) or path.count("/") != 1:
        raise ConfigError(f"{option} = {path!r}: no such directory, and not a Hub name (owner/name)")
    elif local.parent.is_dir():
        raise ConfigError(
            f"{option} = {path!r}: no such directory in {str(local.parent)!r}, which is here; make it first"
        )
    elif not (HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(path, "config.json"), str) or _hub_answers()):
        raise ConfigError(
            f"{option} = {path!r}: no such directory, and {ENDPOINT} can't be reached to look for a model of this "
            "name; give a local directory, or connect this host"
        )


@cache
def _hub_answers() -> bool:
    """Whether the Hub can be reached; transformers would try for more than a minute."""
    answered: list[int] = []

    def ask() -> None:
        with suppress(Exception):  # of which class depends on the release of huggingface_hub
            answered.append(get_session().head(ENDPOINT, timeout=HUB_TIMEOUT_S).status_code)

    asking = threading.Thread(target=ask, daemon=True)  # a timeout does not bound the search for an address
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return bool(answered)


def refuse_adapter(path: str) -> None:
    """Raise `ConfigError` for an adapter where a whole model has to be: training begins with adapters of its own."""
    if adapter := adapter_at(path):
        raise ConfigError(
            f"model.path = {path!r} is an adapter of {adapter.get('base_model_name_or_path')!r}; merge it into that "
            "(peft's merge_and_unload) and give the directory of the merged model"
        )


def adapter_at(path: str) -> dict[str, Any]:
    """How the adapter in a directory is configured that holds no model itself; empty for any other place."""
    file = Path(path) / ADAPTER
    if not file.exists() or (Path(path) / "config.json").exists():
        return {}
    adapter: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return adapter


def pick_device(option: str, name: str) -> torch.device:
    """The device that `auto` means here, or the one named by the option `name`. Raises `ConfigError`."""
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not DEVICE.fullmatch(option):
        raise ConfigError(f'{name} = "{option}": {NO_DEVICE}')
    device = torch.device(option)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f'{name} = "{option}", but there are {torch.cuda.device_count()} GPUs here; try "auto"')
    return device


def device_here() -> torch.device:
    """What a process computes on: the one GPU that it was given to see, or, under `torchrun`, that of its rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def end_of_sequence(*configs: Any) -> frozenset[int]:
    """The ids that end a completion, by the first of these configurations (generation's, the model's) that says so."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def generation_config(path: str) -> Any:
    """The generation configuration beside a model, or None."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def causal_lm(model: Any) -> Any:
    """The Hugging Face model below adapters, if there are any."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: Any) -> Any:
    """What reads text, below adapters and the head, beside what sees images."""
    whole = causal_lm(model)
    found = whole.get_decoder()
    return whole.model if found is whole else found  # Llama 4's says that it is its own


class Heads(NamedTuple):
    """Of attention: how many queries have, how many keys and values, and the size of each; none where there is none."""

    queries: int
    keys: int
    size: int


def heads_of(config: Any) -> Heads:
    """The heads of the model with this configuration, of the part that reads text."""
    text = config.get_text_config()
    if not (queries := getattr(text, "num_attention_heads", 0)):
        return Heads(0, 0, 0)
    keys = getattr(text, "num_key_value_heads", None) or queries
    return Heads(queries, keys, getattr(text, "head_dim", None) or text.hidden_size // queries)


def layers_of(model: nn.Module) -> list[Any]:
    """The decoder layers of a Hugging Face model, adapted or not."""
    names = set(causal_lm(model)._no_split_modules or ())
    # By what a layer is a kind of: FSDP gives it a class of its own.
    return [module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training changes, by name: every weight, or the adapters alone. Tied weights appear once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def routers_of(model: nn.Module) -> dict[str, Any]:
    """The routers of a mixture of experts by name, in the order of layers.

    Each takes tokens `[.., size]`, has a `weight` `[experts, size]` and returns logits `[tokens, experts]`, the weights
    of the chosen experts and the chosen experts, both `[tokens, experts per token]`.
    """
    return {name: m for name, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter")}


def expert_parameters(model: nn.Module) -> list[str]:
    """Names of the weights of experts, which are one tensor `[experts, .., ..]` for all of a layer."""
    return [name for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name]


def has_experts(path: str) -> bool:
    """Whether the model at `path`, or below the adapters there, is a mixture of experts."""
    config = _config_at(path)
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return any((count or 0) > 1 for count in counts)


def context_of(config: Config) -> int:
    """Tokens that prompt and completion share; 0 if neither the run nor the model bounds them."""
    known = config.generator.context, longest_context(config.model.path)
    return min((limit for limit in known if limit), default=0)


def model_type(path: str) -> str:
    """The type of the model at `path`, or below the adapters there; "" if its configuration is not on this host."""
    return getattr(_config_at(path, local_files_only=True), "model_type", "")


def model_sizes(path: str) -> dict[str, int | None]:
    """`sizes_of` the model at `path`, or below the adapters there; nothing where it can't be read."""
    return sizes_of(config) if (config := _config_at(path)) else {}


def longest_context(path: str) -> int:
    """Tokens that the model at `path` can attend to; 0 if its files don't say."""
    return getattr(_config_at(path), "max_position_embeddings", 0) or 0


def sizes_of(config: Any) -> dict[str, int | None]:
    """In what models differ whose parameters have other shapes; of the part that reads and draws text."""
    text = config.get_text_config()
    return {name: getattr(text, name, None) for name in SIZES}


def _config_at(path: str, **options: Any) -> Any:
    """What the model's files say of the part that reads and draws text. None if they don't: loading it will say why."""
    from transformers import AutoConfig

    if adapter := adapter_at(path):
        path = adapter["base_model_name_or_path"]
    try:
        return AutoConfig.from_pretrained(path, **options).get_text_config()
    except (OSError, ValueError, *UNREADABLE):
        return None


def save_policy(model: Any, trained: dict[str, torch.Tensor], path: Path) -> None:
    """The model as `from_pretrained` (or PEFT) loads it, with these values for what is trained."""
    state = dict(trained)
    if not hasattr(model, "get_base_model"):
        first = {id(p): name for name, p in model.named_parameters()}
        tied = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        for name, tensor in model.state_dict().items():
            state[name] = state[tied[name]] if name in tied else tensor.cpu()
    model.save_pretrained(path, state_dict=state)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _quiet() -> None:
    """Keep the libraries' progress bars and advice off a terminal that shows a run."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for library in ("transformers", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)

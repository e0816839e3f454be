"""Loads models, and reports damaged or incomplete files as one `ConfigError` that says what to do."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from slipstream.config.adapter import ADAPTER_WEIGHTS, CANT_TRAIN
from slipstream.config.algorithm import PolicyConfig
from slipstream.config.schema import ConfigError, LoraConfig, ModelConfig
from slipstream.config.toml import to_toml
from slipstream.model.images import reads_images
from slipstream.model.inspection import (
    INVALID_CONFIG,
    adapter_name,
    expert_parameters,
    first_not_finite,
    has_tied_head,
    model_config,
    text_decoder,
)
from slipstream.model.paths import AGAIN, adapter_config, base_of_adapter, check_path, safetensors_files

WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors")
VISION_TOWER = r".*\bvisual\b.*"  # modules of models that read images
HALF_DTYPES = {torch.bfloat16, torch.float16}
# transformers accepts misshapen tensors, so that `_validate_loaded_tensors` names them.
COMPARED: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": False}
BAD_PICKLE = "its pytorch_model.bin is damaged, or holds more than tensors; fetch it again, or save it as safetensors"


def load_model(
    model: ModelConfig, lora: LoraConfig, *, device: torch.device, dtype: torch.dtype,
    policies: Sequence[PolicyConfig] = (),
) -> Any:  # fmt: skip
    """The causal language model at `model.path`, with adapters if `lora.rank` is set: new ones, or those at
    `lora.path`. With `policies`, an adapter for each, new or trained, all trainable. Raises `ConfigError`."""
    options = _nf4_options(device, dtype) if lora.rank and lora.quantization == "4bit" else {}
    loaded = load_causal_lm(model.path, device=device, dtype=dtype, **({} if device.type == "meta" else options))
    if reads_images(loaded.config):
        freeze_vision_tower(loaded)
    return add_adapters(loaded, lora, policies) if lora.rank else loaded


def freeze_vision_tower(model: Any) -> None:
    """Train only the text decoder and the head: engines then encode an image once for all versions."""
    trained = {id(p) for part in (text_decoder(model), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def add_adapters(loaded: Any, lora: LoraConfig, policies: Sequence[PolicyConfig] = ()) -> Any:
    """`loaded` with the adapters of `load_model`. Raises `ConfigError`."""
    experts = expert_parameters(loaded)
    if lora.experts and not experts:
        raise ConfigError("lora.experts = true, but the model has no experts that can be adapted; set it to false")
    from peft import LoraConfig as PeftLora

    adapters = PeftLora(
        r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.use_rslora, lora_dropout=lora.dropout, bias=lora.bias,
        target_modules=_adapted_modules(loaded, lora), task_type="CAUSAL_LM",
        target_parameters=experts if lora.experts else [],
        exclude_modules=VISION_TOWER if reads_images(loaded.config) else None,
    )  # fmt: skip
    adapted = _insert_adapters(loaded, adapters, lora)
    if lora.path:
        load_adapter(adapted, lora.path)
    if policies:
        _name_adapters(adapted, adapters, policies)
    return adapted


def _adapted_modules(loaded: Any, lora: LoraConfig) -> Any:
    """`target_modules` of PEFT: names, a pattern, or "all-linear"."""
    targets: Any = lora.target_pattern or lora.targets or "all-linear"
    if targets == "all-linear" and (expert_parameters(loaded) or loaded._is_stateful):
        # PEFT would count experts and routers as linear layers, and refuses layers that Mamba's kernels read.
        linear = _linear_layers(loaded)
        targets = [name for name in linear if not (loaded._is_stateful and name.endswith(".out_proj"))]
    return targets


def _linear_layers(loaded: Any) -> list[str]:
    """Names of the linear layers, without the head."""
    head = loaded.get_output_embeddings()
    return [name for name, module in loaded.named_modules() if isinstance(module, nn.Linear) and module is not head]


def describe_targets(lora: LoraConfig) -> str:
    """The option that names the modules to adapt, with its value, and the trained adapter that sets it."""
    source = f" of the adapter at lora.path = {lora.path!r}" if lora.path else ""
    pattern = lora.target_pattern
    return (f"lora.target_pattern = {pattern!r}" if pattern else f"lora.targets = {lora.targets}") + source


def _insert_adapters(loaded: Any, adapters: Any, lora: LoraConfig) -> Any:
    """`loaded` with PEFT's `adapters`. Raises `ConfigError` for targets that can't be adapted."""
    from peft import get_peft_model

    chosen, linear = describe_targets(lora), _linear_layers(loaded)
    head, embedding, tied = loaded.get_output_embeddings(), loaded.get_input_embeddings(), has_tied_head(loaded)
    try:
        with warnings.catch_warnings(action="ignore"):  # of a tied head, which is refused below
            adapted = get_peft_model(loaded, adapters)
    except (ValueError, re.error) as error:
        adaptable = {name.rpartition(".")[2] for name in linear if not re.fullmatch(VISION_TOWER, name)}
        why, names = first_line(error).removesuffix("."), ", ".join(sorted(adaptable))
        raise ConfigError(f"{chosen}: {why}. Linear layers are {names}") from None
    if not lora.experts and any(".base_layer" in name for name in expert_parameters(loaded)):
        raise ConfigError(f"{chosen} adapts experts; set lora.experts = true for all of them, or name other modules")
    if loaded.get_output_embeddings() is not head:
        raise ConfigError(
            f"{chosen} adapts the language-model head, which can't be trained by adapters; name other modules, or "
            "leave it out to adapt every linear layer but the head"
        )
    if tied and loaded.get_input_embeddings() is not embedding:
        raise ConfigError(
            f"{chosen} adapts the embedding, whose weight is the language-model head's, too (tie_word_embeddings), "
            "which can't be trained by adapters; name other modules"
        )
    trained = (name for name, parameter in adapted.named_parameters() if parameter.requires_grad)
    if lora.bias != "none" and all(".lora_" in name for name in trained):
        raise ConfigError(f'lora.bias = "{lora.bias}", but this model has no such biases; set it to "none"')
    return adapted


def _name_adapters(model: Any, adapters: Any, policies: Sequence[PolicyConfig]) -> None:
    """Replace the adapter of `model` by one for each policy, by PEFT's configuration `adapters`. All are trainable."""
    for index, policy in enumerate(policies):
        model.add_adapter(adapter_name(policy.name), adapters)
        if policy.adapter:
            load_adapter(model, policy.adapter, f"policies.{index}.adapter", adapter_name(policy.name))
    with warnings.catch_warnings(action="ignore"):  # of another adapter that is active then
        model.delete_adapter("default")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def load_adapter(model: Any, path: str, option: str = "lora.path", name: str = "default") -> None:
    """Load the PEFT directory `path` into the adapter `name` of `model`. Errors name the configuration's `option`.

    A model on the meta device is only compared with the files. Raises `ConfigError` for damaged files, for missing,
    unexpected and misshapen tensors, and for values that are not finite.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    with explain_damaged_files(path, option):
        stored = load_file(Path(path) / ADAPTER_WEIGHTS)
        own = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        shapes = {n: (n, stored[n].shape, own[n].shape) for n in stored.keys() & own.keys()}
        adapter = adapter_config(path)
        base, excluded = adapter.get("base_model_name_or_path"), adapter.get("exclude_modules")
        if own.keys() - stored.keys() and excluded not in (None, VISION_TOWER):
            raise ConfigError(f"{option} = {path!r} has exclude_modules = {to_toml(excluded)}, {CANT_TRAIN}")
        _validate_loaded_tensors(
            {
                "missing_keys": own.keys() - stored.keys(),
                "unexpected_keys": stored.keys() - own.keys(),
                "mismatched_keys": [found for found in shapes.values() if found[1] != found[2]],
            },
            f"it is an adapter of {base!r}; train it over that model, or {AGAIN}" if base else AGAIN,
        )
        if wrong := first_not_finite(stored):
            raise ValueError(f"{wrong} holds values that are not finite; {AGAIN}")
    if not next(iter(own.values())).is_meta:
        set_peft_model_state_dict(model, stored, adapter_name=name)


def _nf4_options(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Options of `from_pretrained` for 4-bit NormalFloat weights, not quantized twice, computing in `dtype`.

    NormalFloat: Dettmers et al. 2023, arXiv:2305.14314. Raises `ConfigError` if bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError('lora.quantization = "4bit" needs bitsandbytes: pip install bitsandbytes')
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": quantization, "device_map": {"": device}}


def load_causal_lm(
    path: str, *, device: torch.device, dtype: torch.dtype, option: str = "model.path", **options: Any
) -> Any:
    """The causal language model at `path`: a directory (model or adapter), or a Hub name. Raises `ConfigError`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if reads_images(model_config(path)) else AutoModelForCausalLM
    return load_pretrained(kind, path, device=device, dtype=dtype, option=option, **options)


def load_pretrained(
    kind: Any, path: str, *, device: torch.device, dtype: torch.dtype, option: str, **options: Any
) -> Any:
    """The model at `path`, loaded by the transformers class `kind`; every tensor comes from the files.

    On the meta device as `_load_headers`. Raises `ConfigError`, naming `option`, also for missing, unexpected and
    misshapen tensors, and for values that are not finite.
    """
    silence_libraries()
    check_path(path, option)
    adapter = adapter_config(path)
    base = base_of_adapter(path, adapter) if adapter else path
    with explain_damaged_files(path, option):
        config, folder = _load_config(kind, base), Path(base)
        if folder.is_dir() and not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir()):
            raise ValueError(f"it has no weights (model.safetensors); {AGAIN}")
        if device.type == "meta":
            return _load_headers(kind, config, folder, option)
        model, loading_info = kind.from_pretrained(base, dtype=dtype, **COMPARED, **options)
        _validate_loaded_tensors(loading_info)
        if adapter:
            _validate_loaded_tensors(model.load_adapter(path).to_dict())
        model = model if "device_map" in options else model.to(device)
        if name := first_not_finite(model.state_dict()):
            raise ValueError(f"{name} holds values that are not finite; {AGAIN}")
    return model


def _load_headers(kind: Any, config: Any, folder: Path, option: str) -> Any:
    """The model of `config` on the meta device, compared with the headers of its safetensors files.

    Quantized weights, weights on a Hub, and adapters are not compared. Raises `ValueError`, naming a tensor.
    """
    from transformers.modeling_utils import load_state_dict

    device = torch.device("meta")
    headers: dict[str, torch.Tensor] = {}
    with device:
        model = kind.from_config(config, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is None:
        for file in filter(Path.exists, safetensors_files(folder, option)):
            headers |= load_state_dict(file, map_location=device.type)
    if headers:
        source = {"config": model.config, "state_dict": headers, "device_map": {"": device}}
        model, loading_info = type(model).from_pretrained(None, **source, **COMPARED)
        _validate_loaded_tensors(loading_info)
    return model


def _load_config(kind: Any, path: str) -> Any:
    """The configuration at `path` of a model that the transformers class `kind` loads. Raises `ValueError`."""
    from transformers import AutoConfig
    from transformers.quantizers import AutoHfQuantizer

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except ValueError as error:
        if "custom code" in str(error):
            remedy = "which Slipstream does not run; give a model of a type that transformers has"
            raise ValueError(f"its config.json names custom code (auto_map), {remedy}") from None
        raise
    if type(config) not in kind._model_mapping:
        found = f"{kind.__name__} can't load model_type = {config.model_type!r} of its config.json"
        raise ValueError(f"{found}; give a model with a decoder only")
    quantization = getattr(config, "quantization_config", None)
    known = isinstance(quantization, dict) and "quant_method" in quantization
    if quantization is not None and not (known and AutoHfQuantizer.supports_quant_method(quantization)):
        found = f"quantization_config = {json.dumps(quantization):.60} of its config.json names no quant_method"
        raise ValueError(f"{found} that transformers has; remove it if the weights are whole, or give another model")
    return config


@contextmanager
def explain_damaged_files(path: str, option: str) -> Iterator[None]:
    """Convert what transformers raises while it reads the files at `path` to a `ConfigError` that names `option`."""
    try:
        yield
    except ConfigError:
        raise
    except SafetensorError as error:
        raise ConfigError(f"{option} = {path!r} has damaged files ({error}); fetch or save them again") from None
    except (UnpicklingError, EOFError):
        raise ConfigError(f"{option} = {path!r}: {BAD_PICKLE}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} = {path!r}: {first_line(error)}") from None
    except INVALID_CONFIG as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{option} = {path!r} is no model by its config.json: {reason}") from None
    except RuntimeError as error:
        if "PytorchStreamReader" in str(error):
            raise ConfigError(f"{option} = {path!r}: {BAD_PICKLE}") from None
        if not (names := _unconverted_parameters(error)):
            raise
        raise ConfigError(
            f"{option} = {path!r}: {_first_and_count(names)} can't be made of the files, which lack or misshape its "
            f"tensors; {AGAIN}"
        ) from None


def _validate_loaded_tensors(loading_info: Mapping[str, Any], remedy: str = AGAIN) -> None:
    """Raise `ValueError`, naming a tensor and the remedy, if files and model differ by transformers' `loading_info`."""
    if missing := sorted(loading_info["missing_keys"]):
        raise ValueError(f"the files lack {_first_and_count(missing)}, which its configuration asks for; {remedy}")
    if misshapen := sorted(loading_info["mismatched_keys"]):
        name, stored, asked = misshapen[0]
        more = f" (and {len(misshapen) - 1} more)" if misshapen[1:] else ""
        found = f"{list(stored)} in the files and {list(asked)} by its configuration"
        raise ValueError(f"{name}{more} is {found}; {remedy}")
    if unexpected := sorted(loading_info["unexpected_keys"]):
        extra = _first_and_count(unexpected)
        raise ValueError(f"the files hold {extra}, which its configuration has no place for; {remedy}")


def _unconverted_parameters(error: RuntimeError) -> list[str]:
    """Names of the parameters that transformers could not convert from the files.

    The names are in no attribute of `error`: they are read from the frames of its traceback.
    """
    step = error.__traceback__
    while "above report" in str(error) and step:
        if info := step.tb_frame.f_locals.get("loading_info"):
            return sorted(getattr(info, "conversion_errors", ())) or ["parameters"]
        step = step.tb_next
    return []


def _first_and_count(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more tensors" if names[1:] else "")


def stored_dtype(path: str) -> torch.dtype:
    """The 16-bit dtype that all weights of the model at `path` are stored in, or float32.

    Weights that are loaded in their stored dtype are memory-mapped: all processes of a host share those pages.
    """
    from transformers.modeling_utils import load_state_dict

    try:
        folder = Path(path)
        if not folder.is_dir():
            folder = Path(snapshot_download(path, allow_patterns=[*WEIGHT_FILES]))
        files = (file for pattern in WEIGHT_FILES for file in folder.glob(pattern))
        dtypes = {tensor.dtype for file in files for tensor in load_state_dict(file, map_location="meta").values()}
    except (OSError, ValueError, SafetensorError):  # `load_model` reports the reason
        return torch.float32
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= HALF_DTYPES else torch.float32


def save_policy(model: Any, trained: dict[str, torch.Tensor], path: Path) -> None:
    """Save `model` to `path` for `from_pretrained` (or PEFT), with the values `trained` for its trained parameters."""
    state = dict(trained)
    is_adapter = hasattr(model, "get_base_model")
    if not is_adapter:
        first = {id(p): name for name, p in model.named_parameters()}
        tied = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        for name, tensor in model.state_dict().items():
            state[name] = state[tied[name]] if name in tied else tensor.cpu()
    model.save_pretrained(path, state_dict=state)
    if is_adapter:
        (path / "README.md").unlink(missing_ok=True)  # PEFT's card without content


def first_line(error: Exception) -> str:
    """The first line of the error's text, or the whole text in one line if the first ends with a colon."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return " ".join(str(error).split()) if line.endswith(":") else line


def silence_libraries() -> None:
    """Turn off progress bars and warnings of transformers and bitsandbytes: a run has its own progress display."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for library in ("transformers", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)

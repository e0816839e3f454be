"""Loading of models and tokenizers: dtypes, damaged files, and memory-mapped weights."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError, LoraConfig, ModelConfig
from slipstream.model import paths as model_paths
from slipstream.model.device import dtype_of
from slipstream.model.inspection import first_not_finite, model_config
from slipstream.model.loading import load_causal_lm, load_model, stored_dtype
from slipstream.model.policy import PackedPolicy
from slipstream.model.tokenizer import load_tokenizer, validate_same_vocabulary
from slipstream.runtime.placement import resolve_auto
from slipstream.scoring.model import load_classifier
from tests.conftest import build_model, build_tokenizer, save_model
from tests.trainers.test_trainer import make_trainer

CPU, META = torch.device("cpu"), torch.device("meta")
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def half(tiny: Path, tmp_path: Path) -> Path:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half", max_shard_size="20KB")
    return tmp_path / "half"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stored_dtype_is_that_of_the_weights_not_of_the_configuration(
    tiny: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=dtype)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert stored_dtype(str(tmp_path)) == dtype


def test_a_model_of_several_dtypes_is_loaded_in_float32(half: Path) -> None:
    files = sorted(half.glob("*.safetensors"))
    assert len(files) > 1 and stored_dtype(str(half)) == torch.bfloat16
    save_file({name: t.float() for name, t in load_file(files[-1]).items()}, files[-1], {"format": "pt"})
    assert stored_dtype(str(half)) == torch.float32


def test_weights_in_other_files_are_loaded_in_float32(tmp_path: Path) -> None:
    assert stored_dtype(str(tmp_path)) == torch.float32


def test_damaged_files_are_reported(half: Path) -> None:
    file = next(half.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"^model.path = '.*half' has damaged files \(.*\); fetch or save them"):
        make_trainer(half)


def test_a_missing_directory_is_reported_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_session() -> None:
        raise OSError("Name or service not known")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_paths, "get_session", get_session)
    monkeypatch.setattr(model_paths.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"'models/gemma': no such directory, .* HF_HUB_OFFLINE is set; give a local"):
        load_tokenizer("models/gemma")
    monkeypatch.setattr(model_paths.constants, "HF_HUB_OFFLINE", False)
    model_paths.hub_answers.cache_clear()
    with pytest.raises(ConfigError, match=r"'models/gemma': no such directory, and https://.* can't be reached"):
        load_tokenizer("models/gemma")
    (tmp_path / "models").mkdir()
    monkeypatch.delattr(model_paths, "get_session")
    with pytest.raises(ConfigError, match=r"'models/gemma': no such directory in 'models', which is here"):
        load_tokenizer("models/gemma")
    model_paths.hub_answers.cache_clear()


def without(path: Path, name: str) -> None:
    file = path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != name}, file, {"format": "pt"})


def with_value(path: Path, value: float) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[UP][3, 5] = value
    save_file(tensors, file, {"format": "pt"})


def configured(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


FEWER = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
MORE = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}


@pytest.mark.parametrize(
    ("family", "damage", "said"),
    [
        ("qwen3", lambda path: without(path, UP), rf"files lack {UP}, which its configuration asks for; fetch"),
        ("qwen3", lambda path: configured(path, **MORE), r"lack model.layers.3.*weight and 10 more tensors, which"),
        ("qwen3", lambda path: configured(path, **FEWER), r"hold model.layers.2.*weight and 10 more tensors, which"),
        (
            "qwen3",
            lambda path: configured(path, intermediate_size=32),
            r"\(and 8 more\) is \[32, 64\] in",
        ),
        ("qwen3", lambda path: configured(path, tie_word_embeddings=False), "files lack lm_head.weight"),
        ("qwen3", lambda path: configured(path, hidden_size="x"), "is no model by its config.json.*hidden_size"),
        ("qwen3", lambda path: configured(path, hidden_act="none"), "is no model by its config.json: KeyError: 'none'"),
        ("qwen3", lambda path: with_value(path, float("nan")), f"{UP} holds values that are not finite"),
        ("qwen3", lambda path: with_value(path, -float("inf")), f"{UP} holds values that are not finite"),
        (
            "mixtral",
            lambda path: without(path, "model.layers.1.block_sparse_moe.experts.2.w1.weight"),
            "model.layers.1.mlp.experts.gate_up_proj can't be made of the files",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_damaged_model_is_refused_with_the_name_of_a_tensor(
    tmp_path: Path, family: str, damage: Any, said: str, dtype: torch.dtype
) -> None:
    save_model(tmp_path, family=family)
    devices = [CPU, META]
    for device in devices:
        assert load_causal_lm(str(tmp_path), device=device, dtype=dtype).device == device
    damage(tmp_path)
    for device in devices[: 1 if "finite" in said else 2]:  # no values are read on the meta device
        with pytest.raises(ConfigError, match=said) as refused:
            load_causal_lm(str(tmp_path), device=device, dtype=dtype)
        assert str(refused.value).startswith(f"model.path = '{tmp_path}'") and "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["modle", "./model", "a/b/c"])
def test_a_misspelt_directory_is_not_looked_for_on_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*arguments: Any, **options: Any) -> None:
        raise AssertionError(f"transformers is asked for {arguments}")

    monkeypatch.setattr(AutoConfig, "from_pretrained", ask)
    assert model_config(path) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 4}, "is no model by its config.json: .*`num_hidden_layers` .4. must be equal to"),
        ({"num_hidden_layers": "two"}, "is no model by its config.json: .*'num_hidden_layers' expected int"),
        ({"dtype": "float99"}, "is no model by its config.json: .*float99"),
    ],
)
def test_load_tokenizer_reports_an_invalid_model_configuration(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    save_model(tmp_path)
    configured(tmp_path, **changes)
    with pytest.raises(ConfigError, match=said) as refused:
        load_tokenizer(str(tmp_path))
    assert str(refused.value).startswith(f"model.path = '{tmp_path}'") and "\n" not in str(refused.value)


def test_remote_code_is_refused_without_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    save_model(tmp_path)
    configured(tmp_path, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"names custom code \(auto_map\), which Slipstream does not run"):
        load_causal_lm(str(tmp_path), device=CPU, dtype=torch.float32)
    assert not asked


@pytest.mark.parametrize("keep", [0, 1, 100, -100])
def test_damaged_pickles_are_reported(tmp_path: Path, keep: int) -> None:
    save_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, file := tmp_path / "pytorch_model.bin")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"^model.path = '.*': its pytorch_model.bin is damaged, or holds more"):
        load_causal_lm(str(tmp_path), device=CPU, dtype=torch.float32)


def test_a_damaged_adapter_or_base_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    save_model(base := tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["up_proj"])).save_pretrained(adapter := tmp_path / "adapter")
    for device in (CPU, META):
        load_causal_lm(str(adapter), device=device, dtype=torch.float32)
    described = adapter / "adapter_config.json"
    for content, said in (
        ("{", "is damaged .*; save the"),
        ("[1]", "no table of JSON"),
        ('{"r": "4"}', 'r = "4" in its'),
    ):
        whole = described.read_text()
        described.write_text(content)
        with pytest.raises(ConfigError, match=said):
            load_causal_lm(str(adapter), device=CPU, dtype=torch.float32)
        described.write_text(whole)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if ".1.mlp.up_proj.lora_B" not in n}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"files lack model.layers.1.mlp.up_proj.lora_B"):
        load_causal_lm(str(adapter), device=CPU, dtype=torch.float32)
    save_file(tensors, file, {"format": "pt"})
    without(base, UP)
    for device in (CPU, META):
        with pytest.raises(ConfigError, match=rf"files lack {UP}"):
            load_causal_lm(str(adapter), device=device, dtype=torch.float32)


def test_quantized_weights_need_no_library_on_the_meta_device(tmp_path: Path) -> None:
    save_model(tmp_path)
    configured(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    model = load_model(ModelConfig(path=str(tmp_path)), LoraConfig(rank=2), device=META, dtype=torch.float32)
    assert model.get_parameter("base_model.model.model.layers.1.mlp.up_proj.lora_A.default.weight").is_meta


@pytest.mark.parametrize(("size", "tokenizer", "same"), [(42, True, True), (42, False, True), (50, True, True),
                                                         (50, False, False), (41, False, False)])  # fmt: skip
def test_a_larger_embedding_of_the_same_tokenizer_is_the_same_vocabulary(
    tiny: Path, tmp_path: Path, size: int, tokenizer: bool, same: bool
) -> None:
    build_model(vocab_size=size).save_pretrained(tmp_path)
    if tokenizer:
        build_tokenizer().save_pretrained(tmp_path)
    with nullcontext() if same else pytest.raises(ConfigError, match=rf"teacher.path .* vocabulary \({size} tokens"):
        validate_same_vocabulary(str(tmp_path), "teacher.path", str(tiny))


def test_a_reward_model_without_its_head_is_refused(tmp_path: Path) -> None:
    build_model().save_pretrained(tmp_path)
    configured(tmp_path, architectures=["Qwen3ForSequenceClassification"])
    with pytest.raises(ConfigError, match=r"^scoring.options.path = '.*': the files lack score.weight"):
        load_classifier(str(tmp_path), CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_found_in_any_format(dtype: torch.dtype, value: float) -> None:
    largest = torch.full((5, 70), torch.finfo(dtype).max, dtype=dtype)
    tensors = {"a": largest, "counts": torch.ones(3, dtype=torch.int64), "none": torch.empty(0), "b": largest.clone()}
    assert first_not_finite(tensors) is None
    tensors["b"][4, 66] = value
    assert first_not_finite(tensors) == "b"


def test_a_model_without_tokenizer_files_is_refused(tmp_path: Path) -> None:
    build_model().save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"has no tokenizer files \(tokenizer.json\); save the model's tokenizer there"
    ):
        load_tokenizer(str(tmp_path))


def test_an_adapter_without_tokenizer_has_that_of_its_base(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    save_model(base := tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["up_proj"])).save_pretrained(adapter := tmp_path / "adapter")
    assert load_tokenizer(str(adapter)).get_vocab() == load_tokenizer(str(base)).get_vocab()
    own = build_tokenizer()
    own.add_special_tokens({"additional_special_tokens": ["<own>"]})
    own.save_pretrained(adapter)
    assert "<own>" in load_tokenizer(str(adapter)).get_vocab()


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    size = len(build_tokenizer())
    save_model(tmp_path, vocab_size=size)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(tmp_path)
    assert len(load_tokenizer(str(tmp_path))) == size + 1
    configured(tmp_path, vocab_size=8)
    with pytest.raises(ConfigError, match=f"the tokenizer has {size} tokens and the model 8; save the model's own"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("ways", [(), ("--trainer.keep_compute_copy=false",)])
def test_masters_are_the_stored_values_in_float32(half: Path, ways: tuple[str, ...]) -> None:
    trainer = make_trainer(half, "--model.dtype=bfloat16", *ways)
    stored = {name: t for file in half.glob("*.safetensors") for name, t in load_file(file).items()}
    assert trainer.parameters.keys() == stored.keys()
    for name, parameter in trainer.parameters.items():
        values = getattr(parameter.detach(), "full_tensor", parameter.detach)()
        assert values.dtype == torch.float32 and torch.equal(values.cpu(), stored[name].float()), name


def test_sharding_ranks_memory_map_the_model_before_sharding(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in memory-mapped files until a layer moves to the device."""
    seen: list[bool] = []
    begin = PackedPolicy.__init__

    def look(self: PackedPolicy, model: Any, *more: Any) -> None:
        files = {str(file.resolve()) for file in half.glob("*.safetensors")}
        mapped = Path("/proc/self/maps").read_text().splitlines()
        bounds = [
            tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped if line.split()[-1] in files
        ]
        seen.extend(any(a <= p.data_ptr() < b for a, b in bounds) for p in model.parameters())
        begin(self, model, *more)

    monkeypatch.setattr(PackedPolicy, "__init__", look)
    make_trainer(half, "--model.dtype=bfloat16", "--trainer.keep_compute_copy=false")
    assert seen and all(seen)


@pytest.mark.parametrize(
    ("flags", "gpus", "dtype"),
    [
        ([], True, torch.bfloat16),
        ([], False, torch.float32),
        (["--generator.device=cpu"], True, torch.float32),
        (["--trainer.device=cpu"], True, torch.float32),
        (["--model.dtype=float32"], True, torch.float32),
        (["--model.dtype=bfloat16"], False, torch.bfloat16),
    ],
)
def test_auto_dtype_is_fast_on_both_devices(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], gpus: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    config = load_config(None, ["--model.path=m", "--environment.name=addition", *flags])
    assert dtype_of(config) == dtype
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpus))
    assert resolve_auto(config).model.dtype == str(dtype).removeprefix("torch.")


def test_options_that_conflict_with_the_dtype_are_refused() -> None:
    flags = [
        "--model.path=m",
        "--environment.name=addition",
        "--trainer.keep_compute_copy=false",
        "--trainer.device=cpu",
    ]
    with pytest.raises(ConfigError, match=r'keep_compute_copy = false does not go with model.dtype = "float32"'):
        resolve_auto(load_config(None, flags))

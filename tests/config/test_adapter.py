"""Options of a run that starts from an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.model.paths import check_paths, replaced_bases

ADAPTER = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj", "q_proj"], "bias": "none",
    "base_model_name_or_path": "owner/base",
}  # fmt: skip


def start(folder: Path, *flags: str, **changes: Any) -> Any:
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | changes))
    (folder / "adapter_model.safetensors").touch()
    return load_config(None, [f"--lora.path={folder}", "--environment.name=addition", *flags])


def test_an_adapter_sets_its_options_and_its_base(tmp_path: Path) -> None:
    config = start(tmp_path)
    lora = config.lora
    assert (config.model.path, lora.rank, lora.alpha, lora.targets) == ("owner/base", 4, 8.0, ["q_proj", "up_proj"])
    assert start(tmp_path, "--model.path=given", "--lora.rank=4").model.path == "given"
    assert start(tmp_path, target_parameters=["experts.down_proj"]).lora.experts
    other = start(tmp_path, target_modules=r".*\.q_proj", use_rslora=True).lora
    assert (other.targets, other.target_pattern, other.use_rslora) == ([], r".*\.q_proj", True)


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        (["--lora.rank=8"], {}, r"lora.rank = 8, but the adapter at lora.path = '.*' has 4; leave lora.rank out"),
        (["--lora.alpha=16"], {}, "lora.alpha = 16, but the adapter"),
        (["--lora.targets=['q_proj']"], {}, r'lora.targets = \["q_proj"\], but the adapter'),
        ([], {"use_dora": True}, "has use_dora = true, which a run can't train; merge it into its"),
        ([], {"layers_to_transform": 0}, "has layers_to_transform = 0, which a run can't train; merge it into its"),
        ([], {"lora_bias": True}, "has lora_bias = true, which a run can't train"),
        ([], {"trainable_token_indices": {"embed_tokens": [1]}}, "has trainable_token_indices = .*, which a run can't"),
        ([], {"bias": "all"}, 'has bias = "all", which'),
        ([], {"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights = "pissa_niter_4"'),
        ([], {"peft_type": "IA3"}, 'is no LoRA adapter: peft_type = "IA3"'),
        ([], {"target_modules": 3}, "target_modules = 3 in its adapter_config.json must be a list of names, a pattern"),
        ([], {"target_modules": [1, 2]}, r"target_modules = \[1, 2\] in its adapter_config.json must be a list of"),
        ([], {"r": "4"}, r'lora.path = .*: r = "4" in its adapter_config.json must be a whole number from 1; save the'),
        ([], {"r": 0}, "lora.path = .*: r = 0 in its"),
        ([], {"lora_alpha": None}, "lora_alpha = null in its adapter_config.json must be a number"),
        (["--lora.use_rslora=true"], {}, "lora.use_rslora = true, but the adapter at .* has false"),
        ([], {"base_model_name_or_path": None}, "lora.path = .*: its adapter_config.json names no base .*; give the"),
        ([], {"lora_alpha": -4}, "lora.path = .* has lora_alpha = -4, which a run can't train"),
        (["--lora.path=nowhere"], {}, "lora.path = 'nowhere' has no adapter_config.json"),
    ],
)  # fmt: skip
def test_what_contradicts_an_adapter_or_cannot_be_trained_is_refused(
    flags: list[str], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, *flags, **changes)


def test_a_base_that_is_missing_or_another_is_named_with_its_adapter(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path = '/none': .*; the adapter at lora.path = .* names this base"):
        check_paths(start(tmp_path, base_model_name_or_path="/none"))
    config = start(tmp_path, f"--model.path={tiny}", base_model_name_or_path="/none")
    assert replaced_bases(config)[0].endswith(f"names the base '/none', and is trained over '{tiny}'")
    assert not replaced_bases(start(tmp_path, base_model_name_or_path=str(tiny)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora.bias=all", "--generator.engine=vllm"], 'lora.bias = "all" does not go with vLLM, .* without biases'),
        (["--lora.dropout=0.1", "--lora.experts=true"], "lora.dropout = 0.1 can't be with adapters on experts"),
        (
            ["--lora.targets=['q_proj']", "--lora.target_pattern=.*"],
            "both name modules to adapt; leave one of them out",
        ),
    ],
)
def test_options_of_adapters_that_cannot_be_together_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["--model.path=m", "--environment.name=addition", "--lora.rank=4", *flags])

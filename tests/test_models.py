"""How a model's weights get from their files to where they are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipstream.config import ConfigError, load_config
from slipstream.models import dtype_of, stored_dtype
from slipstream.packed.policy import Policy
from slipstream.runtime.placement import settled
from tests.trainers.test_trainer import make_trainer


@pytest.fixture
def half(tiny: Path, tmp_path: Path) -> Path:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half", max_shard_size="20KB")
    return tmp_path / "half"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_format_is_that_of_the_weights_whatever_the_configuration_says(
    tiny: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=dtype)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert stored_dtype(str(tmp_path)) == dtype


def test_a_model_of_several_formats_is_read_in_the_widest(half: Path) -> None:
    files = sorted(half.glob("*.safetensors"))
    assert len(files) > 1 and stored_dtype(str(half)) == torch.bfloat16
    save_file({name: t.float() for name, t in load_file(files[-1]).items()}, files[-1], {"format": "pt"})
    assert stored_dtype(str(half)) == torch.float32


def test_weights_that_are_in_no_such_file_are_read_as_float32(tmp_path: Path) -> None:
    assert stored_dtype(str(tmp_path)) == torch.float32


def test_damaged_files_are_told(half: Path) -> None:
    file = next(half.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"^model.path = '.*half' has damaged files \(.*\); fetch or save them"):
        make_trainer(half)


@pytest.mark.parametrize("ways", [(), ("--trainer.compute_copy=false",)])
def test_masters_are_the_stored_values_in_float32(half: Path, ways: tuple[str, ...]) -> None:
    trainer = make_trainer(half, "--model.dtype=bfloat16", *ways)
    stored = {name: t for file in half.glob("*.safetensors") for name, t in load_file(file).items()}
    assert trainer.parameters.keys() == stored.keys()
    for name, parameter in trainer.parameters.items():
        values = getattr(parameter.detach(), "full_tensor", parameter.detach)()
        assert values.dtype == torch.float32 and torch.equal(values, stored[name].float()), name


def test_ranks_that_cut_a_model_up_do_not_copy_it_first(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in its files, which processes share, until a layer goes to the device."""
    seen: list[bool] = []
    begin = Policy.__init__

    def look(self: Policy, model: Any, *more: Any) -> None:
        files = {str(file.resolve()) for file in half.glob("*.safetensors")}
        mapped = Path("/proc/self/maps").read_text().splitlines()
        bounds = [
            tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped if line.split()[-1] in files
        ]
        seen.extend(any(a <= p.data_ptr() < b for a, b in bounds) for p in model.parameters())
        begin(self, model, *more)

    monkeypatch.setattr(Policy, "__init__", look)
    make_trainer(half, "--model.dtype=bfloat16", "--trainer.compute_copy=false")
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
def test_both_sides_compute_in_what_both_are_fast_in(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], gpus: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    config = load_config(None, ["--model.path=m", "--environment.name=addition", *flags])
    assert dtype_of(config) == dtype
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpus))
    assert settled(config).model.dtype == str(dtype).removeprefix("torch.")


def test_what_does_not_go_with_the_number_format_here_is_refused() -> None:
    flags = ["--model.path=m", "--environment.name=addition", "--trainer.compute_copy=false"]
    with pytest.raises(ConfigError, match=r'compute_copy = false does not go with model.dtype = "float32"'):
        settled(load_config(None, flags))

"""Write the policy of a run for other programs: as the run has it, or merged into the model that its adapters adapt."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from slipstream.config.adapter import ADAPTER_WEIGHTS, unsupported
from slipstream.config.loading import policy_of
from slipstream.config.schema import ConfigError
from slipstream.model.inspection import has_tied_head
from slipstream.model.loading import explain_damaged_files, load_causal_lm, silence_libraries, stored_dtype
from slipstream.model.paths import INDEX, adapter_config, base_of_adapter, check_path, safetensors_files
from slipstream.observe.run_data import load_run
from slipstream.runtime import disk

TEXTS = (".json", ".txt", ".model", ".jinja")  # configurations and tokenizers
PREFIX = "base_model.model."  # of PEFT, before the name of a module
SUFFIX = ".lora_A.weight"
FROM_4BIT = (
    "slipstream: the adapters were trained over 4-bit weights, and are merged into the whole ones: log-probabilities "
    "differ from the run's by the rounding to 4 bits"
)
Factors = tuple[Tensor, Tensor]  # A `[rank, in]` and B `[out, rank]`


def export(run: Path, to: Path | None = None, merge: bool = False, name: str = "") -> Path:
    """Write the policy of the run in directory `run` to `to`, by default `RUN/merged` or `RUN/export`; of several
    policies the one of this `name`, by default to a directory of this name in there.

    Returns the directory. Raises `ConfigError`, and `DiskFull`; then nothing is left there.
    """
    options = load_run(run).options
    policy, to = policy_of(str(run), name), to or run / ("merged" if merge else "export") / name
    adapter = _checked(policy, "policy")
    if merge and not adapter:
        raise ConfigError(f"--merge: {run} has trained all weights, so {policy} is a whole model; leave --merge out")
    if to.exists():
        raise ConfigError(f"--to {to} exists; remove it, or give another directory")
    if merge and options.get("lora.quantization") == "4bit":
        print(FROM_4BIT, file=sys.stderr)
    with _whole(to) as partial:
        if merge:
            merge_adapter(policy, partial)
        else:
            shutil.copytree(policy, partial, dirs_exist_ok=True)
    return to


def _checked(policy: Path, option: str) -> dict[str, Any]:
    """The adapter's configuration, empty for a whole model. Raises `ConfigError` for missing or damaged files."""
    check_path(str(policy), option)
    with explain_damaged_files(str(policy), option):
        adapter = adapter_config(str(policy))
        if adapter:
            with safe_open(policy / ADAPTER_WEIGHTS, "np"):
                pass
    return adapter


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A directory that gets the name `path` at the end of the block, and is removed if the block fails."""
    partial = path.with_name(path.name + ".partial")
    try:
        with disk.writing(path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            partial.rename(path)
    except OSError as error:
        raise ConfigError(
            f"--to {path} can't be written: {error.strerror or error}; choose another directory"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def merge_adapter(policy: Path, to: Path, requantize: bool = False) -> None:
    """Write the base of the adapter at `policy`, with the adapter merged into its weights, to the directory `to`.

    Weights keep the dtype of the base. They are merged in copies of the base's files, with one tensor in memory, if
    those have a tensor for each adapted module; else in memory. Quantized weights are quantized again after the merge
    with `requantize`, else refused. Raises `ConfigError`.
    """
    silence_libraries()
    adapter = adapter_config(str(policy))
    name, option = base_of_adapter(str(policy), adapter), f"the base of {policy}"
    with explain_damaged_files(name, option):
        base = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, allow_patterns=_patterns()))
        quantized = "quantization_config" in json.loads((base / "config.json").read_text(encoding="utf-8"))
    if quantized and not requantize:
        remedy = f"name the model with whole weights as base_model_name_or_path in {policy}/adapter_config.json"
        raise ConfigError(f"{option} = {name!r} has quantized weights, which a merge would round again; {remedy}")
    _validate_targets(policy, base)
    to.mkdir(exist_ok=True)
    for folder in (base, policy):  # the policy's tokenizer replaces the base's
        for file in folder.iterdir():
            if file.suffix in TEXTS and not file.name.endswith(".index.json") and not file.name.startswith("adapter_"):
                shutil.copyfile(file, to / file.name)
    files = [file for file in safetensors_files(base, option) if file.exists()]
    stored = {tensor for file in files for tensor in _header(file)[0]}
    factors = {} if quantized or unsupported(adapter) or adapter.get("fan_in_fan_out") else _factors(policy)
    if factors and factors.keys() <= stored:
        rank = math.sqrt(adapter["r"]) if adapter.get("use_rslora") else adapter["r"]
        _merge_files(base, files, to, factors, adapter["lora_alpha"] / rank)
    else:
        _merge_in_memory(base, policy, to)


def _validate_targets(policy: Path, base: Path) -> None:
    """Raise `ConfigError` if the adapter at `policy` adapts an embedding or a head that share their weight in `base`:
    a merge would change both."""
    stored = _header(policy / ADAPTER_WEIGHTS)[0] if (policy / ADAPTER_WEIGHTS).exists() else {}
    adapted = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in stored if ".lora_" in name}
    outside = {name for name in adapted if not re.search(r"\.\d+\.", name)}
    if not outside:  # all adapted modules are in layers: transformers need not know the model
        return
    model = load_causal_lm(str(base), device=torch.device("meta"), dtype=torch.float32)
    shared = (model.get_input_embeddings(), model.get_output_embeddings()) if has_tied_head(model) else ()
    if found := [name for name in sorted(outside) if any(model.get_submodule(name) is module for module in shared)]:
        raise ConfigError(
            f"{policy} adapts {found[0]}, whose weight is that of embedding and head of its base "
            "(tie_word_embeddings): a merge would change both; serve the adapter unmerged"
        )


def _patterns() -> list[str]:
    return [*(f"*{suffix}" for suffix in TEXTS), "*.safetensors"]


def _factors(policy: Path) -> dict[str, Factors]:
    """The factors of each adapted weight by its name in the base; empty if the adapter has other tensors, too."""
    stored = load_file(policy / ADAPTER_WEIGHTS) if (policy / ADAPTER_WEIGHTS).exists() else {}
    found = {
        name.removeprefix(PREFIX).replace(SUFFIX, ".weight"): (down, stored[name.replace("lora_A", "lora_B")])
        for name, down in stored.items()
        if name.endswith(SUFFIX)
    }
    return found if 2 * len(found) == len(stored) else {}


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors file by tensor, and the offset of the first tensor's bytes."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        entries: dict[str, Any] = json.loads(opened.read(size))
    entries.pop("__metadata__", None)
    return entries, 8 + size


def _merge_files(base: Path, files: list[Path], to: Path, factors: dict[str, Factors], scale: float) -> None:
    """Copy the files, and write `W + scale B A`, computed in float32, over each adapted weight `W` of the copies."""
    for file in [*files, *filter(Path.exists, [base / INDEX])]:
        shutil.copyfile(file, to / file.name)
    for file in files:
        entries, start = _header(file)
        with safe_open(file, "pt") as source, (to / file.name).open("r+b") as target:
            for name in entries.keys() & factors.keys():
                weight, (down, up) = source.get_tensor(name), factors[name]
                merged = torch.addmm(weight.float(), up.float(), down.float(), alpha=scale).to(weight.dtype)
                target.seek(start + entries[name]["data_offsets"][0])
                target.write(merged.view(torch.uint8).numpy().data)


def _merge_in_memory(base: Path, policy: Path, to: Path) -> None:
    """Merge by PEFT: for bases whose files name or lay out their weights otherwise than the model."""
    from peft import PeftModel

    model = load_causal_lm(str(base), device=torch.device("cpu"), dtype=stored_dtype(str(base)))
    PeftModel.from_pretrained(model, policy).merge_and_unload().save_pretrained(to)

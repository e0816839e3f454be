"""The options that trained adapters set: `lora.path` and `policies.N.adapter` name their PEFT directories."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.config.schema import ConfigError
from slipstream.config.toml import to_toml

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UNSUPPORTED = (
    "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "lora_bias",
    "trainable_token_indices", "alora_invocation_tokens",
)  # fmt: skip
CANT_TRAIN = "which a run can't train; merge it into its base, and train that"
VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda v: type(v) is int and v > 0, "a whole number from 1"),
    "lora_alpha": (lambda v: type(v) in (int, float) and math.isfinite(v), "a number"),
    "target_modules": (
        lambda v: v is None or isinstance(v, str) or (isinstance(v, list) and all(isinstance(n, str) for n in v)),
        "a list of names, a pattern or null",
    ),
    "base_model_name_or_path": (lambda v: v is None or isinstance(v, str), "a path or a Hub name"),
}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")  # initialisations that change the base weights, too


def with_adapter_options(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of a configuration with those of the adapters at `lora.path` and `policies.N.adapter`: rank, scale,
    targets, experts, and the base as `model.path` if that is not set.

    Raises `ConfigError` for an option that contradicts an adapter, and for an adapter that a run can't train. The
    records of a run hold the values, so they can be read without the adapters.
    """
    policies = values.get("policies")
    entries = {"lora.path": values.get("lora")}
    entries |= {f"policies.{i}.adapter": e for i, e in enumerate(policies if isinstance(policies, list) else [])}
    for option, entry in entries.items():
        known = entry if isinstance(entry, dict) else {}
        path = known.get(option.rpartition(".")[2])
        if isinstance(path, str) and path:
            values = _with_options_of(values, path, option, own_model=bool(known.get("model")))
    return values


def _with_options_of(values: Mapping[str, Any], path: str, option: str, own_model: bool) -> Mapping[str, Any]:
    """As `with_adapter_options`, for one adapter. If its policy has another model, modules and `model.path` stay."""
    lora, model = values.get("lora", {}), values.get("model", {})
    if not isinstance(lora, dict) or not isinstance(model, dict) or ("rank" in lora and not Path(path).exists()):
        return values
    adapter = _read(path, f"{option} = {path!r}")
    targets = adapter["target_modules"] or ()
    pattern = targets if isinstance(targets, str) else ""
    found = {
        "rank": adapter["r"], "alpha": float(adapter["lora_alpha"]), "use_rslora": bool(adapter.get("use_rslora")),
        "targets": [] if pattern else sorted(targets), "target_pattern": pattern,
        "experts": bool(adapter.get("target_parameters")),
    }  # fmt: skip
    if own_model:  # PEFT may name the same modules of another model differently
        found = {name: value for name, value in found.items() if not name.startswith("target")}
    for name, value in found.items():
        given = value if lora.get(name) in ([], "") else lora.get(name, value)
        if (sorted(map(str, given)) if isinstance(given, list) else given) != value:
            raise ConfigError(
                f"lora.{name} = {to_toml(given)}, but the adapter at {option} = {path!r} has {to_toml(value)}; leave "
                f"lora.{name} out"
            )
    base_path = None if own_model else adapter.get("base_model_name_or_path")
    base = {"path": base_path} if base_path else {}
    if not own_model and "path" not in base | model:
        raise ConfigError(
            f"{option} = {path!r}: its {ADAPTER} names no base (base_model_name_or_path); give the base as model.path"
        )
    return {**values, "model": base | model, "lora": {**lora, **found}}


def _read(path: str, setting: str) -> dict[str, Any]:
    """The configuration of a LoRA adapter that a run can train. Raises `ConfigError`."""
    folder = Path(path)
    if missing := next((name for name in (ADAPTER, ADAPTER_WEIGHTS) if not (folder / name).exists()), None):
        raise ConfigError(f"{setting} has no {missing}; give a directory that PEFT saved an adapter to")
    adapter = read_adapter(folder, setting)
    if adapter.get("peft_type") != "LORA":
        kind = json.dumps(adapter.get("peft_type"))
        raise ConfigError(f"{setting} is no LoRA adapter: peft_type = {kind}; give one that is")
    if lacking := next((name for name in ("r", "lora_alpha", "target_modules") if name not in adapter), None):
        raise ConfigError(f"{setting}: its {ADAPTER} has no {lacking}; save the adapter again")
    if why := unsupported(adapter):
        raise ConfigError(f"{setting} has {why}, {CANT_TRAIN}")
    return adapter


def read_adapter(folder: Path, setting: str) -> dict[str, Any]:
    """The configuration of the adapter in `folder`. Raises `ConfigError`, naming `setting`, if it is damaged."""
    try:
        adapter = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: its {ADAPTER} is damaged ({error}); save the adapter again") from None
    if not isinstance(adapter, dict):
        raise ConfigError(f"{setting}: its {ADAPTER} is no table of JSON; save the adapter again")
    for name, (valid, meaning) in VALUES.items():
        if name in adapter and not valid(adapter[name]):
            found = f"{name} = {json.dumps(adapter[name]):.60}"
            raise ConfigError(f"{setting}: {found} in its {ADAPTER} must be {meaning}; save the adapter again")
    return adapter


def unsupported(adapter: Mapping[str, Any]) -> str:
    """The setting by which an adapter is other than `base + scale * B A` of all its targets, or ""."""
    used = {name: v for name in UNSUPPORTED if (v := adapter.get(name)) or type(v) is int}  # layer 0
    if adapter.get("lora_alpha", 1) <= 0:
        used["lora_alpha"] = adapter["lora_alpha"]
    if adapter.get("bias", "none") != "none":
        used["bias"] = adapter["bias"]
    if str(start := adapter.get("init_lora_weights")).startswith(CHANGES_BASE):
        used["init_lora_weights"] = start
    return next((f"{name} = {to_toml(value)}" for name, value in used.items()), "")

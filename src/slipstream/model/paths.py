"""Checks of model paths without torch and transformers, so that a misspelt path is reported at once."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from slipstream.config.schema import Config, ConfigError

ADAPTER = "adapter_config.json"
HUB_TIMEOUT_S = 5.0


def check_paths(config: Config) -> None:
    """Raise `ConfigError` if a model path of the configuration can't be a model."""
    check_path(config.model.path)
    validate_adapter(config.model.path)
    validate_quantization(config.model.path, config.lora.rank)
    if config.algorithm.kl_coef and config.algorithm.reference not in ("start", "average"):
        check_path(config.algorithm.reference, "algorithm.reference")
    if config.teacher.path:
        check_path(config.teacher.path, "teacher.path")
    if config.scoring.kind == "model" and isinstance(path := config.scoring.options.get("path"), str):
        check_path(path, "scoring.options.path")


def check_path(path: str, option: str = "model.path") -> None:
    """Raise `ConfigError` if `path` is neither a local model nor a name on a Hub that can be reached."""
    local = Path(path)
    if local.is_dir():
        if not (local / "config.json").exists() and not (local / ADAPTER).exists():
            raise ConfigError(f"{option} = {path!r} has no config.json; give a directory that a model was saved to")
        _check_weights(local, f"{option} = {path!r}")
    elif local.exists():
        raise ConfigError(f"{option} = {path!r} is a file; give the directory that the model was saved to")
    elif path.startswith(("/", "./", "../", "~")) or path.count("/") != 1:
        raise ConfigError(f"{option} = {path!r}: no such directory, and not a Hub name (owner/name)")
    elif local.parent.is_dir():
        found = f"no such directory in {str(local.parent)!r}, which is here"
        raise ConfigError(f"{option} = {path!r}: {found}; make it first")
    elif isinstance(try_to_load_from_cache(path, "config.json"), str):
        return
    elif constants.HF_HUB_OFFLINE:
        found = "no such directory, no model of this name in the cache, and HF_HUB_OFFLINE is set"
        raise ConfigError(f"{option} = {path!r}: {found}; give a local directory, or unset HF_HUB_OFFLINE")
    elif not _hub_answers():
        raise ConfigError(
            f"{option} = {path!r}: no such directory, and {constants.ENDPOINT} can't be reached to look for a model of "
            "this name; give a local directory, or connect this host"
        )


def _check_weights(folder: Path, setting: str) -> None:
    """Raise `ConfigError` for a truncated or missing safetensors file. Reads headers only."""
    index = folder / "model.safetensors.index.json"
    shards = _shards(index, setting) if index.exists() else ["model.safetensors"]
    for file in (folder / name for name in shards):
        if index.exists() and not file.exists():
            raise ConfigError(f"{setting} has no {file.name}, which {index.name} names; fetch or save the model again")
        try:
            if file.exists():
                with safe_open(file, "np"):
                    pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{setting} has damaged files ({file.name}: {error}); fetch or save them again") from None


def _shards(index: Path, setting: str) -> list[str]:
    """The files that an index names, sorted. Raises `ConfigError`."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        found = f"{index.name} is damaged: it has no table weight_map of file names"
        raise ConfigError(f"{setting}: {found}; fetch or save the model again") from None


@cache
def _hub_answers() -> bool:
    """Whether the Hub answers within 5 s; transformers would retry for more than a minute."""
    answered: list[int] = []

    def ask() -> None:
        with suppress(Exception):  # the class depends on the huggingface_hub release
            answered.append(get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S).status_code)

    asking = threading.Thread(target=ask, daemon=True)  # the request timeout does not limit the DNS lookup
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return bool(answered)


def validate_adapter(path: str) -> None:
    """Raise `ConfigError` if `path` is an adapter: training starts from a full model, with new adapters."""
    if adapter := adapter_config(path):
        raise ConfigError(
            f"model.path = {path!r} is an adapter of {adapter.get('base_model_name_or_path')!r}; merge it into that "
            "(peft's merge_and_unload) and give the directory of the merged model"
        )


def validate_quantization(path: str, adapters: int) -> None:
    """Raise `ConfigError` for a malformed `quantization_config`, or if quantized weights would be trained."""
    file = Path(path) / "config.json"
    try:
        quantization = json.loads(file.read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError):  # a Hub name, or a damaged file, which transformers explains
        return
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if not isinstance(method, str):
        raise ConfigError(
            f"{file}: quantization_config = {json.dumps(quantization):.60} names no quant_method; remove it if the "
            "weights are whole, or save the model again"
        )
    if method == "bitsandbytes" and not adapters:
        raise ConfigError(
            f"model.path = {path!r} has weights in the format of bitsandbytes, which can't be trained; train adapters "
            "(lora.rank = 16), or give the model with whole weights"
        )


def adapter_config(path: str) -> dict[str, Any]:
    """The `adapter_config.json` of an adapter directory; empty for a model directory or a Hub name."""
    file = Path(path) / ADAPTER
    if not file.exists() or (Path(path) / "config.json").exists():
        return {}
    adapter: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return adapter

"""Checks of model paths without torch and transformers, so that a misspelt path is reported at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from slipstream.config.adapter import ADAPTER, read_adapter
from slipstream.config.schema import Config, ConfigError

INDEX = "model.safetensors.index.json"
HUB_TIMEOUT_S = 5.0
AGAIN = "fetch or save the model again"


def check_paths(config: Config) -> None:
    """Raise `ConfigError` if a model path of the configuration can't be a model."""
    try:
        check_path(config.model.path)
    except ConfigError as error:
        named = (f"{option} = {path!r}" for option, path, base in adapters(config) if _named_base(path) == base)
        if not (adapter := next(named, "")):
            raise
        remedy = f"the adapter at {adapter} names this base: give the directory of the base as model.path"
        raise ConfigError(f"{error}; {remedy}") from None
    validate_adapter(config.model.path)
    check_policy_paths(config)
    if config.algorithm.kl_coef and config.algorithm.reference not in ("start", "average"):
        check_path(config.algorithm.reference, "algorithm.reference")
    if config.teacher.path:
        check_path(config.teacher.path, "teacher.path")
    if config.scoring.kind == "model" and isinstance(path := config.scoring.options.get("path"), str):
        check_path(path, "scoring.options.path")


def adapters(config: Config) -> Iterator[tuple[str, str, str]]:
    """Option, path and base model of each trained adapter that the run starts from."""
    if config.lora.path:
        yield "lora.path", config.lora.path, config.model.path
    for index, policy in enumerate(config.policies):
        if policy.adapter:
            yield f"policies.{index}.adapter", policy.adapter, policy.model or config.model.path


def replaced_bases(config: Config) -> list[str]:
    """A warning for each adapter that is trained over another model than the base that it names."""
    return [
        f"the adapter at {option} = {path!r} names the base {named!r}, and is trained over {base!r}"
        for option, path, base in adapters(config)
        if (named := _named_base(path)) and Path(named).resolve() != Path(base).resolve()
    ]


def _named_base(adapter: str) -> str:
    return adapter_config(adapter).get("base_model_name_or_path") or ""


def check_policy_paths(config: Config) -> None:
    """Raise `ConfigError` for an adapter path that is no directory, or a policy's model path that is no base model.

    Adapter paths are `lora.path` and `policies.N.adapter`, model paths `policies.N.model`.
    """
    for option, path, _ in adapters(config):
        if not Path(path).is_dir():
            raise ConfigError(f"{option} = {path!r}: no such directory; give that of a PEFT adapter")
    for index, policy in enumerate(config.policies):
        if policy.model:
            check_path(policy.model, f"policies.{index}.model")
            validate_adapter(policy.model, f"policies.{index}.model", f"policies.{index}.adapter")


def check_path(path: str, option: str = "model.path") -> None:
    """Raise `ConfigError` if `path` is neither a local model nor a name on a Hub that can be reached."""
    local = Path(path)
    if local.is_dir():
        if not (local / "config.json").exists() and not (local / ADAPTER).exists():
            raise ConfigError(f"{option} = {path!r} has no config.json; give a directory that a model was saved to")
        _check_weights(local, f"{option} = {path!r}")
        _check_generation_config(local / "generation_config.json")
    elif local.exists():
        raise ConfigError(f"{option} = {path!r} is a file; give the directory that the model was saved to")
    elif not may_be_model(path):
        keywords = ', and neither "start" nor "average"' if option == "algorithm.reference" else ""
        raise ConfigError(f"{option} = {path!r}: no such directory, and not a Hub name (owner/name){keywords}")
    elif local.parent.is_dir():
        found = f"no such directory in {str(local.parent)!r}, which is here"
        raise ConfigError(f"{option} = {path!r}: {found}; give one that exists")
    elif isinstance(try_to_load_from_cache(path, "config.json"), str):
        return
    elif constants.HF_HUB_OFFLINE:
        found = "no such directory, no model of this name in the cache, and HF_HUB_OFFLINE is set"
        raise ConfigError(f"{option} = {path!r}: {found}; give a local directory, or unset HF_HUB_OFFLINE")
    elif not hub_answers():
        raise ConfigError(
            f"{option} = {path!r}: no such directory, and {constants.ENDPOINT} can't be reached to look for a model of "
            "this name; give a local directory, or connect this host"
        )


def may_be_model(path: str) -> bool:
    """Whether `path` exists, or has the form of a Hub name (owner/name). Reads no file and asks no Hub."""
    return Path(path).exists() or (not path.startswith(("/", "./", "../", "~")) and path.count("/") == 1)


def _check_weights(folder: Path, setting: str) -> None:
    """Raise `ConfigError` for a truncated or missing safetensors file. Reads headers only."""
    for file in safetensors_files(folder, setting):
        if (folder / INDEX).exists() and not file.exists():
            raise ConfigError(f"{setting} has no {file.name}, which {INDEX} names; {AGAIN}")
        try:
            if file.exists():
                with safe_open(file, "np"):
                    pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{setting} has damaged files ({file.name}: {error}); fetch or save them again") from None


def safetensors_files(folder: Path, setting: str) -> list[Path]:
    """Paths of a model's safetensors files: the sorted files of its index, or `model.safetensors` without an index.

    Files may be missing. Raises `ConfigError` for a damaged index.
    """
    if not (index := folder / INDEX).exists():
        return [folder / "model.safetensors"]
    try:
        return sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        found = f"{INDEX} is damaged: it has no table weight_map of file names"
        raise ConfigError(f"{setting}: {found}; {AGAIN}") from None


def _check_generation_config(file: Path) -> None:
    """Raise `ConfigError` for a malformed `generation_config.json`, of which transformers would use the defaults."""
    try:
        ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.exists() else None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is no table of JSON ({error}); fetch or save it again, or remove it") from None
    if not all(isinstance(token, int) for token in (ids if isinstance(ids, list) else [ids or 0])):
        raise ConfigError(
            f"{file}: eos_token_id = {json.dumps(ids):.60} must be a token id or a list of these; change it"
        )


@cache
def hub_answers() -> bool:
    """Whether the Hub answers within 5 s; transformers would retry for more than a minute."""
    answered: list[int] = []

    def ask() -> None:
        with suppress(Exception):  # the class depends on the huggingface_hub release
            answered.append(get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S).status_code)

    asking = threading.Thread(target=ask, daemon=True)  # the request timeout does not limit the DNS lookup
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return bool(answered)


def validate_adapter(path: str, option: str = "model.path", adapter_option: str = "lora.path") -> None:
    """Raise `ConfigError` if `path` is an adapter: `adapter_option` names the adapter to start from."""
    if adapter := adapter_config(path):
        raise ConfigError(
            f"{option} = {path!r} is an adapter of {adapter.get('base_model_name_or_path')!r}; to train it further, "
            f"give its directory as {adapter_option}, and leave {option} out or name the base there"
        )


def base_of_adapter(path: str, adapter: dict[str, Any]) -> str:
    """The path or Hub name of an adapter's base model. Raises `ConfigError` as `check_path`."""
    base, named = adapter.get("base_model_name_or_path"), f"base_model_name_or_path in {Path(path) / ADAPTER}"
    if not base or not isinstance(base, str):
        raise ConfigError(f"there is no {named}; name the base model there")
    try:
        check_path(base, f"the base of {path}")
    except ConfigError as error:
        raise ConfigError(f"{error}; its name is {named}") from None
    return base


def adapter_config(path: str) -> dict[str, Any]:
    """The `adapter_config.json` of an adapter directory; empty for a model directory or a Hub name.

    Raises `ConfigError` if it is damaged.
    """
    folder = Path(path)
    if not (folder / ADAPTER).exists() or (folder / "config.json").exists():
        return {}
    return read_adapter(folder, path)

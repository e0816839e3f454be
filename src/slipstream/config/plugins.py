"""Loads the user's own Python that a configuration references as "module:thing" or "path/to/file.py:thing"."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.config.loading import suggest
from slipstream.config.schema import ConfigError
from slipstream.errors import UserError

SEE = "docs/own-parts.md says what it needs"


class LoadError(UserError):
    """A reference that can't be loaded. The message is one line for its user."""


def load_option(option: str, reference: str, kind: str = "function", known: Sequence[str] = ()) -> Any:
    """`load_object` for the value of an option. Raises `ConfigError`, which names the option."""
    try:
        return load_object(reference, kind, known)
    except LoadError as error:
        raise ConfigError(f"{option} = {json.dumps(reference)} can't be loaded: {error}") from None


def load_object(reference: str, kind: str = "function", known: Sequence[str] = ()) -> Any:
    """The object that "module:thing" or "path/to/file.py:thing" references, for instance an environment.

    The message suggests one of the `known` built-in names. Raises `LoadError`.
    """
    source, _, name = reference.rpartition(":")
    if not source or not name:
        hint = suggest(reference, known) or f"; there are {', '.join(known)}" * bool(known)
        raise LoadError(f"no such {kind}{hint}; your own is 'module:thing' or 'path/to/file.py:thing'")
    try:
        module = _import(source)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(one_line(error)) from error
    if not hasattr(module, name):
        raise LoadError(f"{source} has no attribute {name!r}{suggest(name, list(vars(module)))}")
    return getattr(module, name)


def build(factory: Callable[..., Any], arguments: Sequence[Any], needed: Sequence[str]) -> Any:
    """`factory(*arguments)`, whose exceptions pass.

    Raises `LoadError` if the arguments don't fit, or the result lacks a `needed` attribute.
    """
    try:
        inspect.signature(factory).bind(*arguments)
    except TypeError as error:
        raise LoadError(f"it can't be called with {len(arguments)} arguments ({error}); {SEE}") from None
    built = factory(*arguments)
    for name in needed:
        if not hasattr(built, name):
            raise LoadError(f"it has no attribute {name!r}; {SEE}")
    return built


def one_line(error: BaseException) -> str:
    """An error of the user's code in one line, with the file and line that raised it."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return text
    ours = ("<frozen", str(importlib.__file__), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{text}{where}" if isinstance(error, ImportError) else f"{type(error).__name__}: {text}{where}"


def _import(source: str) -> ModuleType:
    """The module of this name, or of this file if it ends in ".py". Raises whatever its import raises."""
    if not source.endswith(".py"):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # console scripts lack the working directory
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            near = suggest(source, [file.stem for file in Path.cwd().glob("*.py")])
            if error.name is None or not near or not f"{source}.".startswith(f"{error.name}."):
                raise
            raise LoadError(f"{error}{near}") from None
    path = Path(source).resolve()
    if not path.is_file():
        near = suggest(path.stem, [file.stem for file in path.parent.glob("*.py") if file.is_file()])
        raise LoadError(f"there is no file {path}{near.replace('?', '.py?')}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script: imports of files in its folder
    spec.loader.exec_module(module)
    return module

"""From a name in a configuration to a user's own Python: "module:thing" or "path/to/file.py:thing"."""

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

from slipstream.config import ConfigError, suggest

SEE = "docs/own-parts.md says what it needs"


class LoadError(ImportError):
    """A reference that can't be loaded. The message is one line for its user."""


def load_option(option: str, reference: str, kind: str = "function", known: Sequence[str] = ()) -> Any:
    """`load_thing` for the value of an option, which a `ConfigError` names."""
    try:
        return load_thing(reference, kind, known)
    except LoadError as error:
        raise ConfigError(f"{option} = {json.dumps(reference)} can't be loaded: {error}") from None


def load_thing(reference: str, kind: str = "function", known: Sequence[str] = ()) -> Any:
    """The attribute that "module:thing" or "path/to/file.py:thing" names, say an environment.

    `known` are the names that need no module, for the message. Raises `LoadError`.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        hint = suggest(reference, known) or f"; there are {', '.join(known)}" * bool(known)
        raise LoadError(f"no such {kind}{hint}; your own is 'module:thing' or 'path/to/file.py:thing'")
    try:
        module = _module(place)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(one_line(error)) from error
    if not hasattr(module, name):
        raise LoadError(f"{place} has no attribute {name!r}{suggest(name, list(vars(module)))}")
    return getattr(module, name)


def build(kind: Callable[..., Any], arguments: Sequence[Any], needed: Sequence[str]) -> Any:
    """`kind(*arguments)`. Raises `LoadError` if it takes other arguments, or lacks one of the `needed` attributes."""
    try:
        inspect.signature(kind).bind(*arguments)
    except TypeError as error:
        raise LoadError(f"it can't be called with {len(arguments)} arguments ({error}); {SEE}") from None
    made = kind(*arguments)
    for name in needed:
        if not hasattr(made, name):
            raise LoadError(f"it has no attribute {name!r}; {SEE}")
    return made


def one_line(error: BaseException) -> str:
    """The error of a user's code in one line, with the file and line that raised it."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return text
    ours = ("<frozen", str(importlib.__file__), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{text}{where}" if isinstance(error, ImportError) else f"{type(error).__name__}: {text}{where}"


def _module(place: str) -> ModuleType:
    """The module of this name, or the file if it ends in ".py". Raises whatever its import raises."""
    if not place.endswith(".py"):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # a console script does not look where the user stands
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            near = suggest(place, [file.stem for file in Path.cwd().glob("*.py")])
            if error.name is None or not near or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise LoadError(f"{error}{near}") from None
    path = Path(place).resolve()
    if not path.is_file():
        near = suggest(path.stem, [file.stem for file in path.parent.glob("*.py") if file.is_file()])
        raise LoadError(f"there is no file {path}{near.replace('?', '.py?')}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as Python does for a script: a file may import its neighbours
    spec.loader.exec_module(module)
    return module

"""Loads the user's own Python that a configuration references as "module:thing" or "path/to/file.py:thing"."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.config.schema import ConfigError
from slipstream.config.suggestions import suggest
from slipstream.errors import UserError

SEE = "docs/own-parts.md says what it needs"


class LoadError(UserError):
    """A reference that can't be loaded. The message is one line for its user."""


class Interrupts:
    """Context in which `is_ctrl_c` distinguishes Ctrl-C from a `KeyboardInterrupt` that the user's code raises."""

    arrived = False

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self)

    def __exit__(self, *_: object) -> None:
        installed: object = signal.getsignal(signal.SIGINT)
        if installed is self:
            signal.signal(signal.SIGINT, self._handler)

    def __call__(self, *signal_and_frame: Any) -> None:
        """Handle the signal as before."""
        self.arrived = True
        self._handler(*signal_and_frame)


def is_ctrl_c(error: BaseException) -> bool:
    """Whether an error is a `KeyboardInterrupt` that a signal may have raised: only in the main thread, if handled."""
    handler, main = signal.getsignal(signal.SIGINT), threading.current_thread() is threading.main_thread()
    handled = main and (callable(handler) or handler is None)  # None: a handler of another language
    return isinstance(error, KeyboardInterrupt) and handled and getattr(handler, "arrived", True)


@contextmanager
def user_code() -> Iterator[None]:
    """Context for the user's code: an exception in it becomes a `LoadError` of one line.

    Errors whose message is written for users pass, and Ctrl-C.
    """
    with Interrupts():
        try:
            yield
        except UserError:
            raise
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            raise LoadError(one_line(error)) from error


@contextmanager
def option_code(option: str, reference: str) -> Iterator[None]:
    """`user_code` for the value of an option. Raises `ConfigError`, which names the option."""
    try:
        with user_code():
            yield
    except LoadError as error:
        raise ConfigError(f"{option} = {json.dumps(reference)} can't be loaded: {error}") from error


def load_option(option: str, reference: str, kind: str = "function", known: Sequence[str] = ()) -> Any:
    """`load_object` for the value of an option. Raises `ConfigError`, which names the option."""
    with option_code(option, reference):
        return load_object(reference, kind, known)


def load_object(reference: str, kind: str = "function", known: Sequence[str] = ()) -> Any:
    """The object that "module:thing" or "path/to/file.py:thing" references, for instance an environment.

    The message suggests one of the `known` built-in names. Raises `LoadError`.
    """
    source, _, name = reference.rpartition(":")
    if not source or not name:
        hint = suggest(reference, known) or f"; there are {', '.join(known)}" * bool(known)
        raise LoadError(f"no such {kind}{hint}; your own is 'module:thing' or 'path/to/file.py:thing'")
    with user_code():
        module = _import(source)
        if not hasattr(module, name):
            raise LoadError(f"{source} has no attribute {name!r}{suggest(name, list(vars(module)))}")
        return getattr(module, name)


def build(factory: Callable[..., Any], arguments: Sequence[Any], needed: Sequence[str]) -> Any:
    """`factory(*arguments)`. What it raises is a `LoadError`, or passes if it is Slipstream's own class.

    Raises `LoadError` if the arguments don't fit, or the result lacks a `needed` attribute.
    """
    try:
        inspect.signature(factory).bind(*arguments)
    except (TypeError, ValueError) as error:
        number = f"{len(arguments)} argument{'s' * (len(arguments) != 1)}"
        raise LoadError(f"it can't be called with {number} ({error}); {SEE}") from None
    with nullcontext() if str(getattr(factory, "__module__", "")).startswith("slipstream.") else user_code():
        built = factory(*arguments)
        for name in needed:
            if not hasattr(built, name):
                raise LoadError(f"it has no attribute {name!r}; {SEE}")
    return built


def construct(
    section: str, reference: str, factory: Callable[..., Any], options: Mapping[str, Any], **settings: Any
) -> Any:
    """`factory(**options, **settings)`, within `option_code`. `settings` are no options of the section.

    Errors of wrong options are a `ConfigError` about SECTION.options.
    """
    parameters = inspect.signature(factory).parameters.values()
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    given = {**options, **settings}
    if missing := [f"{section}.options.{name}" for name in required if name not in given]:
        raise ConfigError(
            f"{' and '.join(missing)} must be set: {reference} needs {'it' if len(missing) == 1 else 'them'}"
        )
    try:
        return factory(**given)
    except UserError:
        raise
    except (TypeError, ValueError, OSError) as error:
        if not options:
            raise
        raise ConfigError(f"{section}.options for {reference}: {message_of(error) or one_line(error)}") from error


def message_of(error: BaseException) -> str:
    """The message of an error in one line; "" if it has none."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


def one_line(error: BaseException) -> str:
    """An error of the user's code in one line, with the file and line that raised it."""
    text = message_of(error)
    if isinstance(error, SyntaxError):
        return text
    ours = ("<frozen", str(importlib.__file__), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    name = type(error).__name__
    return f"{text}{where}" if isinstance(error, ImportError) else f"{name}: {text}".removesuffix(": ") + where


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

"""From a name in a configuration to a user's own Python: "module:thing" or "path/to/file.py:thing"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.config import suggest


def load_thing(reference: str, kind: str = "function", known: Sequence[str] = ()) -> Any:
    """What "module:thing" or "path/to/file.py:thing" names, say an environment, beside those `known` by a name alone.

    Raises what importing it raises, or `ImportError`.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        hint = suggest(reference, known) or f"; there are {', '.join(known)}" * bool(known)
        raise ImportError(f"no such {kind}{hint}; your own is 'module:thing' or 'path/to/file.py:thing'")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.exists():
            raise ImportError(f"there is no file {path}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # as Python does for a script: a file may import its neighbours
        spec.loader.exec_module(module)
    else:
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # a console script does not look where the user stands
        module = importlib.import_module(place)
    if not hasattr(module, name):
        raise ImportError(f"{place} has no attribute {name!r}{suggest(name, list(vars(module)))}")
    return getattr(module, name)


def one_line(error: Exception) -> str:
    """What went wrong while something of the user's was loaded, and where, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, ImportError | SyntaxError):
        return text
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({last.filename}, line {last.lineno})"

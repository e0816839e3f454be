"""What all sections of the configuration have in common."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.errors import InvalidInput

MAX_INT = 2**63 - 1  # of TOML, of torch and of a seed
MAX_WORKERS, MAX_SEQUENCES = 2**12, 2**16  # processes or threads of a kind; rollouts of a group, sequences of an engine

DEVICE = re.compile(r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")


class ConfigError(InvalidInput):
    """A configuration that can't be run. The message is one line for the user."""


class Section(BaseModel):
    """A section of options. Types are strict: text is not converted to a number, nor 1 to true."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


def option(default: Any, description: str, **bounds: Any) -> Any:
    """A field with a default, a description that ends in a period, and bounds such as `ge` and `le`."""
    if type(default) is int:
        bounds.setdefault("le", MAX_INT)
    return Field(default, description=description, validate_default=True, **bounds)


def is_url(text: str) -> bool:
    """Whether the text is an HTTP URL with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of brackets, or of a port above 65535
        return False


Options = TypeVar("Options", bound=Section)


def parse_options(section: str, kind: type[Options], options: Mapping[str, Any]) -> Options:
    """The options of SECTION.options. Raises `ConfigError` that names the first invalid one."""
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join((section, "options", *map(str, first["loc"])))
        problem = " is not set" if first["type"] == "missing" else f" = {first['input']!r:.60}: {first['msg']}"
        raise ConfigError(f"{name}{problem}; the options are {', '.join(kind.model_fields)}") from None


def bearer_headers(section: str, variable: str) -> dict[str, str]:
    """The Authorization header with the token in `variable`, SECTION.options.token_env; {} if that is "".

    Raises `ConfigError`.
    """
    if variable and variable not in os.environ:
        raise ConfigError(f"{section}.options.token_env = {variable!r}: no such environment variable")
    return {"Authorization": f"Bearer {os.environ[variable]}"} if variable else {}

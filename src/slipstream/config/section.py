"""What all sections of the configuration have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slipstream.errors import InvalidInput

MAX_INT = 2**63 - 1  # of TOML, of torch and of a seed


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

"""Evaluation: an environment is closed whichever way it is written, and another's options are not passed to it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import _config_of
from slipstream.config import dump, load_config
from slipstream.evaluation import close_environment


class Closable:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class AsyncClosable(Closable):
    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.closed += 1


@pytest.mark.parametrize("environment", [Closable(), AsyncClosable()])
def test_an_environment_is_closed_async_or_not(environment: Any) -> None:
    asyncio.run(close_environment(environment))
    assert environment.closed == 1


def test_an_environment_needs_no_close() -> None:
    nothing: Any = object()
    asyncio.run(close_environment(nothing))


def test_options_belong_to_their_environment(tmp_path: Path) -> None:
    run = load_config(None, ["--model.path=m", "--environment.name=gsm8k", "--environment.options.shots=2"])
    (tmp_path / "config.toml").write_text(dump(run))
    (tmp_path / "policy").mkdir()
    assert _config_of(str(tmp_path), None, []).environment.options == {"shots": 2}
    assert _config_of(str(tmp_path), "gsm8k", []).environment.options == {"shots": 2}
    assert _config_of(str(tmp_path), "addition", []).environment.options == {}
    digits = ["--environment.options.digits", "1"]
    assert _config_of(str(tmp_path), "addition", digits).environment.options == {"digits": 1}

"""Around an evaluation: the environment is closed, its options are its own, and the busy times do not wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.cli import _config_of
from slipstream.config import dump, load_config
from slipstream.evaluation import close_environment
from slipstream.observe.tally import Tally
from slipstream.run import Run


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


def test_the_window_ends_and_the_last_step_is_recorded_before_a_running_evaluation_is_waited_for() -> None:
    written: list[bool] = []

    async def stats() -> dict[str, float]:
        return {"tokens": 0.0, "busy": 0.0}

    async def main() -> float:
        run: Any = Run.__new__(Run)
        run._started, run._groups, run.stopped = SimpleNamespace(generator=SimpleNamespace(stats=stats)), set(), None
        run._publishing = None
        run.tally = Tally()
        run.tally.open(await stats())
        run._evaluation = asyncio.create_task(asyncio.sleep(0.5))
        run.recorder = SimpleNamespace(write=lambda: written.append(run._evaluation.done()))
        await run._settle()
        assert run._evaluation.done()
        return float(run.tally.window_seconds)

    assert asyncio.run(main()) < 0.4
    assert written == [False]

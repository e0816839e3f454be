"""A checkpoint holds the weights of its step: the trainer is told to save before it is told to take another step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slipstream.directory import RunDirectory
from slipstream.run import Run


class Calls:
    """A trainer, recorder, state and tally that record which calls come in which order."""

    step = 1
    tokens_trained = 1
    ready: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.made: list[str] = []

    async def save(self, path: Path, last: bool) -> None:
        self.made.append("save")

    def snapshot(self) -> dict[str, Any]:
        return {}

    async def flush(self) -> None:
        self.made.append("flush")


def test_a_checkpoint_is_saved_before_the_next_step(tmp_path: Path) -> None:
    """Also if an unfinished one has to be removed first."""
    (tmp_path / "checkpoints" / "step_1.partial" / "trainer").mkdir(parents=True)
    calls, run = Calls(), Run.__new__(Run)
    run.directory, run.stopped, run._saving, run._evaluation = RunDirectory(tmp_path), None, None, None
    run.config = SimpleNamespace(  # type: ignore[assignment]
        checkpoint=SimpleNamespace(every=1, keep=1),
        evaluation=SimpleNamespace(every=0, every_tokens=0),
        loop=SimpleNamespace(steps=9, tokens=0),
    )
    run._started = SimpleNamespace(trainer=calls)  # type: ignore[assignment]
    run.state = run.tally = run.recorder = calls  # type: ignore[assignment]

    async def main() -> None:
        async with asyncio.TaskGroup() as run._tasks:
            await run._evaluate_and_save_if_due(1)
            calls.made.append("step")  # what the run does next if a batch is ready

    asyncio.run(main())
    assert calls.made == ["save", "step", "flush"] or calls.made == ["save", "flush", "step"]
    assert RunDirectory(tmp_path).newest_whole()[0] == tmp_path / "checkpoints" / "step_1"

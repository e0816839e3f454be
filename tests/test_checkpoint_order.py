"""A checkpoint holds the weights of its step: the trainer's save is called before its next step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slipstream.controller.checkpoints import save_if_due
from slipstream.observe.events import EventLog
from slipstream.runtime.run_directory import RunDirectory


class Calls:
    """Trainer, recorder, loop state and totals in one; records the order of calls."""

    step = 1
    ready: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.made: list[str] = []

    async def save(self, path: Path, last: bool) -> None:
        self.made.append("save")
        path.mkdir(parents=True)
        (path / "weights").write_bytes(b"1")

    def snapshot(self) -> dict[str, Any]:
        return {}

    async def flush(self) -> None:
        self.made.append("flush")


def test_a_checkpoint_is_saved_before_the_next_step(tmp_path: Path) -> None:
    """Also if an unfinished one has to be removed first."""
    (tmp_path / "checkpoints" / "step_1.partial" / "trainer").mkdir(parents=True)
    calls = Calls()
    run: Any = SimpleNamespace(
        directory=RunDirectory(tmp_path), ending=False, checkpoint=None, requested_checkpoint=None,
        cluster=SimpleNamespace(trainer=calls),
        config=SimpleNamespace(checkpoint=SimpleNamespace(every=1, keep=1)),
        state=calls, totals=calls, recorder=calls, events=EventLog(tmp_path / "events.jsonl"),
    )  # fmt: skip

    async def main() -> None:
        async with asyncio.TaskGroup() as run.tasks:
            await save_if_due(run)
            calls.made.append("step")  # what the run does next if a batch is ready

    asyncio.run(main())
    assert calls.made == ["save", "step", "flush"] or calls.made == ["save", "flush", "step"]
    assert RunDirectory(tmp_path).newest_whole()[0] == tmp_path / "checkpoints" / "step_1"

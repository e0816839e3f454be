"""A checkpoint holds the weights of its step: the trainer's save is called before its next step.

Waits for its disk happen outside the event loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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


def run_of(tmp_path: Path, calls: Calls) -> Any:
    return SimpleNamespace(
        directory=RunDirectory(tmp_path), ending=False, checkpoint=None, requested_checkpoint=None,
        cluster=SimpleNamespace(trainer=calls),
        config=SimpleNamespace(checkpoint=SimpleNamespace(every=1, keep=1)),
        state=calls, totals=calls, recorder=calls, events=EventLog(tmp_path / "events.jsonl"),
    )  # fmt: skip


def test_a_checkpoint_is_saved_before_the_next_step(tmp_path: Path) -> None:
    """Also if an unfinished one has to be removed first."""
    (tmp_path / "checkpoints" / "step_1.partial" / "trainer").mkdir(parents=True)
    calls = Calls()
    run = run_of(tmp_path, calls)

    async def main() -> None:
        async with asyncio.TaskGroup() as run.tasks:
            await save_if_due(run)
            calls.made.append("step")  # what the run does next if a batch is ready

    asyncio.run(main())
    assert calls.made == ["save", "step", "flush"] or calls.made == ["save", "flush", "step"]
    assert RunDirectory(tmp_path).newest_whole()[0] == tmp_path / "checkpoints" / "step_1"


def test_the_event_loop_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are synced, and an unfinished and an old checkpoint are removed, by other threads."""
    for name in ("step_1.partial", "step_0"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    threads: dict[str, set[int]] = {"fsync": set(), "rmtree": set()}

    def record(module: Any, name: str) -> None:
        function = getattr(module, name)

        def recording(*arguments: Any, **options: Any) -> Any:
            threads[name].add(threading.get_ident())
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, recording)

    record(os, "fsync")
    record(shutil, "rmtree")
    run = run_of(tmp_path, Calls())

    async def main() -> None:
        async with asyncio.TaskGroup() as run.tasks:
            await save_if_due(run)

    asyncio.run(main())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    assert all(threads.values()) and threading.get_ident() not in threads["fsync"] | threads["rmtree"]

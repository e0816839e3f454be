"""Which processes a test has started, and which of them still live."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.controller.launch import Cluster
from slipstream.runtime.worker import handle
from slipstream.tools.verify import PerturbingTrainer

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import kill

# an environment with rewards that differ within a group
ENDLESS = """
from slipstream.environments.base import Task

class Endless:
    def __init__(self):
        self.train = self.test = [Task(str(i), f"{i % 10} + 1 =") for i in range(20)]

    async def rollout(self, task, policy):
        completion = await policy.sample(task.prompt)
        return float(sum(completion.token_ids) % 7)
"""


@contextmanager
def module_for_processes(name: str, source: str, folder: Path, path: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of this source in `folder`, which this process, and those that it starts, can import meanwhile."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(source)
    path.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop(name, None)


def descendants(process: int) -> set[int]:
    """The processes that `process` started, and that those did."""
    children = set(kill.children(process))
    return children.union(*(descendants(child) for child in children))


def command_line(process: int) -> bytes:
    """Empty if the process has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def output(process: int) -> str:
    """The path of a process's standard output; empty if the process has ended."""
    try:
        return str(Path(f"/proc/{process}/fd/1").readlink())
    except OSError:
        return ""


def workers(command: int) -> list[int]:
    """The workers that a `warm.Command` has started."""
    return [worker for server in kill.children(command) for worker in kill.children(server)]


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def changing(pools: Cluster) -> PerturbingTrainer:
    """The trainer of a run whose `trainer.kind` is `PerturbingTrainer`."""
    return handle(PerturbingTrainer, pools.trainer_process)


async def published_versions(pools: Cluster, folder: Path) -> AsyncIterator[tuple[int, Path]]:
    """Versions 0 and 1 of a run of `changing`, each with the directory of its files, once engines serve it."""
    trainer = changing(pools)
    await pools.link.connect(0)
    for version in (0, 1):
        if version:
            await trainer.change(1)
            await pools.link.publish(1)
        await trainer.store(folder / str(version))
        yield version, folder / str(version)

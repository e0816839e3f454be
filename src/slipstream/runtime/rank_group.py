"""The ranks of a trainer as one worker: every call goes to all ranks, and returns the result of rank 0."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from slipstream.config.schema import RuntimeConfig
from slipstream.runtime.addresses import RENDEZVOUS_FILE, RENDEZVOUS_PREFIX, private_store
from slipstream.runtime.placement import Placement
from slipstream.runtime.runtime import Runtime, current_runtime
from slipstream.runtime.worker import WorkerDied, WorkerError, handle
from slipstream.runtime.worker_process import WorkerProcess, serialize

# Errors of collective operations after the loss of a peer. The loss of its host may become known a minute later.
LOST_CONNECTION = re.compile(r"^Dist(Network|Backend)Error|Connection (closed|reset) by peer|Broken pipe")
W = TypeVar("W")
DEATH_DETECTION_S = 1.0  # time after a failure in which the death of a peer that caused it is detected


class RankGroup:
    """Processes that run every call together; the result of rank 0 is returned.

    A rank that dies or fails leaves the others waiting in a collective operation. The call ends with the first error,
    and `stop` waits for no rank then.
    """

    def __init__(self, processes: Sequence[WorkerProcess], store: Any = None) -> None:
        """`store` is that of `_rendezvous`; this object keeps it."""
        self.processes, self._store = processes, store
        self._broken = False
        self.name = processes[0].name

    @property
    def dead(self) -> WorkerDied | None:
        """The error of the first rank that died, or None."""
        return next((process.dead for process in self.processes if process.dead), None)

    @property
    def dying(self) -> bool:
        """Whether the connection to a rank ended."""
        return any(process.dying for process in self.processes)

    async def start(self, kind: type[W], reference: str, *arguments: Any) -> W:
        """As `WorkerProcess.start`, in all ranks. Rendezvous addresses are in the environment of each rank."""
        await asyncio.gather(*(process.start(kind, reference, *arguments) for process in self.processes))
        return handle(kind, self)

    def call(self, method: str, arguments: tuple[Any, ...], large: bool = False) -> asyncio.Future[Any]:
        """As `Transport.call`; calls reach all ranks in the same order. Arguments are serialized once."""
        serialized = serialize(arguments, large)
        calls = [process.call_serialized(method, serialized) for process in self.processes]
        return asyncio.ensure_future(self._answer(calls))

    async def _answer(self, calls: Sequence[asyncio.Future[Any]]) -> Any:
        try:
            return (await asyncio.gather(*calls))[0]
        except (WorkerDied, WorkerError) as error:
            self._broken = True
            if dead := await detect_death(self.processes):
                raise dead from None
            if LOST_CONNECTION.search(f"{getattr(error, 'kind', '')}: {error}"):
                raise self.processes[0].terminate(f"{self.name} lost the connection to another rank: {error}") from None
            raise

    async def stop(self, grace: float = 10.0) -> None:
        """Ask all ranks to end, and kill them after `grace` seconds; kill all at once if a rank has failed."""
        if self._broken or self.dead:
            for process in self.processes:
                process.kill()
        await asyncio.gather(*(process.stop(grace) for process in self.processes))
        if isinstance(self._store, TemporaryDirectory):
            self._store.cleanup()


async def detect_death(ends: Sequence[Any]) -> WorkerDied | None:
    """The death of a worker that has died or dies soon: it may have caused the failure of another worker."""
    last = time.monotonic() + DEATH_DETECTION_S
    while not (dead := next((end.dead for end in ends if end.dead), None)):
        if time.monotonic() > last and not any(end.dying for end in ends):
            break
        await asyncio.sleep(DEATH_DETECTION_S / 20)
    return dead


def trainer_process(
    directory: Path, placement: Placement, ranks: int, limits: RuntimeConfig | None = None,
    variables: Mapping[str, str] | None = None,
) -> WorkerProcess | RankGroup:  # fmt: skip
    """The trainer's process, or one for each rank, with its GPU, rank, these variables and those of `_rendezvous`."""
    runtime, processes = current_runtime(), []
    store, where = _rendezvous(runtime, directory) if ranks > 1 else (None, {})
    for rank in range(ranks):
        environment = {**(variables or {}), **where}
        environment |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        } if store else {}  # fmt: skip
        name, log = (f"trainer rank {rank}", f"trainer_{rank}.log") if rank else ("trainer", "trainer.log")
        launcher = runtime.launcher(f"trainer {rank}", placement.trainer[rank : rank + 1])
        processes.append(WorkerProcess(name, directory / "logs" / log, launcher, environment, limits))
    return RankGroup(processes, store) if store else processes[0]


def _rendezvous(runtime: Runtime, run: Path) -> tuple[Any, dict[str, str]]:
    """A new store by which ranks form their process group, and the environment variables that name it.

    A TCP store has no authentication, so ranks on this host use a file in a directory that only their user can open.
    It is in the directory of the run, which removes it at its next start if the controller was killed.
    """
    if runtime.kind == "local":
        directory = TemporaryDirectory(prefix=RENDEZVOUS_PREFIX, dir=run.absolute())
        return directory, {RENDEZVOUS_FILE: f"{directory.name}/store"}
    store = private_store(runtime.address)
    address = {"MASTER_ADDR": runtime.address, "MASTER_PORT": str(store.port)}
    return store, address | {"TORCHELASTIC_USE_AGENT_STORE": "True"}

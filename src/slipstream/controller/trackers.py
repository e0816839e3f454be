"""The processes of a run's trackers: their start, warnings of those that fail or hang, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from slipstream.observe.trackers import Follower, label
from slipstream.runtime.priority import OBSERVER_NICENESS, at_niceness
from slipstream.runtime.worker import WorkerDied, WorkerError, describe_death, succeeded
from slipstream.runtime.worker_process import WorkerProcess

WORKER = "slipstream.observe.trackers:Follower"
HANG_S = 60.0  # without progress, after which a tracker is reported
DRAIN_S, DRAIN_INTERRUPTED_S = 30.0, 2.0  # in which a tracker has to end; the latter after a second signal
STOP_S = 5.0  # in which its process has to end once all is sent


class TrackerProcess:
    """The process of one tracker, started by the constructor.

    It reads the records from the run's directory, and gets none from the controller. `warn` is called with each
    problem.
    """

    def __init__(self, name: str, project: str, path: Path, warn: Callable[[str], None]) -> None:
        self._name, self._path, self._warn = name, path, warn
        self._log = path / "logs" / f"tracker_{label(name)}.log"
        self._process = WorkerProcess(
            f"tracker {label(name)}", self._log, environment=at_niceness(OBSERVER_NICENESS), essential=False
        )
        self._worker: Follower | None = None
        self._ending = False
        self._following = asyncio.create_task(self._follow(project))

    async def close(self) -> None:
        """Wait until all records are sent, at most `DRAIN_S`, and end the process.

        After a second signal it waits at most `DRAIN_INTERRUPTED_S`.
        """
        task, self._ending = asyncio.current_task(), True
        grace = DRAIN_INTERRUPTED_S if task and task.cancelling() else DRAIN_S
        self._finish()
        if (await asyncio.wait((self._following,), timeout=grace))[1]:
            self._following.cancel()
            self._process.kill()
            self._report(f"did not finish within {grace:g} s and was killed")
        await self._process.stop(STOP_S)
        await asyncio.wait((self._following,))

    def _finish(self) -> None:
        """Tell the tracker that all is recorded, if it has started and `close` was called."""
        if self._worker and self._ending:
            asyncio.ensure_future(self._worker.finish()).add_done_callback(succeeded)

    async def _follow(self, project: str) -> None:
        """Run the tracker to its end. Reports its failure."""
        hang = asyncio.create_task(self._report_hang())
        try:
            self._worker = await self._process.start(Follower, WORKER, self._path.absolute(), self._name, project)
            self._finish()
            await self._worker.follow()
        except WorkerError as error:
            self._report(f"failed: {error.kind}: {str(error).partition(chr(10))[0]}")
        except (WorkerDied, OSError) as error:
            self._report(f"failed: {describe_death(error)}")
        finally:
            hang.cancel()

    async def _report_hang(self) -> None:
        while self._process.seconds_since_progress < HANG_S:
            await asyncio.sleep(HANG_S / 10)
        self._report(f"has made no progress for {HANG_S:g} s; its log has its stack")

    def _report(self, what: str) -> None:
        self._warn(
            f"tracker {label(self._name)} {what}. The run is not affected; log: {self._log}; "
            f"upload the rest later: slipstream track {self._path} --to {self._name}"
        )

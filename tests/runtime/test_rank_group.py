"""A trainer of several ranks under the controller: its weights reach generators by every link, its deaths are reported.

tests/trainers/test_parallel.py tests the computation of the ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.rollout import Sampling
from slipstream.runtime.addresses import RENDEZVOUS_FILE, own_address, private_store
from slipstream.runtime.placement import Placement
from slipstream.runtime.rank_group import RankGroup, trainer_process
from slipstream.runtime.run_directory import RunDirectory
from slipstream.runtime.worker import WorkerDied, WorkerError, handle
from slipstream.trainers.base import TrainerWorker
from tests.processes import changing
from tests.runtime.test_faults import pid_of, started
from tests.trainers.test_trainer import random_batch

RANKS = "--trainer.ranks=2"


@pytest.mark.parametrize(("link", "parallel"), [("shared", "fsdp"), ("nccl", "fsdp"), ("checkpoint", "ddp")])
def test_generators_serve_the_weights_of_all_ranks(link: str, parallel: str, tiny: Path, tmp_path: Path) -> None:
    """Every parameter is compared after each publish, and generator and trainer compute the same log-probabilities."""

    async def main() -> None:
        async with started(
            tiny, tmp_path, link, RANKS, f"--trainer.parallel={parallel}", "--sync.verify=full"
        ) as pools:
            await pools.link.connect(0)
            for version in (1, 2):
                await changing(pools).change(version)
                await pools.trainer.step(random_batch(38, seed=version))
                await pools.link.publish(version)
            drawn = await pools.generator.generate((5, 6, 7), Sampling(temperature=1.0, max_tokens=8, seed=3))
            [scored] = await pools.trainer.score([drawn])
            assert scored == pytest.approx(drawn.logprobs, abs=1e-4)

    asyncio.run(main())


def test_the_death_of_a_rank_ends_the_call_of_all_ranks_at_once(tiny: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tiny, tmp_path, "shared", RANKS, close=8.0) as pools:
            processes = pools.trainer_process.processes  # type: ignore[union-attr]
            os.kill(pid_of(processes[1]), signal.SIGSTOP)  # so that rank 0 waits for it in the step
            step = asyncio.ensure_future(pools.trainer.step(random_batch(38)))
            await asyncio.sleep(0.5)
            began = time.monotonic()
            os.kill(pid_of(processes[1]), signal.SIGKILL)
            with pytest.raises(WorkerDied, match=r"trainer rank 1 died \(log: .*trainer_1.log"):
                await step
            assert time.monotonic() - began < 5

    asyncio.run(main())


class Rank:
    """A process whose one call ends with a given result or error, or never."""

    dying = False

    def __init__(self, outcome: Any) -> None:
        self.name, self.dead, self.killed, self._outcome = "trainer", None, False, outcome

    def call_serialized(self, method: str, arguments: bytes) -> asyncio.Future[Any]:
        self.told = pickle.loads(arguments)
        future = asyncio.get_running_loop().create_future()
        if isinstance(self._outcome, Exception):
            future.set_exception(self._outcome)
        elif self._outcome is not None:
            future.set_result(self._outcome)
        return future

    def kill(self) -> None:
        self.killed = True

    async def stop(self, grace: float) -> None: ...


def test_a_call_returns_the_result_of_rank_0() -> None:
    async def main() -> None:
        ranks = RankGroup([Rank("zero"), Rank("one")])  # type: ignore[list-item]
        assert await handle(TrainerWorker, ranks).score([]) == "zero"
        await ranks.stop()
        assert not any(rank.killed for rank in ranks.processes)  # type: ignore[attr-defined]

    asyncio.run(main())


class Told:
    """An argument that counts how often it is serialized."""

    times = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Told.times += 1
        return str, ("a batch",)


def test_arguments_are_serialized_once_for_all_ranks() -> None:
    async def main() -> None:
        ranks = RankGroup([Rank(number) for number in range(8)])  # type: ignore[list-item]
        await ranks.call("score", (Told(), 3))
        assert [rank.told for rank in ranks.processes] == [("a batch", 3)] * 8  # type: ignore[attr-defined]
        assert Told.times == 1

    asyncio.run(main())


def test_the_error_of_a_rank_is_raised_while_others_wait_for_it() -> None:
    async def main() -> None:
        ranks = RankGroup([Rank(None), Rank(WorkerError("no memory", "OutOfMemory", ""))])  # type: ignore[list-item]
        with pytest.raises(WorkerError, match="no memory"):
            await handle(TrainerWorker, ranks).score([])
        await ranks.stop()
        assert all(rank.killed for rank in ranks.processes)  # type: ignore[attr-defined]

    asyncio.run(main())


def test_ranks_on_one_host_meet_at_a_file_of_their_user(tmp_path: Path) -> None:
    """No other user of the host can join the group. Ranks that are restarted get a new file.

    A killed run leaves none behind once its directory is used again.
    """

    async def main() -> None:
        first, second = (trainer_process(tmp_path, Placement(((),), ()), 2) for _ in range(2))
        assert isinstance(first, RankGroup) and isinstance(second, RankGroup)
        files = [
            process._launch.environment[RENDEZVOUS_FILE] for ranks in (first, second) for process in ranks.processes
        ]
        assert files[0] == files[1] != files[2] == files[3]
        private = Path(files[0]).parent
        assert private.stat().st_mode & 0o777 == 0o700 and "MASTER_PORT" not in first.processes[0]._launch.environment
        await first.stop()
        assert not private.exists()
        with contextlib.closing(RunDirectory.create(tmp_path)):  # as after the controller was killed
            assert not Path(files[2]).parent.exists()

    asyncio.run(main())


def test_stores_of_links_listen_on_the_loopback_interface() -> None:
    """They listen on no other interface of the host."""
    store = private_store(own_address())
    port = f"{store.port:04X}"
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    listening = [line.split()[1] for table in tables for line in table if line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{port}")] == [f"0100007F:{port}"]

"""A trainer of several ranks under the controller: its weights reach generators by every link, and its deaths are told.

What ranks compute is in tests/trainers/test_ranks.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.actor import Actor, ActorDied, ActorError, Line
from slipstream.config import ConfigError, load_config
from slipstream.rollout import Sampling
from slipstream.run import train
from slipstream.runtime.placement import Placement
from slipstream.runtime.ranks import Ranks, _receive, join, refuse_other_user, trainer_actor
from tests.processes import descendants
from tests.runtime.test_faults import pid_of, started
from tests.trainers.test_trainer import random_batch

RANKS = "--trainer.ranks=2"


@pytest.mark.parametrize(("link", "parallel"), [("shared", "fsdp"), ("nccl", "fsdp"), ("checkpoint", "ddp")])
def test_generators_serve_what_all_ranks_have_trained(link: str, parallel: str, tiny: Path, tmp_path: Path) -> None:
    """Every parameter is compared after each publish, and generator and trainer agree on probabilities."""

    async def main() -> None:
        async with started(
            tiny, tmp_path, link, RANKS, f"--trainer.parallel={parallel}", "--sync.verify=full"
        ) as pools:
            await pools.link.connect(0)
            for version in (1, 2):
                await pools.trainer.actor.call("change", version)
                await pools.trainer.step(random_batch(38, seed=version))
                await pools.link.publish(version)
            drawn = await pools.generator.generate((5, 6, 7), Sampling(temperature=1.0, max_tokens=8, seed=3))
            [scored] = await pools.trainer.score([drawn])
            assert scored == pytest.approx(drawn.logprobs, abs=1e-4)

    asyncio.run(main())


def test_a_rank_that_dies_ends_what_others_do_with_it_at_once(tiny: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tiny, tmp_path, "shared", RANKS, close=8.0) as pools:
            actors = pools.trainer.actor.actors  # type: ignore[union-attr]
            os.kill(pid_of(actors[1]), signal.SIGSTOP)  # so that rank 0 waits for it in the step
            step = pools.trainer.actor.call("step", random_batch(38))
            await asyncio.sleep(0.5)
            began = time.monotonic()
            os.kill(pid_of(actors[1]), signal.SIGKILL)
            with pytest.raises(ActorDied, match=r"trainer rank 1 died \(log: .*trainer_1.log"):
                await step
            assert time.monotonic() - began < 5

    asyncio.run(main())


class Rank:
    """An actor whose one call ends as it is told, or never."""

    def __init__(self, outcome: Any) -> None:
        self.name, self.dead, self.killed, self._outcome = "trainer", None, False, outcome

    dumps = staticmethod(pickle.dumps)

    def call_dumped(self, method: str, arguments: bytes) -> asyncio.Future[Any]:
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


def torchrun(count: int, *arguments: str, where: str = "--standalone") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", where, f"--nproc-per-node={count}", "-m", "slipstream",
               *arguments]  # fmt: skip
    environment = torchrun_environment()
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240, env=environment)


def torchrun_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}


def test_processes_of_torchrun_are_the_ranks_of_a_run(tiny: Path, tmp_path: Path) -> None:
    """The first controls, the others train, and all end with the run; a wrong number of them is one line."""
    flags = [f"--model.path={tiny}", "--environment.name=addition", "--loop.steps=2", "--loop.groups_per_step=2",
             "--loop.group_size=2", "--sampling.max_tokens=4", "--evaluation.tasks=0", "--trainer.device=cpu",
             "--generator.device=cpu", RANKS]  # fmt: skip
    (tmp_path / "empty.toml").write_text("")
    done = torchrun(2, "train", str(tmp_path / "empty.toml"), f"--run.dir={tmp_path / 'run'}", *flags)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["version"] for record in records] == [1, 2]
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"trainer.log", "generator_0.log"}


def test_a_signal_that_torchrun_passes_on_lets_a_run_end_with_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    """As a cluster sends it that takes its machines back."""
    flags = [f"--model.path={tiny}", "--environment.name=addition", "--loop.steps=100000", "--loop.groups_per_step=2",
             "--loop.group_size=2", "--sampling.max_tokens=4", "--evaluation.tasks=0", "--trainer.device=cpu",
             "--generator.device=cpu", RANKS]  # fmt: skip
    (tmp_path / "empty.toml").write_text("")
    run, said = tmp_path / "run", (tmp_path / "said").open("w+")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "slipstream",
               "train", str(tmp_path / "empty.toml"), f"--run.dir={run}", *flags]  # fmt: skip
    process = subprocess.Popen(command, stdout=said, stderr=said, env=torchrun_environment())
    try:
        last = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
            assert process.poll() is None and time.monotonic() < last, (tmp_path / "said").read_text()
            time.sleep(0.1)
        process.terminate()
        process.wait(60)
    finally:
        process.kill()
    assert json.loads((run / "summary.json").read_text())["stopped"] == "SIGTERM", (tmp_path / "said").read_text()
    assert [path.name.startswith("step_") for path in (run / "checkpoints").iterdir()] == [True]


def test_what_torchrun_starts_and_a_run_has_no_use_for_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    single = ["--sync.link=single_copy", "--generator.kind=vllm", "--generator.tensor_parallel=4",
              "--trainer.parallel=tensor"]  # fmt: skip
    for ranks, flags, said in (
        (2, [], r"started 4 processes, but trainer\.ranks = 2"),
        (4, single, r'sync.link = "single_copy" needs all ranks on one host'),
        (4, ["--trainer.kind=my.own:Trainer"], r'trainer.kind = "my.own:Trainer" needs all ranks on one host'),
    ):
        given = [f"--model.path={tiny}", "--environment.name=addition", f"--trainer.ranks={ranks}", *flags]
        with pytest.raises(ConfigError, match=said):
            train(load_config(None, given))


def test_ranks_on_two_hosts_are_those_of_a_run(tiny: Path, tmp_path: Path) -> None:
    """One that is killed there ends the run here, by its name; what was saved is gone on with."""
    flags = [f"--model.path={tiny}", "--environment.name=addition", "--loop.steps=100000", "--loop.groups_per_step=2",
             "--loop.group_size=2", "--sampling.max_tokens=4", "--evaluation.tasks=0", "--trainer.device=cpu",
             "--generator.device=cpu", "--checkpoint.every=1", f"--run.dir={tmp_path / 'run'}", RANKS]  # fmt: skip
    (tmp_path / "empty.toml").write_text("")
    metrics = tmp_path / "run" / "metrics.jsonl"
    with two_hosts(tmp_path, "train", str(tmp_path / "empty.toml"), *flags) as (here, there):
        last = time.monotonic() + 180
        while len(list((tmp_path / "run" / "checkpoints").glob("step_?"))) < 2:
            assert here.poll() is None and time.monotonic() < last, (tmp_path / "here").read_text()
            time.sleep(0.1)
        environments = {child: Path(f"/proc/{child}/environ").read_bytes() for child in descendants(there.pid)}
        (rank,) = (child for child, environment in environments.items() if b"\0RANK=1\0" in environment)
        os.kill(rank, signal.SIGKILL)
        assert here.wait(60)
    said = f"slipstream: trainer rank 1 on {socket.gethostname()} died"
    assert said in (tmp_path / "here").read_text()
    steps = len(metrics.read_text().splitlines()) + 2
    resumed = ["train", "--resume", str(tmp_path / "run"), f"--loop.steps={steps}"]
    with two_hosts(tmp_path, *resumed) as (here, there):
        assert here.wait(180) == 0 and there.wait(60) == 0, (tmp_path / "here").read_text()
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [*range(1, steps + 1)]


@contextlib.contextmanager
def two_hosts(path: Path, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process of `torchrun` for each, which start one rank each; what they say is in `here` and `there`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents = []
    for number, name in enumerate(("here", "there")):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}",
                   "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "slipstream",
                   *arguments]  # fmt: skip
        with (path / name).open("w") as said:
            agents.append(subprocess.Popen(command, stdout=said, stderr=said, env=torchrun_environment()))
    try:
        yield agents
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait()


def test_a_port_that_is_taken_is_named_or_another_is_used(tmp_path: Path) -> None:
    """torchrun's is the user's to choose, and it tells by itself; a trainer's ranks meet at one that is free."""

    async def meeting() -> tuple[Any, str]:
        ranks = await trainer_actor(tmp_path, Placement(((),), ()), 2)
        return ranks, ranks.actors[0]._environment["MASTER_PORT"]

    (_one, port), (_other, another) = asyncio.run(meeting()), asyncio.run(meeting())
    assert port != another
    began = time.monotonic()
    done = torchrun(2, "train", "none.toml", where=f"--master-port={port}")
    assert done.returncode and time.monotonic() - began < 30
    assert f"port: {port}" in done.stderr and "address already in use" in done.stderr


def test_rank_0_answers() -> None:
    async def main() -> None:
        ranks = Ranks([Rank("zero"), Rank("one")])  # type: ignore[list-item]
        assert await ranks.call("step") == "zero"
        await ranks.stop()
        assert not any(actor.killed for actor in ranks.actors)  # type: ignore[attr-defined]

    asyncio.run(main())


class Told:
    """What counts how often it is told."""

    times = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Told.times += 1
        return str, ("a batch",)


def test_ranks_are_told_the_same_at_the_cost_of_telling_one() -> None:
    async def main() -> None:
        ranks = Ranks([Rank(number) for number in range(8)])  # type: ignore[list-item]
        await ranks.call("step", Told(), 3)
        assert [rank.told for rank in ranks.actors] == [("a batch", 3)] * 8  # type: ignore[attr-defined]
        assert Told.times == 1

    asyncio.run(main())


def test_a_rank_that_fails_is_heard_while_others_wait_for_it() -> None:
    async def main() -> None:
        ranks = Ranks([Rank(None), Rank(ActorError("no memory", "OutOfMemory", ""))])  # type: ignore[list-item]
        with pytest.raises(ActorError, match="no memory"):
            await ranks.call("step")
        await ranks.stop()
        assert all(actor.killed for actor in ranks.actors)  # type: ignore[attr-defined]

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["link", "open to all", "of another user"])
def test_ranks_meet_in_a_directory_of_their_user_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that another user has put at that path is never connected to: what it sends would be unpickled."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    place = tmp_path / f"slipstream-{os.getuid()}-{os.getppid()}"
    held = tmp_path / "elsewhere" if kind == "link" else place
    held.mkdir(mode=0o777 if kind == "open to all" else 0o700)
    held.chmod(0o777 if kind == "open to all" else 0o700)
    if kind == "link":
        place.symlink_to(held)
    if kind == "of another user":
        lstat, other = Path.lstat, held.stat().st_uid + 1
        monkeypatch.setattr(
            Path,
            "lstat",
            lambda path: os.stat_result((*lstat(path)[:4], other, *lstat(path)[5:])) if path == place else lstat(path),
        )
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # as it ends for what is another user's
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(held / "door"))
        door.listen(1)
        door.setblocking(False)
        for meet in (join, lambda: _receive(1)):
            with pytest.raises(ConfigError, match="is not a private directory of this user"):
                meet()
        with pytest.raises(BlockingIOError):
            door.accept()


def test_a_process_of_another_user_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    refuse_other_user(ours)
    monkeypatch.setattr(os, "getuid", lambda: 2**20)
    with pytest.raises(ConfigError, match="where ranks of the trainer of user 1048576 meet"):
        refuse_other_user(ours)
    ours.close()
    theirs.close()


def test_stores_of_ranks_and_links_listen_on_the_loopback_interface(tmp_path: Path) -> None:
    """Not on every interface of the host."""
    ranks: Any = asyncio.run(trainer_actor(tmp_path, Placement(((),), ()), 2))
    port = f"{ranks._store.port:04X}"
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    listening = [line.split()[1] for table in tables for line in table if line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{port}")] == [f"0100007F:{port}"]


def test_no_worker_but_a_rank_is_told_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torchrun` has set stays set in the controller, from beginning to end."""
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "h"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("slipstream.runtime.ranks._receive", lambda count: {1: Line(os.dup(0))})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ranks: Any = asyncio.run(trainer_actor(tmp_path, Placement(((),), ()), 2))
    assert ranks.actors[0]._child_environment().items() >= (told | {"LOCAL_WORLD_SIZE": "2"}).items()
    assert not told.keys() & Actor("generator")._child_environment().keys()
    assert os.environ.items() >= (told | {"LOCAL_WORLD_SIZE": "2"}).items()

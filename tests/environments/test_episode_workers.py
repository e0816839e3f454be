"""Episodes in worker processes: the same results, and faults that cost one worker's episodes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.environments import worker_environment
from slipstream.environments.base import Policy
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.episode import EpisodeOptions, RolloutFailed, run_episode
from slipstream.environments.load import load_environments
from slipstream.environments.reward_workers import RewardErrorCounter, ScoringError
from slipstream.environments.worker_environment import WorkerEnvironment
from slipstream.generators.base import ContextFull
from slipstream.rollout import Completion, Rollout, Sampling, VersionSpan
from tests.conftest import build_tokenizer
from tests.processes import lives

USERS = """
import asyncio, collections, dataclasses, itertools, os
from slipstream.environments.base import Task
from slipstream.environments.reward_workers import await_reward

leaked = []

class Faults:
    test = ()
    train = [Task(str(i), "1+1=", {"fault": f}) for i, f in enumerate(FAULTS)]

    async def rollout(self, task, policy):
        fault = task.data["fault"]
        completion = await policy.sample(task.prompt) if fault != "policies" else None
        if fault == "crash": os._exit(3)
        if fault == "busy":
            while True: pass
        if fault == "deaf": collections.deque(itertools.repeat(0), maxlen=0)  # a loop of C code, which no alarm ends
        if fault == "leak": leaked.append(bytearray(b"x" * 100_000_000))
        if fault == "raise": raise ValueError("a bad day")
        if fault == "long": await policy.sample("1" * 1000)
        if fault == "policies":
            own, other = policy["a"], policy["b"]
            await own.sample("1="), await other.sample("1=")
            return [dataclasses.replace(own.rollout(1.0), role="b"), other.rollout(0.0)]
        if fault == "slow": await asyncio.sleep(1000)
        if fault == "reward":
            async def bad(): raise KeyError("answer")
            return policy.rollout(await await_reward(bad()), pid=os.getpid())
        await asyncio.sleep(0.05)
        return policy.rollout(len(completion.token_ids), pid=os.getpid(), seed=completion.token_ids[0])
"""


class Quick:
    """A generator that answers soon, and refuses long prompts."""

    version = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0.01)
        if len(prompt_ids) > 100:
            raise ContextFull("too long")
        ids = (3 + sampling.seed % 5, 1)
        return Completion(tuple(prompt_ids), ids, (-0.5,) * 2, (VersionSpan(0, 0, 2),), "stop", policy=sampling.policy)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def faults(tmp_path: Path, *kinds: str, **options: Any) -> AsyncIterator[WorkerEnvironment]:
    """An environment with a task of each of these faults; no process of its workers is left over."""
    (tmp_path / "users.py").write_text(f"FAULTS = {kinds}\n{USERS}")
    values = {"name": f"{tmp_path / 'users.py'}:Faults", "workers": 2, **options}
    config = load_config(None, ["--model.path=none", *(f"--environment.{k}={v}" for k, v in values.items())])
    [loaded] = load_environments(config, tmp_path)
    environment = loaded.environment
    assert isinstance(environment, WorkerEnvironment)
    started: set[int] = set()
    begin = worker_environment.EpisodeProcess.start

    async def start(self: Any, *arguments: Any) -> None:
        await begin(self, *arguments)
        started.add(self.process.process.pid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_environment.EpisodeProcess, "start", start)
        try:
            yield environment
        finally:
            await environment.close()
    async with asyncio.timeout(10):
        while any(map(lives, started)):
            await asyncio.sleep(0.05)


async def play(environment: WorkerEnvironment, index: int, **options: Any) -> Rollout | RolloutFailed:
    policy = Policy(Quick(), TOKENIZER, Sampling(max_tokens=4), f"{index}")
    try:
        [rollout] = await run_episode(environment, environment.train[index], policy, EpisodeOptions(60.0, **options))
        return rollout
    except RolloutFailed as failure:
        return failure


TOKENIZER = ChatTokenizer(build_tokenizer())


def test_an_episode_in_a_worker_has_the_rollout_and_the_failures_of_one_without(tmp_path: Path) -> None:
    errors: list[ScoringError] = []

    async def main() -> None:
        async with faults(tmp_path, "", "raise", "long", "reward", "slow") as environment:
            counter = RewardErrorCounter(5, errors.append)
            for index in range(4):
                there = await play(environment, index, reward_errors=counter)
                here = await play(environment.environment, index, reward_errors=counter)  # type: ignore[arg-type]
                if isinstance(here, Rollout):
                    assert isinstance(there, Rollout) and there.metrics.pop("pid") != here.metrics.pop("pid")
                    assert there == here
                else:
                    assert isinstance(there, RolloutFailed) and str(there) == str(here)
            playing = asyncio.create_task(play(environment, 4))
            await asyncio.sleep(0.5)
            playing.cancel()
            await asyncio.wait([playing])
            assert isinstance(await play(environment, 0), Rollout)

    asyncio.run(main())
    assert [error.reason for error in errors] == ["KeyError"] * 2


def test_the_role_of_a_policy_has_its_name_once(tmp_path: Path) -> None:
    async def main() -> list[str]:
        async with faults(tmp_path, "policies", workers=1) as environment:
            policy = Policy(Quick(), TOKENIZER, Sampling(max_tokens=4), "0", policies={"a": "a", "b": "b"})
            rollouts = await run_episode(environment, environment.train[0], policy, EpisodeOptions(60.0))
            return [rollout.role for rollout in rollouts]

    assert asyncio.run(main()) == ["a:b", "b"]


def test_faults_cost_the_episodes_of_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5% of the episodes crash their process, 5% block it, 5% leak; all are drawn again until the others succeed."""
    monkeypatch.setattr(worker_environment, "HANG_S", 5.0)
    kinds = [{0: "crash", 1: "busy", 2: "leak"}.get(index % 20, "") for index in range(80)]
    kinds[1] = "deaf"
    pids: Counter[float] = Counter()
    failures: dict[str, list[RolloutFailed]] = {kind: [] for kind in kinds}

    async def again(environment: WorkerEnvironment, index: int) -> None:
        for _ in range(1 if kinds[index] in ("crash", "busy", "deaf") else 20):
            outcome = await play(environment, index)
            if isinstance(outcome, Rollout):
                pids[outcome.metrics["pid"]] += 1
                return
            failures[kinds[index]].append(outcome)
        assert kinds[index] in ("crash", "busy", "deaf"), outcome

    async def main() -> None:
        async with faults(tmp_path, *kinds, workers=2, worker_memory_gb=0.25, timeout=10) as environment:
            for first in range(0, 80, 8):
                await asyncio.gather(*(again(environment, index) for index in range(first, first + 8)))
                assert len(environment._alive) <= 4

    asyncio.run(main())
    assert sum(pids.values()) == sum(kind in ("", "leak") for kind in kinds)
    assert os.getpid() not in pids and len(pids) >= 4, "workers are replaced"
    assert {f.reason for f in failures["crash"]} == {"environment worker died"}
    assert {f.reason for f in failures["busy"]} <= {"blocked the event loop", "environment worker died"}
    assert any("has blocked its event loop" in f.detail for f in failures["deaf"]), failures["deaf"]
    assert {f.reason for f in failures[""]} <= {"environment worker died"}


def test_episodes_neither_gather_in_the_last_workers_nor_join_one_that_is_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_environment, "HANG_S", 100.0)
    monkeypatch.setattr(worker_environment, "HANG_CHECKS", 1000)

    async def main() -> None:
        async with faults(tmp_path, "", "crash", "slow", "deaf") as environment:

            async def pids(count: int) -> list[float]:
                found = await asyncio.gather(*(play(environment, 0) for _ in range(count)))
                assert all(isinstance(rollout, Rollout) for rollout in found), found
                return [rollout.metrics["pid"] for rollout in found if isinstance(rollout, Rollout)]

            assert sorted(Counter(before := await pids(4)).values()) == [2, 2]
            slow = [asyncio.create_task(play(environment, 2)) for _ in range(2)]
            await asyncio.sleep(0.5)
            assert isinstance(await play(environment, 1), RolloutFailed)  # and a slow one with it
            await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
            [remaining] = [task for task in slow if not task.done()]
            after = await pids(1)
            assert after[0] not in before, "it waits for the worker that replaces the dead one"
            remaining.cancel()
            blocking = asyncio.create_task(play(environment, 3))
            async with asyncio.timeout(30):
                while all(process.responsive for process in environment._alive):
                    await asyncio.sleep(0.05)
            assert len({*await pids(3)}) == 1
            blocking.cancel()
            for process in environment._alive:
                if not process.responsive:
                    process.process.kill()
            await asyncio.wait([blocking, remaining])

    asyncio.run(main())


def test_a_worker_that_cannot_load_the_environment_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        async with faults(tmp_path, "") as environment:
            (tmp_path / "users.py").write_text("raise RuntimeError('gone')")
            with pytest.raises(ConfigError, match="gone"):
                await play(environment, 0)

    asyncio.run(main())


def test_a_worker_in_c_code_ends_although_its_controller_was_killed() -> None:
    """No thread of Python runs in it."""
    program = """
import asyncio, collections, itertools
from types import SimpleNamespace
from slipstream.environments import episode_workers
episode_workers.BLOCKED_EXIT_S = 0.5

async def main():
    running = asyncio.create_task(episode_workers.EpisodeWorker.run(SimpleNamespace(_blocked_limit=0.1)))
    await asyncio.sleep(1.0)
    print("it runs while its loop has time", flush=True)
    collections.deque(itertools.repeat(0), maxlen=0)

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGPROF and ended.stdout.startswith("it runs"), ended
    assert "most recent call first" in ended.stderr


def test_a_memory_limit_needs_workers() -> None:
    with pytest.raises(ConfigError, match=r"environment\.workers"):
        load_config(None, ["--model.path=none", "--environment.name=addition", "--environment.worker_memory_gb=1"])

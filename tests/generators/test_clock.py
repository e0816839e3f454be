"""While engines sleep, no time passes for episodes. The loop of these tests waits for nothing: it leaps in time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.environments.base import Codec, Policy, Task
from slipstream.environments.conversation import Limits
from slipstream.environments.guard import RolloutFailed, attempt
from slipstream.rollout import Completion, Rollout, Sampling, VersionSpan
from slipstream.runtime.pool import GeneratorPool, ProcessGenerator
from slipstream.runtime.turns import Turns
from tests.conftest import build_tokenizer

LIMIT = 10.0


class Leaping(asyncio.SelectorEventLoop):
    """Whenever nothing is left to do but to wait, it is that much later already."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run(monkeypatch: pytest.MonkeyPatch, episode: Coroutine[Any, Any, Any]) -> Any:
    loop = Leaping()
    monkeypatch.setattr("slipstream.generators.clock.time", SimpleNamespace(monotonic=loop.time))
    try:
        return loop.run_until_complete(episode)
    finally:
        loop.close()


class Engine(ProcessGenerator):
    """An engine, and its process, that draws a token in so many seconds, of those in which it is awake."""

    dead, name = None, "engine"

    def __init__(self, seconds: float) -> None:
        super().__init__(self)  # type: ignore[arg-type]
        self._seconds, self._asleep = seconds, False

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        self._asleep = method in ("sleep", "load", "offload")
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        drawn = 0.0
        while drawn < self._seconds:
            await asyncio.sleep(0.1)
            drawn += 0.1 * (not self._asleep)
        return Completion(tuple(prompt_ids), (5,), (0.0,), (VersionSpan(0, 0, 1),), "length")


class Talks:
    """Three replies, and what had become of the conversation by then."""

    train = test = ()

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        chat = policy.conversation()
        said = [await chat.ask("and?") for _ in range(3)]
        return policy.rollout(float(sum(map(bool, said))), ended=float(chat.ended == "seconds"))


async def episode(seconds: float, sleeps: float, conversation: float) -> Rollout | str:
    """What an episode comes to whose tokens take so many seconds, between which generators sleep three times."""
    engine: Any = Engine(seconds)
    pool = GeneratorPool([engine])
    turns = Turns(engine, pool)  # whose trainer is as quick to answer
    policy = Policy(pool, Codec(build_tokenizer()), Sampling(), "0", limits=Limits(seconds=conversation))
    playing = asyncio.ensure_future(attempt(Talks(), Task("0", "hi"), policy, LIMIT))
    for _ in range(3):
        await asyncio.sleep(1.0)
        async with turns.of_the_trainer(publishes=False):
            await asyncio.sleep(sleeps)
    try:
        return (await playing)[0]
    except RolloutFailed as failed:
        return failed.reason


@pytest.mark.parametrize("sleeps", [0.5, 100 * LIMIT])
def test_time_asleep_counts_for_no_limit(sleeps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = run(monkeypatch, episode(0.9, sleeps, conversation=LIMIT - 1))
    assert rollout.reward == 3 and rollout.metrics["ended"] == 0


@pytest.mark.parametrize("sleeps", [0.0, 100 * LIMIT])
def test_time_awake_does(sleeps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode's as a conversation's: what is left when they sleep is left when they wake."""
    assert run(monkeypatch, episode(5.0, sleeps, conversation=0)) == "time limit"
    rollout = run(monkeypatch, episode(2.5, sleeps, conversation=6.0))
    assert rollout.metrics["ended"] == 1 and 0 < rollout.reward < 3

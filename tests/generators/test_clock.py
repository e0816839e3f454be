"""While engines sleep, and while a request waits for a slot, no time passes for its episode. The loop of these tests
waits for nothing: it leaps in time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config import load_config
from slipstream.environments.base import Codec, Policy, Task
from slipstream.environments.conversation import Limits
from slipstream.environments.guard import RolloutFailed, attempt, episode_places
from slipstream.environments.in_flight import Places
from slipstream.generators.torch import TorchGenerator
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

    async def generate(self, prompt_ids: Any, sampling: Sampling, clock: Any = None) -> Completion:
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


SLOTS, SECONDS = 2, 0.3  # of an engine that is asked for far more than it can draw in the time limit of an episode


class Crowded:
    """An engine of `SLOTS` slots, in this process or behind an actor, that draws a token in `SECONDS` and admits
    requests in order of arrival."""

    dead, name, slots = None, "engine", SLOTS

    def __init__(self) -> None:
        self.queue: deque[Any] = deque()
        self.began: list[float] = []

    def submit(self, key: Any, prompt: Any, sampling: Sampling) -> None:
        self.queue.append(key)

    def abort(self, key: Any) -> None:
        self.queue = deque(k for k in self.queue if k != key)

    @property
    def busy(self) -> bool:
        return bool(self.queue)

    def step(self) -> list[tuple[Any, Completion]]:
        loop: Any = asyncio.get_running_loop()
        loop.now += SECONDS
        keys = [self.queue.popleft() for _ in range(min(SLOTS, len(self.queue)))]
        return [(key, Completion((1,), (5,), (0.0,), (VersionSpan(0, 0, 1),), "length")) for key in keys]

    def call(self, method: str, key: Any, prompt: Any, sampling: Sampling) -> asyncio.Future[Any]:
        """As an actor: all that was drawn arrives in the next turn of the loop."""
        loop = asyncio.get_running_loop()
        told = loop.create_future()
        self.queue.append(key)
        turns = (len(self.queue) + SLOTS - 1) // SLOTS
        loop.call_at(turns * SECONDS, lambda: told.done() or told.set_result(self._one()))
        return told

    def post(self, method: str, *arguments: Any) -> None: ...

    def _one(self) -> Completion:
        return Completion((1,), (5,), (0.0,), (VersionSpan(0, 0, 1),), "length")


class Says:
    """One reply in a conversation, the number of which is the metric `turns`."""

    train = test = ()

    def __init__(self) -> None:
        self.at_once = self.most = 0

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await policy.conversation().ask("and?")
            return policy.rollout(1.0)
        finally:
            self.at_once -= 1


def in_a_process() -> Any:
    engine: Any = Crowded()
    return GeneratorPool([ProcessGenerator(engine, slots=SLOTS)])


def here() -> Any:
    engine: Any = Crowded()
    return TorchGenerator(engine)


@pytest.mark.parametrize("engine", [in_a_process, here])
@pytest.mark.parametrize("bound", [0, 4])
def test_time_in_the_queue_of_an_engine_counts_for_no_limit(
    engine: Callable[[], Any], bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen episodes of 0.3 s at two slots take 2.4 s, and each of them far less than its limit of 1 s."""
    environment, count = Says(), 16

    async def play() -> list[Any]:
        generator, codec = engine(), Codec(build_tokenizer())
        places = Places(bound)
        limits = Limits(seconds=0.9)
        policies = [Policy(generator, codec, Sampling(), str(i), limits=limits) for i in range(count)]
        one = (attempt(environment, Task(p.secret, "hi"), p, 1.0, places=places) for p in policies)
        return await asyncio.gather(*one, return_exceptions=True)

    played = run(monkeypatch, play())
    assert [getattr(p, "reason", "played") for p in played] == ["played"] * count
    assert {rollout.metrics["turns"] for (rollout,) in played} == {1.0}, "a conversation ended in the queue"
    assert environment.most == (bound or count)


def test_time_in_a_slot_does_and_a_drain_is_a_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(drains: bool) -> str:
        engine: Any = Crowded()
        engine.queue.extend(range(20))  # of somebody else, whom this pool does not know of
        generator = ProcessGenerator(engine, slots=SLOTS)
        policy = Policy(GeneratorPool([generator]), Codec(build_tokenizer()), Sampling(), "0")
        try:
            playing = asyncio.ensure_future(attempt(Says(), Task("0", "hi"), policy, 1.0))
            if drains:
                with generator.slots.closed():
                    ended, _ = await asyncio.wait([playing], timeout=2.9)
                    assert not ended
            await playing
            return "played"
        except RolloutFailed as failed:
            return failed.reason

    assert run(monkeypatch, play(drains=False)) == "time limit"
    assert run(monkeypatch, play(drains=True)) == "played"


def test_episodes_in_flight_are_twice_the_slots_and_whole_waves_where_a_run_is_reproducible() -> None:
    def most(slots: int, *flags: str) -> int:
        config = load_config(None, ["--model.path=m", "--environment.name=e", *flags])
        return episode_places(config, slots).count

    assert most(64) == 128 and most(64, "--environment.max_concurrent=9") == 9
    assert most(0) == 0, "of servers whose slots are not known"
    assert most(1) == 8, "a group begins together"
    assert most(64, "--loop.max_lag=0") == 0
    assert most(64, "--loop.max_lag=0", "--environment.max_concurrent=9") == 9

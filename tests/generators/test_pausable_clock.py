"""An episode's clock pauses while engines sleep and while its request waits for a slot. The event loop of these tests
advances a simulated clock instead of waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config.loading import load_config
from slipstream.controller.colocation import ColocatedScheduler
from slipstream.environments.base import Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.concurrency import EpisodeSlots
from slipstream.environments.conversation import ConversationLimits
from slipstream.environments.episode import EpisodeOptions, RolloutFailed, episode_slots, run_episode
from slipstream.generators.pool import EngineReplica, GeneratorPool
from slipstream.generators.torch.generator import TorchGenerator
from slipstream.rollout import Completion, Rollout, Sampling, VersionSpan
from slipstream.runtime.worker import handle
from slipstream.trainers.base import TrainerWorker
from tests.conftest import build_tokenizer

LIMIT = 10.0


class Leaping(asyncio.SelectorEventLoop):
    """An event loop that advances its clock to the next timer when no callback is ready."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run(monkeypatch: pytest.MonkeyPatch, episode: Coroutine[Any, Any, Any]) -> Any:
    loop = Leaping()
    monkeypatch.setattr("slipstream.generators.pausable_clock.time", SimpleNamespace(monotonic=loop.time))
    try:
        return loop.run_until_complete(episode)
    finally:
        loop.close()


class Engine(EngineReplica):
    """An engine and its process. Sampling a token takes a fixed time, in which the engine must be awake."""

    dead, name = None, "engine"

    def __init__(self, seconds: float) -> None:
        super().__init__(self)  # type: ignore[arg-type]
        self._seconds, self._asleep = seconds, False

    def call(self, method: str, arguments: tuple[Any, ...], large: bool = False) -> asyncio.Future[Any]:
        self._asleep = method in ("sleep", "onload", "offload")
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
    """Three replies, and the state of the conversation after them."""

    train = test = ()

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        chat = policy.conversation()
        said = [await chat.ask("and?") for _ in range(3)]
        return policy.rollout(float(sum(map(bool, said))), ended=float(chat.ended == "seconds"))


async def episode(seconds: float, sleeps: float, conversation: float) -> Rollout | str:
    """The outcome of an episode with a given time for each token, during which generators sleep three times."""
    engine: Any = Engine(seconds)
    pool = GeneratorPool([engine])
    turns = ColocatedScheduler(handle(TrainerWorker, engine), pool)  # the same object is the trainer
    policy = Policy(
        pool, ChatTokenizer(build_tokenizer()), Sampling(), "0", limits=ConversationLimits(seconds=conversation)
    )
    playing = asyncio.ensure_future(run_episode(Talks(), Task("0", "hi"), policy, EpisodeOptions(LIMIT)))
    for _ in range(3):
        await asyncio.sleep(1.0)
        async with turns.trainer_turn(publishes=False):
            await asyncio.sleep(sleeps)
    try:
        return (await playing)[0]
    except RolloutFailed as failed:
        return failed.reason


@pytest.mark.parametrize("sleeps", [0.5, 100 * LIMIT])
def test_time_limits_exclude_sleep(sleeps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = run(monkeypatch, episode(0.9, sleeps, conversation=LIMIT - 1))
    assert rollout.reward == 3 and rollout.metrics["ended"] == 0


@pytest.mark.parametrize("sleeps", [0.0, 100 * LIMIT])
def test_time_limits_include_time_awake(sleeps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """For episodes and conversations: the remaining time before and after the sleep is equal."""
    assert run(monkeypatch, episode(5.0, sleeps, conversation=0)) == "time limit"
    rollout = run(monkeypatch, episode(2.5, sleeps, conversation=6.0))
    assert rollout.metrics["ended"] == 1 and 0 < rollout.reward < 3


SLOTS, SECONDS = 2, 0.3  # of an engine with more requests than it can serve in the time limit of an episode


class Crowded:
    """An engine of `SLOTS` slots, in this process or in another, that draws a token in `SECONDS` and admits
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

    def call(self, method: str, arguments: tuple[Any, ...], large: bool = False) -> asyncio.Future[Any]:
        """As a process: sampled tokens arrive in the next iteration of the event loop."""
        loop = asyncio.get_running_loop()
        told = loop.create_future()
        self.queue.append(arguments)
        turns = (len(self.queue) + SLOTS - 1) // SLOTS
        loop.call_at(turns * SECONDS, lambda: told.done() or told.set_result(self._one()))
        return told

    def _one(self) -> Completion:
        return Completion((1,), (5,), (0.0,), (VersionSpan(0, 0, 1),), "length")


class Says:
    """One reply in a conversation; the metric `turns` is the number of replies."""

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
    return GeneratorPool([EngineReplica(engine, max_num_seqs=SLOTS)])


def here() -> Any:
    engine: Any = Crowded()
    return TorchGenerator(engine)


@pytest.mark.parametrize("engine", [in_a_process, here])
@pytest.mark.parametrize("bound", [0, 4])
def test_time_limits_exclude_waits_for_a_slot(
    engine: Callable[[], Any], bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen episodes of 0.3 s at two slots take 2.4 s; each episode takes far less than its limit of 1 s."""
    environment, count = Says(), 16

    async def play() -> list[Any]:
        generator, tokenizer = engine(), ChatTokenizer(build_tokenizer())
        slots = EpisodeSlots(bound)
        limits = ConversationLimits(seconds=0.9)
        policies = [Policy(generator, tokenizer, Sampling(), str(i), limits=limits) for i in range(count)]
        one = (run_episode(environment, Task(p.secret, "hi"), p, EpisodeOptions(1.0, slots=slots)) for p in policies)
        return await asyncio.gather(*one, return_exceptions=True)

    played = run(monkeypatch, play())
    assert [getattr(p, "reason", "played") for p in played] == ["played"] * count
    assert {rollout.metrics["turns"] for (rollout,) in played} == {1.0}, "a conversation ended in the queue"
    assert environment.most == (bound or count)


def test_time_limits_include_time_in_a_slot_and_exclude_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(drains: bool) -> str:
        engine: Any = Crowded()
        engine.queue.extend(range(20))  # requests of another client of the engine
        generator = EngineReplica(engine, max_num_seqs=SLOTS)
        policy = Policy(GeneratorPool([generator]), ChatTokenizer(build_tokenizer()), Sampling(), "0")
        try:
            playing = asyncio.ensure_future(run_episode(Says(), Task("0", "hi"), policy, EpisodeOptions(1.0)))
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


def test_episodes_in_flight_are_bounded_by_twice_the_slots_or_by_a_wave() -> None:
    def most(slots: int, *flags: str) -> int:
        config = load_config(None, ["--model.path=m", "--environment.name=e", *flags])
        return episode_slots(config, slots).count

    assert most(64) == 128 and most(64, "--environment.max_concurrent=9") == 9
    assert most(0) == 0, "of servers whose slots are not known"
    assert most(1) == 8, "a group begins together"
    assert most(64, "--loop.max_lag=0") == 0
    assert most(64, "--loop.max_lag=0", "--environment.max_concurrent=9") == 9

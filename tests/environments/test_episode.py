"""A failure of user code costs one rollout, with a reason, and the next episode works."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.config.plugins import Interrupts
from slipstream.environments.base import Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.concurrency import PACKAGE, EpisodeSlots
from slipstream.environments.episode import (
    EpisodeOptions,
    EventLoopWatchdog,
    RolloutFailed,
    _users_line,
    run_episode,
    validate_numbers,
)
from slipstream.environments.reward_workers import RewardWorkerPool, ScoringError
from slipstream.rollout import Completion, Rollout, Sampling, StepReward
from tests.conftest import build_tokenizer
from tests.environments.test_environments import Scripted, completion, policy

TASK = Task("t1", "1+1=")
LIMIT = 0.4


class Episode:
    """An environment with the given body."""

    train: tuple[Task, ...] = (TASK,)
    test: tuple[Task, ...] = ()

    def __init__(self, body: Any) -> None:
        self._body = body

    async def rollout(self, task: Task, policy: Policy) -> Any:
        await policy.sample(task.prompt)
        outcome = self._body()
        return await outcome if asyncio.iscoroutine(outcome) else outcome


def outcome(body: Any) -> Rollout | RolloutFailed:
    async def main() -> Rollout | RolloutFailed:
        with EventLoopWatchdog(LIMIT / 2), Interrupts():  # as in a run, long before the time limit
            try:
                [rollout] = await run_episode(Episode(body), TASK, policy("2"), EpisodeOptions(LIMIT))
                return rollout
            except RolloutFailed as failure:
                return failure

    return asyncio.run(main())


def busy() -> float:
    while True:
        pass


def swallows() -> float:
    try:
        time.sleep(60)
    except Exception:
        return 1.0
    return 1.0


async def nested() -> float:
    async def child() -> float:
        time.sleep(60)
        return 1.0

    return sum(await asyncio.gather(child(), asyncio.sleep(0, 1.0)))


async def cancels() -> float:
    child = asyncio.ensure_future(asyncio.sleep(60))
    child.cancel()
    await child
    return 1.0


class Skip(BaseException):
    """An exception of a library that is no `Exception`."""


def throw(error: BaseException) -> None:
    raise error


class SlowToDie:
    """An object whose destructor is interrupted, which Python ignores."""

    def __del__(self) -> None:
        time.sleep(60)


def destroys() -> float:
    SlowToDie()
    return busy()


def test_an_interruption_that_python_ignores_is_repeated(capfd: pytest.CaptureFixture[str]) -> None:
    failure = outcome(destroys)
    assert isinstance(failure, RolloutFailed) and failure.reason == "blocked the event loop"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: asyncio.sleep(60), "time limit"),
        (lambda: time.sleep(60), "blocked the event loop"),
        (busy, "blocked the event loop"),
        (swallows, "blocked the event loop"),
        (nested, "blocked the event loop"),
        (lambda: math.nan, "reward is nan"),
        (lambda: math.inf, "reward is inf"),
        (lambda: asyncio.wait_for(asyncio.sleep(60), 0.01), "TimeoutError"),
        (cancels, "CancelledError"),
        (lambda: sys.exit(2), "SystemExit"),
        (lambda: throw(BaseExceptionGroup("of a library", [SystemExit(2)])), "SystemExit"),
        (lambda: throw(KeyboardInterrupt()), "KeyboardInterrupt"),
        (lambda: throw(Skip("such as a test framework's")), "Skip"),
        (lambda: "good", "reward is not a number"),
        (lambda: "1.5", "reward is not a number"),
        (lambda: None, "reward is not a number"),
    ],
)
def test_a_failing_episode_fails_one_rollout(body: Any, reason: str) -> None:
    began = time.monotonic()
    failure = outcome(body)
    assert isinstance(failure, RolloutFailed)
    assert failure.reason == reason
    assert failure.detail
    assert time.monotonic() - began < 10 * LIMIT


def test_the_line_of_a_blocking_episode_is_not_of_the_script_that_started_the_loop() -> None:
    found: list[str] = []
    names: dict[str, Any] = {"look": lambda frame: found.append(_users_line(frame)), "sys": sys}
    exec(compile("def library(): look(sys._getframe())", f"{PACKAGE}/library.py", "exec"), names)

    async def main() -> None:
        names["library"]()
        asyncio.get_running_loop().call_soon(names["library"])
        await asyncio.sleep(0)

    asyncio.run(main())
    assert found[0].startswith(f" at {__file__}, line ") and found[1] == ""


def test_ctrl_c_in_an_episode_is_no_failure_of_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        outcome(lambda: signal.raise_signal(signal.SIGINT))


@pytest.mark.parametrize(
    "error",
    [ValueError("no such\nplace"), ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("no such place")])],
)
def test_a_failure_is_one_line_with_the_whole_message(error: Exception) -> None:
    failure = outcome(lambda: throw(error))
    assert isinstance(failure, RolloutFailed)
    where = rf" \({re.escape(__file__)}:\d+\)" if isinstance(error, ValueError) else ""  # others were not raised
    assert re.fullmatch(f"ValueError: no such place{where}", failure.one_line)
    assert not any(line and not line.strip(" ^~") for line in failure.detail.splitlines()), "marks without their code"


@pytest.mark.parametrize("reward", [1, True, 0.5, -2])
def test_any_number_is_a_reward(reward: float) -> None:
    rollout = outcome(lambda: reward)
    assert isinstance(rollout, Rollout) and rollout.reward == float(reward)


def test_an_episode_that_never_sampled_fails() -> None:
    class Silent(Episode):
        async def rollout(self, task: Task, policy: Policy) -> float:
            return 1.0

    with pytest.raises(RolloutFailed, match="no completion"):
        asyncio.run(run_episode(Silent(None), TASK, policy(), EpisodeOptions(LIMIT)))


async def samples(policy: Policy) -> float:
    await policy.sample("1+1=")
    return 1.0


async def converses(policy: Policy) -> float:
    conversation = policy.conversation()
    await conversation.ask("1+1=")
    return 1.0


@pytest.mark.parametrize("body", [samples, converses])
def test_completions_do_not_wait_for_a_garbage_collection(body: Any) -> None:
    """A full collection is rare in a run (`raise_gc_thresholds`)."""

    async def main() -> weakref.ref[Policy]:
        played = policy("2")
        environment = SimpleNamespace(rollout=lambda _, asked: body(asked))
        await run_episode(environment, TASK, played, EpisodeOptions(LIMIT))
        assert played.recorded
        return weakref.ref(played)

    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()


def test_rewards_and_metrics_become_plain_numbers() -> None:
    class Odd(Episode):
        async def rollout(self, task: Task, policy: Policy) -> Rollout:
            drawn = await policy.sample(task.prompt)
            return Rollout((drawn,), np.float32(0.5), {"turns": self._body})  # type: ignore[arg-type]

    [rollout] = asyncio.run(run_episode(Odd(np.int64(2)), TASK, policy("2"), EpisodeOptions(5.0)))
    assert (type(rollout.reward), rollout.reward) == (float, 0.5)
    assert (type(rollout.metrics["turns"]), rollout.metrics) == (float, {"turns": 2.0})
    with pytest.raises(RolloutFailed) as failure:
        asyncio.run(run_episode(Odd("two"), TASK, policy("2"), EpisodeOptions(5.0)))
    assert failure.value.reason == "metric turns is no number"


def test_blocking_outside_an_episode_is_not_interrupted() -> None:
    async def main() -> str:
        with EventLoopWatchdog(0.1):
            end = time.monotonic() + 0.4
            while time.monotonic() < end:
                pass
            return "ended"

    assert asyncio.run(main()) == "ended"


def test_cancellation_of_the_run_is_raised() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(
            run_episode(Episode(lambda: asyncio.sleep(60)), TASK, policy("2"), EpisodeOptions(60))
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


class Swallows(Episode):
    """Retries after any exception, without end."""

    async def rollout(self, task: Task, policy: Policy) -> Any:
        while True:
            try:
                await policy.sample(task.prompt)
                await asyncio.sleep(0.01)
            except:  # noqa: E722
                pass


class Drawing(Scripted):
    """A generator that always answers."""

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        self._texts = ["2"]
        return await super().generate(prompt_ids, sampling)


def test_an_episode_that_swallows_its_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no more completions, its slot is free, and the end of the run or event loop does not wait for it."""
    monkeypatch.setattr("slipstream.environments.episode.CLEANUP_S", 0.2)
    generator = Drawing()

    async def main() -> list[asyncio.Task[Any]]:
        asyncio.get_running_loop().call_later(60.0, os._exit, 3)  # nothing else would end this test
        slots, tokenizer = EpisodeSlots(1), ChatTokenizer(build_tokenizer())
        policies = [Policy(generator, tokenizer, Sampling(), seed) for seed in "01"]
        with pytest.raises(RolloutFailed) as failure:
            await run_episode(Swallows(None), TASK, policies[0], EpisodeOptions(1.0, slots=slots))
        assert failure.value.reason == "the episode continued after it was cancelled"
        assert re.search(
            rf"still runs at {re.escape(__file__)}, line \d+, which swallows CancelledError", str(failure.value)
        )
        drawn = len(generator.asked)
        assert drawn and slots.longest is None
        await asyncio.sleep(0.1)
        assert len(generator.asked) == drawn, "it went on to draw"
        playing = asyncio.create_task(run_episode(Swallows(None), TASK, policies[1], EpisodeOptions(60.0, slots=slots)))
        while len(generator.asked) == drawn:
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(main()) == []


ENDLESS = """
import asyncio
from slipstream.runtime import closing
closing.TASK_END_S = 0.2

async def swallows():
    while True:
        try: await asyncio.sleep(1)
        except: pass

async def main():
    asyncio.get_running_loop().call_later(60, os._exit, 3)
    endless = asyncio.create_task(swallows())
    await asyncio.sleep(0)
    return "ended"

import os
print(closing.run_bounded(main()))
"""


def test_a_program_ends_although_its_tasks_swallow_cancellation() -> None:
    done = subprocess.run([sys.executable, "-c", ENDLESS], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


REWARDS = """
import os, time

def reward(task, completion):
    match completion.text:
        case "hang": time.sleep(600)
        case "busy":
            while True: pass
        case "die": os._exit(3)
        case "raise": raise KeyError("lost")
        case "text": return "seven"
        case "pid": return os.getpid()
    return float(len(completion.text))
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return f"{tmp_path / 'rewards.py'}:reward"


def test_a_failing_reward_costs_one_score_and_its_process(rewards: str) -> None:
    async def main() -> None:
        pool = RewardWorkerPool(rewards, processes=1, timeout=LIMIT)
        for said, reason in (
            ("hang", "reward time limit"),
            ("busy", "reward time limit"),
            ("die", "reward process died"),
            ("raise", "KeyError"),
        ):
            with pytest.raises(ScoringError) as failure:
                await pool.score(TASK, completion(said))
            assert failure.value.reason == reason
            assert await pool.score(TASK, completion("abc")) == 3.0
        pid = int(await pool.score(TASK, completion("pid")))
        await pool.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


def test_scores_run_concurrently_also_with_a_hung_one(rewards: str) -> None:
    async def main() -> None:
        pool = RewardWorkerPool(rewards, processes=2, timeout=1.0)
        hung = asyncio.ensure_future(pool.score(TASK, completion("hang")))
        scores = await asyncio.gather(*(pool.score(TASK, completion("x" * n)) for n in range(20)))
        assert scores == [float(n) for n in range(20)]
        assert not hung.done()
        with pytest.raises(ScoringError, match="longer than 1 s"):
            await hung
        await pool.close()

    asyncio.run(main())


def test_an_abandoned_score_is_not_returned_to_the_next_call(rewards: str) -> None:
    async def main() -> None:
        pool = RewardWorkerPool(rewards, processes=1, timeout=5.0)
        abandoned = asyncio.ensure_future(pool.score(TASK, completion("hang")))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(abandoned, 0.5)
        assert await pool.score(TASK, completion("ab")) == 2.0
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("rollout", "why"),
    [
        (Rollout((), 1.0, steps=((StepReward(0, math.nan),),)), "reward of a step is nan"),
        (Rollout((), 1.0, {"style": math.inf}), "metric style is infinite"),
        (
            Rollout((), 1.0, {"style": "x"}),
            "metric style is no number: task a/1: it is 'x', of type str; a metric must",
        ),  # type: ignore[dict-item]
        (Rollout((), 1.0, {"style": 1e300}), r"metric style is above 1e\+100"),
        (Rollout((), 1.0, {"style": 10**400}), "metric style is infinite"),
        (Rollout((), math.inf), "reward is inf"),
    ],
)
def test_an_invalid_number_fails_its_rollout_alone(rollout: Rollout, why: str) -> None:
    with pytest.raises(RolloutFailed, match=why):
        validate_numbers(rollout, "a/1")
    sound = Rollout((), 1.0, {"style": math.nan}, ((StepReward(0, 0.5),),))
    assert validate_numbers(sound, "a/1").steps == sound.steps  # NaN says that there is no such part

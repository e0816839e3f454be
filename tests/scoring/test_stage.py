"""The scoring stage: bounded concurrency, order of arrival, and a slow score delays only its rollout."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.loading import load_config
from slipstream.config.plugins import Interrupts
from slipstream.config.schema import ConfigError, ScoringConfig
from slipstream.environments.base import Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.episode import EpisodeOptions, RolloutFailed, run_episode
from slipstream.environments.reward_workers import ScoringError
from slipstream.rollout import Rollout
from slipstream.scoring.load import load_scoring, make_scorer
from slipstream.scoring.stage import ScoringStage, with_teacher
from tests.conftest import build_tokenizer
from tests.environments.test_environments import completion, policy

TASK = Task("t1", "1+1=")
SCORERS = """
import asyncio, os, time

def plain(task, completion):
    return {"reward": len(completion.text), "parts": {"pid": os.getpid()}}

async def awaited(task, rollout):
    await asyncio.sleep(0)
    return len(rollout.completions)

def hangs(task, rollout):
    time.sleep(600)

def three(task, rollout, more): ...

class Own:
    def __init__(self, gain=1.0):
        self.gain = gain

    async def score(self, task, rollout):
        return self.gain

    async def close(self): ...

class Not:
    def score(self, task, rollout): ...

number = 3
"""


class Gated:
    """A scorer whose scores end when they are told to."""

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}

    async def score(self, task: Task, rollout: Rollout) -> float:
        self.gates[task.id] = asyncio.Event()
        await self.gates[task.id].wait()
        return 1.0

    async def close(self) -> None: ...


class Silent:
    """An environment that leaves rewards to the stage."""

    train = test = (TASK,)

    async def rollout(self, task: Task, policy: Any) -> None:
        await policy.sample(task.prompt)


ROLLOUT = Rollout((completion("2"),), math.nan)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


def test_concurrency_is_bounded_and_scores_end_in_any_order() -> None:
    async def main() -> None:
        scorer = Gated()
        stage = ScoringStage(ScoringConfig(concurrency=2), scorer)
        tasks = [asyncio.create_task(stage(Task(name, ""), ROLLOUT)) for name in "abcd"]
        await until(lambda: len(scorer.gates) == 2)
        assert (set(scorer.gates), stage.queue, stage.running) == ({"a", "b"}, 2, 2)
        scorer.gates["b"].set()
        await until(lambda: "c" in scorer.gates)
        assert tasks[1].done() and not tasks[0].done()
        tasks[0].cancel()  # a run that stops gives its place back
        await until(lambda: "d" in scorer.gates)
        for name in "cd":
            scorer.gates[name].set()
        assert [r.reward for r in await asyncio.gather(*tasks[1:])] == [1.0] * 3
        lap = stage.take_interval()
        assert (lap.scored, lap.queue, lap.running) == (4, 0, 0)
        assert stage.take_interval().scored == 0

    asyncio.run(main())


def test_the_rate_of_requests_is_limited() -> None:
    began: list[float] = []

    class Records:
        async def score(self, task: Task, rollout: Rollout) -> float:
            began.append(asyncio.get_running_loop().time())
            return 1.0

        async def close(self) -> None: ...

    async def main() -> None:
        began.append(asyncio.get_running_loop().time())
        stage = ScoringStage(ScoringConfig(requests_per_second=10.0), Records())
        await asyncio.gather(*(stage(TASK, Rollout((completion("2"),), math.nan)) for _ in range(5)))
        assert stage.running == 0

    asyncio.run(main())
    first, *requests = began
    assert len(requests) == 5 and all(request > first + turn / 10 - 0.01 for turn, request in enumerate(requests))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_of_a_scorer_fails_its_rollout(error: BaseException) -> None:
    class Exits(Gated):
        async def score(self, task: Task, rollout: Rollout) -> float:
            raise error

    async def main() -> RolloutFailed:
        with Interrupts(), pytest.raises(RolloutFailed) as failure:
            await run_episode(Silent(), TASK, policy("2"), EpisodeOptions(20, ScoringStage(ScoringConfig(), Exits())))
        return failure.value

    failure = asyncio.run(main())
    assert failure.reason == type(error).__name__ and "test_stage.py, line " in failure.detail


def test_a_score_has_its_own_timeout_after_the_episode() -> None:
    ended = []

    class Looks:
        async def score(self, task: Task, rollout: Rollout) -> float:
            ended.append(drawing._endpoint is None)
            await asyncio.sleep(0.3)
            return 1.0

        async def close(self) -> None: ...

    drawing = policy("2")

    async def main() -> None:
        stage = ScoringStage(ScoringConfig(timeout=20), Looks())
        assert (await run_episode(Silent(), TASK, drawing, EpisodeOptions(0.2, stage)))[
            0
        ].reward == 1.0  # the episode's limit is past
        short = ScoringStage(ScoringConfig(timeout=0.05), Looks())
        with pytest.raises(RolloutFailed) as failure:
            await run_episode(Silent(), TASK, policy("2"), EpisodeOptions(20, short))
        assert failure.value.reason == "scoring time limit"
        with pytest.raises(RolloutFailed, match="reward is not a number"):
            await run_episode(Silent(), TASK, policy("2"), EpisodeOptions(20))  # nobody gives a reward

    asyncio.run(main())
    assert ended == [True, True]


@pytest.fixture
def scorers(tmp_path: Path) -> str:
    (tmp_path / "scorers.py").write_text(SCORERS)
    return str(tmp_path / "scorers.py")


def config(kind: str, **scoring: Any) -> Any:
    flags = ["--model.path=x", "--environment.name=addition", f"--scoring.kind={kind}"]
    return load_config(None, [*flags, *(f"--scoring.{k}={v}" for k, v in scoring.items())])


def scored(kind: str, **scoring: Any) -> Rollout:
    async def main() -> Rollout:
        stage = load_scoring(config(kind, **scoring), ChatTokenizer(build_tokenizer()))
        assert stage is not None
        try:
            return await stage(TASK, ROLLOUT)
        finally:
            await stage.close()

    return asyncio.run(main())


def test_a_users_function_or_class_scores(scorers: str) -> None:
    plain = scored(f"{scorers}:plain")
    assert plain.reward == 1.0 and plain.metrics["pid"] != os.getpid()
    assert scored(f"{scorers}:awaited").reward == 1.0
    assert scored(f"{scorers}:Own", options="{gain = 2.5}", weights="{score = 2}").reward == 5.0


def test_a_hung_function_costs_one_score(scorers: str) -> None:
    with pytest.raises(ScoringError) as failure:
        scored(f"{scorers}:hangs", timeout=1.0)
    assert failure.value.reason in ("scoring time limit", "reward time limit")


@pytest.mark.parametrize("name", ["three", "Not", "number", "gone"])
def test_an_invalid_scorer_raises(scorers: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"scoring.kind"):
        make_scorer(config(f"{scorers}:{name}"), ChatTokenizer(build_tokenizer()), None)
    with pytest.raises(ConfigError, match=r"scoring.options"):
        make_scorer(config(f"{scorers}:Own", options="{loss = 1}"), ChatTokenizer(build_tokenizer()), None)


def test_unused_options_raise() -> None:
    for flags in (
        ["--scoring.kind=judge"], ["--scoring.weights={score = 1}"], ["--teacher.path=x", "--teacher.lag=1"],
        ["--teacher.path=x", "--teacher.engine=vllm", "--sampling.temperature=0.5"],
        ["--teacher.lag=1", "--teacher.engine=vllm"],
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"scoring\.|teacher\."):
            load_config(None, ["--model.path=x", "--environment.name=addition", *flags])


def test_without_a_reward_the_reward_is_minus_the_teacher_gap() -> None:
    one = completion("23")
    rollout = Rollout((one,), math.nan)
    teacher = (tuple(p - 0.5 for p in one.logprobs),)
    assert with_teacher(rollout, teacher).reward == pytest.approx(-0.5)
    assert with_teacher(rollout, teacher).metrics["teacher_gap"] == pytest.approx(0.5)
    assert with_teacher(Rollout((one,), 1.0), teacher).reward == 1.0

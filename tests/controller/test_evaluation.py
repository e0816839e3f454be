"""Around an evaluation: the environment is closed, its options are its own, and the busy times do not wait for it."""

from __future__ import annotations

import asyncio
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config.loading import dump, load_config, load_policy_config, load_verify_config
from slipstream.config.schema import LoraConfig
from slipstream.controller import rollouts
from slipstream.controller.evaluation import evaluate, one_version
from slipstream.controller.evaluation_record import all_failed, describe_failures
from slipstream.controller.finish import close, stop_generation
from slipstream.controller.run_context import RunContext
from slipstream.environments import load
from slipstream.environments.base import Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.concurrency import EpisodeSlots
from slipstream.environments.episode import EpisodeOptions, run_episode
from slipstream.environments.load import LoadedEnvironment, close_environment
from slipstream.errors import RunError
from slipstream.observe.events import EventLog
from slipstream.observe.run_totals import RunTotals
from slipstream.rollout import Sampling
from slipstream.scheduling.ledger import Visit
from tests.conftest import build_tokenizer
from tests.environments.test_environments import Scripted


class Closable:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class AsyncClosable(Closable):
    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.closed += 1


@pytest.mark.parametrize("environment", [Closable(), AsyncClosable()])
def test_an_environment_is_closed_async_or_not(environment: Any) -> None:
    asyncio.run(close_environment(environment))
    assert environment.closed == 1


def test_a_close_that_hangs_is_cancelled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Hanging:
        async def close(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(load, "CLOSE_TIMEOUT_S", 0.01)
    hanging: Any = Hanging()
    asyncio.run(close_environment(hanging))
    assert capsys.readouterr().err == "slipstream: warning: closing the environment took 0.01 s: cancelled\n"


def test_an_environment_needs_no_close() -> None:
    nothing: Any = object()
    asyncio.run(close_environment(nothing))


def test_options_belong_to_their_environment(tmp_path: Path) -> None:
    run = load_config(None, ["--model.path=m", "--environment.name=gsm8k", "--environment.options.shots=2"])
    (tmp_path / "config.toml").write_text(dump(run))
    (tmp_path / "policy").mkdir()
    assert load_policy_config(str(tmp_path), None, []).environment.options == {"shots": 2}
    assert load_policy_config(str(tmp_path), "gsm8k", []).environment.options == {"shots": 2}
    assert load_policy_config(str(tmp_path), "addition", []).environment.options == {}
    digits = ["--environment.options.digits", "1"]
    assert load_policy_config(str(tmp_path), "addition", digits).environment.options == {"digits": 1}
    by_option = ["--environment.name=addition"]
    assert load_policy_config(str(tmp_path), None, by_option).environment.options == {}
    assert load_policy_config("models/of-mine", None, by_option).environment.name == "addition"


def finished(directory: Path, *flags: str) -> str:
    """The directory of a finished run with these options."""
    run = load_config(None, ["--model.path=m", "--environment.name=mine.py:Mine", *flags])
    (directory / "config.toml").write_text(dump(run))
    (directory / "policy").mkdir()
    return str(directory)


@pytest.mark.parametrize(
    "flags",
    [
        ["--generator.engine=vllm", "--sync.link=lora", "--lora.targets=['q_proj']"],
        ["--generator.engine=vllm", "--sync.link=lora", "--sync.placement=colocated"],
        ["--lora.quantization=4bit", "--lora.alpha=16"],
        ["--lora.experts=true"],
        ["--sync.link=checkpoint", "--sync.keep_versions=2"],
    ],
    ids=["vllm", "in turns", "4bit", "experts", "kept files"],
)
def test_evaluation_uses_trained_adapters(flags: list[str], tmp_path: Path) -> None:
    """They are loaded with the policy: no new adapters are added, and no link publishes others."""
    target = finished(tmp_path, "--lora.rank=8", *flags)
    config = load_policy_config(target, None, [])
    assert config.lora == LoraConfig() and config.sync.link != "lora"
    assert config.model.path == str(tmp_path / "policy")
    assert load_policy_config(target, None, ["--generator.engine=torch"]).generator.engine == "torch"
    assert load_policy_config(target, "addition", []).environment.name == "addition"


def test_evaluation_of_a_run_with_servers_uses_the_embedded_engine(tmp_path: Path) -> None:
    target = finished(
        tmp_path, "--generator.engine=vllm", "--generator.servers=['http://far:1']", "--sync.link=checkpoint"
    )
    assert load_policy_config(target, None, ["--generator.device=cuda:1"]).generator.device == "cuda:1"
    assert load_verify_config(target, []).generator.servers == ["http://far:1"]


def test_rewards_of_steps_belong_to_their_environment(tmp_path: Path) -> None:
    target = finished(tmp_path, "--algorithm.process_reward_coef=0.5")
    assert load_policy_config(target, "addition", []).algorithm.process_reward_coef == 0
    assert load_policy_config(target, None, [], default="addition").environment.name == "mine.py:Mine"


@pytest.mark.parametrize(
    ("flags", "path", "how"),
    [
        (["--lora.rank=8", "--generator.engine=vllm", "--sync.link=lora"], "m", "continue"),
        (["--lora.rank=8", "--lora.alpha=16"], "m", "recompute"),
        (["--sync.link=checkpoint", "--sync.restart=true", "--sync.in_flight=drain"], "policy", "drain"),
        (["--sync.link=nccl"], "policy", "recompute"),
    ],
    ids=["adapters by vLLM", "adapters", "engines that start again", "weights"],
)
def test_verify_uses_the_engine_and_the_link_of_the_run(flags: list[str], path: str, how: str, tmp_path: Path) -> None:
    """The lora link is verified on a model without adapters."""
    target = finished(tmp_path, *flags)
    run, config = load_config(tmp_path / "config.toml"), load_verify_config(target, [])
    assert (config.lora, config.generator, config.sync.link) == (run.lora, run.generator, run.sync.link)
    assert (Path(config.model.path).name, config.sync.in_flight) == (path, how)
    assert load_verify_config(target, ["--sync.in_flight=retry"]).sync.in_flight == "retry"


def test_an_error_in_one_rollout_cancels_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def play(run: RunContext, task: Task, visit: Visit, member: str) -> None:
        try:
            await asyncio.sleep(0 if member == "1" else 60)
            raise RunError("too many failures")
        finally:
            ended.append(f"rollout {member}")

    async def main() -> None:
        run: Any = SimpleNamespace()
        run.events = EventLog(Path("events.jsonl"))
        monkeypatch.setattr(rollouts, "play_rollout", play)
        run.config = load_config(None, ["--model.path=m", "--environment.name=e", "--loop.group_size=3"])
        environment: Any = SimpleNamespace(train=[Task("t", "?")])
        loaded = LoadedEnvironment(run.config.each_environment[0], environment)
        run.environments = [SimpleNamespace(environment=environment, options=loaded.options, loaded=loaded)]
        with pytest.raises(RunError):
            await rollouts.play_group(run, Visit(0, 0))
        await asyncio.sleep(0)
        assert sorted(ended) == ["rollout 0", "rollout 1", "rollout 2"]

    asyncio.run(main())


@pytest.mark.parametrize("fails", [(), ("endpoint",), ("scoring", "environment"), ("environment",)])
def test_close_continues_after_an_error(fails: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[str] = []

    def part(name: str) -> Any:
        async def close() -> None:
            closed.append(name)
            if name in fails:
                raise ValueError(f"{name} is stuck")

        return SimpleNamespace(close=close)

    async def main() -> None:
        parts = {name: part(name) for name in ("endpoint", "scoring", "environment")}
        recorder = SimpleNamespace(close=lambda: closed.append("recorder"))
        environments = [SimpleNamespace(environment=parts.pop("environment"))]
        run: Any = SimpleNamespace(
            **parts, environments=environments, started_cluster=part("cluster"), engine_watches={},
            trackers=[part("trackers")], recorder=recorder, heap_frozen=False, slow_episode_report=None,
        )  # fmt: skip
        await close(run)

    ends = fails and fails[0] != "environment"
    with pytest.raises(ValueError, match=f"{fails[0]} is stuck") if ends else nullcontext():
        asyncio.run(main())
    assert closed == ["endpoint", "scoring", "cluster", "environment", "recorder", "trackers"]
    assert ("environment is stuck" in capsys.readouterr().err) == ("environment" in fails)


def test_slow_episodes_are_reported_with_their_source_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.controller.rollouts.SLOW_EPISODE_S", 0.05)
    said: list[str] = []

    class Loops:
        train = test = ()

        async def rollout(self, task: Task, policy: Policy) -> float:
            while True:
                await asyncio.sleep(0.01)

    async def main() -> None:
        slots = EpisodeSlots()
        report = asyncio.create_task(rollouts.report_slow_episodes(slots, said.append))
        policy = Policy(Scripted(()), ChatTokenizer(build_tokenizer()), Sampling(), "0")
        options = EpisodeOptions(300.0, slots=slots)
        playing = asyncio.create_task(run_episode(Loops(), Task("7", "?"), policy, options))
        async with asyncio.timeout(30):
            while len(said) < 2:
                await asyncio.sleep(0.01)
        report.cancel()
        playing.cancel()

    asyncio.run(main())
    assert said[0].startswith("an episode of task 7 has taken 0 s of its time limit of 300 s (environment.timeout)")
    assert re.search(rf"and is at {re.escape(__file__)}, line \d+$", said[0])


def test_the_busy_window_ends_before_the_last_evaluation() -> None:
    written: list[bool] = []

    async def stats() -> dict[str, float]:
        return {"tokens": 0.0, "busy_s": 0.0}

    async def main() -> float:
        evaluation = asyncio.create_task(asyncio.sleep(0.5))
        recorder = SimpleNamespace(write=lambda: written.append(evaluation.done()))
        totals = RunTotals()
        totals.open(await stats())
        run: Any = SimpleNamespace(
            cluster=SimpleNamespace(generator=SimpleNamespace(stats=stats)), running_groups=set(), stopped=None,
            publishing=None, totals=totals, evaluation=evaluation, recorder=recorder,
        )  # fmt: skip
        await stop_generation(run)
        assert evaluation.done()
        return totals.window_seconds

    assert asyncio.run(main()) < 0.4
    assert written == [False]


class TwoTasks:
    """The episode of the second task fails."""

    train = test = (Task("good", "1+1="), Task("bad", ({"role": "user", "content": "2+2="},)))

    async def rollout(self, task: Task, policy: Policy) -> float:
        if task.id == "bad":
            raise ValueError("no such sum")
        await policy.sample(task.prompt)
        return 0.5


def test_failed_tasks_are_recorded_with_the_others() -> None:
    config = load_config(None, ["--model.path=m", "--environment.name=addition"])
    environments = [LoadedEnvironment(config.each_environment[0], TwoTasks())]
    found = asyncio.run(
        evaluate(
            config,
            environments,
            Scripted("2"),
            ChatTokenizer(build_tokenizer()),
        )
    )
    answered, failed = found["samples"]
    assert answered == {
        "id": "good",
        "prompt": "1+1=",
        "completion": answered["completion"],
        "reward": 0.5,
        "score": 0.5,
    }
    assert "2" in answered["completion"]
    assert failed["id"] == "bad" and failed["prompt"] == "2+2=" and "ValueError" in failed["failed"]


class Graded:
    """The reward of a task's n-th sample is the n-th of its grades; "x" fails."""

    def __init__(self, grades: dict[str, str]) -> None:
        self.train = self.test = tuple(Task(name, "?", category=name[0]) for name in grades)
        self._left = {name: list(each) for name, each in grades.items()}

    async def rollout(self, task: Task, policy: Policy) -> float:
        await policy.sample(task.prompt)
        return float(self._left[task.id].pop(0))


def graded(grades: dict[str, str], samples: int, retries: int = 0) -> tuple[dict[str, Any], set[int]]:
    """The record of an evaluation, and the seeds of its requests."""
    flags = [f"--evaluation.samples={samples}", "--evaluation.temperature=1.0"]
    flags.append(f"--environment.rollout_retries={retries}")
    config = load_config(None, ["--model.path=m", "--environment.name=addition", *flags])
    generator, tokenizer = Scripted(*"2" * 16), ChatTokenizer(build_tokenizer())
    environments = [LoadedEnvironment(config.each_environment[0], Graded(grades))]
    found = asyncio.run(evaluate(config, environments, generator, tokenizer))
    return found, {sampling.seed for _, sampling in generator.asked}


def test_several_samples_of_a_task_give_mean_and_pass_at_k() -> None:
    found, seeds = graded({"a1": "1000", "a2": "1111", "b1": "x0x0", "b2": "0011"}, 4)
    assert found["eval/score"] == pytest.approx((0.25 + 1 + 0 + 0.5) / 4)
    assert found["eval/pass@2"] == pytest.approx((0.5 + 1 + 0 + 5 / 6) / 4)
    assert found["eval/pass@4"] == pytest.approx(3 / 4)
    assert found["eval/category/a"] == pytest.approx(0.625) and found["eval/category/b"] == pytest.approx(0.25)
    assert found["categories"] == {"a": 2, "b": 2}
    assert {name for name in found["intervals"] if not found["intervals"][name][0] <= found[name] <= 1} == set()
    names = {name for name in found["intervals"] if "environments" not in name}
    assert names == {f"eval/{name}" for name in ("score", "pass@2", "pass@4", "category/a", "category/b")}
    assert (found["eval/tasks"], found["eval/samples_per_task"], found["eval/failed"]) == (4, 4, 2)
    assert len(seeds) == 16, "each sample has a seed of its own"
    assert describe_failures(found).startswith("2 of 16 episodes of 4 held-out tasks failed, the last with: ValueError")
    first, *_ = found["samples"]
    assert (first["scores"], first["score"], first["reward"]) == ([1, 0, 0, 0], 0.25, 1)
    assert found["samples"][2] | {"prompt": ""} == {
        "id": "b1", "prompt": "", "failed": "ValueError", "scores": [0, 0, 0, 0], "score": 0.0,
    }  # fmt: skip


def test_pass_at_k_is_of_powers_of_two_and_all_samples() -> None:
    found, _ = graded({"a": "010010"}, 6)
    assert [name for name in found if name.startswith("eval/pass")] == ["eval/pass@2", "eval/pass@4", "eval/pass@6"]
    single, _ = graded({"a": "1", "b": "0"}, 1)
    assert not [name for name in single if "pass" in name] and "scores" not in single["samples"][0]


def test_an_evaluation_fails_if_every_sample_does() -> None:
    found, _ = graded({"a": "xx", "b": "xx"}, 2)
    assert all_failed(found) and describe_failures(found).startswith("all 4 episodes of 2 held-out tasks failed")
    assert not all_failed(graded({"a": "xx", "b": "x0"}, 2)[0])


def test_a_failed_sample_is_drawn_again_with_another_seed() -> None:
    found, seeds = graded({"a": "x1", "b": "xx1"}, 1, retries=1)
    assert (found["eval/score"], found["eval/failed"]) == (0.5, 1)
    assert len(seeds) == 4


def test_late_engines_get_no_requests_during_a_snapshot() -> None:
    """The pool sends requests to engines of `oldest` or a newer version."""
    pool = SimpleNamespace(oldest=1)
    run: Any = SimpleNamespace(cluster=SimpleNamespace(generator=pool), state=SimpleNamespace(version=3))
    with pytest.raises(RunError), one_version(run):
        assert pool.oldest == 3
        raise RunError("stopped")
    assert pool.oldest == 1

"""Around an evaluation: the environment is closed, its options are its own, and the busy times do not wait for it."""

from __future__ import annotations

import asyncio
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.cli import _config_to_draw, _config_to_verify
from slipstream.closing import CloseError
from slipstream.config import LoraConfig, dump, load_config
from slipstream.environments.base import Codec, Policy, Task
from slipstream.environments.guard import attempt
from slipstream.environments.in_flight import Places
from slipstream.evaluation import close_environment, evaluate
from slipstream.ledger import Entry
from slipstream.observe.tally import Tally
from slipstream.rollout import Sampling
from slipstream.run import Run, RunError
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


def test_an_environment_needs_no_close() -> None:
    nothing: Any = object()
    asyncio.run(close_environment(nothing))


def test_options_belong_to_their_environment(tmp_path: Path) -> None:
    run = load_config(None, ["--model.path=m", "--environment.name=gsm8k", "--environment.options.shots=2"])
    (tmp_path / "config.toml").write_text(dump(run))
    (tmp_path / "policy").mkdir()
    assert _config_to_draw(str(tmp_path), None, []).environment.options == {"shots": 2}
    assert _config_to_draw(str(tmp_path), "gsm8k", []).environment.options == {"shots": 2}
    assert _config_to_draw(str(tmp_path), "addition", []).environment.options == {}
    digits = ["--environment.options.digits", "1"]
    assert _config_to_draw(str(tmp_path), "addition", digits).environment.options == {"digits": 1}


def finished(directory: Path, *flags: str) -> str:
    """The directory of a run of these options that is over."""
    run = load_config(None, ["--model.path=m", "--environment.name=mine.py:Mine", *flags])
    (directory / "config.toml").write_text(dump(run))
    (directory / "policy").mkdir()
    return str(directory)


@pytest.mark.parametrize(
    "flags",
    [
        ["--generator.kind=vllm", "--sync.link=lora", "--lora.targets=['q_proj']"],
        ["--generator.kind=vllm", "--sync.link=lora", "--sync.placement=colocated", "--sync.interruption=retry"],
        ["--lora.base=4bit", "--lora.alpha=16"],
        ["--lora.experts=true"],
        ["--sync.link=checkpoint", "--sync.keep=2"],
    ],
    ids=["vllm", "in turns", "4bit", "experts", "kept files"],
)
def test_what_adapters_have_learned_is_drawn_from(flags: list[str], tmp_path: Path) -> None:
    """They are read with the policy: no fresh ones lie over them, and no link brings others."""
    target = finished(tmp_path, "--lora.rank=8", *flags)
    config = _config_to_draw(target, None, [])
    assert config.lora == LoraConfig() and config.sync.link != "lora"
    assert config.model.path == str(tmp_path / "policy")
    assert _config_to_draw(target, None, ["--generator.kind=torch"]).generator.kind == "torch"
    assert _config_to_draw(target, "addition", []).environment.name == "addition"


def test_what_servers_drew_for_a_run_is_drawn_here_and_not_verified_here(tmp_path: Path) -> None:
    target = finished(
        tmp_path, "--generator.kind=vllm", "--generator.servers=['http://far:1']", "--sync.link=checkpoint"
    )
    assert _config_to_draw(target, None, ["--generator.device=cuda:1"]).generator.device == "cuda:1"
    assert _config_to_verify(target, []).generator.servers == ["http://far:1"]


def test_rewards_of_steps_belong_to_their_environment(tmp_path: Path) -> None:
    target = finished(tmp_path, "--algorithm.process=0.5")
    assert _config_to_draw(target, "addition", []).algorithm.process == 0
    assert _config_to_draw(target, None, [], default="addition").environment.name == "mine.py:Mine"


@pytest.mark.parametrize(
    ("flags", "path", "how"),
    [
        (["--lora.rank=8", "--generator.kind=vllm", "--sync.link=lora"], "m", "continue"),
        (["--lora.rank=8", "--lora.alpha=16"], "m", "recompute"),
        (["--sync.link=checkpoint", "--sync.restart=true", "--sync.interruption=drain"], "policy", "drain"),
        (["--sync.link=nccl"], "policy", "recompute"),
    ],
    ids=["adapters by vLLM", "adapters", "engines that start again", "weights"],
)
def test_what_is_verified_is_the_engine_and_the_link_of_the_run(
    flags: list[str], path: str, how: str, tmp_path: Path
) -> None:
    """A link for adapters brings them to a model without any."""
    target = finished(tmp_path, *flags)
    run, config = load_config(tmp_path / "config.toml"), _config_to_verify(target, [])
    assert (config.lora, config.generator, config.sync.link) == (run.lora, run.generator, run.sync.link)
    assert (Path(config.model.path).name, config.sync.interruption) == (path, how)
    assert _config_to_verify(target, ["--sync.interruption=retry"]).sync.interruption == "retry"


def test_rollouts_beside_one_that_ends_the_run_are_cancelled() -> None:
    ended: list[str] = []

    async def play(task: Task, entry: Entry, member: int) -> None:
        try:
            await asyncio.sleep(0 if member == 1 else 60)
            raise RunError("too many failures")
        finally:
            ended.append(f"rollout {member}")

    async def main() -> None:
        run: Any = Run.__new__(Run)
        run.environment, run._play = SimpleNamespace(train=[Task("t", "?")]), play
        run.config = load_config(None, ["--model.path=m", "--environment.name=e", "--loop.group_size=3"])
        with pytest.raises(RunError):
            await run._play_group(Entry(0, 0))
        await asyncio.sleep(0)
        assert sorted(ended) == ["rollout 0", "rollout 1", "rollout 2"]

    asyncio.run(main())


@pytest.mark.parametrize("fails", [(), ("endpoint",), ("scoring", "environment"), ("environment",)])
def test_all_is_closed_whatever_closing_some_of_it_raises(
    fails: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []

    def part(name: str) -> Any:
        async def close() -> None:
            closed.append(name)
            if name in fails:
                raise ValueError(f"{name} is stuck")

        return SimpleNamespace(close=close)

    async def main() -> None:
        run: Any = Run.__new__(Run)
        run.endpoint, run.scoring, run._started = part("endpoint"), part("scoring"), part("pools")
        run.environment, run._aside, run._telling = part("environment"), False, None
        run.recorder = SimpleNamespace(close=lambda: closed.append("recorder"))
        await run.close()

    with pytest.raises((ValueError, CloseError), match=f"{fails[0]} is stuck") if fails else nullcontext():
        asyncio.run(main())
    assert closed == ["endpoint", "scoring", "pools", "environment", "recorder"]
    assert ("environment is stuck" in capsys.readouterr().err) == (len(fails) > 1), "what comes after is not swallowed"


def test_a_run_tells_of_an_episode_that_takes_long_and_where_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.run.FIRST_WORD_S", 0.05)
    said: list[str] = []

    class Loops:
        train = test = ()

        async def rollout(self, task: Task, policy: Policy) -> float:
            while True:
                await asyncio.sleep(0.01)

    async def main() -> None:
        run: Any = Run.__new__(Run)
        run.config = load_config(None, ["--model.path=m", "--environment.name=e"])
        run._places, run.progress = Places(), SimpleNamespace(note=said.append)
        telling = asyncio.create_task(run._tell_of_long_episodes())
        policy = Policy(Scripted(()), Codec(build_tokenizer()), Sampling(), "0")
        playing = asyncio.create_task(attempt(Loops(), Task("7", "?"), policy, 300.0, places=run._places))
        async with asyncio.timeout(30):
            while len(said) < 2:
                await asyncio.sleep(0.01)
        telling.cancel()
        playing.cancel()

    asyncio.run(main())
    assert said[0].startswith("an episode of task 7 has taken 0 s of its time limit of 300 s (environment.time_limit)")
    assert re.search(rf"and is at {re.escape(__file__)}, line \d+$", said[0])


def test_the_window_ends_and_the_last_step_is_recorded_before_a_running_evaluation_is_waited_for() -> None:
    written: list[bool] = []

    async def stats() -> dict[str, float]:
        return {"tokens": 0.0, "busy": 0.0}

    async def main() -> float:
        run: Any = Run.__new__(Run)
        run._started, run._groups, run.stopped = SimpleNamespace(generator=SimpleNamespace(stats=stats)), set(), None
        run._publishing = None
        run.tally = Tally()
        run.tally.open(await stats())
        run._evaluation = asyncio.create_task(asyncio.sleep(0.5))
        run.recorder = SimpleNamespace(write=lambda: written.append(run._evaluation.done()))
        await run._settle()
        assert run._evaluation.done()
        return float(run.tally.window_seconds)

    assert asyncio.run(main()) < 0.4
    assert written == [False]


class TwoTasks:
    """Answers one task; its episode of the other fails."""

    train = test = (Task("good", "1+1="), Task("bad", ({"role": "user", "content": "2+2="},)))

    async def rollout(self, task: Task, policy: Policy) -> float:
        if task.id == "bad":
            raise ValueError("no such sum")
        await policy.sample(task.prompt)
        return 0.5


def test_what_failed_is_recorded_beside_what_was_answered() -> None:
    config = load_config(None, ["--model.path=m", "--environment.name=addition"])
    found = asyncio.run(evaluate(config, TwoTasks(), Scripted("2"), Codec(build_tokenizer())))
    answered, failed = found["samples"]
    assert answered == {"id": "good", "prompt": "1+1=", "completion": answered["completion"], "reward": 0.5}
    assert "2" in answered["completion"]
    assert failed["id"] == "bad" and failed["prompt"] == "2+2=" and "ValueError" in failed["failed"]

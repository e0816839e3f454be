"""Engines that die or hang are replaced while a run goes on, and their number can be changed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.controller import engine_supervisor as supervisor
from slipstream.controller.finish import close
from slipstream.controller.run_context import RunContext
from slipstream.controller.setup import resolve_config
from slipstream.generators.pool import EngineReplica
from slipstream.run import training_loop
from slipstream.runtime.run_directory import RunDirectory
from slipstream.runtime.worker import WorkerDied
from tests.processes import ENDLESS

LIMIT = 120.0  # seconds in which every run must end


class Warned(RunContext):
    """A run that keeps its warnings."""

    warnings: list[str]


def run_of(tiny: Path, folder: Path, *flags: str) -> Warned:
    (folder / "endless.py").write_text(ENDLESS)
    config = load_config(None, [
        f"--model.path={tiny}", f"--environment.name={folder / 'endless.py'}:Endless", "--loop.steps=100000",
        "--loop.groups_per_step=2", "--loop.group_size=4", "--sampling.max_tokens=24", "--evaluation.every=0",
        "--evaluation.tasks=0", "--trainer.threads=1", "--generator.threads=1", *flags,
    ])  # fmt: skip
    run = Warned(resolve_config(config), RunDirectory.create(folder / "run"), quiet=True)
    run.warnings = []
    run.progress.warn = run.warnings.append  # type: ignore[method-assign]
    return run


async def play(run: Warned, script: Callable[[Warned], Awaitable[None]]) -> dict[str, Any]:
    """Train while `script` runs, and stop as by Ctrl-C after it. Returns the summary."""

    async def scripted() -> None:
        await step(run, 2)
        await script(run)
        run.stopped = "SIGINT"
        run.changed.set()

    acting = asyncio.ensure_future(scripted())
    training = asyncio.ensure_future(training_loop(run))
    acting.add_done_callback(lambda done: training.cancel() if not done.cancelled() and done.exception() else None)
    try:
        async with asyncio.timeout(LIMIT):
            try:
                return await training
            except asyncio.CancelledError:
                if acting.done():
                    acting.result()
                raise
    finally:
        acting.cancel()
        await close(run)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def step(run: Warned, more: int = 1) -> None:
    """Wait for further steps."""
    last = run.state.step + more
    await until(lambda: run.state.step >= last)


def send(engine: EngineReplica, number: int) -> None:
    os.kill(engine.process.process.pid, number)  # type: ignore[union-attr]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process is detected within 2 to 3 seconds."""
    monkeypatch.setattr("slipstream.runtime.worker_process.HEARTBEAT_S", 0.1)
    monkeypatch.setattr("slipstream.runtime.worker_process.HEARTBEAT_TIMEOUT_S", 2.0)
    monkeypatch.setattr("slipstream.runtime.process.TERMINATION_GRACE_S", 0.5)


def balanced(summary: dict[str, Any], metrics: Path) -> list[dict[str, Any]]:
    """The records of the steps. Asserts that no rollout failed, and that the ledger balances."""
    counts = summary["rollouts"]
    assert not summary["failures"] and not counts["failed"]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert summary["steps"] == len(records) and counts["trained"] == 8 * len(records)
    assert counts["generated"] == sum(n for name, n in counts.items() if name != "generated")
    return records


@pytest.mark.parametrize(
    ("link", "number", "flags"),
    [
        ("shared", signal.SIGKILL, []),
        ("nccl", signal.SIGKILL, []),
        ("checkpoint", signal.SIGSTOP, []),
        ("delta", signal.SIGKILL, []),
        ("shared", signal.SIGKILL, ["--sync.placement=colocated", "--sync.in_flight=retry", "--trainer.ranks=2"]),
    ],
)
def test_one_of_two_engines_is_replaced(
    link: str, number: int, flags: list[str], tiny: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if number == signal.SIGSTOP:  # a busy host may keep a process that works silent for two seconds, too
        request.getfixturevalue(impatient.__name__)
    run = run_of(tiny, tmp_path, "--generator.replicas=2", f"--sync.link={link}", *flags)

    async def script(run: Warned) -> None:
        pool = run.cluster.generator
        before = pool.generators[1]
        # A death during a transfer into served weights also costs the other engines that took part.
        await until(lambda: run.publishing and run.publishing.done())
        send(before, number)
        await until(lambda: before.process.dead)
        await step(run)
        await until(lambda: len(pool.alive) == 2 and pool.generators[1] is not before)
        engine = pool.generators[1]
        assert engine.version >= run.state.version - 1
        tokens = engine.totals["tokens"]
        await step(run, 3)
        assert engine.totals["tokens"] > tokens
        await until(lambda: engine.version == pool.generators[0].version)  # no publish has swapped one of them only

    summary = asyncio.run(play(run, script))
    records = balanced(summary, tmp_path / "run" / "metrics.jsonl")
    restarts = summary["engine_restarts"], records[-1]["engines/restarts"]
    assert restarts == (1, 1) and records[-1]["engines/alive"] == 2, run.warnings
    (lost,) = summary["engines_lost"]
    assert lost.startswith("generator 1 ") and lost.endswith("1 of 2 generators are left; it is restarted (try 1 of 3)")
    assert run.warnings[0].splitlines()[-1].rstrip(".") in lost, "the record says why, too"
    assert sum(w.startswith("generator 1 was restarted and serves again after") for w in run.warnings) == 1


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_waits_for_its_only_engine(lag: int, tiny: Path, tmp_path: Path) -> None:
    run = run_of(tiny, tmp_path, f"--loop.max_lag={lag}")

    async def script(run: Warned) -> None:
        send(run.cluster.generator.generators[0], signal.SIGKILL)
        await until(lambda: run.totals.engine_restarts)
        await step(run, 3)

    summary = asyncio.run(play(run, script))
    balanced(summary, tmp_path / "run" / "metrics.jsonl")
    assert summary["engine_restarts"] == 1


def test_a_run_takes_no_step_below_min_replicas(tiny: Path, tmp_path: Path) -> None:
    run = run_of(tiny, tmp_path, "--generator.replicas=2", "--generator.min_replicas=2", "--loop.max_lag=4")
    below: list[int] = []

    async def script(run: Warned) -> None:
        pool = run.cluster.generator
        send(pool.generators[1], signal.SIGKILL)
        await until(lambda: run.waits_for_engines)
        first = run.state.step  # the batch that was taken before
        while run.waits_for_engines:
            below.append(run.state.step - first)
            await asyncio.sleep(0.01)
        await step(run, 3)
        assert len(pool.alive) == 2

    summary = asyncio.run(play(run, script))
    balanced(summary, tmp_path / "run" / "metrics.jsonl")
    assert below and max(below) == 0 and summary["engine_restarts"] == 1
    assert any("the run waits for engines: 1 serve, and generator.min_replicas = 2" in said for said in run.warnings)


def test_a_run_ends_if_its_engine_dies_again_and_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.01)
    run = run_of(tiny, tmp_path, "--generator.max_restarts=2")

    async def script(run: Warned) -> None:
        while True:
            for engine in run.cluster.generator.alive:
                send(engine, signal.SIGKILL)
                await until(lambda engine=engine: engine.process.dead)
            await asyncio.sleep(0.01)

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(play(run, script))
    assert caught.value.subgroup(WorkerDied) is not None
    assert run.totals.engine_restarts == 2 and len(run.totals.engines_lost) == 3
    assert run.totals.engines_lost[-1].endswith("0 of 1 generators are left")


@pytest.mark.parametrize("link", ["shared", "single_copy"])
def test_without_restarts_only_single_copy_needs_every_engine(link: str, tiny: Path, tmp_path: Path) -> None:
    """A rank of the trainer would compute on the weights of the dead engine."""
    run = run_of(tiny, tmp_path, "--generator.replicas=2", "--generator.max_restarts=0")

    async def script(run: Warned) -> None:
        run.config = run.config.model_copy(update={"sync": run.config.sync.model_copy(update={"link": link})})
        send(run.cluster.generator.generators[1], signal.SIGKILL)
        await step(run, 3)

    if link == "shared":
        summary = asyncio.run(play(run, script))
        assert len(summary["engines_lost"]) == 1
    else:
        with pytest.raises(BaseExceptionGroup) as caught:
            asyncio.run(play(run, lambda run: asyncio.gather(script(run), until(lambda: False))))
        assert caught.value.subgroup(WorkerDied) is not None


@pytest.mark.parametrize(("served_s", "delays"), [(60.0, [0.0123, 0.0246]), (0.02, [0.0123, 0.0123])])
def test_the_delay_of_a_restart_grows_until_an_engine_serves_for_long(
    served_s: float, delays: list[float], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.0123)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", served_s)
    sleep, slept = asyncio.sleep, []

    async def recorded(seconds: float, *rest: Any) -> Any:
        slept.append(seconds)
        return await sleep(seconds, *rest)

    monkeypatch.setattr(asyncio, "sleep", recorded)
    run = run_of(tiny, tmp_path)

    async def script(run: Warned) -> None:
        for restarts in (1, 2):
            send(run.cluster.generator.alive[0], signal.SIGKILL)
            await until(lambda restarts=restarts: run.totals.engine_restarts == restarts)
            await step(run, 3)

    asyncio.run(play(run, script))
    assert [seconds for seconds in slept if seconds in delays] == delays


@pytest.mark.parametrize("link", ["shared", "nccl", "delta"])
def test_the_number_of_engines_changes_while_a_run_goes_on(link: str, tiny: Path, tmp_path: Path) -> None:
    run = run_of(tiny, tmp_path, f"--sync.link={link}")

    async def script(run: Warned) -> None:
        pool = run.cluster.generator
        with pytest.raises(ConfigError, match=r"engines = 0 is less than generator.min_replicas = 1"):
            await supervisor.scale(run, 0)
        await until(lambda: pool.generators[0].process.memory_bytes > 0)
        with pytest.raises(ConfigError, match=r"3999 more engines need [\d,.]+ GB of memory, .* GB are left"):
            await supervisor.scale(run, 4000)
        await supervisor.scale(run, 3)
        await until(lambda: len(pool.alive) == 3)
        await step(run, 3)
        await until(lambda: len({engine.version for engine in pool.alive}) == 1)  # between two publishes
        assert all(engine.totals["tokens"] for engine in pool.alive)
        tokens = pool.totals["tokens"]
        await supervisor.scale(run, 1)
        assert len(pool.generators) == len(pool.alive) == 1 and pool.totals["tokens"] >= tokens
        await step(run, 3)

    summary = asyncio.run(play(run, script))
    records = balanced(summary, tmp_path / "run" / "metrics.jsonl")
    assert {1, 3} <= {record["engines/alive"] for record in records} and records[-1]["engines/alive"] == 1
    assert not summary["engines_lost"] and not run.warnings


@pytest.mark.parametrize("link", ["shared", "nccl", "delta"])
def test_a_trainer_that_dies_while_its_run_waits_for_the_only_engine(link: str, tiny: Path, tmp_path: Path) -> None:
    """No call to the trainer is pending then, and the engine can't join without it."""
    run = run_of(tiny, tmp_path, f"--sync.link={link}")

    async def script(run: Warned) -> None:
        send(run.cluster.generator.generators[0], signal.SIGKILL)
        await until(lambda: run.waits_for_engines)
        os.kill(run.cluster.trainer_process.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        await until(lambda: run.trainer_restarts)
        await step(run, 3)

    summary = asyncio.run(play(run, script))
    balanced(summary, tmp_path / "run" / "metrics.jsonl")
    assert summary["trainer_restarts"] == 1

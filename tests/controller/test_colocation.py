"""Placement `colocated`: trainer and engines alternate, and the trained weights equal those of a usual run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow.parquet import read_table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream.config.loading import load_config
from slipstream.config.schema import Config, ConfigError
from slipstream.controller import weight_publisher
from slipstream.controller.colocation import PARTS, ColocatedScheduler
from slipstream.controller.engine_calls import prepare_version, swap_version
from slipstream.controller.launch import Cluster
from slipstream.generators.pool import EngineReplica
from slipstream.generators.torch.engine import Engine
from slipstream.rollout import Batch, Completion, Sampling
from slipstream.run import resume, train
from slipstream.runtime.worker import WorkerDied, WorkerError
from tests.conftest import build_model
from tests.generators.vllm.test_engine import assert_drawn_by
from tests.processes import changing, module_for_processes

RECORDING = """
import json, os, time
from pathlib import Path
from slipstream.environments.base import Task
from slipstream.generators.generator_worker import GeneratorWorker
from slipstream.trainers.trainer_worker import PytorchTrainerWorker

def record(side, began):
    with (Path(__file__).parent / f"{side} {os.getpid()}").open("a") as file:
        file.write(json.dumps([began, time.perf_counter()]) + "\\n")

class Sums:
    train = [Task(str(i), f"{i % 10} + 1 =") for i in range(20)]
    test = train[:6]
    async def rollout(self, task, policy):
        completion = await policy.sample(task.prompt)
        return float(sum(completion.token_ids) % 7)

class Generator(GeneratorWorker):
    def _load(self):
        engine, open_weights = super()._load()
        step = engine.step
        def timed():
            began, before = time.perf_counter(), engine.tokens_generated
            finished = step()
            if engine.tokens_generated > before:
                record("generator", began)
            return finished
        engine.step = timed
        return engine, open_weights

class Trainer(PytorchTrainerWorker):
    async def step(self, batch):
        began = time.perf_counter()
        stats = await super().step(batch)
        record("trainer", began)
        return stats
    async def score(self, completions):
        began = time.perf_counter()
        scores = await super().score(completions)
        record("trainer", began)
        return scores
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """File in which the workers of the module `recording` log when they compute."""
    with module_for_processes("recording", RECORDING, tmp_path / "recorded", monkeypatch) as folder:
        yield folder


def config_of(model: Path, *flags: str) -> Config:
    named = [f"--model.path={model}", "--trainer.threads=1", "--generator.threads=1", "--environment.name=addition"]
    return load_config(None, [*named, *flags])


def run(model: Path, directory: Path, *flags: str) -> dict[str, Any]:
    small = ["--loop.steps=4", "--loop.groups_per_step=3", "--loop.group_size=4", "--sampling.max_tokens=12"]
    rest = ["--trainer.learning_rate=1e-3", "--evaluation.tasks=6", "--evaluation.every=2", "--checkpoint.every=2"]
    kinds = ["--generator.engine=recording:Generator", "--trainer.kind=recording:Trainer", f"--run.dir={directory}"]
    kinds.append("--environment.name=recording:Sums")
    return train(config_of(model, *small, *rest, *kinds, *flags), quiet=True)


def intervals(folder: Path, side: str) -> list[tuple[float, float]]:
    return sorted(
        tuple(json.loads(line)) for file in folder.glob(f"{side} *") for line in file.read_text().splitlines()
    )


def overlapping(folder: Path) -> int:
    """Number of times that trainer and an engine computed concurrently."""
    drawn = intervals(folder, "generator")
    return sum(
        any(began < end and start < ended for began, ended in drawn) for start, end in intervals(folder, "trainer")
    )


COLOCATED = "--sync.placement=colocated"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("ranks", "more"), [(1, []), (2, []), (1, ["--trainer.keep_compute_copy=false", "--model.dtype=bfloat16"])]
)
def test_a_synchronous_colocated_run_trains_bitwise_identical_weights(
    ranks: int, more: list[str], tiny: Path, tmp_path: Path, recorded: Path
) -> None:
    flags = ["--loop.max_lag=0", f"--trainer.ranks={ranks}", *more]
    summary = run(tiny, tmp_path / "turns", *flags, COLOCATED, "--sync.in_flight=recompute")
    assert summary["steps"] == summary["sync"]["publishes"] == 4
    assert len(intervals(recorded, "trainer")) == 5 * ranks and not overlapping(recorded)  # with the probe's score
    run(tiny, tmp_path / "both", *flags)
    policies = [load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("turns", "both")]
    start = load_file(tiny / "model.safetensors")
    assert all(torch.equal(policies[0][name], policies[1][name]) for name in policies[0])
    assert any(not torch.equal(policies[0][name], start[name]) for name in policies[0])


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("how", "more"),
    [
        ("continue", []),
        ("recompute", ["--generator.replicas=2"]),
        ("retry", []),
        ("drain", ["--sync.every=2", "--loop.max_lag=1"]),
    ],
)
def test_colocation_with_sequences_in_flight(
    how: str, more: list[str], tiny: Path, tmp_path: Path, recorded: Path
) -> None:
    """Trainer and engines never compute concurrently, and recorded log-probabilities and versions are exact."""
    kept = ["--sync.link=checkpoint", "--sync.keep_versions=9", "--sampling.max_tokens=60"]
    flags = ["--loop.max_lag=2", COLOCATED, f"--sync.in_flight={how}", *kept, *more]
    summary = run(tiny, tmp_path / "run", *flags)
    assert summary["steps"] == 4 and not summary["failures"] and summary["lag"]["max"] <= 2
    assert len(intervals(recorded, "trainer")) == 5 and not overlapping(recorded)
    drawn = [row for file in (tmp_path / "run" / "rollouts").glob("*.parquet") for row in read_table(file).to_pylist()]
    assert len(drawn) == 4 * 12
    for row in drawn:
        assert_exact(row, tiny, tmp_path / "run" / "weights")
    assert any(len(row["spans"]) > 1 for row in drawn) == (how in ("continue", "recompute"))
    shortest = min(end - start for start, end in intervals(recorded, "trainer"))
    assert summary["sync"]["pause_ms"]["median"] >= 1000 * shortest, "engines sleep during the step"


@pytest.mark.e2e
def test_two_ranks_hand_their_weights_to_two_engines(tiny: Path, tmp_path: Path, recorded: Path) -> None:
    """All checksums are compared, and the run is resumed."""
    flags = ["--loop.max_lag=1", "--trainer.ranks=2", "--generator.replicas=2", "--sync.verify=full", "--loop.steps=2"]
    assert run(tiny, tmp_path / "turns", *flags, COLOCATED, "--sync.in_flight=recompute")["steps"] == 2
    summary = resume(tmp_path / "turns", ["--loop.steps=4"], quiet=True)
    assert summary["steps"] == 4 and not summary["failures"] and not overlapping(recorded)
    assert summary["rollouts"]["trained"] == 4 * 12
    (first, *_, last) = map(json.loads, (tmp_path / "turns" / "metrics.jsonl").read_text().splitlines())
    parts = ("sleep", "onload", "wake_weights", "offload", "wake")
    for metrics in (first, last):
        assert 0 < sum(metrics[f"sync/{part}_s"] for part in parts) < metrics["sync/changeover_s"] < 60


def assert_exact(row: dict[str, Any], model: Path, weights: Path) -> None:
    """Every token has the log-probability of its recorded version in a plain forward pass."""
    first, ids = len(row["prompt_ids"]), torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    for span in row["spans"]:
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        policy.load_state_dict(load_file(weights / f"version_{span['version']}.safetensors"), strict=False)
        with torch.no_grad():
            scores = policy(ids[:, :-1]).logits[0, first - 1 :].log_softmax(-1)
        wanted = scores.gather(-1, ids[0, first:, None])[span["start"] : span["end"], 0]
        assert (wanted - torch.tensor(row["logprobs"])[span["start"] : span["end"]]).abs().max() < 1e-4


def test_a_sleeping_engine_rejects_calls(tiny: Path, tmp_path: Path) -> None:
    """A direct call raises an error, while requests wait in the pool. An offloaded trainer rejects calls, too."""

    async def main() -> None:
        config = config_of(tiny, COLOCATED, "--sync.in_flight=recompute")
        pools = await Cluster.start(config, tmp_path)
        (generator,), sampling = pools.generator.generators, Sampling(temperature=0.0, max_tokens=20)
        try:
            await pools.link.connect(0)
            with pytest.raises(ConfigError, match=r'be changed with sync\.placement = "colocated"'):
                pools.validate_engine_count(2)
            before = await pools.generator.generate([5, 6, 7], sampling)
            with pytest.raises(WorkerError, match="this trainer is offloaded"):
                await pools.trainer.score([before])
            async with pools.trainer_turn(publishes=False):
                with pytest.raises(WorkerError, match="this engine sleeps"):
                    await generator.generate([5, 6, 7], sampling)
                waiting = asyncio.ensure_future(pools.generator.generate([5, 6, 7], sampling))
                await pools.trainer.score([before])
                assert not waiting.done() and not await pools.generator.longest_in_flight()
            with pytest.raises(WorkerError, match="this trainer is offloaded"):
                await pools.trainer.step(Batch((), ()))
            assert (await waiting).token_ids == before.token_ids
        finally:
            await pools.close()

    asyncio.run(main())


def completions(engine: Engine) -> list[Completion]:
    done: dict[Any, Completion] = {}
    while engine.busy:
        done |= dict(engine.step())
    return [done[key] for key in sorted(done)]


def engines_with_sequences() -> tuple[Engine, Engine]:
    """Two engines with 6 requests each, 4 of which are in flight."""
    engines = Engine(build_model("qwen3"), slots=4), Engine(build_model("qwen3"), slots=4)
    for engine in engines:
        for key in range(6):
            engine.submit(key, [5, 6, 7 + key], Sampling(max_tokens=20, seed=key))
        for _ in range(7):
            engine.step()
    return engines


def assert_same_tokens(swapped: Engine, other: Engine, how: str) -> None:
    """Both engines finish with the same tokens. `swapped` has swapped to version 1 in between."""
    ours, theirs = completions(swapped), completions(other)
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert {c.versions for c in ours} == ({(1, 1)} if how == "retry" else {(0, 1), (1, 1)})


@pytest.mark.parametrize("how", ["continue", "recompute", "retry"])
def test_a_sleep_changes_no_token(how: Any) -> None:
    """An engine that slept samples the same tokens as one that did not."""
    slept, awake = engines_with_sequences()
    slept.sleep(2)
    assert slept.step() == [] and slept._cache.positions == 0 and slept.busy
    with pytest.raises(RuntimeError, match="sleeps"):
        slept.submit(9, [5], Sampling())
    slept.wake(["weights"])
    assert slept.asleep
    slept.swap(1, lambda: None, how)
    slept.wake(["kv_cache"])
    assert_same_tokens(slept, awake, how)


@pytest.mark.parametrize("how", ["continue", "recompute", "retry"])
def test_a_pause_keeps_keys_and_values_until_a_swap(how: Any) -> None:
    """And `continue` keeps them beyond it."""
    paused, awake = engines_with_sequences()
    paused.sleep(0)
    assert paused.step() == [] and paused.running == 4 and paused._cache.positions
    paused.swap(1, lambda: None, how)
    assert paused.asleep and paused.running == (4 if how == "continue" else 0)
    paused.wake(["scheduling"])
    assert_same_tokens(paused, awake, how)


class SharedGpu:
    """An engine and a trainer in one process, for the scheduler alone. The trainer's steps fit from a turn on."""

    def __init__(self, fits: list[bool]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fits = iter(fits)

    async def onload(self) -> None:
        self.calls.append(("onload",))

    async def offload(self) -> bool:
        self.calls.append(("offload",))
        return next(self._fits)

    async def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    async def wake(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("wake", *tags))


class Pool:
    """A pool whose clock counts its calls."""

    def __init__(self, engine: SharedGpu) -> None:
        self.engine, self.paused, self.time = engine, False, 0.0

    async def call_all(self, call: Any, doing: str) -> None:
        await call(self.engine)

    def now(self) -> float:
        self.time += 1.0
        return self.time

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


@pytest.mark.parametrize("in_place", [True, False])
def test_engines_stay_awake_once_steps_fit_beside_them(in_place: bool) -> None:
    shared: Any = SharedGpu([False, True])

    async def turns() -> list[list[tuple[Any, ...]]]:
        pool: Any = Pool(shared)
        scheduler, found = ColocatedScheduler(shared, pool), []
        for _ in range(3):
            async with scheduler.trainer_turn(publishes=True):
                shared.calls.append(("step", pool.paused))
                await scheduler.before_publish(in_place)
                shared.calls.append(("publish", pool.paused))
                stopped = pool.time if pool.paused else 90.0
                assert scheduler.pauses_from_sleep([("engine 0", 90.0, 91.0)]) == [("engine 0", stopped, 91.0)]
            assert not pool.paused and set(scheduler.seconds) == {*PARTS, "turn"}
            found.append(shared.calls)
            shared.calls = []
        return found

    first, second, third = asyncio.run(turns())
    assert first == second == [
        ("sleep", 2), ("onload",), ("step", True), ("wake", "weights"), ("publish", True), ("offload",),
        ("wake", "kv_cache"),
    ]  # fmt: skip
    pause = [("sleep", 0)] * in_place
    assert third == [("step", False), *pause, ("publish", in_place), *[("wake", "scheduling")] * in_place]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sync.link=nccl"], 'sync.link = "nccl", whose ends run at once; use "shared"'),
        (
            ["--generator.engine=vllm", "--generator.servers=['http://a:1']"],
            "generator.servers, which can't be put to sleep; leave them out",
        ),
    ],
)
def test_incompatible_options_are_refused(flags: list[str], said: str, tiny: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tiny, COLOCATED, *flags)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@asynccontextmanager
async def three_engines(model: Path, directory: Path) -> AsyncIterator[tuple[Cluster, list[EngineReplica]]]:
    """A colocated run with version 0 in all engines, which are replaced if they die."""
    flags = ["--generator.replicas=3", "--trainer.kind=slipstream.tools.verify:PerturbingTrainer", "--loop.max_lag=2"]
    pools = await Cluster.start(config_of(model, COLOCATED, *flags), directory)
    pools.generator.supervised = True
    try:
        await pools.link.connect(0)
        yield pools, list(pools.generator.generators)
    finally:
        await pools.close()


def test_engines_keep_the_version_that_they_received_if_one_of_them_dies(
    patient: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dies before its swap, when the served weights of all of them have been written."""

    async def main() -> None:
        async with three_engines(patient, tmp_path) as (pools, (first, *others)):

            async def swap(engine: EngineReplica, *arguments: Any) -> Any:
                if engine is first:
                    engine.terminate("killed")
                return await swap_version(engine, *arguments)

            monkeypatch.setattr(weight_publisher, "swap_version", swap)
            async with pools.trainer_turn(publishes=True):
                await changing(pools).change(1)
                stats = await pools.link.publish(1)
                await changing(pools).store(tmp_path / "1")
            assert len(stats.engines_lost) == 1 and [engine.version for engine in others] == [1, 1]
            for engine in others:
                completion = await engine.generate([5, 6, 7], Sampling(max_tokens=20))
                assert completion.versions == (1, 1)
                assert_drawn_by(tmp_path / "1", completion)

    asyncio.run(main())


def test_engines_with_a_part_of_a_version_are_terminated(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fail to receive it: one dies, and the others report an error after their served weights have been written."""

    async def main() -> None:
        async with three_engines(tiny, tmp_path) as (pools, (first, *others)):

            async def prepare(engine: EngineReplica, *arguments: Any) -> None:
                await prepare_version(engine, *arguments)
                if engine is first:
                    raise engine.terminate("killed")
                raise WorkerError("no memory", "OSError", "")

            monkeypatch.setattr(weight_publisher, "prepare_version", prepare)
            async with pools.trainer_turn(publishes=True):
                await changing(pools).change(1)
                with pytest.raises((WorkerError, WorkerDied)):
                    await pools.link.publish(1)
                assert not any(engine.alive for engine in others)

    asyncio.run(main())

"""Sequences in flight at a swap: each mode behaves as documented, and records of tokens stay exact."""

from __future__ import annotations

import asyncio
import copy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config.loading import load_config
from slipstream.config.schema import SyncConfig
from slipstream.generators.base import Interruption
from slipstream.generators.generator_worker import GeneratorWorker
from slipstream.generators.torch import engine as engines
from slipstream.generators.torch.engine import Engine
from slipstream.generators.vllm.engine import VllmEngine
from slipstream.rollout import Completion, Sampling
from tests.conftest import FAMILIES, build_model
from tests.generators.test_engine import BOUND, assert_true, drain, kept_by_hand, replay, requests

MODES: tuple[Interruption, ...] = get_args(Interruption)


def swap(engine: Engine, version: int, model: Any, how: Interruption = "continue") -> dict[Any, Completion]:
    """Swap to the weights of `model` as a caller does. Returns the completions that finished during a drain."""
    finished = {}
    if how == "drain":
        engine.draining = True
        while engine.running:
            finished |= dict(engine.step())
    engine.swap(version, lambda: engine.model.load_state_dict(model.state_dict()), how)
    return finished


def started(family: str, asked: list[tuple[list[int], Sampling]], slots: int, steps: int) -> tuple[Engine, dict]:
    """An engine with sequences in flight, and its finished completions."""
    engine, finished = Engine(build_model(family), slots=slots), {}
    for key, (prompt, sampling) in enumerate(asked):
        engine.submit(key, prompt, sampling)
    for _ in range(steps):
        finished |= dict(engine.step())
    return engine, finished


@pytest.mark.parametrize("budget", [4096, 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_samples_as_if_the_new_weights_had_computed_all_keys(
    family: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the small budget sequences are recomputed over several passes, and the last swap comes before the end."""
    monkeypatch.setattr(engines, "PROMPT_TOKENS", budget)
    models = {version: build_model(family, seed=version) for version in range(4)}
    asked = requests(18, seed=3)
    engine, finished = started(family, asked, slots=9, steps=8)
    undisturbed = drain(started(family, asked, slots=9, steps=0)[0])
    drawn = {s.key: len(s.tokens) for s in engine._running if s.finish is None}
    swap(engine, 1, models[1], "recompute")
    finished |= dict(engine.step())
    for version, steps in ((2, 7), (3, 1)):
        for _ in range(steps):
            finished |= dict(engine.step())
        swap(engine, version, models[version], "recompute")
    finished |= drain(engine)
    assert len(finished) == len(asked) and len(drawn) > 3 and engine.tokens_discarded == 0
    for key, completion in finished.items():
        assert len(completion.token_ids) == asked[key][1].max_tokens
        assert_true(completion, asked[key][1], models)
    for key, count in drawn.items():
        before, first = undisturbed[key], finished[key].spans[0]
        assert (first.version, first.end) == (0, count) and len(finished[key].spans) > 1
        assert finished[key].token_ids[:count] == before.token_ids[:count]
        assert finished[key].logprobs[:count] == pytest.approx(before.logprobs[:count], abs=BOUND)


def test_recompute_records_every_expert_once() -> None:
    models = [build_model("qwen3_moe", seed=seed) for seed in (0, 1)]
    asked = [([5, 6, 7], Sampling(max_tokens=12, seed=seed, record_routing=True)) for seed in range(4)]
    asked.append(([9], Sampling(max_tokens=12, seed=9, record_routing=True)))
    engine, _ = started("qwen3_moe", asked, slots=4, steps=5)
    swap(engine, 1, models[1], "recompute")
    for completion in drain(engine).values():
        chosen: list[Any] = []
        for model in models:
            routes: list[torch.Tensor] = []
            gates = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
            hooks = [g.register_forward_hook(lambda _m, _i, out, to=routes: to.append(out[-1])) for g in gates]
            with torch.no_grad():
                model(torch.tensor([completion.prompt_ids + completion.token_ids[:-1]]))
            for hook in hooks:
                hook.remove()
            chosen.append(torch.stack(routes, 1).sort(-1).values.numpy())
        old = completion.spans[0].end if completion.spans[0].version == 0 else 0
        by_old = len(completion.prompt_ids) - 1 + old if old else 0
        assert completion.experts.shape == chosen[0].shape
        assert (np.sort(completion.experts) == np.concatenate([chosen[0][:by_old], chosen[1][by_old:]])).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_retry_samples_the_completion_from_its_start(family: str) -> None:
    model, asked = build_model(family, seed=1), requests(12, seed=4)
    engine, early = started(family, asked, slots=12, steps=6)
    drawn = sum(len(s.tokens) for s in engine._running if s.finish is None)
    swap(engine, 1, model, "retry")
    assert engine.tokens_discarded == drawn > 0
    finished = drain(engine)
    assert early and finished.keys() == set(range(12)) - early.keys()
    fresh = Engine(copy.deepcopy(model), slots=12, version=1)
    for key in finished:
        fresh.submit(key, *asked[key])
    for key, completion in drain(fresh).items():
        assert finished[key].token_ids == completion.token_ids and finished[key].spans == completion.spans
        assert finished[key].logprobs == completion.logprobs
        assert np.array_equal(
            np.concatenate(finished[key].sampling_mask or [[]]), np.concatenate(completion.sampling_mask or [[]])
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_drain_gives_each_completion_one_version(family: str) -> None:
    models, asked = {version: build_model(family, seed=version) for version in (0, 1)}, requests(20, seed=6)
    engine, finished = started(family, asked, slots=6, steps=5)
    running, waiting = {s.key for s in engine._running}, {s.key for s in engine._queue}
    with pytest.raises(RuntimeError, match="still run"):
        engine.swap(1, lambda: None, "drain")
    assert engine.version == 0
    finished |= swap(engine, 1, models[1], "drain")
    assert finished.keys() >= running and not finished.keys() & waiting
    finished |= drain(engine)
    assert finished.keys() == set(range(20))
    for key, completion in finished.items():
        assert [span.version for span in completion.spans] == [int(key in waiting)]
        assert_true(completion, asked[key][1], models)


def test_continue_keeps_keys_and_values() -> None:
    models, asked = {version: build_model(seed=version) for version in (0, 1)}, requests(10, seed=7)
    engine, finished = started("qwen3", asked, slots=10, steps=6)
    swap(engine, 1, models[1], "continue")
    finished |= drain(engine)
    assert sum(len(c.spans) == 2 for c in finished.values()) > 4 and engine.tokens_discarded == 0
    for key, completion in finished.items():
        sampling = asked[key][1]
        for i, logits in enumerate(replay(models, completion)):
            if sampling.temperature:
                scaled = logits / sampling.temperature
                kept = list(kept_by_hand(scaled, sampling.top_k, sampling.top_p))
                expected = scaled[completion.token_ids[i]] - scaled[kept].logsumexp(0)
                assert abs(expected.item() - completion.logprobs[i]) < BOUND


@pytest.mark.parametrize("how", MODES)
def test_a_failed_swap_changes_nothing(how: Interruption) -> None:
    asked = requests(16, seed=8)
    engine, finished = started("qwen3", asked, slots=6, steps=5)
    if how == "drain":
        engine.draining = True
        while engine.running:
            finished |= dict(engine.step())

    def broken() -> None:
        raise OSError("file is gone")

    with pytest.raises(OSError, match="gone"):
        engine.swap(1, broken, how)
    assert engine.version == 0 and not engine.draining and engine.tokens_discarded == 0
    finished |= drain(engine)
    undisturbed = drain(started("qwen3", asked, slots=6, steps=0)[0])
    assert finished.keys() == undisturbed.keys()
    for key, completion in finished.items():
        assert completion.token_ids == undisturbed[key].token_ids and completion.spans == undisturbed[key].spans
        assert completion.logprobs == pytest.approx(undisturbed[key].logprobs, abs=BOUND if how == "drain" else 0)


@pytest.mark.parametrize("failing", ["", "apply", "reset"])
def test_vllm_continues_after_a_successful_or_failed_swap(failing: str) -> None:
    told: list[str] = []

    def apply() -> Any:
        told.append("apply")
        if failing == "apply":
            raise OSError("file is gone")
        return dict

    def reset(reset_running_requests: bool) -> bool:
        told.append("reset")
        return failing != "reset"

    core = SimpleNamespace(call_utility=lambda method, *_: told.append(method))
    engine = object.__new__(VllmEngine)  # without vLLM
    engine._llm = SimpleNamespace(engine_core=core, reset_prefix_cache=reset)
    engine._parallel_core, engine.asleep, engine._draining, engine._adapters = True, False, False, None
    engine._cache_dropped = False
    engine._requests, engine._cache_salt, engine.version = {}, 0, 0
    with pytest.raises((OSError, RuntimeError), match=r"gone|did not drop") if failing else nullcontext():
        engine.swap(1, apply, "recompute")
    calls = ["apply"] if failing == "apply" else ["apply", "reset"]
    assert told == ["pause_scheduler", *calls, "resume_scheduler"]
    assert engine.version == (failing != "apply")


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 9), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("swap"), st.sampled_from(MODES)),
    st.tuples(st.just("fail"), st.sampled_from(MODES[:3])),
)


@settings(max_examples=40)
@given(actions=st.lists(ACTIONS, min_size=6, max_size=30), budget=st.sampled_from([20, 4096]))
def test_every_request_ends_exactly_once(actions: list[tuple[Any, ...]], budget: int) -> None:
    models = {version: build_model(seed=version) for version in range(3)}
    engine, finished, asked, aborted = Engine(build_model(), slots=4), {}, {}, set()
    modes, served = set(), {0: models[0]}

    def broken() -> None:
        raise OSError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "PROMPT_TOKENS", budget)
        for name, *values in actions:
            if name == "submit":
                sampling = Sampling(max_tokens=values[1], seed=len(asked), top_k=7, record_sampling_mask=True)
                engine.submit(len(asked), [7] * values[0], sampling)
                asked[len(asked)] = sampling
            elif name == "abort":
                engine.abort(values[0])
                if values[0] in asked and values[0] not in finished:
                    aborted.add(values[0])
            elif name == "step":
                for _ in range(values[0]):
                    finished |= dict(engine.step())
            elif name == "swap":
                version = engine.version + 1
                served[version] = models[version % 3]
                modes.add(values[0])
                finished |= swap(engine, version, served[version], values[0])
            else:
                with pytest.raises(OSError):
                    engine.swap(99, broken, values[0])
        finished |= drain(engine)
    assert finished.keys() | aborted == asked.keys() and not finished.keys() & aborted
    assert not engine.busy and engine.tokens_discarded <= engine.tokens_generated
    for key, completion in finished.items():
        count, versions = len(completion.token_ids), [span.version for span in completion.spans]
        assert count == asked[key].max_tokens == len(completion.logprobs) == len(completion.sampling_mask or ())
        assert versions == sorted(set(versions)) and versions[-1] <= engine.version
        assert [s.start for s in completion.spans] + [count] == [0] + [s.end for s in completion.spans]
        if "continue" not in modes:
            assert_true(completion, asked[key], served)


class Weights:
    """Served weights whose next version may fail to arrive."""

    fails = False

    def prepare(self, handle: Any) -> None: ...
    def prepared(self) -> bool:
        if self.fails:
            raise OSError("file is gone")
        return True

    def apply(self) -> None: ...
    def pause_s(self) -> float:
        return 0.0

    def start_checksums(self, names: Any) -> None: ...
    def checksums(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def service(tiny: Path, how: Interruption) -> GeneratorWorker:
    flags = [
        "--environment.name=addition",
        "--generator.max_num_seqs=2",
        "--generator.device=cpu",
        "--generator.threads=1",
    ]
    made = GeneratorWorker(load_config(None, [f"--model.path={tiny}", f"--sync.in_flight={how}", *flags]))
    made._engine._eos = frozenset()
    made._weights = Weights()
    return made


async def steps(serving: GeneratorWorker, count: int) -> None:
    """Wait for `count` steps of the engine."""
    last = serving.progress + count
    while serving.progress < last:
        await asyncio.sleep(0)


def test_an_engine_drains_while_requests_come_and_go(tiny: Path) -> None:
    async def main() -> None:
        serving = service(tiny, "drain")
        running = asyncio.ensure_future(serving.run())
        samplings = [Sampling(max_tokens=tokens, seed=key) for key, tokens in enumerate((5, 40, 5))]
        first, second, third = (asyncio.ensure_future(serving.generate((5, 6), sampling)) for sampling in samplings)
        await steps(serving, 1)
        swap = asyncio.ensure_future(serving.swap(1))
        await steps(serving, 1)
        new = asyncio.ensure_future(serving.generate((5, 6), Sampling(max_tokens=3)))
        await steps(serving, 8)
        assert [call.done() for call in (first, second, third, swap, new)] == [True, False, False, False, False]
        assert serving._engine.version == 0
        second.cancel()
        third.cancel()
        await swap
        assert ((await first).versions, (await new).versions) == ((0, 0), (1, 1))
        assert second.cancelled() and third.cancelled()
        while serving._engine.busy:  # the next step removes what has ended
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("how", MODES)
def test_an_engine_continues_if_a_version_fails_to_arrive(tiny: Path, how: Interruption) -> None:
    async def main() -> None:
        serving = service(tiny, how)
        running = asyncio.ensure_future(serving.run())
        calls = [asyncio.ensure_future(serving.generate((5, 6), Sampling(max_tokens=90))) for _ in range(3)]
        await steps(serving, 1)
        with pytest.raises(OSError):
            await serving.prepare({})
        assert not any(call.done() for call in calls), "the engine drained for weights that never came"
        assert [(await call).versions for call in calls] == [(0, 0)] * 3
        assert (await serving.stats())["tokens_discarded"] == 0
        running.cancel()

    Weights.fails = True
    try:
        asyncio.run(main())
    finally:
        Weights.fails = False


def test_the_option_names_every_mode() -> None:
    assert get_args(SyncConfig.model_fields["in_flight"].annotation) == MODES

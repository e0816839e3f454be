"""Sequences that vLLM's core reports at their end have what vLLM reports token by token."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import random
import weakref
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from slipstream.generators.vllm.engine import VllmEngine
from slipstream.generators.vllm.scheduler import CHUNK, DEFERRED, BuffersOutputs, OutputBuffer, StepLogprobs
from slipstream.rollout import Completion, Sampling
from tests.conftest import save_model
from tests.generators.vllm.test_engine import config_of

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(240),
]
VLLMS_OWN = "vllm.v1.core.sched.scheduler.Scheduler"
DEFERRING = f"{__name__}.create_deferring_scheduler"
TOKENS = CHUNK + 40
KINDS = (  # of one batch: a step then has log-probabilities of 6 tokens for each sequence
    Sampling(max_tokens=TOKENS, ignore_eos=True, seed=1),
    Sampling(max_tokens=TOKENS, ignore_eos=True, seed=2, top_k=5, record_sampling_mask=True),
    Sampling(max_tokens=1, seed=3),
    Sampling(max_tokens=TOKENS, ignore_eos=True, seed=4, record_logprobs=False),
    Sampling(max_tokens=TOKENS, seed=5, stop_strings=("7",)),
    Sampling(max_tokens=TOKENS, seed=6, stop_tokens=(22,)),
)


SCARCE = "--generator.engine_args.block_size=32", "--generator.engine_args.num_gpu_blocks_override=12"


def engine_of(model: Path, *flags: str, scheduler: str = "") -> VllmEngine:
    gc.collect()  # the end of another engine in this process would end the groups of processes that this one uses
    own = [f"--generator.engine_args.scheduler_cls={scheduler}"] if scheduler else []
    return VllmEngine(config_of(model, "--sampling.top_k=5", *flags, *own))


def buffers_of(engine: VllmEngine) -> dict[str, OutputBuffer]:
    return engine._llm.engine_core.engine_core.scheduler.buffers


def preemptions(engine: VllmEngine) -> list[Any]:
    """The requests that vLLM's scheduler preempts from now on."""
    scheduler, found = engine._llm.engine_core.engine_core.scheduler, list[Any]()
    preempt = scheduler._preempt_request

    def noted(request: Any, *more: Any, **named: Any) -> Any:
        found.append(request)
        return preempt(request, *more, **named)

    scheduler._preempt_request = noted
    return found


def completions(engine: VllmEngine) -> dict[Any, Completion]:
    for number, sampling in enumerate(KINDS):
        engine.submit(number, [5, 6, 7 + number], sampling)
    found: dict[Any, Any] = {}
    while engine.busy:
        found |= dict(engine.step())
    return found


def create_deferring_scheduler(**arguments: Any) -> Any:
    """The scheduler of a GPU: on a CPU vLLM would choose neither the asynchronous one nor the second model runner."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    scheduler = type("Deferring", (BuffersOutputs, AsyncScheduler), {})(**arguments)
    assert not scheduler.defers
    scheduler.defers = True
    return scheduler


@pytest.mark.parametrize("flags", [(), SCARCE])
@pytest.mark.parametrize("scheduler", ["", DEFERRING])
def test_completions_are_those_of_vllms_own_scheduler(scheduler: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Also if sequences fill several blocks of the KV cache, and vLLM preempts some for others."""
    save_model(model := tmp_path / "model", head_dim=32)
    engine = engine_of(model, *flags, scheduler=scheduler)
    preempted = preemptions(engine)
    ours = completions(engine)
    assert not buffers_of(engine) and bool(preempted) == bool(flags)

    engine.submit("aborted", [5, 6, 7], KINDS[0])
    for _ in range(4):
        engine.step()
    [buffer] = buffers_of(engine).values()
    assert len(buffer.tokens) > 1 and bool(buffer.deferred) == bool(scheduler)
    engine.abort("aborted")
    engine.step()
    assert not buffers_of(engine)

    del engine
    engine = engine_of(model, *flags, scheduler=VLLMS_OWN)
    theirs = completions(engine)
    assert len(ours) == len(KINDS) and len(ours[0].token_ids) == TOKENS
    assert ours[5].finish_reason == "stop" and DEFERRED < len(ours[5].token_ids) < TOKENS
    for number, wanted in theirs.items():
        got = ours[number]
        assert got.token_ids == wanted.token_ids and got.finish_reason == wanted.finish_reason
        assert np.array_equal(got.logprobs, wanted.logprobs, equal_nan=True)
        assert got.sampling_mask == wanted.sampling_mask


def test_an_engine_that_defers_answers_in_each_step(tmp_path: Path) -> None:
    """Else a core in its own process would let the generator wait for several forward passes."""
    save_model(model := tmp_path / "model", head_dim=32)
    engine = engine_of(model, scheduler=DEFERRING)
    engine.submit("one", [5, 6, 7], KINDS[0])
    scheduler = engine._llm.engine_core.engine_core.scheduler
    update, messages = scheduler.update_from_output, list[Any]()
    scheduler.update_from_output = lambda *given: messages.append(update(*given)) or messages[-1]
    while engine.busy:
        engine.step()
    assert len(messages) == TOKENS and all(messages)


def test_a_sequence_has_its_rows_of_all_steps_and_keeps_no_array_of_a_step() -> None:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    buffer, draw, arrays = OutputBuffer(2), np.random.default_rng(0), []
    steps = [(draw.random((9, 3), dtype=np.float32), draw.integers(0, 50, (9, 2, 4))) for _ in range(3 * CHUNK)]
    for number, (logprobs, experts) in enumerate(steps):
        lists = LogprobsLists(np.full((9, 3), number), logprobs.copy(), np.full(9, number, np.int32))
        step, routing = StepLogprobs(lists), experts.copy()
        arrays += [weakref.ref(array) for array in (*lists[:3], routing)]
        output = EngineCoreOutput("name", [number], step.slice_request(4, 1), routed_experts=routing[4:5])
        (buffer.complete if number == len(steps) - 1 else buffer.append)(output, step)
        if number % CHUNK == 3:
            buffer.join()
            del lists, step, routing, output
            assert not any(array() is not None for array in arrays)
    assert output.new_token_ids == list(range(len(steps)))
    assert np.array_equal(output.new_logprobs.logprobs, np.stack([logprobs[4, :2] for logprobs, _ in steps]))
    assert output.new_logprobs.logprob_token_ids.tolist() == [[number] * 2 for number in output.new_token_ids]
    assert output.new_logprobs.sampled_token_ranks.tolist() == output.new_token_ids
    assert np.array_equal(output.routed_experts, np.stack([experts[4] for _, experts in steps]))


@pytest.mark.parametrize("starts_each_step", [4 * CHUNK, 1])
def test_each_step_joins_the_arrays_of_few_sequences(starts_each_step: int) -> None:
    """Whether sequences start together or one after the other, and end at any time."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    slots, draw = 4 * CHUNK, random.Random(0)
    wanted = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False, logprobs=0)
    remaining: dict[str, int] = {}  # tokens of each sequence in flight

    class Scheduler:
        requests: ClassVar[dict[str, Any]] = defaultdict(lambda: SimpleNamespace(sampling_params=wanted))
        kv_cache_manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=()), allocate_slots=None)

        def update_from_output(self, scheduled: Any, results: Any) -> dict[int, EngineCoreOutputs]:
            routing, outputs = np.zeros((slots, 1, 2, 4)), []
            for row, name in enumerate(list(remaining)):
                remaining[name] -= 1
                ended = FinishReason.LENGTH if not remaining[name] else None
                outputs.append(EngineCoreOutput(name, [5], routed_experts=routing[row], finish_reason=ended))
                if ended:
                    del remaining[name]
            return {0: EngineCoreOutputs(outputs=outputs)}

    class Buffering(BuffersOutputs, Scheduler):
        pass

    scheduler, numbers, arrays = Buffering(), itertools.count(), dict[str, int]()
    for _ in range(2000):
        for _ in range(min(starts_each_step, slots - len(remaining))):
            remaining[str(next(numbers))] = draw.randint(206, 306)
        scheduler.update_from_output(None, SimpleNamespace(logprobs=None))
        before, arrays = arrays, {name: len(buffer._experts) for name, buffer in scheduler.buffers.items()}
        assert sum(arrays[name] <= before[name] for name in arrays.keys() & before.keys()) <= slots // CHUNK
        assert max(arrays.values()) <= CHUNK + 1
    assert len(arrays) == len(remaining) > slots // 2

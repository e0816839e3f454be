from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.generators.vllm.requests import VllmRequest
from slipstream.generators.vllm.sampler import SinglePassSampler, samples_from_all, use_single_pass
from slipstream.rollout import Sampling
from tests.conftest import run_interpreted

pytest.importorskip("vllm")


def parameters(sampling: Sampling, **more: Any) -> Any:
    """The parameters that the engine gives vLLM, as vLLM completes them."""
    from vllm import SamplingParams

    asked = VllmRequest("key", (1, 2), sampling).parameters(context=64, eos=[0], seeded=True)
    found = SamplingParams(**(asked | more), flat_logprobs=True, detokenize=bool(sampling.stop_strings))
    found.update_from_generation_config({}, 5)
    return found


def test_kernels_sample_with_the_probabilities_of_the_logits() -> None:
    run_interpreted(Path(__file__).with_name("sampling_cases.py"))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=8),
        Sampling(max_tokens=8, temperature=0.0),
        Sampling(max_tokens=8, temperature=0.7, stop_strings=("a",), stop_tokens=(3,), ignore_eos=True, seed=7),
        Sampling(max_tokens=8, record_logprobs=False),
    ],
)
def test_whole_distributions_need_one_pass(sampling: Sampling) -> None:
    assert samples_from_all(parameters(sampling))


@pytest.mark.parametrize(
    "parameter",
    [
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"logprobs": 3},
        {"min_tokens": 2},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
    ],
)
def test_other_distributions_are_left_to_vllm(parameter: dict[str, Any]) -> None:
    assert not samples_from_all(parameters(Sampling(max_tokens=8), **parameter))


def test_a_step_with_one_other_distribution_is_left_to_vllm() -> None:
    calls: list[Any] = []

    class Theirs:
        sampling_states = SimpleNamespace(num_logprobs=np.empty(4))
        compute_nans = False

        def add_request(self, *arguments: Any) -> None:
            calls.append(arguments[:2])

        def __call__(self, logits: Any, batch: Any) -> str:
            return "sampled by vLLM"

    sampler = SinglePassSampler(Theirs())
    sampler.add_request(2, 10, parameters(Sampling(max_tokens=8)))
    sampler.add_request(1, 20, parameters(Sampling(max_tokens=8, top_p=0.5)))
    assert calls == [(2, 10), (1, 20)]
    assert sampler.compute_nans is False
    batch = SimpleNamespace(idx_mapping_np=np.array([2, 1]))
    assert sampler([None, None], batch) == "sampled by vLLM"


def test_other_samplers_stay() -> None:
    runner = SimpleNamespace(sampler=object())
    before = runner.sampler
    use_single_pass(runner)
    assert runner.sampler is before
    use_single_pass(SimpleNamespace())

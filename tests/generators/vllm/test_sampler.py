from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.generators.vllm.requests import VllmRequest
from slipstream.generators.vllm.sampler import SinglePassSampler, is_logit_neutral, use_single_pass
from slipstream.rollout import Sampling
from tests.conftest import run_kernel_cases

pytest.importorskip("vllm")


def parameters(sampling: Sampling, **more: Any) -> Any:
    """The parameters that the engine gives vLLM, as vLLM completes them."""
    from vllm import SamplingParams

    asked = VllmRequest("key", (1, 2), sampling).parameters(context=64, eos=[0], seeded=True)
    found = SamplingParams(**(asked | more), flat_logprobs=True, detokenize=bool(sampling.stop_strings))
    found.update_from_generation_config({}, 5)
    if hasattr(found, "watermarking"):  # not in vLLM 0.25
        found.watermarking = False
    return found


def test_kernels_sample_with_the_probabilities_of_the_logits() -> None:
    run_kernel_cases(Path(__file__).with_name("sampling_cases.py"), interpret=not torch.cuda.is_available())


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
    assert is_logit_neutral(parameters(sampling))


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
        {"prompt_logprobs": 1},
        {"extra_args": {"a": 1}},
    ],
)
def test_other_distributions_are_left_to_vllm(parameter: dict[str, Any]) -> None:
    assert not is_logit_neutral(parameters(Sampling(max_tokens=8), **parameter))


class Theirs:
    """vLLM's sampler, which samples token 7 with log-probability -7 and token 8 as the second likeliest."""

    compute_nans = False

    def __init__(self) -> None:
        self.sampling_states = SimpleNamespace(num_logprobs=np.empty(4), temperature=None, seeds=None)
        self.sampling_states.temperature = self.sampling_states.seeds = SimpleNamespace(gpu=None)
        self.added: list[Any] = []

    def add_request(self, *arguments: Any) -> None:
        self.added.append(arguments[:2])

    def __call__(self, logits: Any, batch: Any) -> Any:
        rows = len(logits)
        return SimpleNamespace(
            sampled_token_ids=torch.full((rows, 1), 7),
            logprobs_tensors=SimpleNamespace(
                logprob_token_ids=torch.tensor([[7, 8]] * rows, dtype=torch.int32),
                logprobs=torch.tensor([[-7.0, -8.0]] * rows),
            ),
        )


def test_a_sequence_samples_the_same_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step with other distributions, vLLM samples only these."""
    kernels = types.ModuleType("slipstream.generators.vllm.sampling_kernels")
    tokens, logprobs = torch.tensor([1, 2, 3]), torch.tensor([-1.0, -2.0, -3.0])
    kernels.sample = lambda *_: (tokens, logprobs)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    theirs = Theirs()
    sampler = SinglePassSampler(theirs)
    sampler.add_request(2, 10, parameters(Sampling(max_tokens=8)))
    sampler.add_request(1, 20, parameters(Sampling(max_tokens=8, top_p=0.5)))
    sampler.add_request(0, 30, parameters(Sampling(max_tokens=8)))
    assert theirs.added == [(2, 10), (1, 20), (0, 30)]
    assert sampler.compute_nans is False
    batch = SimpleNamespace(
        idx_mapping_np=np.array([2, 1, 0]), positions=torch.zeros(3), logits_indices=torch.arange(3),
        expanded_idx_mapping=None,
    )  # fmt: skip
    output = sampler(torch.zeros(3, 4), batch)
    assert output.sampled_token_ids.tolist() == [[1], [7], [3]]
    assert output.logprobs_tensors.logprob_token_ids.tolist() == [[1, 8], [7, 8], [3, 8]]
    assert output.logprobs_tensors.logprobs.tolist() == [[-1, -8], [-7, -8], [-3, -8]]
    batch.idx_mapping_np = np.array([1, 1, 1])
    assert sampler(torch.zeros(3, 4), batch).sampled_token_ids.tolist() == [[7], [7], [7]]


def test_other_samplers_stay() -> None:
    runner = SimpleNamespace(sampler=object())
    before = runner.sampler
    use_single_pass(runner)
    assert runner.sampler is before
    use_single_pass(SimpleNamespace())

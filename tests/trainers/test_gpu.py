"""Accuracy of the trainer on a GPU in bfloat16, compared with the model's own passes.

`make test-gpu` runs these, and with them the trainer's other tests, which then compute in float32 on that GPU.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.model.loading import load_causal_lm
from slipstream.rollout import Batch
from tests.conftest import save_model
from tests.trainers.test_trainer import gradient, make_trainer, random_batch, sequences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
WAYS = {
    "defaults": (),
    "no checkpointing": ("--trainer.activation_checkpointing=none",),
    "full checkpointing": ("--trainer.activation_checkpointing=full",),
    "small micro-batches": ("--trainer.tokens_per_microbatch=64",),
    "as it is": ("--trainer.compile=false",),
    "without a copy": ("--trainer.keep_compute_copy=false",),
}
WORSE = 1.25  # than the model's own passes, at most: other kernels round elsewhere


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "llama"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(path, family=request.param, vocab_size=40, head_dim=64, hidden_size=128)
    return path


@functools.cache
def batch_of_groups() -> Batch:
    return random_batch(vocabulary=40, groups=24)


def own_gradient(path: Path, batch: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
    """REINFORCE gradient by the model's own passes, one sequence at a time; sums are in float32 or float64."""
    model: Any = load_causal_lm(str(path), device=torch.device("cuda"), dtype=torch.float32).to(dtype).eval()
    model.set_attn_implementation("sdpa")
    exact = torch.promote_types(dtype, torch.float32)
    total = {name: torch.zeros_like(p, dtype=exact) for name, p in model.named_parameters()}
    for completion, advantage in sequences(batch):
        ids = torch.tensor([completion.prompt_ids + completion.token_ids], device="cuda")
        logits = model(ids, use_cache=False).logits[0, len(completion.prompt_ids) - 1 : -1]
        logprobs = (logits.to(exact) / completion.temperature).log_softmax(-1)
        drawn = logprobs.gather(-1, torch.tensor(completion.token_ids, device="cuda")[:, None])
        (-advantage * drawn.sum() / batch.tokens).backward()
        for name, parameter in model.named_parameters():
            total[name] += parameter.grad
            parameter.grad = None
    return total


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative error of all gradients as one vector."""
    pairs = [(found[name].cpu().double(), truth.cpu()) for name, truth in wanted.items()]
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)) ** 0.5


@functools.cache
def truth_and_own_distance(path: Path) -> tuple[dict[str, Tensor], float]:
    exact = own_gradient(path, batch_of_groups(), torch.float64)
    return exact, distance(own_gradient(path, batch_of_groups(), torch.bfloat16), exact)


@pytest.mark.parametrize("way", WAYS)
def test_gradient_error_is_no_larger_than_that_of_unpacked_passes(saved: Path, way: str) -> None:
    flags = ("--model.dtype=auto", "--trainer.gradient_clip=0", '--algorithm.loss={name="reinforce"}')
    trainer = make_trainer(saved, *flags, *WAYS[way])
    assert trainer.device.type == "cuda"
    exact, own = truth_and_own_distance(saved)
    assert distance(gradient(trainer, batch_of_groups()), exact) < WORSE * own


def test_auto_dtype_on_a_gpu_is_bfloat16(tiny: Path) -> None:
    assert {p.dtype for p in make_trainer(tiny, "--model.dtype=auto").model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in make_trainer(tiny, "--model.dtype=float32").model.parameters()} == {torch.float32}

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

from slipstream.model import logprobs
from slipstream.model.loading import load_causal_lm
from slipstream.rollout import Batch
from slipstream.trainers import fp8
from slipstream.trainers.optimizer import adamw_update
from slipstream.trainers.stochastic_rounding import BLOCK
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


@pytest.mark.parametrize("masked", [False, True])
def test_the_kernels_of_the_head_compute_what_float64_does(masked: bool) -> None:
    from slipstream.model import head_kernels

    draw = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn(70, 20_000, device="cuda", generator=draw, dtype=torch.float64)
    logits = logits.bfloat16().double()
    targets, temperatures = torch.arange(70, device="cuda") * 281, torch.linspace(0.5, 1.5, 70, device="cuda")
    excluded = torch.rand(logits.shape, device="cuda", generator=draw) < 0.5 if masked else None
    if excluded is not None:
        excluded[torch.arange(70), targets] = False
    exact = logprobs.logprobs_and_entropy(logits, targets, temperatures.double(), excluded)
    found = head_kernels.logprobs_and_entropy(logits.bfloat16(), targets, temperatures, excluded)
    for one, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-5, atol=1e-5)
    scale = torch.linspace(-1, 1, 70, device="cuda")
    wanted = logprobs.logit_gradients(logits, targets, temperatures.double(), excluded, exact[1], scale.double())
    by_kernel = head_kernels.logit_gradients(logits.bfloat16(), targets, temperatures, excluded, found[1], scale)
    assert (by_kernel.double() - wanted).norm() < 1.01 * (wanted.bfloat16().double() - wanted).norm()


@pytest.mark.parametrize("dtype", [fp8.WEIGHT_DTYPE, fp8.GRADIENT_DTYPE])
def test_a_matrix_is_quantized_as_on_a_cpu(dtype: torch.dtype) -> None:
    matrix = torch.randn(304, 208, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = torch.cat([matrix, matrix], 1).cuda()  # of which a part is not contiguous
    for here, there in zip(fp8.quantize(matrix, dtype), fp8.quantize(wide[:, :208], dtype), strict=True):
        torch.testing.assert_close(there.cpu().float(), here.float(), rtol=0.13, atol=0)  # a step, where a tie rounds


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


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon"])
def test_state_in_host_memory_gives_the_same_weights(saved: Path, optimizer: str) -> None:
    """The host's state is pinned, and the GPU holds a few pieces of it during an update."""
    flags = (f"--trainer.optimizer={optimizer}", "--trainer.learning_rate=1e-3", "--trainer.compile=false")
    here, there = make_trainer(saved, *flags), make_trainer(saved, *flags, "--trainer.offload_optimizer=true")
    for _ in range(3):
        here.step(batch_of_groups())
        there.step(batch_of_groups())
    assert all(torch.equal(p, there.parameters[name]) for name, p in here.parameters.items())
    state = [v for each in there._optimizer.state.values() for kind, v in each.items() if kind != "step"]
    assert all(v.is_pinned() for v in state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_update_is_that_of_plain_operations(dtype: torch.dtype) -> None:
    """Few elements round elsewhere, since fused operations differ in the last bit."""
    draw = torch.Generator("cuda").manual_seed(0)
    numbers = torch.tensor([0.9, 0.99, 1e-3, 0.3, 1.0], device="cuda")
    weight, gradient = (torch.randn(500, BLOCK, device="cuda", generator=draw) for _ in range(2))
    codes = torch.zeros(500, BLOCK, dtype=torch.int8, device="cuda")
    ways = []
    for update in (adamw_update, torch.compile(adamw_update, dynamic=True)):
        scales = [torch.zeros(500, 1, device="cuda") for _ in range(2)]
        state = [weight.to(dtype), gradient.clone(), codes.clone(), codes.to(torch.uint8)]
        for seed in range(3):
            update(*state, torch.tensor([seed, 7], dtype=torch.int32, device="cuda"), numbers, *scales)
        ways.append([*state, *scales])
    for plain, compiled in zip(*ways, strict=True):
        apart = (plain.float() - compiled.float()).abs() > 1e-6 * plain.float().abs()
        assert apart.float().mean() < 1e-3


@pytest.mark.parametrize(
    "flags",
    [
        (), ("--lora.rank=4",), ("--lora.rank=4", "--algorithm.kl_coef=0.1"), ("--trainer.fp8=true",),
        ("--trainer.activation_checkpointing=none",),
    ],
)  # fmt: skip
def test_a_step_compiles_nothing(saved: Path, flags: tuple[str, ...]) -> None:
    """Batches of any sizes, with prompts that are shared and prompts that are not."""
    torch._dynamo.reset()
    trainer = make_trainer(saved, "--model.dtype=auto", *flags)
    torch._dynamo.utils.counters.clear()
    for groups in (1, 24, 7):
        trainer.step(random_batch(vocabulary=40, groups=groups))
        trainer.score([completion for completion, _ in sequences(random_batch(vocabulary=40, groups=groups))])
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]

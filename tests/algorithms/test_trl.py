"""The same losses, corrections and advantages as TRL computes them, by running TRL's own code on the same numbers.

Needs `pip install trl`. Losses are `GRPOTrainer._compute_loss`; advantages and importance weights are statements inside
longer methods, which are taken out of the source by what they mention, and run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.algorithms import advantages, aggregation, corrections, losses
from slipstream.algorithms.kl import kl_to_reference
from slipstream.algorithms.tokens import Tokens

pytest.importorskip("trl")
pytest.importorskip("datasets")

LENGTHS = torch.tensor([5, 1, 3, 7, 2, 6])
LONGEST = 9


class Padded:
    """Random sequences as TRL has them, `[sequences, longest]`, and as tokens."""

    def __init__(self, dtype: torch.dtype, spread: float = 0.5) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        shape = (len(LENGTHS), LONGEST)
        self.mask = (torch.arange(LONGEST) < LENGTHS[:, None]).long()
        self.logprobs = (-random(*shape).abs() - 0.1).requires_grad_()
        self.behaviour = (self.logprobs + spread * random(*shape)).detach()
        self.reference = (self.logprobs + 0.3 * random(*shape)).detach()
        self.advantages = random(len(LENGTHS))

    def tokens(self) -> Tokens:
        chosen = self.mask.bool()
        sequence = torch.arange(len(LENGTHS))[:, None].expand(chosen.shape)[chosen]
        return Tokens(
            logprobs=self.logprobs[chosen],
            behaviour=self.behaviour[chosen],
            advantages=self.advantages[sequence],
            sequence=sequence,
            lag=torch.zeros_like(sequence),
            proximal=self.logprobs[chosen].detach(),
            reference=self.reference[chosen],
        )


def trl_loss(data: Padded, loss_type: str, **changes: Any) -> Tensor:
    """The result of TRL's GRPO trainer for these inputs."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    arguments = {"delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
                 "use_bias_correction_kl": False, "steps_per_generation": 1}  # fmt: skip
    options: dict[str, Any] = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (data.logprobs, torch.zeros_like(data.logprobs), None),
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask, "aux_loss_enabled": False, "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None, "importance_sampling_level": "token", "beta": 0.0, "loss_type": loss_type,
        "epsilon_low": 0.2, "epsilon_high": 0.28, "use_vllm": False, "max_completion_length": LONGEST,
        "vllm_importance_sampling_correction": False, "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)}, "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
    }  # fmt: skip
    for name, value in changes.items():
        (arguments if name in arguments else options)[name] = value
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1), "prompt_mask": torch.ones(len(LENGTHS), 1),
        "completion_ids": torch.zeros(data.mask.shape), "completion_mask": data.mask, "advantages": data.advantages,
        "old_per_token_logps": data.behaviour, "ref_per_token_logps": data.reference,
        "num_items_in_batch": data.mask.sum(), **options.pop("inputs", {}),
    }  # fmt: skip
    trainer = SimpleNamespace(args=SimpleNamespace(**arguments), **options)
    return GRPOTrainer._compute_loss(trainer, None, inputs)


AVERAGES = {
    "grpo": aggregation.sequence_mean,
    "dapo": aggregation.token_mean,
    "dr_grpo": partial(aggregation.constant, length=LONGEST),
}
MATCHES: list[tuple[str, Any, str, dict[str, Any]]] = [
    *(("ppo", partial(losses.ppo, clip_high=0.28), average, {}) for average in AVERAGES),
    ("dual", partial(losses.ppo, clip_high=0.28, dual_clip=1.5), "dapo", {"delta": 1.5}),
    ("gspo", partial(losses.gspo, clip_low=0.05, clip_high=0.1), "grpo",
     {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1}),
    ("cispo", partial(losses.cispo, high=1.4), "dapo", {"loss_type": "cispo", "epsilon_high": 1.4}),
    ("sapo", losses.sapo, "grpo", {"loss_type": "sapo"}),
]  # fmt: skip


def assert_same(data: Padded, ours: Tensor, theirs: Tensor, digits: float) -> None:
    """Value and gradient."""
    assert ours.item() == pytest.approx(theirs.item(), rel=digits, abs=digits)
    (mine,) = torch.autograd.grad(ours, data.logprobs, retain_graph=True)
    (other,) = torch.autograd.grad(theirs, data.logprobs)
    assert mine.abs().max() > 0
    torch.testing.assert_close(mine, other, rtol=digits, atol=digits)


PRECISIONS = [(torch.float64, 1e-6), (torch.float32, 1e-5)]


@pytest.mark.parametrize(("dtype", "digits"), PRECISIONS)
@pytest.mark.parametrize(
    ("loss", "average", "changes"), [m[1:] for m in MATCHES], ids=[f"{m[0]}-{m[2]}" for m in MATCHES]
)
def test_losses(loss: Any, average: str, changes: dict[str, Any], dtype: torch.dtype, digits: float) -> None:
    data = Padded(dtype)
    tokens = data.tokens()
    weights = AVERAGES[average](LENGTHS.to(dtype))[tokens.sequence]
    assert_same(data, (loss(tokens) * weights).sum(), trl_loss(data, **({"loss_type": average} | changes)), digits)


@pytest.mark.parametrize(("dtype", "digits"), PRECISIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_kl(weighted: bool, dtype: torch.dtype, digits: float) -> None:
    data = Padded(dtype)
    tokens = data.tokens()
    weights = aggregation.token_mean(LENGTHS.to(dtype))[tokens.sequence]
    ours = (losses.ppo(tokens, clip_high=0.28) + 0.3 * kl_to_reference(tokens, weighted=weighted)) * weights
    assert_same(data, ours.sum(), trl_loss(data, "dapo", beta=0.3, use_bias_correction_kl=weighted), digits)


@pytest.mark.parametrize(("dtype", "digits"), PRECISIONS)
@pytest.mark.parametrize("bound", [0.0, 0.05, 0.3])
def test_off_policy_sequence_mask(bound: float, dtype: torch.dtype, digits: float) -> None:
    data = Padded(dtype)
    tokens = data.tokens()
    mask = corrections.opsm(tokens, bound=bound)
    weights = aggregation.sequence_mean(LENGTHS.to(dtype))[tokens.sequence]
    ours = (mask * weights * losses.ppo(tokens, clip_high=0.28)).sum()
    assert_same(data, ours, trl_loss(data, "grpo", off_policy_mask_threshold=bound), digits)
    assert bound or 0 < mask.mean() < 1


def run_block(method: Any, mentions: str, **names: Any) -> dict[str, Any]:
    """Run the first `if` of a method whose condition or body mentions something, and return its variables."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.If) and mentions in ast.unparse(n)]
    smallest = min(found, key=lambda n: len(ast.unparse(n)))
    scope = dict(vars(inspect.getmodule(method)), **names)
    exec(compile(ast.Module([smallest], []), "trl", "exec"), scope)
    return scope


WEIGHTS = [
    ("token_truncate", None, 1.2, partial(corrections.truncate_tokens, high=1.2)),
    ("sequence_truncate", None, 1.2, partial(corrections.truncate_sequences, high=1.2)),
    ("token_mask", 0.6, 1.4, partial(corrections.icepop, low=0.6, high=1.4)),
]


@pytest.mark.parametrize(("mode", "low", "high", "correction"), WEIGHTS, ids=[w[0] for w in WEIGHTS])
@pytest.mark.parametrize(("dtype", "digits"), PRECISIONS)
def test_importance_weights(
    mode: str, low: float | None, high: float, correction: Any, dtype: torch.dtype, digits: float
) -> None:
    from trl.trainer.grpo_trainer import GRPOTrainer

    data = Padded(dtype)
    trainer = SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low, vllm_importance_sampling_clip_max=high,
    )  # fmt: skip
    scope = run_block(
        GRPOTrainer._generate_and_score_completions, "per_token_logps_diff = ", self=trainer, tool_mask=None,
        completion_mask=data.mask, old_per_token_logps=data.logprobs.detach(), sampling_per_token_logps=data.behaviour,
    )  # fmt: skip
    theirs = scope["vllm_importance_sampling_ratio"].expand(data.mask.shape)[data.mask.bool()]
    torch.testing.assert_close(correction(data.tokens()), theirs, rtol=digits, atol=digits)


REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [2.0, -1.0, 0.3, 0.0]], dtype=torch.float64)


def trl_advantages(rewards: Tensor, scale: str, aggregate: str = "sum_then_normalize") -> list[float]:
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = SimpleNamespace(
        multi_objective_aggregation=aggregate, scale_rewards=scale, reward_funcs=[None] * rewards.shape[1],
        reward_weights=torch.arange(1.0, 1 + rewards.shape[1], dtype=rewards.dtype),
    )  # fmt: skip
    scope = run_block(
        GRPOTrainer._generate_and_score_completions, "mean_grouped_rewards.repeat_interleave", self=trainer,
        device="cpu", num_generations=4, rewards_per_func=rewards, unscorable_mask=rewards.isnan().all(1),
    )  # fmt: skip
    return scope["advantages"].tolist()


def test_advantages() -> None:
    """TRL divides by the sample deviation plus 1e-4, we by the population's: the same up to that factor."""
    flat = REWARDS.reshape(-1, 1)
    ours = advantages.group_advantages(list(REWARDS), advantages.group_mean)
    assert torch.cat(ours).tolist() == pytest.approx(trl_advantages(flat, "none"), abs=1e-6)
    normalized = advantages.group_advantages(list(REWARDS), partial(advantages.group_mean, normalize=True))
    scaled = [a * g.std(correction=0) / (g.std() + 1e-4) for a, g in zip(normalized, REWARDS, strict=True)]
    assert torch.cat(scaled).tolist() == pytest.approx(trl_advantages(flat, "group"), abs=1e-6)


def test_reward_parts() -> None:
    """GDPO: each part normalised in its group, weighted, added, and normalised over the batch."""
    second = REWARDS.flip(1) * 100 + REWARDS**2
    rule = partial(advantages.group_mean, normalize=True)
    summed = advantages.weighted_parts({"a": list(REWARDS), "b": list(second)}, {"a": 1.0, "b": 2.0}, rule)
    ours = torch.cat(advantages.whiten(summed))
    theirs = trl_advantages(torch.stack([REWARDS.flatten(), second.flatten()], 1), "group", "normalize_then_sum")
    # Both use n - 1 where we use n, and add 1e-4: the direction is the same, the size differs by a factor.
    found = torch.tensor(theirs, dtype=torch.float64)
    assert torch.nn.functional.cosine_similarity(ours, found, dim=0).item() == pytest.approx(1.0, abs=1e-6)


def test_leave_one_out() -> None:
    from trl.trainer.rloo_trainer import RLOOTrainer

    rewards = REWARDS.flatten()
    grouped = rewards.view(-1, 4)
    scope = run_block(
        RLOOTrainer._generate_and_score_completions, "baselines = ", num_generations=4, rewards=rewards,
        grouped_sum=grouped.sum(1, keepdim=True), grouped_rewards=grouped,
        scorable_counts=torch.full((3, 1), 4), torch=torch,
    )  # fmt: skip
    ours = torch.cat(advantages.group_advantages(list(REWARDS), advantages.leave_one_out))
    assert ours.tolist() == pytest.approx(scope["advantages"].tolist(), abs=1e-6)

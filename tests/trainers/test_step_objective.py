"""The objective in a step: its gradient for any micro-batches, its masks, and the reference policy."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.algorithms.corrections import combine
from slipstream.algorithms.kl import kl_to_reference
from slipstream.algorithms.tokens import Tokens
from slipstream.rollout import Batch, Group, Rollout, VersionSpan
from slipstream.trainers.trainer import Trainer
from tests.conftest import save_model
from tests.trainers.test_trainer import gradient, make_trainer, plain, random_batch, sequences

VERSION = 5


def aged_batch(trainer: Trainer, seed: int = 0, spread: float = 0.4) -> Batch:
    """Groups near the policy whose tokens were sampled by several versions, with changes in mid-sequence."""
    batch = random_batch(38, groups=4, seed=seed)
    noise = torch.Generator().manual_seed(seed)
    scored = iter(trainer.score([c for c, _ in sequences(batch)]))

    def aged(rollout: Rollout, oldest: int) -> Rollout:
        (c,) = rollout.completions
        moved = (torch.tensor(next(scored)) + spread * torch.randn(len(c.token_ids), generator=noise)).clamp(max=-1e-3)
        cut = max(1, len(c.token_ids) // 2)
        spans = (VersionSpan(oldest, 0, cut), VersionSpan(oldest + 1, cut, len(c.token_ids)))
        return Rollout((dataclasses.replace(c, logprobs=tuple(moved.tolist()), spans=spans),), rollout.reward)

    groups = tuple(
        Group(g.visit_id, g.task_id, tuple(aged(r, i % (VERSION - 1)) for i, r in enumerate(g.rollouts)))
        for g in batch.groups
    )
    return Batch(groups, batch.advantages, VERSION)


def all_tokens(model: Any, batch: Batch, reference: Any = None) -> Tokens:
    """All tokens of the step in one tensor, computed in float64, one sequence at a time."""
    rows: list[Tokens] = []
    for i, (c, advantage) in enumerate(sequences(batch)):
        ids, count = torch.tensor([c.prompt_ids + c.token_ids]), len(c.token_ids)

        def score(which: Any, ids: Any = ids, c: Any = c) -> torch.Tensor:
            logits = which(ids).logits[0, len(c.prompt_ids) - 1 : -1] / c.temperature
            return logits.log_softmax(-1).gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0]

        logprobs = score(model)
        rows.append(
            Tokens(
                logprobs,
                torch.tensor(c.logprobs, dtype=torch.float64),
                torch.full((count,), advantage, dtype=torch.float64),
                torch.full((count,), i),
                torch.tensor([VERSION - s.version for s in c.spans for _ in range(s.end - s.start)]),
                logprobs.detach(),
                score(reference).detach() if reference else torch.zeros(count),
                torch.zeros(count),
            )
        )
    return Tokens(*(torch.cat([getattr(r, f.name) for r in rows]) for f in dataclasses.fields(Tokens)))


RULES = [
    ("loss=gspo", "loss.clip_low=0.1", "loss.clip_high=0.1", "corrections=opsm", "aggregation=sequence_mean"),
    ("loss=cispo", 'corrections=["mask_divergence", "discount_lag"]', 'aggregation={ name = "constant", length = 8 }'),
    ("loss=decoupled", 'corrections=[{ name = "mask_lag", most = 3 }]'),
    ("loss=reinforce", 'corrections=[{ name = "truncate_sequences", high = 1.5 }]', "aggregation=sequence_mean"),
    ("loss=topr", "kl_coef=0.2", "kl_weighted=true", "kl_estimator=k1", "aggregation=sequence_mean"),
    ("loss=sapo", "kl_coef=0.2", "kl_estimator=k2", "corrections=mask_tokens"),
]


@pytest.mark.parametrize("flags", RULES, ids=lambda f: f[0])
@pytest.mark.parametrize("budget", [16, 8192])
def test_gradient_is_that_of_the_objective_over_the_whole_step(tiny: Path, flags: tuple[str, ...], budget: int) -> None:
    flags = tuple(f"--algorithm.{f}" for f in flags)
    trainer = make_trainer(tiny, *flags, f"--trainer.tokens_per_microbatch={budget}", "--trainer.gradient_clip=0")
    batch, rule, options = aged_batch(trainer), trainer._objective, trainer._algorithm
    model = plain(trainer.model)
    tokens = all_tokens(model, batch, copy.deepcopy(model) if options.kl_coef else None)
    lengths = torch.bincount(tokens.sequence).double()
    loss = rule.loss(tokens) * combine(rule.corrections, tokens)
    if options.kl_coef:
        loss = loss + options.kl_coef * kl_to_reference(
            tokens, estimator=options.kl_estimator, weighted=options.kl_weighted
        )
    (loss * rule.aggregation(lengths)[tokens.sequence]).sum().backward()
    got = gradient(trainer, batch)
    for name, parameter in model.named_parameters():
        assert (got[name] - parameter.grad).abs().max() <= 2e-5 * parameter.grad.abs().max(), name


OWN = """
def shy(tokens):
    return (0.5 - tokens.advantages) * tokens.logprobs

def taught(tokens):
    return (tokens.logprobs - tokens.teacher).square()
"""


@pytest.mark.parametrize("name", ["shy", "taught"])
def test_a_custom_loss_gets_samples_without_advantage(tiny: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    more = ("--teacher.path=other",) * (name == "taught")
    trainer = make_trainer(tiny, f"--algorithm.loss={tmp_path / 'mine.py'}:{name}", "--trainer.gradient_clip=0", *more)
    batch, rule = aged_batch(trainer), trainer._objective
    groups = tuple(with_teacher(g, 0.0) for g in batch.groups) if name == "taught" else batch.groups
    batch = Batch(groups, (*batch.advantages[:2], *((0.0,) * len(g.rollouts) for g in groups[2:])), VERSION)
    model = plain(trainer.model)
    tokens = all_tokens(model, batch)
    weights = rule.aggregation(torch.bincount(tokens.sequence).double())
    (rule.loss(tokens) * weights[tokens.sequence]).sum().backward()
    got = gradient(trainer, batch)
    for parameter_name, parameter in model.named_parameters():
        assert (got[parameter_name] - parameter.grad).abs().max() <= 2e-5 * parameter.grad.abs().max(), parameter_name


def test_samples_with_teacher_but_without_advantage_cost_no_pass(tiny: Path) -> None:
    groups = tuple(with_teacher(g, -1.0) for g in random_batch(38).groups)
    stats = make_trainer(tiny).step(Batch(groups, tuple((0.0,) * len(g.rollouts) for g in groups)))
    assert stats.packed_tokens == 0 and stats.grad_norm == 0


def with_teacher(group: Group, logprob: float) -> Group:
    """Rollouts of one completion with equal teacher log-probabilities."""
    rollouts = (dataclasses.replace(r, teacher=((logprob,) * r.tokens,)) for r in group.rollouts)
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def test_masked_samples_are_in_neither_gradient_nor_denominator(tiny: Path) -> None:
    """Samples with a NaN advantage are in neither the gradient nor the denominator."""
    batch = random_batch(38)
    whole = Batch(batch.groups[:2], batch.advantages[:2])
    holes = Batch(batch.groups, (*batch.advantages[:2], tuple(float("nan") for _ in batch.advantages[2])))
    for flags in ((), ("--algorithm.kl_coef=0.1",), ("--algorithm.aggregation=sequence_mean",)):
        alone = gradient(make_trainer(tiny, *flags), whole)
        for name, grad in gradient(make_trainer(tiny, *flags), holes).items():
            torch.testing.assert_close(grad, alone[name])


def test_a_step_of_masked_tokens_updates_nothing(tiny: Path) -> None:
    trainer = make_trainer(tiny, '--algorithm.corrections=[{ name = "mask_lag", most = 0 }]')
    batch = aged_batch(trainer)
    before = {n: p.clone() for n, p in trainer.parameters.items()}
    stats = trainer.step(batch)
    assert stats.masked_fraction == 1 and stats.grad_norm == 0
    assert all(torch.equal(p, before[n]) for n, p in trainer.parameters.items())


def kl_of(trainer: Trainer, other: dict[str, torch.Tensor], batch: Batch) -> float:
    """Mean k3 estimate to the log-probabilities `other` over all tokens."""
    reference = plain(trainer.model)
    reference.load_state_dict(other, strict=False)
    tokens = all_tokens(plain(trainer.model), batch, reference)
    return kl_to_reference(tokens).mean().item()


@pytest.mark.parametrize("rank", [0, 4])
def test_the_average_follows_the_policy_and_survives_a_checkpoint(tiny: Path, tmp_path: Path, rank: int) -> None:
    flags = ("--algorithm.kl_coef=0.1", "--algorithm.reference=average", "--algorithm.reference_decay=0.7",
             f"--lora.rank={rank}", "--trainer.learning_rate=1e-2")  # fmt: skip
    trainer = make_trainer(tiny, *flags)
    average = {n: p.detach().double() for n, p in trainer.parameters.items()}
    for seed in range(3):
        assert trainer.step(aged_batch(trainer, seed)).kl >= 0
        average = {n: 0.7 * average[n] + 0.3 * p.detach().double() for n, p in trainer.parameters.items()}
    trainer.save(tmp_path / "saved").result()
    again = make_trainer(tiny, *flags)
    again.restore(tmp_path / "saved")
    batch = aged_batch(trainer, 9)
    wanted = kl_of(trainer, average, batch)
    assert trainer.step(batch).kl == pytest.approx(wanted, rel=1e-3, abs=1e-7) and wanted > 1e-5
    again.step(batch)
    assert all(torch.equal(p, again.parameters[n]) for n, p in trainer.parameters.items())


@pytest.mark.parametrize("rank", [0, 4])
def test_another_model_as_reference(tiny: Path, tmp_path: Path, rank: int) -> None:
    from tests.conftest import build_tokenizer

    save_model(tmp_path / "other", vocab_size=len(build_tokenizer()), seed=1)
    trainer = make_trainer(
        tiny, "--algorithm.kl_coef=0.1", f"--algorithm.reference={tmp_path / 'other'}", f"--lora.rank={rank}"
    )
    start = make_trainer(tiny, "--algorithm.kl_coef=0.1", f"--lora.rank={rank}")
    batch = aged_batch(trainer)
    assert start.step(batch).kl == pytest.approx(0, abs=1e-6)
    assert trainer.step(batch).kl > 0.1

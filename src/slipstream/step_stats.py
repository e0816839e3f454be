"""The statistics of one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SUMS = ("tokens", "seconds", "packed_tokens")  # of several policies; other values are means
MAXIMA = ("grad_norm", "ratio_max", "max_memory_gb")


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one optimizer step over all ranks, with their names in `metrics.jsonl`.

    `algorithms.statistics` defines the loss and the policy's statistics. `tokens` are all completion tokens of the
    batch. `packed_tokens` are all tokens in the forward pass, a group's prompt once. `seconds` is the duration of the
    whole step. `skipped_steps` counts the run's steps without an update because loss or gradient was not finite. Of one
    rank, `tflops` is the model's arithmetic in 10^12 operations/s, and `matmul_utilisation` its share of the device's
    matrix-product rate. `max_memory_gb` is the peak memory of the rank that needs most.

    None without experts: `expert_max_load` is the busiest expert's share of choices (one per token and chosen expert),
    `expert_load_entropy` the entropy of the load over that of an even load, `expert_idle_fraction` the share of experts
    without a token, each a mean over layers. `expert_changed_fraction` is the share, over all layers, of replayed
    choices that the current router would not make, 0 without replay. `policies` has, by name, the statistics of
    each of several policies that took the step.
    """

    step: int
    loss: float = field(metadata={"metric": "train/loss"})
    grad_norm: float = field(metadata={"metric": "train/grad_norm"})
    learning_rate: float = field(metadata={"metric": "train/learning_rate"})
    entropy: float = field(metadata={"metric": "policy/entropy"})
    kl: float = field(metadata={"metric": "policy/kl"})
    mismatch_kl: float = field(metadata={"metric": "policy/mismatch_kl"})
    ratio_mean: float = field(metadata={"metric": "policy/ratio_mean"})
    ratio_max: float = field(metadata={"metric": "policy/ratio_max"})
    effective_sample_size: float = field(metadata={"metric": "policy/effective_sample_size"})
    clip_fraction: float = field(metadata={"metric": "policy/clip_fraction"})
    masked_fraction: float = field(metadata={"metric": "policy/masked_fraction"})
    tokens: int = field(metadata={"metric": "train/tokens"})
    skipped_steps: int = field(metadata={"metric": "train/skipped_steps"})
    seconds: float = field(metadata={"metric": "time/step_s"})
    packed_tokens: int = field(metadata={"metric": "train/packed_tokens"})
    tflops: float = field(metadata={"metric": "train/tflops"})
    matmul_utilisation: float | None = field(metadata={"metric": "train/matmul_utilisation"})
    max_memory_gb: float = field(metadata={"metric": "train/max_memory_gb"})
    expert_max_load: float | None = field(metadata={"metric": "experts/max_load"})
    expert_load_entropy: float | None = field(metadata={"metric": "experts/load_entropy"})
    expert_idle_fraction: float | None = field(metadata={"metric": "experts/idle_fraction"})
    expert_changed_fraction: float | None = field(metadata={"metric": "experts/changed_fraction"})
    policies: Mapping[str, StepStats] = field(default_factory=dict)


def merge(policies: Mapping[str, StepStats], **counters: int) -> StepStats:
    """The statistics of a step of several policies: sums, maxima, and means over their tokens.

    `counters` are `step` and `skipped_steps` of the run, which include policies that have no rollouts in this step.
    """
    each, merged = list(policies.values()), dict[str, Any](counters)
    tokens = sum(stats.tokens for stats in each)
    for name in (one.name for one in fields(StepStats) if one.name not in ("policies", *counters)):
        values = [getattr(stats, name) for stats in each]
        if name in SUMS:
            merged[name] = sum(values)
        elif name in MAXIMA:
            merged[name] = max(values)
        elif None in values:
            merged[name] = None
        else:
            merged[name] = sum(v * stats.tokens for v, stats in zip(values, each, strict=True)) / max(1, tokens)
    return StepStats(**merged, policies=policies)

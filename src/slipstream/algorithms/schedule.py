"""The learning rate of a step, as a share of its peak."""

from __future__ import annotations

import math


def learning_rate(schedule: str, step: int, *, steps: int, warmup: int = 0, spent: float = 0.0) -> float:
    """Share of the peak after `step` finished steps: linear warm-up, then decay to 0 at the end unless "constant".

    The run ends after `steps`, or when `spent`, the trained share of its token budget, is 1. `schedule` is "linear",
    "cosine" or "constant".
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, max(spent, (step - warmup) / max(1, steps - warmup)))
    if schedule == "linear":
        return 1 - progress
    return (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1.0

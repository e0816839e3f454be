"""What ends a run that can't learn any more, said so that its user can mend it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipstream.config import TrainerConfig


class NotFinite(RuntimeError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


class OutOfMemory(RuntimeError):
    """A step needs more memory than the trainer's device has."""


def refuse_to_go_on(skipped: int, options: TrainerConfig) -> None:
    """Raise `NotFinite` after too many skipped steps in a row."""
    if skipped >= options.max_skipped > 0:
        raise NotFinite(
            f"the last {skipped} steps had a loss or gradient that is not finite and were skipped (trainer.max_skipped "
            f"= {options.max_skipped}); lower trainer.learning_rate = {options.learning_rate:g}, raise "
            "trainer.warmup_steps, or go on from an earlier checkpoint"
        )


@contextmanager
def naming_remedies(options: TrainerConfig, spare_copy: bool) -> Iterator[None]:
    """Name the options that lower what a step needs if there is not enough memory for it.

    `spare_copy` says whether there is a copy of the weights that can be done without.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedies = {
            f"lower trainer.tokens_per_microbatch = {options.tokens_per_microbatch}": True,
            'set trainer.activation_checkpointing = "full"': options.activation_checkpointing != "full",
            "set trainer.compute_copy = false": spare_copy,
            "train adapters (lora.rank)": True,
            'spread the weights over more GPUs (trainer.ranks, trainer.parallel = "fsdp")': True,
        }
        said = ", ".join(remedy for remedy, helps in remedies.items() if helps)
        raise OutOfMemory(f"the trainer has not enough memory for a step: {said}\n{error}") from error

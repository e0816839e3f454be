"""What ends a run that can't learn any more, said so that its user can mend it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipstream.config import Config, TrainerConfig

# That memory is short: torch has a class for what its own allocator on a GPU lacks, and only words for all else.
SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "memory allocation failed")


class NotFinite(RuntimeError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


class OutOfMemory(RuntimeError):
    """The trainer's device has less memory than is needed."""


def refuse_to_go_on(skipped: int, options: TrainerConfig) -> None:
    """Raise `NotFinite` after too many skipped steps in a row."""
    if skipped >= options.max_skipped > 0:
        raise NotFinite(
            f"the last {skipped} steps had a loss or gradient that is not finite and were skipped (trainer.max_skipped "
            f"= {options.max_skipped}); lower trainer.learning_rate = {options.learning_rate:g}, raise "
            "trainer.warmup_steps, go on from an earlier checkpoint, or see whether rewards, and a loss of your own, "
            "are finite"
        )


@contextmanager
def naming_remedies(config: Config, what: str) -> Iterator[None]:
    """Raise `OutOfMemory` that names the options which lower the need, if there is not enough memory to do `what`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        short = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not short and not any(sign in str(error) for sign in SIGNS):
            raise
        said = "; ".join(_remedies(config))
        raise OutOfMemory(f"the trainer has not enough memory to {what}: {said}\n{error}") from error


def _remedies(config: Config) -> list[str]:
    trainer, algorithm, lora = config.trainer, config.algorithm, config.lora
    # A reference that is no more than the base below adapters takes no memory.
    refers = algorithm.kl > 0 and not (lora.rank and algorithm.reference == "start")
    remedies = {
        f"lower trainer.tokens_per_microbatch = {trainer.tokens_per_microbatch}": True,
        'set trainer.activation_checkpointing = "full"': trainer.activation_checkpointing != "full",
        "set trainer.compute_copy = false": config.spare_copy,
        "do without the reference policy (algorithm.kl = 0)": refers,
        "train adapters (lora.rank)": not lora.rank,
        'hold their base in 4 bits (lora.base = "4bit")': lora.rank > 0 and lora.base != "4bit",
        'spread the weights over more GPUs (trainer.ranks, trainer.parallel = "fsdp")': True,
        "share long sequences between ranks (trainer.context_parallel)": trainer.ranks > 1,
        **_others_here(config),
    }
    return [remedy for remedy, helps in remedies.items() if helps]


def _others_here(config: Config) -> dict[str, bool]:
    """What to do about other processes on the trainer's GPU, which an engine may be."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    option = "generator.memory" if config.generator.kind == "vllm" else "generator.slots"
    return {f"leave it more of its GPU, of which others hold {others / 1e9:.0f} GB ({option})": others > total / 10}

"""Errors that end a run, with the options that remedy them: non-finite steps and lack of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipstream.config.checks import refers_to_base, spares_copy
from slipstream.config.schema import Config, TrainerConfig
from slipstream.errors import UserError
from slipstream.model.device import dtype_of

# Messages of errors without their own class; torch.OutOfMemoryError covers only torch's CUDA allocator.
OUT_OF_MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "memory allocation failed")


class NotFinite(UserError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


class OutOfMemory(UserError):
    """The trainer's device or host has too little memory."""


def validate_skipped_steps(skipped: int, options: TrainerConfig) -> None:
    """Raise `NotFinite` after `max_consecutive_nonfinite` skipped steps in a row (0: never)."""
    if skipped >= options.max_consecutive_nonfinite > 0:
        raise NotFinite(
            f"the last {skipped} steps had a loss or gradient that is not finite and were skipped "
            f"(trainer.max_consecutive_nonfinite = {options.max_consecutive_nonfinite}); "
            f"lower trainer.learning_rate = {options.learning_rate:g}, raise trainer.warmup_steps, resume from an "
            "earlier checkpoint, or see whether rewards, and a loss of your own, are finite"
        )


def trains_in_bfloat16(config: Config) -> bool:
    return dtype_of(config) == torch.bfloat16


@contextmanager
def explain_out_of_memory(config: Config, what: str) -> Iterator[None]:
    """Convert an out-of-memory error while the trainer does `what` to an `OutOfMemory` that names options to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        short = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not short and not any(message in str(error) for message in OUT_OF_MEMORY_MESSAGES):
            raise
        first, *others = _remedies(config, computes=what in ("step", "score"))
        more = f"; if that is not enough: {'; '.join(others)}" if others else ""
        raise OutOfMemory(f"the trainer has not enough memory to {what}: {first}{more}\n{error}") from error


def _remedies(config: Config, computes: bool) -> list[str]:
    """What to change to save memory, the cheapest remedy first. `computes`: whether activations took memory."""
    trainer, algorithm, lora = config.trainer, config.algorithm, config.lora
    refers = algorithm.kl_coef > 0 and not refers_to_base(config)
    averages = algorithm.kl_coef > 0 and algorithm.reference == "average"
    whole, wide = not lora.rank, trainer.master_weights == "float32" and not averages
    remedies = {
        f"lower trainer.tokens_per_microbatch = {trainer.tokens_per_microbatch}": computes,
        'set trainer.activation_checkpointing = "selective"': computes and trainer.activation_checkpointing == "none",
        'set trainer.activation_checkpointing = "full"': computes and trainer.activation_checkpointing != "full",
        'set trainer.optimizer = "adamw_8bit"': whole and trainer.optimizer == "adamw",
        'set trainer.master_weights = "bfloat16"': whole and wide and trains_in_bfloat16(config),
        "set trainer.offload_optimizer = true": whole and not trainer.offload_optimizer and torch.cuda.is_available(),
        "set trainer.keep_compute_copy = false": spares_copy(config),
        "do without the reference policy (algorithm.kl_coef = 0)": refers,
        "train adapters (lora.rank)": not lora.rank,
        'hold their base in 4 bits (lora.quantization = "4bit")': lora.rank > 0 and lora.quantization != "4bit",
        'spread the weights over more GPUs (trainer.ranks, trainer.parallel = "fsdp")': True,
        "share long sequences between ranks (trainer.context_parallel)": trainer.ranks > 1,
        **_shared_gpu_remedy(config),
    }
    return [remedy for remedy, helps in remedies.items() if helps]


def _shared_gpu_remedy(config: Config) -> dict[str, bool]:
    """A remedy if other processes, such as an engine, hold more than a tenth of the trainer's GPU."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    option = "generator.gpu_memory_utilization" if config.generator.engine == "vllm" else "generator.max_num_seqs"
    return {f"leave it more of its GPU, of which others hold {others / 1e9:.0f} GB ({option})": others > total / 10}

"""Options of the trainer: its ranks, its optimizer, and its memory."""

from __future__ import annotations

from typing import Literal

from slipstream.config.section import DEVICE, MAX_WORKERS, Section, option


class TrainerConfig(Section):
    """The optimizer and its schedule."""

    kind: str = option("pytorch", '"pytorch", or your own worker class as "module:Class" or "file.py:Class".')
    ranks: int = option(1, "Processes of the trainer, each with its own GPU.", ge=1, le=MAX_WORKERS)
    parallel: Literal["fsdp", "ddp", "tensor"] = option(
        "fsdp", "Ranks have shards of weights and optimizer (fsdp), copies (ddp), or tensor parallelism (tensor)."
    )
    fsdp_shard_size: int = option(0, "Ranks that share one copy of the weights (fsdp); 0 is all of them.", ge=0)
    context_parallel: int = option(1, "Ranks that split the tokens of each micro-batch, for long sequences.", ge=1)
    expert_parallel: int = option(1, "Ranks that split the experts of each layer (fsdp, mixtures of experts).", ge=1)
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = option(
        "adamw", "AdamW, AdamW with moments of 8 bits, or Muon for the matrices of layers and AdamW for other weights."
    )
    master_weights: Literal["float32", "bfloat16"] = option(
        "float32", "Weights that the optimizer updates: float32, or bfloat16 with stochastic rounding."
    )
    offload_optimizer: bool = option(False, "Keep the optimizer's moments in host memory.")
    learning_rate: float = option(1e-5, "Peak learning rate.", gt=0)
    betas: tuple[float, ...] = option((0.9, 0.99), "Decay rates of AdamW's two moments.", strict=False)
    weight_decay: float = option(0.0, "Decoupled weight decay.", ge=0)
    warmup_steps: int = option(0, "Steps over which the learning rate rises from 0.", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = option(
        "linear", "Decay to 0 after warm-up, over loop.steps or loop.max_tokens, whichever ends first."
    )
    gradient_clip: float = option(1.0, "Largest norm of the gradient; 0 disables clipping.", ge=0)
    max_consecutive_nonfinite: int = option(10, "Non-finite steps in a row that end the run; 0: no limit.", ge=0)
    memory: Literal["manual", "auto"] = option(
        "manual", '"auto": the least costly of the options that save memory with which the trainer fits its GPU.'
    )
    chosen: str = option("", 'Written by a run: what memory = "auto" took, and why.')
    tokens_per_microbatch: int = option(16384, "Most tokens in one forward and backward pass.", ge=1)
    activation_checkpointing: Literal["none", "selective", "full"] = option(
        "selective",
        "What the backward pass recomputes: nothing, all but matrix products and what ranks exchange, or whole layers.",
    )
    fp8: bool = option(False, "Compute the matrix products of linear layers in FP8, on GPUs that have these.")
    keep_compute_copy: bool = option(
        True, "Keep a copy of the weights in model.dtype; false casts layer by layer and needs less memory (one rank)."
    )
    compile: bool = option(True, "Compile the layers on a GPU: faster after the first steps.")
    logprob_tolerance: float = option(
        0.0, "Largest mean log-probability difference to the engine at start; 0: 1e-3 (float32), else 0.2.", ge=0
    )
    device: str = option("auto", '"auto", "cpu", "cuda" or "cuda:N".', pattern=DEVICE.pattern)
    threads: int = option(0, "CPU threads of the trainer; 0 divides the cores between processes.", ge=0, le=MAX_WORKERS)

"""Activation checkpointing and compilation of decoder layers."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from slipstream.model.inspection import decoder_layers

# Operations whose outputs are saved, by prefix; attention's operation depends on the torch release. The last prefix is
# that of collectives in compiled code: the collective and the `wait_tensor` of its output are saved together, since
# nothing would await a repeated collective. Eager code repeats its blocking collectives.
SAVED_OPERATIONS = (
    "aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_mm", "aten._grouped_mm", "aten._scaled_dot_product",
    "aten._flash_attention", "torch_attn.", "_c10d_functional.",
)  # fmt: skip
LINEAR = "aten.mm", "aten.addmm"  # of those, the products whose last argument is a matrix [inner, outer]
# A product with this inner dimension or less, and WIDER times as many columns, is computed again, such as those of
# adapters: that costs less than to hold its output.
NARROW, WIDER = 512, 8
# Limit of compiled variants: one for each kind of layer, with and without gradients, adapters, and shared prompts.
# Beyond torch's default limit of 8, layers would silently run uncompiled.
MAX_COMPILED_PROGRAMS = 64
# Compiler options without which a program would depend on the number of tokens, and others would be compiled in steps:
# by padded products, and by reductions that are fused from 4096 rows on.
ANY_SIZE: dict[str, Any] = {"shape_padding": False, "triton.mix_order_reduction_non_strict_mode": True}


def prepare_layers(model: Any, recompute: str, compiled: bool) -> None:
    """Checkpoint the activations of each decoder layer, and compile the layer if `compiled`.

    `recompute` says what the backward pass computes again: "none", "selective" (all but matrix products and, in
    compiled layers, what ranks exchange) or "full".
    """
    for layer in decoder_layers(model):
        if recompute != "none":
            _checkpoint_forward(layer, recompute)
        if compiled:
            _compile(layer)


def _checkpoint_forward(module: Any, how: str) -> None:
    module.uncheckpointed_forward = module.forward
    module.forward = MethodType({"full": _recompute_all, "selective": _recompute_selectively}[how], module)


def _compile(layer: Any) -> None:
    """Compile the forward method for any number of tokens; layers of one class share the compiled code."""
    allow_recompilation()
    compiler: Any = torch._dynamo.config
    # Routers record their choice as a side effect of the forward pass; recomputation may skip it.
    compiler.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # Else `dynamic` makes each number of a layer, such as the epsilon of a norm, a tensor on the CPU: the program gets
    # operations there, and the compiler tries the host's vector instructions for 40 s.
    compiler.specialize_float = True
    # `forward` instead of `__call__`: FSDP's hooks differ between layers, so each `__call__` would need a program.
    layer.forward = torch.compile(layer.forward, dynamic=True, options=ANY_SIZE)


def allow_recompilation() -> None:
    """Let a function have up to `MAX_COMPILED_PROGRAMS` compiled programs. After torch's 8 it would run uncompiled."""
    compiler: Any = torch._dynamo.config
    compiler.recompile_limit = max(MAX_COMPILED_PROGRAMS, compiler.recompile_limit)


# Functions of this module: the compiler traces them, unlike `checkpoint` itself. Bound as methods, they are copied with
# their layer.
def _recompute_all(layer: Any, *arguments: Any, **options: Any) -> Any:
    return checkpoint(layer.uncheckpointed_forward, *arguments, use_reentrant=False, **options)


def _recompute_selectively(layer: Any, *arguments: Any, **options: Any) -> Any:
    return checkpoint(layer.uncheckpointed_forward, *arguments, use_reentrant=False, context_fn=_contexts, **options)


def save_or_recompute(ctx: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Whether selective checkpointing saves an operation's output: attention, collectives, and products that
    are not narrow."""
    name = str(operation)
    saved = name.startswith(SAVED_OPERATIONS) and not (name.startswith(LINEAR) and _is_narrow(arguments[-1]))
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _is_narrow(matrix: torch.Tensor) -> bool:
    inner, columns = matrix.shape
    return inner <= min(NARROW, columns // WIDER)


_contexts = partial(create_selective_checkpoint_contexts, save_or_recompute)

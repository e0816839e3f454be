"""What the backward pass keeps of the forward pass, layer by layer, and compiled layers."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from slipstream.models import layers_of

# What is dear to compute again, by name: which operation stands behind attention depends on torch's release.
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten._grouped_mm", "aten._scaled_dot_product",
            "aten._flash_attention", "torch_attn.")  # fmt: skip
# Programs that layers may share. There is one for each kind of layer, with and without gradients, for adapters and for
# the reference, with shared prompts and without. Beyond torch's own limit of 8 it would go on uncompiled, in silence.
PROGRAMS = 64


def checkpoint_activations(model: Any, how: str) -> None:
    """Compute again in the backward pass what a layer did: all of it ("full"), or all but its matrix products."""
    forwards = {"full": _all_again, "selective": _products_kept}
    if how != "none":
        for layer in layers_of(model):
            layer.whole_forward = layer.forward
            layer.forward = MethodType(forwards[how], layer)


def compile_layers(model: Any) -> None:
    """Compile each layer; those of one kind share a program, for any number of tokens."""
    compiler: Any = torch._dynamo.config
    compiler.recompile_limit = max(PROGRAMS, compiler.recompile_limit)
    if hasattr(compiler, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        # A router notes what it chose: the forward pass may, and what is computed again need not.
        compiler.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for layer in layers_of(model):
        # Not the call: what FSDP hooks into it differs from layer to layer, and would be a program for each.
        layer.forward = torch.compile(layer.forward, dynamic=True)


# Functions of this file, which the compiler looks into, unlike a bare `checkpoint`; as methods they are copied with
# their layer.
def _all_again(layer: Any, *arguments: Any, **options: Any) -> Any:
    return checkpoint(layer.whole_forward, *arguments, use_reentrant=False, **options)


def _products_kept(layer: Any, *arguments: Any, **options: Any) -> Any:
    return checkpoint(layer.whole_forward, *arguments, use_reentrant=False, context_fn=_contexts, **options)


def _keep_products(ctx: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    dear = str(operation).startswith(PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


_contexts = partial(create_selective_checkpoint_contexts, _keep_products)

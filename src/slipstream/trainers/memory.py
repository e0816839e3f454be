"""What the backward pass keeps of the forward pass, layer by layer, and compiled layers."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from slipstream.models import layers_of
from slipstream.trainers.experts import experts_here

# What is dear to compute again, by name: which operation stands behind attention depends on torch's release.
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten._grouped_mm", "aten._scaled_dot_product",
            "aten._flash_attention", "torch_attn.")  # fmt: skip
# Programs that layers may share. There is one for each kind of layer, with and without gradients, for adapters and for
# the reference, with shared prompts and without. Beyond torch's own limit of 8 it would go on uncompiled, in silence.
PROGRAMS = 64


def prepare_layers(model: Any, again: str, fuse: bool) -> None:
    """Compute again in the backward pass what a layer did: all of it ("full"), or all but its matrix products
    ("selective"); and compile each layer, if asked to `fuse`.

    No program can hold the journey of tokens to experts of other ranks, and it need not be made again: in a layer with
    such experts, these and what lies before and behind them are prepared each by themselves.
    """
    for layer in layers_of(model):
        away = experts_here(layer)
        whole = again == "full" and away  # goes around its programs, none of which can be computed again in part
        if fuse and whole:
            _compile(layer, *away)
        if again == "selective" and away:
            for module in (*(m for m in layer.children() if not experts_here(m)), *away):
                _compute_again(module, again)
        elif again != "none":
            _compute_again(layer, again)
        if fuse and not whole:
            _compile(layer, *away)


def _compute_again(module: Any, how: str) -> None:
    module.whole_forward = module.forward
    module.forward = MethodType({"full": _all_again, "selective": _products_kept}[how], module)


def _compile(*modules: Any) -> None:
    """Compile each module; those of one kind share a program, for any number of tokens."""
    compiler: Any = torch._dynamo.config
    compiler.recompile_limit = max(PROGRAMS, compiler.recompile_limit)
    if hasattr(compiler, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        # A router notes what it chose: the forward pass may, and what is computed again need not.
        compiler.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for module in modules:
        # Not the call: what FSDP hooks into it differs from layer to layer, and would be a program for each.
        module.forward = torch.compile(module.forward, dynamic=True)


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

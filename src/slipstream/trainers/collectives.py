"""Collectives whose gradients are collectives, too, by the names that this release of torch has for them."""

from __future__ import annotations

from torch.distributed import _functional_collectives as functional

if hasattr(functional, "all_gather_single_autograd"):
    all_gather = functional.all_gather_single_autograd
    reduce_scatter = functional.reduce_scatter_single_autograd
else:  # until torch 2.12
    all_gather = functional.all_gather_tensor_autograd
    reduce_scatter = functional.reduce_scatter_tensor_autograd

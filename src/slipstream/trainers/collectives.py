"""Collectives whose gradients are collectives, too, by the names that this release of torch has for them."""

from __future__ import annotations

from typing import Any

from torch.distributed import _functional_collectives as functional

# Until torch 2.12 they were `..._tensor_autograd`.
all_gather: Any = getattr(functional, "all_gather_single_autograd", functional.all_gather_tensor_autograd)
reduce_scatter: Any = getattr(functional, "reduce_scatter_single_autograd", functional.reduce_scatter_tensor_autograd)

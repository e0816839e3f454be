"""A trainer's state in the host's memory while somebody else uses its GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def move(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Bring these tensors to `device`, each as the object that it is; those that share memory share it there, too.

    On the host they lie in pinned memory, to and from which a GPU copies fastest; torch keeps it for the next time.
    """
    moved: dict[tuple[int, torch.Size, torch.dtype], tuple[Tensor, Tensor]] = {}  # what was there, and is here now
    for tensor in list(tensors):
        if tensor.device.type == device.type:
            continue
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if key not in moved:
            there = torch.empty_like(tensor.data, device=device, pin_memory=device.type == "cpu")
            moved[key] = (tensor.data, there.copy_(tensor.data, non_blocking=True))
        tensor.data = moved[key][1]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        moved.clear()
        torch.cuda.empty_cache()

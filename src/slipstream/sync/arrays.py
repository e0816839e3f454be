"""Array operations of the delta link, on NumPy arrays and on tensors of a GPU.

On a CPU with one thread NumPy is three times as fast as torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any
KINDS = {"u1": torch.uint8, "i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64}


def as_array(tensor: Tensor) -> Array:
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def like(array: Array, values: Any) -> Array:
    """NumPy's values where `array` is."""
    return values if isinstance(array, np.ndarray) else torch.tensor(values, device=array.device)


def cast(array: Array, kind: str) -> Array:
    """The values as integers of this kind, modulo their size."""
    return array.astype(kind) if isinstance(array, np.ndarray) else array.to(KINDS[kind])


def concatenate(arrays: Sequence[Array]) -> Array:
    return np.concatenate(arrays) if isinstance(arrays[0], np.ndarray) else torch.cat([*arrays])


def arange(array: Array, count: int) -> Array:
    """The integers from 0 to `count` - 1, where `array` is."""
    return np.arange(count) if isinstance(array, np.ndarray) else torch.arange(count, device=array.device)


def zeros(array: Array, count: int) -> Array:
    """A mask of `count` false elements, where `array` is."""
    return np.zeros(count, np.bool_) if isinstance(array, np.ndarray) else array.new_zeros(count, dtype=torch.bool)


def nonzero(mask: Array) -> Array:
    """The indices of true elements."""
    return np.flatnonzero(mask) if isinstance(mask, np.ndarray) else mask.nonzero().flatten()


def pack_bits(mask: Array) -> Array:
    """Bytes with an element in each bit, the first in the highest, and zeros at the end."""
    if isinstance(mask, np.ndarray):
        return np.packbits(mask)
    bits = torch.nn.functional.pad(mask.byte(), (0, -len(mask) % 8)).view(-1, 8)
    return (bits << _shifts(mask)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Array, count: int) -> Array:
    """The first `count` elements that `pack_bits` packed."""
    if isinstance(packed, np.ndarray):
        return np.unpackbits(packed, count=count).view(np.bool_)
    return (packed[:, None] >> _shifts(packed) & 1).flatten()[:count].bool()


def _shifts(tensor: Tensor) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=tensor.device)


def to_bytes(arrays: Sequence[Array]) -> bytes:
    """The words of these arrays. Those of a GPU are copied at once."""
    if isinstance(arrays[0], np.ndarray):
        return b"".join(array.tobytes() for array in arrays)
    return bytes(torch.cat([array.view(torch.uint8) for array in arrays]).cpu().numpy().tobytes())


def from_bytes(data: memoryview, device: torch.device) -> Array:
    """A copy of the bytes on this device."""
    return as_array(torch.tensor(np.frombuffer(data, np.uint8)).to(device))


def view(raw: Array, kind: str) -> Array:
    """Bytes as integers of this kind."""
    return raw.view(kind) if isinstance(raw, np.ndarray) else raw.clone().view(KINDS[kind])  # aligned


def on_host(array: Array) -> Any:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def to_ints(numbers: Sequence[Array]) -> list[int]:
    """Numbers of arrays on one device, in order. A GPU is waited for once."""
    flat = [torch.as_tensor(number).reshape(-1).long() for number in numbers]
    return torch.cat(flat).tolist() if flat else []


def nonzero_sparse(mask: Array) -> Array:
    """The indices of true elements of `mask`, on a CPU faster if they are few: it looks at eight elements at a time."""
    if isinstance(mask, Tensor) or len(mask) % 8:
        return nonzero(mask)
    eights = mask.view(np.uint64)
    some = np.flatnonzero(eights != 0)
    within = np.flatnonzero(eights[some].view(np.bool_))
    return (some[within >> 3] << 3) + (within & 7)

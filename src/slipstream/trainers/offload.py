"""A trainer's state in host memory while engines use its GPU (`sync.placement = "colocated"`).

Storages are emptied and allocated again in place, so parameters, shards of FSDP, optimizer state and all views of them
stay valid. Each storage has one copy in pinned host memory, allocated once. What fits beside the engines stays.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.sync.sharded_weights import local_part

MIN_BYTES = 2**16  # a smaller storage stays: a copy would take longer than its memory is worth
RESERVE = 4 * 2**30  # bytes: what vLLM uses beyond its share, the buckets of a publish, and NCCL's buffers


class Offloader:
    """Moves the storages of tensors from a device to the host and back."""

    def __init__(self, device: torch.device, share: float) -> None:
        """`share` of the GPU's memory is for the engines."""
        self._device, self._share = device, share
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host: dict[int, tuple[Any, Tensor]] = {}  # by storage: the storage, and its copy
        self._away: list[int] = []  # storages whose contents are on the host
        self._dropped: list[tuple[Any, int]] = []  # emptied storages without a copy, and their sizes
        self._context: int | None = None  # bytes that this process uses on the GPU, without torch's allocations

    def offload(self, saved: Iterable[Tensor], derived: Iterable[Tensor] = (), constant: Iterable[Tensor] = ()) -> None:
        """Empty the storages of `derived`, whose contents are lost, and those of `saved`, in order, until the rest fits
        beside the engines. `constant` are those of `saved` that never change: they are copied once."""
        for storage in _storages(derived).values():
            self._dropped.append((storage, storage.nbytes()))
            storage.resize_(0)
        self._move(saved, self._excess(), constant)

    def make_room(self, size: int, saved: Iterable[Tensor]) -> None:
        """Empty storages of `saved`, in order, until `size` bytes of the device are free."""
        if self._stream:
            torch.cuda.empty_cache()
            self._move(saved, size - torch.cuda.mem_get_info(self._device)[0])

    def onload(self) -> None:
        """Allocate all storages again, and copy back what was saved."""
        for storage, size in self._dropped:
            storage.resize_(size)
        for storage, host in (self._host[key] for key in self._away):
            storage.resize_(host.numel())
            _bytes_of(storage, self._device).copy_(host, non_blocking=True)
        self._away, self._dropped = [], []

    def on_host(self, tensor: Tensor) -> Tensor:
        """A tensor that shares memory with the host's copy of `tensor`, or `tensor` itself if it is on the device."""
        local = local_part(tensor)
        key = local.untyped_storage()._cdata
        if key not in self._away:
            return tensor
        flat = self._host[key][1].view(local.dtype)
        view = flat.as_strided(local.size(), local.stride(), local.storage_offset())
        if isinstance(tensor, DTensor):
            return DTensor(view, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return view

    def _excess(self) -> float:
        """Bytes that must leave the device so that engines have their share."""
        if not self._stream:
            return math.inf
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        if self._context is None:  # no engine has started yet
            self._context = total - free - reserved
        return self._context + reserved + RESERVE - (1 - self._share) * total

    def _move(self, saved: Iterable[Tensor], size: float, constant: Iterable[Tensor] = ()) -> None:
        """Move storages to the host, in order, until `size` bytes are free."""
        leaving: dict[int, Any] = {}
        for key, storage in _storages(saved).items():
            if size > 0:
                leaving[key] = storage
                size -= storage.nbytes()
        fixed = _storages(constant).keys() & self._host.keys()
        self._copy_to_host({key: storage for key, storage in leaving.items() if key not in fixed})
        for storage in leaving.values():
            storage.resize_(0)
        self._away += leaving
        if self._stream and leaving:
            torch.cuda.empty_cache()

    def _copy_to_host(self, storages: Mapping[int, Any]) -> None:
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for key, storage in storages.items():
                if key not in self._host:
                    self._host[key] = storage, _pinned_memory(storage.nbytes(), self._device)
                self._host[key][1].copy_(_bytes_of(storage, self._device), non_blocking=True)
        if self._stream:
            self._stream.synchronize()


def _storages(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """The storages of tensors by identity, each once, without small, empty and borrowed ones."""
    found = {}
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        if storage.nbytes() >= MIN_BYTES and storage.resizable():
            found[storage._cdata] = storage
    return found


def _bytes_of(storage: Any, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _pinned_memory(size: int, device: torch.device) -> Tensor:
    """`size` bytes of host memory, pinned for a GPU. Torch's own allocator would round up to a power of two."""
    mapped = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    if device.type == "cuda":
        cudart: Any = torch.cuda.cudart
        if failure := int(cudart().cudaHostRegister(memory.data_ptr(), size, 1)):
            raise RuntimeError(f"{size} bytes of host memory can't be pinned for the trainer's state (error {failure})")
    return memory

"""A trainer's state in host memory while engines use its GPU (`sync.placement = "colocated"`).

Storages are emptied and allocated again in place, so parameters, shards of FSDP, optimizer state and all views of them
stay valid. Each storage has one copy in pinned host memory, allocated once. State stays on the GPU as far as engines
leave room for it.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.config.schema import Config
from slipstream.generators.vllm.launch import share_in_turns
from slipstream.sync.sharded_weights import local_part

MIN_BYTES = 2**16  # a smaller storage stays: a copy would take longer than its memory is worth
RESERVE = 4 * 2**30  # bytes: what vLLM uses beyond its share, the buckets of a publish, and NCCL's buffers
FRAGMENTATION = 1.1  # memory that torch reserves, relative to the peak of what tensors take
MEASURED = 2  # steps: the first one has no moments before its update


class Offloader:
    """Moves the storages of tensors from a device to the host and back."""

    def __init__(self, device: torch.device, share: float) -> None:
        """`share` of the GPU's memory is for the engines."""
        self._device, self._share = device, share
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host: dict[int, tuple[Any, Tensor]] = {}  # by storage: the storage, and its copy
        self._away: list[int] = []  # storages whose contents are on the host
        self._dropped: list[tuple[Any, int]] = []  # emptied storages without a copy, and their sizes
        self._started: set[int] = set()  # storages whose copies to the host have begun, before they leave
        self._context: int | None = None  # bytes that this process uses on the GPU, without torch's allocations
        self._steps, self._peak = 0, 0.0

    def record_step(self, peak: float) -> None:
        """Record the peak of a step: the bytes of all tensors."""
        self._steps, self._peak = self._steps + 1, max(self._peak, peak)

    @property
    def has_room(self) -> bool:
        """Whether the GPU holds a step and the engines together, by the peaks of the steps so far."""
        return self._steps >= MEASURED and bool(self._stream) and FRAGMENTATION * self._peak <= self._allowed()

    def offload(self, saved: Iterable[Tensor], derived: Iterable[Tensor] = (), constant: Iterable[Tensor] = ()) -> None:
        """Empty storages until the rest fits in the memory that engines leave: those of `derived`, whose contents are
        lost, and then those of `saved`, in order. `constant` are those of `saved` that never change: they are copied
        once."""
        excess = self._excess()
        if excess > 0:
            for storage in _storages(derived).values():
                self._dropped.append((storage, storage.nbytes()))
                storage.resize_(0)
            self._move(saved, self._excess(), constant)
        self._started.clear()

    def make_room(self, size: int, saved: Iterable[Tensor]) -> None:
        """Empty storages of `saved`, in order, until `size` bytes of the device are free. Begin to copy those that are
        likely to leave in the next `offload`."""
        saved = list(saved)
        if self._stream and (excess := self._excess()) > 0:
            self._move(saved, size - torch.cuda.mem_get_info(self._device)[0])
            self._begin_copies(_first(_storages(saved), excess))
            self._started = {*_first(_storages(saved), excess)}

    def onload(self, late: Iterable[Tensor] = ()) -> None:
        """Allocate all storages again, and copy back what was saved. Contents of `late` are there after `wait`."""
        for storage, size in [*self._dropped, *((self._host[k][0], len(self._host[k][1])) for k in self._away)]:
            storage.resize_(size)
        last = {local_part(tensor).untyped_storage()._cdata for tensor in late}
        self._copy_back([key for key in self._away if key not in last])
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy_back([key for key in self._away if key in last])
        self._away, self._dropped = [], []

    def wait(self) -> None:
        """Let the current stream wait for the copies of `onload`."""
        if self._stream:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

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
        """Bytes that must leave the device so that engines have their share. Frees torch's cache if there are any."""
        if not self._stream:
            return math.inf
        allowed = self._allowed()
        if torch.cuda.memory_reserved(self._device) > allowed:
            torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device) - allowed

    def _allowed(self) -> float:
        """Bytes that torch may reserve: the GPU's memory without the engines' share, `RESERVE` and the CUDA context."""
        free, total = torch.cuda.mem_get_info(self._device)
        if self._context is None:  # no engine has started yet
            self._context = total - free - torch.cuda.memory_reserved(self._device)
        return (1 - self._share) * total - RESERVE - self._context

    def _move(self, saved: Iterable[Tensor], size: float, constant: Iterable[Tensor] = ()) -> None:
        """Move storages to the host, in order, until `size` bytes are free."""
        leaving = _first(_storages(saved), size)
        copied = (_storages(constant).keys() & self._host.keys()) | self._started
        self._begin_copies({key: storage for key, storage in leaving.items() if key not in copied})
        if self._stream:
            self._stream.synchronize()
        for storage in leaving.values():
            storage.resize_(0)
        self._away += leaving
        if self._stream and leaving:
            torch.cuda.empty_cache()

    def _copy_back(self, keys: Iterable[int]) -> None:
        for storage, host in (self._host[key] for key in keys):
            _bytes_of(storage, self._device).copy_(host, non_blocking=True)

    def _begin_copies(self, storages: Mapping[int, Any]) -> None:
        """Begin to copy storages to the host, in the side stream."""
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for key, storage in storages.items():
                if key not in self._host:
                    self._host[key] = storage, _pinned_memory(storage.nbytes(), self._device)
                self._host[key][1].copy_(_bytes_of(storage, self._device), non_blocking=True)


def _first(storages: Mapping[int, Any], size: float) -> dict[int, Any]:
    """The first storages that have at least `size` bytes together."""
    found: dict[int, Any] = {}
    for key, storage in storages.items():
        if size > 0:
            found[key] = storage
            size -= storage.nbytes()
    return found


def _storages(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """The storages of tensors by identity, each once.

    Excludes storages below `MIN_BYTES`, and storages that can't be resized, such as memory of another process.
    """
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
    # Private: Linux has no huge pages for shared memory unless the host's settings say so.
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    if device.type == "cuda":
        cudart: Any = torch.cuda.cudart
        if failure := int(cudart().cudaHostRegister(memory.data_ptr(), size, 1)):
            raise MemoryError(f"{size} bytes of host memory can't be pinned for the trainer's state (error {failure})")
        # Before the memory is unmapped: CUDA would refuse to pin the next mapping at the same address.
        unpin = weakref.finalize(memory, cudart().cudaHostUnregister, memory.data_ptr())
        unpin.atexit = False  # CUDA may be gone by then
    return memory


def new_offloader(config: Config, device: torch.device) -> Offloader | None:
    """The offloader of a trainer that shares its GPU with engines in turns, else None."""
    if config.sync.placement != "colocated" or device.type != "cuda":
        return None
    memory = torch.cuda.get_device_properties(device).total_memory
    # The embedded engine has no limit.
    return Offloader(device, share_in_turns(config, memory) if config.generator.engine == "vllm" else 1.0)

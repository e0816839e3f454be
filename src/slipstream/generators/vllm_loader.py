"""A worker's end of the `lora` link: an adapter is read, and copied into a slot that is free, beside the passes.

vLLM's own `add_lora` does that between two passes, which nothing is drawn in meanwhile. What it does is done once, by
its own code, with values by chance, and watched; for every version the copies alone are made again. Between two passes
an adapter is only made known. All that is used of vLLM beyond what it documents is in this file. vLLM then finds the
adapter there and does no more than count it as used.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from slipstream.generators.watched import Copies, Watched
from slipstream.generators.weights import Beside, side_stream
from slipstream.sync.adapters import AdapterFile, plain
from slipstream.sync.checksum import checksum
from slipstream.sync.link import Ticket


class AdapterLoader:
    """Brings adapters to a worker. `worker_manager` is the worker's `LRUCacheWorkerLoRAManager`."""

    def __init__(self, worker_manager: Any) -> None:
        self._worker_manager, self._slots = worker_manager, worker_manager._adapter_manager
        self._stream = side_stream(worker_manager.device)
        self._beside = Beside("adapter")
        self._opened: tuple[AdapterFile, torch.Tensor] | None = None
        self._copies: Copies | None = None  # None: vLLM's own way cannot be gone again so
        self._coming: tuple[Future[LoRAModel], int] | None = None  # and its slot
        self._sums: Future[dict[str, int]] | None = None

    def prepare(self, ticket: Ticket) -> None:
        """Begin to read a version."""
        request = request_of(ticket)
        self._slots.remove_adapter(request.lora_int_id)  # of a publish that failed elsewhere
        if None not in self._slots.lora_index_to_id:
            raise RuntimeError("vLLM has no free slot for an adapter: generator.options.max_loras is too low")
        # Nobody else takes a slot: there is one for every version that may be in use, and for this one.
        slot = self._slots.lora_index_to_id.index(None)
        self._coming = (self._beside.do(lambda: self._load(request, slot)), slot)

    def prepared(self) -> float | None:
        """The seconds for which passes waited until it was known, which it is as soon as it is in its slot; None
        before. Raises what went wrong."""
        assert self._coming is not None
        read, slot = self._coming
        if not read.done():
            return None
        adapter, began = read.result(), time.perf_counter()
        if self._slots.get_adapter(adapter.id) is not adapter:
            self._slots._registered_adapters[adapter.id] = adapter
            self._slots._active_adapters[adapter.id] = None
            self._slots.lora_index_to_id[slot] = adapter.id
        return time.perf_counter() - began

    def check(self, names: Sequence[str]) -> None:
        """Begin to add up the tensors of these names of the newest version, as they lie on the device."""
        self._sums = self._beside.do(lambda: self._checksums(names))

    def checked(self) -> dict[str, int] | None:
        """The checksums, once they are there. Raises if the slot has other values."""
        assert self._sums is not None
        return self._sums.result() if self._sums.done() else None

    def _load(self, request: LoRARequest, slot: int) -> LoRAModel:
        """All of `add_lora` before an adapter is known to vLLM."""
        with torch.cuda.stream(self._stream):
            adapter = self._into_slot(request, slot)
        if self._stream:
            self._stream.synchronize()
        return adapter

    def _into_slot(self, request: LoRARequest, slot: int) -> LoRAModel:
        path = Path(request.lora_path)
        if self._opened is None:
            file = AdapterFile(path)
            self._opened = file, torch.empty_like(file.values, device=self._worker_manager.device)
            self._copies = self._watch(request, slot, *self._opened)
        file, values = self._opened
        if not file.is_of(path):
            raise RuntimeError("the trainer's adapters lie in other memory than before: start the engine anew")
        values.copy_(file.values, non_blocking=True)
        if self._copies:
            self._copies.make(slot)
            return _InSlot(request.lora_int_id, self._worker_manager.lora_config.max_lora_rank, {})
        return self._own_way(request, slot, file.named(values.clone()))

    def _own_way(self, request: LoRARequest, slot: int, named: dict[str, torch.Tensor]) -> LoRAModel:
        """Read, checked, in the form that slots want, and in one, by vLLM's own code."""
        reader = copy.copy(self._worker_manager)
        reader._lora_model_cls = _adapter_of(named)
        adapter: LoRAModel = reader._load_adapter(request)
        self._slots._create_merged_loras_inplace(adapter)
        for name, module in self._slots.modules.items():
            weights = self._slots._get_lora_layer_weights(adapter, name)
            if weights:
                module.set_lora(slot, weights.lora_a, weights.lora_b)
            else:
                module.reset_lora(slot)
        return adapter

    def _watch(self, request: LoRARequest, slot: int, file: AdapterFile, values: torch.Tensor) -> Copies | None:
        """The copies that vLLM makes on its own way, if they leave in a slot all that it leaves there; else None, as
        where slots are of another number format than the policy, so that it casts on the way."""
        chance = torch.randn(values.shape, generator=torch.Generator().manual_seed(0)).to(values)
        with Watched(values.copy_(chance)) as watched:
            self._own_way(request, slot, file.named(values))
        try:
            copies = Copies(watched, slot, self._slots.lora_slots)
        except ValueError:
            return None
        wanted = [whole.clone() for whole in copies.wholes(slot)]
        for free in [number for number, user in enumerate(self._slots.lora_index_to_id) if user is None]:
            for module in self._slots.modules.values():
                module.reset_lora(free)
        values.copy_(chance)
        copies.make(slot)
        same = all(torch.equal(*pair) for pair in zip(wanted, copies.wholes(slot), strict=True))
        return copies if same else None

    def _checksums(self, names: Sequence[str]) -> dict[str, int]:
        assert self._opened and self._coming
        (file, values), (_, slot) = self._opened, self._coming
        named, sums = file.named(values), {}
        with torch.cuda.stream(self._stream):
            for name in names:
                here = named[plain(name)]
                if self._copies and not self._copies.holds(slot, here):
                    raise RuntimeError(f"{name} has other values in its slot than the trainer published")
                sums[name] = checksum(here)
        return sums


class _InSlot(LoRAModel):  # type: ignore[misc]
    """An adapter whose tensors are in its slot and nowhere else."""

    def get_lora(self, module_name: str) -> Any:
        raise RuntimeError(f"vLLM moves adapter {self.id}, which is in use: there are too few slots for adapters")


def request_of(ticket: Ticket) -> LoRARequest:
    """The name of a version's adapter, for vLLM; numbers begin at 1."""
    return LoRARequest(f"policy-v{ticket['version']}", ticket["version"] + 1, ticket["path"])


def _adapter_of(there: dict[str, torch.Tensor]) -> type[LoRAModel]:
    """vLLM's class of adapters, with the tensors of one that are on a device already."""

    class Adapter(LoRAModel):  # type: ignore[misc]
        @classmethod
        def from_lora_tensors(cls, *, tensors: Any, **more: Any) -> LoRAModel:
            device = str(next(iter(there.values())).device)
            return super().from_lora_tensors(
                tensors={name: there[name] for name in tensors}, **(more | {"device": device})
            )

    return Adapter

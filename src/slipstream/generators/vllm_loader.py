"""A worker's end of the `lora` link: an adapter is read, and copied into a slot that is free, beside the passes.

vLLM's own `add_lora` does that between two passes, which nothing is drawn in meanwhile. For the first adapter this is
what it does, in its parts and by its own code, watched; for all further ones the copies alone are made again. Between
two passes an adapter is only made known. All that is used of vLLM beyond what it documents is in this file. vLLM then
finds the adapter there and does no more than count it as used.
"""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from slipstream.generators.watched import Copies, Watched
from slipstream.generators.weights import answer, side_stream
from slipstream.sync.adapters import AdapterFile
from slipstream.sync.link import Ticket


class AdapterLoader:
    """Brings adapters to a worker. `worker_manager` is the worker's `LRUCacheWorkerLoRAManager`."""

    def __init__(self, worker_manager: Any) -> None:
        self._worker_manager, self._slots = worker_manager, worker_manager._adapter_manager
        self._stream = side_stream(worker_manager.device)
        self._opened: tuple[AdapterFile, torch.Tensor] | None = None
        self._copies: Copies | None = None
        self._coming: tuple[Future[LoRAModel], int] | None = None  # and its slot

    def prepare(self, ticket: Ticket) -> None:
        """Begin to read a version, in a thread that keeps no process from its end."""
        if None not in self._slots.lora_index_to_id:
            raise RuntimeError("vLLM has no free slot for an adapter: generator.options.max_loras is too low")
        # Nobody else takes a slot: there is one for every version that may be in use, and for this one.
        slot, read = self._slots.lora_index_to_id.index(None), Future[LoRAModel]()
        self._coming = (read, slot)
        work = (lambda: self._load(ticket, slot), read)
        threading.Thread(target=answer, args=work, name="adapter", daemon=True).start()

    def prepared(self) -> float | None:
        """The seconds for which passes waited until it was known, which it is as soon as it is in its slot; None
        before. Raises what went wrong."""
        assert self._coming is not None
        read, slot = self._coming
        if not read.done():
            return None
        adapter, began = read.result(), time.perf_counter()
        if self._slots.get_adapter(adapter.id) is not adapter:
            self._slots.remove_adapter(adapter.id)  # of a publish that failed elsewhere
            self._slots._registered_adapters[adapter.id] = adapter
            self._slots._active_adapters[adapter.id] = None
            self._slots.lora_index_to_id[slot] = adapter.id
        return time.perf_counter() - began

    def _load(self, ticket: Ticket, slot: int) -> LoRAModel:
        """All of `add_lora` before an adapter is known to vLLM."""
        request = request_of(ticket)
        with torch.cuda.stream(self._stream):
            file, values = self._open(Path(request.lora_path))
            values.copy_(file.values, non_blocking=True)
            if self._copies:
                self._copies.make(slot)
                adapter: LoRAModel = _InSlot(request.lora_int_id, self._worker_manager.lora_config.max_lora_rank, {})
            else:
                adapter = self._first(request, slot, file, values)
        if self._stream:
            self._stream.synchronize()
        return adapter

    def _open(self, path: Path) -> tuple[AdapterFile, torch.Tensor]:
        """The file of this version, and room on the device for what is in it."""
        if self._opened and not self._opened[0].is_of(path):
            self._opened[0].close()
            self._opened = self._copies = None
        if self._opened is None:
            file = AdapterFile(path)
            self._opened = file, torch.empty_like(file.values, device=self._worker_manager.device)
        return self._opened

    def _first(self, request: LoRARequest, slot: int, file: AdapterFile, values: torch.Tensor) -> LoRAModel:
        """Read, checked, in the form that slots want, and in one, by vLLM's own code."""
        reader = copy.copy(self._worker_manager)
        reader._lora_model_cls = _adapter_of(file.named(values))
        with Watched(values) as watched:
            adapter: LoRAModel = reader._load_adapter(request)
            self._slots._create_merged_loras_inplace(adapter)
            for name, module in self._slots.modules.items():
                weights = self._slots._get_lora_layer_weights(adapter, name)
                if weights:
                    module.set_lora(slot, weights.lora_a, weights.lora_b)
                else:
                    module.reset_lora(slot)
        self._copies = self._copies_of(watched, slot, file, values)
        if self._copies:
            return _InSlot(adapter.id, adapter.rank, {})
        self._opened = file, torch.empty_like(values)  # what was read is the adapter's own
        return adapter

    def _copies_of(self, watched: Watched, slot: int, file: AdapterFile, values: torch.Tensor) -> Copies | None:
        """What was watched, if doing it again leaves in the slot what vLLM left there; else None, as for experts, whose
        tensors vLLM puts together on the way."""
        try:
            copies = Copies(watched, slot, self._slots.lora_slots)
        except ValueError:
            return None
        wanted = [place.clone() for place in copies.places(slot)]
        for free in [number for number, user in enumerate(self._slots.lora_index_to_id) if user is None]:
            for module in self._slots.modules.values():
                module.reset_lora(free)
        values.copy_(file.values)
        copies.make(slot)
        same = all(torch.equal(*pair) for pair in zip(wanted, copies.places(slot), strict=True))
        return copies if same else None


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

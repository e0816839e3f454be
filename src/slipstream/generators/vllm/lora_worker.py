"""A worker's end of the `lora` link: loads an adapter into a free slot, in a background thread and CUDA stream.

vLLM's own `add_lora` does the same between two forward passes. On H200s it paused 256 sequences for 140 ms
(`benchmarks/results/publish_lora_h200x2.json` as of commit a044860); this loader pauses them for 11 ms
(`benchmarks/results/publish_in_turns_h200.json`).

The first version runs vLLM's code on random values while `copy_replay` records its copies. Later versions replay the
copies. Between two passes the adapter is only registered. Every use of vLLM's private fields for adapters is in this
file.
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

from slipstream.errors import UserError
from slipstream.generators.served_weights import BackgroundWorker, side_stream
from slipstream.generators.vllm.copy_replay import CopyRecorder, RecordedCopies
from slipstream.sync.adapters import AdapterFile, peft_name
from slipstream.sync.checksum import checksum
from slipstream.sync.link import PublishHandle


class AdapterLoader:
    """Loads adapters into a worker. `worker_manager` is the worker's `LRUCacheWorkerLoRAManager`."""

    def __init__(self, worker_manager: Any) -> None:
        self._worker_manager, self._slots = worker_manager, worker_manager._adapter_manager
        self._stream = side_stream(worker_manager.device)
        self._background = BackgroundWorker("adapter")
        self._opened: tuple[AdapterFile, torch.Tensor] | None = None  # and its values on the device
        self._copies: RecordedCopies | None = None  # None: vLLM's own code loads each version
        self._loading: tuple[Future[LoRAModel], int] | None = None  # and its slot
        self._sums: Future[dict[str, int]] | None = None

    def prepare(self, handle: PublishHandle) -> None:
        """Start to load a version."""
        request = request_of(handle)
        self._slots.remove_adapter(request.lora_int_id)  # left by a publish that failed in another engine
        if None not in self._slots.lora_index_to_id:
            raise UserError("vLLM has no free slot for an adapter: generator.engine_args.max_loras is too low")
        # The slot stays free: there is one for each version that may be in use, and one for this version.
        slot = self._slots.lora_index_to_id.index(None)
        self._loading = (self._background.submit(lambda: self._load(request, slot)), slot)

    def prepared(self) -> float | None:
        """Register the adapter once it is in its slot. Returns the seconds this took; None while it loads.

        Raises the error of a failed load.
        """
        assert self._loading is not None
        load, slot = self._loading
        if not load.done():
            return None
        adapter, started = load.result(), time.perf_counter()
        if self._slots.get_adapter(adapter.id) is not adapter:
            self._slots._registered_adapters[adapter.id] = adapter
            self._slots._active_adapters[adapter.id] = None
            self._slots.lora_index_to_id[slot] = adapter.id
        return time.perf_counter() - started

    def start_checksums(self, names: Sequence[str]) -> None:
        """Start to compute checksums of these tensors of the newest version, on the device."""
        self._sums = self._background.submit(lambda: self._compute_checksums(names))

    def checksums(self) -> dict[str, int] | None:
        """The checksums; None until they are computed. Raises if the slot has other values."""
        assert self._sums is not None
        return self._sums.result() if self._sums.done() else None

    def _load(self, request: LoRARequest, slot: int) -> LoRAModel:
        """Everything that `add_lora` does before it registers the adapter."""
        with torch.cuda.stream(self._stream):
            adapter = self._load_into_slot(request, slot)
        if self._stream:
            self._stream.synchronize()
        return adapter

    def _load_into_slot(self, request: LoRARequest, slot: int) -> LoRAModel:
        path = Path(request.lora_path)
        if self._opened is None:
            file = AdapterFile(path)
            self._opened = file, torch.empty_like(file.values, device=self._worker_manager.device)
            self._copies = self._record_copies(request, slot, *self._opened)
        file, values = self._opened
        if not file.is_same_file(path):
            raise UserError("the trainer's adapters are in other memory than before: restart the engine")
        values.copy_(file.values, non_blocking=True)
        if self._copies:
            self._copies.replay(slot)
            return _AdapterInSlot(request.lora_int_id, self._worker_manager.lora_config.max_lora_rank, {})
        return self._load_by_vllm(request, slot, file.by_name(values.clone()))

    def _load_by_vllm(self, request: LoRARequest, slot: int, tensors: dict[str, torch.Tensor]) -> LoRAModel:
        reader = copy.copy(self._worker_manager)
        reader._lora_model_cls = _adapter_class(tensors)
        adapter: LoRAModel = reader._load_adapter(request)
        self._slots._create_merged_loras_inplace(adapter)
        for name, module in self._slots.modules.items():
            weights = self._slots._get_lora_layer_weights(adapter, name)
            if weights:
                module.set_lora(slot, weights.lora_a, weights.lora_b)
            else:
                module.reset_lora(slot)
        return adapter

    def _record_copies(
        self, request: LoRARequest, slot: int, file: AdapterFile, values: torch.Tensor
    ) -> RecordedCopies | None:
        """The copies by which vLLM fills a slot; None if replaying them leaves other values there.

        That is so where slots have another dtype than the policy, for example.
        """
        random = torch.randn(values.shape, generator=torch.Generator().manual_seed(0)).to(values)
        with CopyRecorder(values.copy_(random)) as recorder:
            self._load_by_vllm(request, slot, file.by_name(values))
        try:
            copies = RecordedCopies(recorder, slot, self._slots.lora_slots)
        except ValueError:
            return None
        expected = [memory.clone() for memory in copies.slot_memory(slot)]
        for free in [number for number, user in enumerate(self._slots.lora_index_to_id) if user is None]:
            for module in self._slots.modules.values():
                module.reset_lora(free)
        values.copy_(random)
        copies.replay(slot)
        same = all(torch.equal(*pair) for pair in zip(expected, copies.slot_memory(slot), strict=True))
        return copies if same else None

    def _compute_checksums(self, names: Sequence[str]) -> dict[str, int]:
        assert self._opened and self._loading
        (file, values), (_, slot) = self._opened, self._loading
        tensors, sums = file.by_name(values), {}
        with torch.cuda.stream(self._stream):
            for name in names:
                tensor = tensors[peft_name(name)]
                if self._copies and not self._copies.slot_holds(slot, tensor):
                    raise UserError(f"{name} has other values in its slot than the trainer published")
                sums[name] = checksum(tensor)
        return sums


class _AdapterInSlot(LoRAModel):  # type: ignore[misc]
    """An adapter whose only tensors are those in its slot."""

    def get_lora(self, module_name: str) -> Any:
        raise UserError(f"vLLM moves adapter {self.id}, which is in use: there are too few slots for adapters")


def request_of(handle: PublishHandle) -> LoRARequest:
    """vLLM's request for a version's adapter; its ids start at 1."""
    return LoRARequest(f"policy-v{handle['version']}", handle["version"] + 1, handle["path"])


def _adapter_class(loaded: dict[str, torch.Tensor]) -> type[LoRAModel]:
    """vLLM's adapter class, changed to take its tensors from `loaded` instead of the file."""

    class Adapter(LoRAModel):  # type: ignore[misc]
        @classmethod
        def from_lora_tensors(cls, *, tensors: Any, **kwargs: Any) -> LoRAModel:
            kwargs |= {"device": str(next(iter(loaded.values())).device)}
            return super().from_lora_tensors(tensors={name: loaded[name] for name in tensors}, **kwargs)

    return Adapter

"""The `lora` link in a vLLM worker: loads an adapter into a free LoRA slot, in a background thread and CUDA stream.

Every use of vLLM's private fields for adapters is in this file.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from slipstream.errors import UserError
from slipstream.generators.served_weights import BackgroundWorker, side_stream
from slipstream.generators.vllm.recorded_copies import RecordedCopies, load_kernels
from slipstream.sync.adapters import adapter_files, read_adapter, split_name
from slipstream.sync.checksum import checksum
from slipstream.sync.link import PublishHandle
from slipstream.sync.shared import SharedFiles


class AdapterLoader:
    """Loads adapters into a worker. `batch` returns the worker's input batch.

    `worker_manager` is the worker's `LRUCacheWorkerLoRAManager`. Its `add_adapter` is replaced until `close`.
    vLLM's own `add_lora` loads an adapter between two forward passes, and sampling waits for it.
    """

    def __init__(self, worker_manager: Any, batch: Callable[[], Any]) -> None:
        self._batch, self._worker_manager, self._slots = batch, worker_manager, worker_manager._adapter_manager
        self._stream = side_stream(worker_manager.device)
        self._files = SharedFiles(worker_manager.device)  # the trainer's, on this host
        self._background = BackgroundWorker("adapter")
        self._values: dict[tuple[str, str], torch.Tensor] = {}  # of the newest version, by policy and name
        self._tensors: dict[str, torch.Tensor] = {}  # of the adapter that is loading; vLLM scales them in place
        self._filled: dict[int, tuple[RecordedCopies, LoRAModel]] = {}  # how vLLM filled each slot
        self._all_filled = False
        self._loading: list[tuple[Future[LoRAModel], int]] = []  # an adapter for each policy, with its slot
        self._sums: Future[dict[str, int]] | None = None
        self._name = self._owner = ""  # of the adapter that is loading for a server, and whose it is; see `prepare`
        self._numbers: dict[str, int] = {}  # of the adapters that vLLM has numbered, by name
        self._add_adapter = worker_manager.add_adapter
        worker_manager.add_adapter = self._add_named
        load_kernels(torch.empty(0, dtype=self._slots.lora_config.lora_dtype, device=worker_manager.device))

    def prepare(self, handle: PublishHandle) -> None:
        """Start to load a version in the background. Raises `UserError` if too few slots are free.

        Without a `name` in the handle, `prepared` registers the adapters. With one, vLLM registers the adapter when its
        HTTP interface loads the path of that name. First unloads what an earlier run or a failed publish left.
        """
        requests, self._name = requests_of(handle), handle.get("name", "")
        if self._name and handle["owner"] != self._owner:
            self._worker_manager.remove_all_adapters()  # of an earlier run, which may have been killed
            self._owner, self._numbers = handle["owner"], {}
        elif not self._name:
            for request in requests.values():
                self._slots.remove_adapter(request.lora_int_id)  # left by a publish that failed in another engine
        free = self._free_slots()
        if len(free) < len(requests):
            raise UserError("vLLM has no free slot for an adapter; a server needs a higher --max-loras")
        # The slots stay free: there is one for each version that may be in use, and one for this version.
        self._loading = [
            (self._background.submit(partial(self._load, handle, policy, request.lora_int_id, slot)), slot)
            for (policy, request), slot in zip(requests.items(), free, strict=False)
        ]

    def prepared(self) -> float | None:
        """Register the version with vLLM if it is loaded. Returns the seconds of the registration; None while it loads.

        Raises the error of a failed load.
        """
        if not all(load.done() for load, _ in self._loading):
            return None
        loaded, started = [(load.result(), slot) for load, slot in self._loading], time.perf_counter()
        for adapter, slot in loaded:
            if not self._name and self._slots.get_adapter(adapter.id) is not adapter:
                self._register(adapter, slot)
        return time.perf_counter() - started

    def remove(self, name: str) -> bool:
        """Unload a named adapter. False if a sequence still uses it."""
        number, batch = self._numbers.get(name, 0), self._batch()
        if number and batch.lora_id_to_request_ids.get(number):
            return False
        self._worker_manager.remove_adapter(self._numbers.pop(name, 0))
        return True

    def close(self) -> None:
        """Leave vLLM's manager as it was. The newest named adapter is pinned: vLLM could not load it again."""
        self._worker_manager.add_adapter = self._add_adapter
        for number in [*self._numbers.values()][-1:]:
            self._worker_manager.pin_adapter(number)
        self._background.submit(self._files.close)  # after a load that is under way
        self._background.close()

    def _register(self, adapter: LoRAModel, slot: int) -> None:
        self._slots._registered_adapters[adapter.id] = adapter
        self._slots._active_adapters[adapter.id] = None
        self._slots.lora_index_to_id[slot] = adapter.id

    def _add_named(self, request: LoRARequest) -> bool:
        """Replaces vLLM's `add_adapter`. First registers the adapter that `prepare` loaded from this path, if any.

        It waits for the load and raises its error.
        """
        if self._loading and self._name and request.lora_path == self._name:
            [(load, slot)] = self._loading
            adapter, self._name = load.result(), ""
            adapter.id = self._numbers[request.lora_path] = request.lora_int_id
            self._register(adapter, slot)
        added: bool = self._add_adapter(request)
        return added

    def start_checksums(self, names: Sequence[str]) -> None:
        """Start to compute checksums of these tensors of the newest version, as received, on the device."""
        self._sums = self._background.submit(lambda: self._compute_checksums(names))

    def checksums(self) -> dict[str, int] | None:
        """The checksums; None until they are computed."""
        assert self._sums is not None
        return self._sums.result() if self._sums.done() else None

    def _load(self, handle: PublishHandle, policy: str, number: int, slot: int) -> LoRAModel:
        """Everything that `add_lora` does before it registers the adapter under its number."""
        with torch.cuda.stream(self._stream), adapter_files(handle, policy) as path:
            values = read_adapter(path, self._worker_manager.device, None if "server" in handle else self._files)
            self._values |= {(policy, name): value for name, value in values.items()}
            if not self._tensors:
                self._tensors = {name: torch.empty_like(value) for name, value in values.items()}
            torch._foreach_copy_(list(self._tensors.values()), list(values.values()))
            request = LoRARequest(path.name, number, str(path))
            adapter = self._repeat(slot, number) or self._fill(slot, request)
            if not (self._all_filled or self._name):  # the first version of a run arrives before sampling starts
                self._fill_free_slots(request)
        if self._stream:
            self._stream.synchronize()
        return adapter

    def _repeat(self, slot: int, number: int) -> LoRAModel | None:
        """Fill a slot as it was filled before. None if it was not, or if that can't be repeated."""
        if slot not in self._filled:
            return None
        copies, adapter = self._filled[slot]
        copies.repeat()
        return adapter.clone(number)

    def _fill(self, slot: int, request: LoRARequest) -> LoRAModel:
        """Fill a slot by vLLM's code, from `_tensors`."""
        reader = copy.copy(self._worker_manager)
        reader._lora_model_cls = _adapter_class(self._tensors)
        adapter: LoRAModel = reader._load_adapter(request)
        with RecordedCopies(self._tensors.values()) as copies:
            self._slots._create_merged_loras_inplace(adapter)
            for name, module in self._slots.modules.items():
                weights = self._slots._get_lora_layer_weights(adapter, name)
                if weights:
                    module.set_lora(slot, weights.lora_a, weights.lora_b)
                else:
                    module.reset_lora(slot)
        if copies.complete:
            self._filled[slot] = copies, adapter
        return adapter

    def _fill_free_slots(self, request: LoRARequest) -> None:
        """Fill all free slots, so that later versions only repeat the copies while vLLM samples."""
        for slot in self._free_slots():
            if slot not in self._filled:
                self._fill(slot, request)
        self._all_filled = True

    def _free_slots(self) -> list[int]:
        slots = self._slots.lora_index_to_id
        usable = slots[:-1] if self._worker_manager.device.type == "cpu" and not self._name else slots
        return [slot for slot, number in enumerate(usable) if number is None]  # see `engine_arguments` for CPUs

    def _compute_checksums(self, names: Sequence[str]) -> dict[str, int]:
        with torch.cuda.stream(self._stream):
            return {name: checksum(self._values[split_name(name)]) for name in names}


def requests_of(handle: PublishHandle) -> dict[str, LoRARequest]:
    """One `LoRARequest` for each policy of a version, by policy name; "" is the name in a single-policy run.

    Ids start at 1, and no two versions share an id.
    """
    version, policies, found = handle["version"], handle["policies"] or [""], {}
    for number, policy in enumerate(policies, 1 + version * len(policies)):
        name = f"policy-v{version}" + f"-{policy}" * bool(policy)
        found[policy] = LoRARequest(name, number, str(Path(handle["path"], policy)))
    return found


def _adapter_class(loaded: dict[str, torch.Tensor]) -> type[LoRAModel]:
    """vLLM's adapter class, changed to take its tensors from `loaded` instead of the file."""

    class Adapter(LoRAModel):  # type: ignore[misc]
        @classmethod
        def from_lora_tensors(cls, *, tensors: Any, **kwargs: Any) -> LoRAModel:
            kwargs |= {"device": str(next(iter(loaded.values())).device)}
            return super().from_lora_tensors(tensors={name: loaded[name] for name in tensors}, **kwargs)

    return Adapter

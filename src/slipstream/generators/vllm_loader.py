"""A worker's end of the `lora` link: an adapter is read beside the passes, and gets its slot between two of them.

vLLM's own `add_lora` does both between two passes, which nothing is drawn in meanwhile. This is its two halves, by the
same code of vLLM's; all that is used of it beyond what it documents is in this file. vLLM then finds the adapter there
and does no more than count it as used.
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

from slipstream.generators.weights import answer, side_stream
from slipstream.sync.adapters import loaded
from slipstream.sync.link import Ticket


class AdapterLoader:
    """Brings adapters to a worker. `worker_manager` is the worker's `LRUCacheWorkerLoRAManager`.

    An adapter is kept on the device of the slots: activating it copies there alone, and nothing has to be pinned.
    """

    def __init__(self, worker_manager: Any) -> None:
        self._worker_manager, self._slots = worker_manager, worker_manager._adapter_manager
        self._stream = side_stream(worker_manager.device)
        self._copied: Any = None  # the event after which the last adapter is in its slot
        self._read: Future[LoRAModel] | None = None

    def prepare(self, ticket: Ticket) -> None:
        """Begin to read a version, in a thread that keeps no process from its end."""
        self._read = Future()
        work = (lambda: self._load(ticket), self._read)
        threading.Thread(target=answer, args=work, name="adapter", daemon=True).start()

    def prepared(self) -> float | None:
        """The seconds for which passes waited until it was in its slot, where it goes as soon as it was read; None
        before. Raises what went wrong."""
        assert self._read is not None
        if not self._read.done():
            return None
        adapter, began = self._read.result(), time.perf_counter()
        if self._slots.get_adapter(adapter.id) is not adapter:
            self._slots.remove_adapter(adapter.id)  # of a publish that failed elsewhere
            self._slots._registered_adapters[adapter.id] = adapter
            self._slots.activate_adapter(adapter.id)
            if self._stream:
                self._copied = torch.cuda.current_stream().record_event()
        return time.perf_counter() - began

    def _load(self, ticket: Ticket) -> LoRAModel:
        """All of `add_lora` before an adapter is known to vLLM: read, checked, and in the form that slots want."""
        request = request_of(ticket)
        with torch.cuda.stream(self._stream):
            if self._copied:  # memory that was copied from until then may be used again
                self._stream.wait_event(self._copied)
            reader = copy.copy(self._worker_manager)
            reader._lora_model_cls = _adapter_on(reader.device, Path(request.lora_path))
            adapter: LoRAModel = reader._load_adapter(request)
            self._slots._create_merged_loras_inplace(adapter)
        if self._stream:
            self._stream.synchronize()
        return adapter


def request_of(ticket: Ticket) -> LoRARequest:
    """The name of a version's adapter, for vLLM; numbers begin at 1."""
    return LoRARequest(f"policy-v{ticket['version']}", ticket["version"] + 1, ticket["path"])


def _adapter_on(device: torch.device, path: Path) -> type[LoRAModel]:
    """vLLM's class of adapters, with the tensors of one on a device, where one copy has brought them."""

    class Adapter(LoRAModel):  # type: ignore[misc]
        @classmethod
        def from_lora_tensors(cls, *, tensors: Any, **more: Any) -> LoRAModel:
            there = loaded(path, device)
            tensors = {name: there[name] for name in tensors}
            return super().from_lora_tensors(tensors=tensors, **(more | {"device": str(device)}))

    return Adapter

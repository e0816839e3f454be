"""The `lora` link to a server: each request names the adapter that samples it, by vLLM's HTTP interface."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from slipstream.generators.vllm.requests import VllmRequest
from slipstream.generators.vllm.server_client import UNLOAD_ADAPTER
from slipstream.generators.vllm.worker_methods import WorkerMethods
from slipstream.sync.link import PublishHandle

Call = Callable[..., Awaitable[Any]]  # `Server._call_workers` and others, which end the server if they fail


class ServerAdapters:
    """Adapters of one server: a new name for each version. An older one stays loaded until its last request ends.

    The HTTP interface drops a name before workers unload the adapter: a request for an unloaded one ends vLLM's core.

    Workers load an adapter under a slot while they decode (`lora_worker`); the HTTP interface gives it a name and a
    number afterwards.
    """

    def __init__(self, max_adapters: int, call: Call, poll: Call, post: Call) -> None:
        self._max_adapters, self._call, self._poll, self._post = max_adapters, call, poll, post
        self._owner = uuid4().hex  # for workers, which unload the adapters of another owner
        self._requests: dict[VllmRequest, str] = {}  # in flight, and the adapter of each
        self._loaded: list[str] = []  # in workers, oldest first
        self._served: list[str] = []  # by the HTTP interface, oldest first
        self._next = ""

    @property
    def current(self) -> str:
        return self._served[-1]

    @property
    def older(self) -> list[str]:
        """Names that the HTTP interface serves besides the current one."""
        return self._served[:-1]

    async def prepare(self, handle: PublishHandle, limit: float) -> str:
        """Load a version while the server decodes, after adapters that no request uses are unloaded.

        Returns why it did not arrive, or "".
        """
        purpose = "get a version of the adapters"
        for name in [name for name in self._loaded[:-1] if name not in self._requests.values()]:
            if name in self._served:
                await self._post(UNLOAD_ADAPTER, {"lora_name": name}, parse=str)
                self._served.remove(name)
            if all(await self._call(purpose, None, WorkerMethods.slipstream_remove_adapter, name)):
                self._loaded.remove(name)
        self._next = f"policy-v{handle['version']}-{uuid4().hex[:8]}"
        named = {**handle, "name": self._next, "owner": self._owner}
        await self._call(purpose, None, WorkerMethods.slipstream_prepare_adapter, named)
        results = await self._poll(purpose, limit, WorkerMethods.slipstream_adapter_prepared)
        return next((result for result in results if isinstance(result, str)), "")

    async def serve(self) -> None:
        """Let new requests use the prepared adapter."""
        await self._post("/v1/load_lora_adapter", {"lora_name": self._next, "lora_path": self._next}, str)
        self._loaded.append(self._next)
        self._served.append(self._next)

    def outdated(self, every: bool) -> list[VllmRequest]:
        """Requests to restart: all of older adapters, or of the oldest if more are in use than there are slots for."""
        used = [name for name in self._loaded if name in self._requests.values() or name == self.current]
        excess = used[: len(used) - self._max_adapters] if len(used) > self._max_adapters else []
        old = self._loaded[:-1] if every else excess
        return [request for request, name in self._requests.items() if name in old]

    def acquire(self, request: VllmRequest) -> str:
        """The current adapter, for a request that starts."""
        self._requests[request] = self.current
        return self.current

    def release(self, request: VllmRequest) -> None:
        del self._requests[request]

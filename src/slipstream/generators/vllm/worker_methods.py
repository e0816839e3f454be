"""The methods that Slipstream adds to vLLM's workers, by vLLM's option `worker_extension_cls`.

Callers name them as `WorkerMethods.slipstream_...` and reach them by `collective_rpc`: in-process through
`compat.call_workers`, over HTTP through `server_client`. Each runs in every worker, between two forward passes.
This module imports without vLLM.
"""

from __future__ import annotations

import math
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from slipstream.errors import InvalidInput, UserError
from slipstream.generators.served_weights import ServedWeights
from slipstream.generators.vllm.compat import count_tokens, is_known_runner
from slipstream.generators.vllm.quantized_weights import validate_link
from slipstream.generators.vllm.requests import LEASE_S, TokenCounts
from slipstream.generators.vllm.sampler import use_single_pass
from slipstream.generators.vllm.weight_mapping import USE_RESTART, expert_shard, map_parameters
from slipstream.model.inspection import config_sizes, end_of_sequence, generation_config
from slipstream.runtime.memory import freeze_heap, raise_gc_thresholds
from slipstream.sync.checksum import checksum
from slipstream.sync.frames import Superseded
from slipstream.sync.link import ConnectionInfo, ParameterShard, PublishHandle
from slipstream.sync.nccl_direct import NcclDirectReceiver
from slipstream.sync.single_copy import export_ipc_handles
from slipstream.sync.update import RolledBack

UPDATE_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"  # environment variable of servers that load adapters
STREAM_TIMEOUT_S = 5.0  # of a connection, and of silence
MAX_FINISHED = 1 << 12  # finished requests remembered since the last swap; outputs of older ones are read by then


class BlockingWeights:
    """The interface of `ServedWeights`. vLLM's own transfer engine receives weights while forward passes wait."""

    def __init__(self, receiver: NcclDirectReceiver, shards: Mapping[str, ParameterShard]) -> None:
        self._receiver, self._shards = receiver, shards

    def prepare(self, handle: PublishHandle) -> None: ...

    def prepared(self) -> bool:
        return True

    def apply(self) -> None:
        started = time.perf_counter()
        self._receiver.receive()
        self._pause_s = time.perf_counter() - started

    def applied(self) -> bool:
        return True

    def pause_s(self) -> float:
        return self._pause_s

    @torch.no_grad()
    def start_checksums(self, names: Sequence[str]) -> None:
        own = {name: self._shards[name] for name in names if name in self._shards}
        self._computed = {
            name: checksum(shard.tensor, shard.index) if shard.counted else 0 for name, shard in own.items()
        }

    def checksums(self) -> dict[str, int]:
        return self._computed

    def close(self) -> None:
        self._receiver.close()


class TokenCounter:
    """Counts the tokens that each request has sampled, including requests that the model runner has dropped.

    Both of vLLM's model runners drop a finished request; the second one also drops a preempted request until it
    resumes. They do so at the start of a pass, so `execute_model` is wrapped to record the counts right before.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._preempted: dict[str, Callable[[], dict[str, int]]] = {}  # deferred counts as of the preemption
        self._finished: deque[str] = deque(maxlen=MAX_FINISHED)
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._record(scheduler_output)
            return execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model

    def count(self) -> Callable[[], TokenCounts]:
        """A function that returns the tokens which each request had sampled at this call; None for a finished one.

        With vLLM's second model runner it waits for the device to reach this point of its stream.
        """
        running, preempted, finished = count_tokens(self._runner), dict(self._preempted), list(self._finished)

        def counts() -> TokenCounts:
            dropped = {name: n for name, before in preempted.items() if (n := before().get(name)) is not None}
            return dict.fromkeys(finished) | dropped | running()  # `running` last: it has the resumed requests

        return counts

    def forget_finished(self) -> None:
        self._finished.clear()

    def _record(self, scheduler_output: Any) -> None:
        finished = scheduler_output.finished_req_ids
        self._finished.extend(finished)
        for name in finished:
            self._preempted.pop(name, None)
        if preempted := (scheduler_output.preempted_req_ids or set()) - finished:
            self._preempted |= dict.fromkeys(preempted, cache(count_tokens(self._runner)))


class WorkerMethods:
    """Mixed into the worker, whose `model_runner`, `rank` and `vllm_config` it uses."""

    model_runner: Any
    rank: int
    vllm_config: Any
    _slipstream: Any  # `ServedWeights`, `BlockingWeights` or `AdapterLoader`
    _slipstream_tokens: TokenCounter

    def slipstream_call(self, method: str, *arguments: Any) -> list[Any] | str:
        """Result of another method in a list of one, or the error as text. For servers.

        vLLM's HTTP interface replaces an exception by status 500 and turns scalars into text.
        """
        try:
            if not method.startswith("slipstream_"):
                raise ValueError(f"{method} is not one of WorkerMethods")
            return [getattr(self, method)(*arguments)]
        except Exception as error:
            traceback.print_exc()
            return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"

    def slipstream_describe(self) -> dict[str, Any]:
        """Facts about a server, by which `validate_server` decides whether a run can use it."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        adapters, updates = self.vllm_config.lora_config, os.environ.get(UPDATE_ADAPTERS, "").lower() in ("1", "true")
        return {
            "logprobs_mode": model.logprobs_mode,
            "dtype": str(model.dtype).removeprefix("torch."),
            "context": model.max_model_len,
            "vocabulary": model.get_vocab_size(),
            "sizes": config_sizes(model.hf_config),
            "max_logprobs": model.max_logprobs,
            "eos": sorted(end_of_sequence(generation_config(model.model), model.hf_config)),
            "replicas": parallel.data_parallel_size * parallel.pipeline_parallel_size,
            "counts": is_known_runner(self.model_runner),
            "max_loras": adapters.max_loras if adapters and updates else 0,
            "max_lora_rank": adapters.max_lora_rank if adapters else 0,
            "max_num_seqs": self.vllm_config.scheduler_config.max_num_seqs,
        }

    def slipstream_receive_stream(self, host: str, port: int) -> float:
        """Bytes per second of a TCP stream from this address to the first worker; infinity for the others."""
        if self.rank:
            return math.inf
        with socket.create_connection((host, port), STREAM_TIMEOUT_S) as stream:
            received, began = 0, time.perf_counter()
            while data := stream.recv(2**20):
                received += len(data)
            return received / (time.perf_counter() - began)

    def slipstream_claim(self, run: str, address: str, new: bool) -> str | None:
        """Claim this worker for `run`, or with `new` false renew the claim. A claim expires after `LEASE_S`.

        Returns the address under which the run claimed it first; None if the claim is another run's, or was lost.
        """
        holder, first, renewed = getattr(self, "_slipstream_lease", ("", "", -LEASE_S))
        if holder != run and (not new or time.monotonic() - renewed < LEASE_S):
            return None
        self._slipstream_lease = run, first if holder == run else address, time.monotonic()
        return self._slipstream_lease[1]

    def slipstream_release(self, run: str) -> None:
        """Drop the claim of `run`."""
        if getattr(self, "_slipstream_lease", ("",))[0] == run:
            del self._slipstream_lease

    def slipstream_export_ipc_handles(self, shapes: dict[str, list[int]]) -> dict[str, str]:
        """IPC handles of this worker's tensors for parameters of these shapes (`sync.single_copy`)."""
        shards = map_parameters(self.model_runner.get_model(), shapes, *_tensor_parallel(self))
        return export_ipc_handles({name: shard.tensor for name, shard in shards.items()})

    def slipstream_track_tokens(self) -> None:
        """Start counting the tokens of requests. Idempotent."""
        if not hasattr(self, "_slipstream_tokens"):
            self._slipstream_tokens = TokenCounter(self.model_runner)

    def slipstream_sample_in_one_pass(self) -> None:
        """Sample with fewer passes over the logits, on a GPU."""
        if torch.cuda.is_available():
            use_single_pass(self.model_runner)

    def slipstream_tune_gc(self) -> None:
        """Collect garbage rarely in this process, which the engine core shares if there is one worker.

        vLLM collects it at each sleep and wake-up: without the objects that exist now that takes milliseconds.
        """
        raise_gc_thresholds()
        freeze_heap()

    def slipstream_connect(self, link: str, connection_info: ConnectionInfo, rank: int) -> list[str]:
        """Open this worker's end of a link. The first worker has this rank.

        Returns the parameters that only other pipeline stages hold. Raises `InvalidInput` for a model that can't be
        updated in place.
        """
        self.slipstream_track_tokens()
        model = self.model_runner.get_model()
        for module in model.modules():
            if hasattr(module, "cpu_linear"):  # the head: replace the repacked copy by the weights themselves
                module.cpu_linear = torch.nn.functional.linear
        stages = self.model_runner.parallel_config.pipeline_parallel_size
        shards = map_parameters(model, connection_info["shapes"], *_tensor_parallel(self), stages)
        validate_link(link, shards)
        if not getattr(self, "_slipstream_validated", False):  # later the weights may be those of a run
            _validate_layout(self.model_runner, shards)
            self._slipstream_validated = True
        if hasattr(self, "_slipstream"):
            self._slipstream.close()
        if link == "nccl_direct":
            self._slipstream = BlockingWeights(NcclDirectReceiver(connection_info, self, rank), shards)
        else:
            staged = not self.vllm_config.model_config.enable_sleep_mode
            self._slipstream = ServedWeights(
                link, connection_info, shards, rank + self.rank, rebind=False, staged=staged, stage_only=stages > 1
            )
        if hasattr(self, "_slipstream_lease"):  # renew: this call blocked the run's own renewals
            self.slipstream_claim(*self._slipstream_lease[:2], new=False)
        return [name for name in connection_info["shapes"] if name not in shards]

    def slipstream_prepare(self, handle: PublishHandle) -> None:
        """Start to receive a version."""
        self._slipstream.prepare(handle)

    def slipstream_prepared(self) -> str | None:
        """ "" once the version is staged, or why it did not arrive (vLLM loses kinds of exceptions), else None."""
        try:
            return "" if self._slipstream.prepared() else None
        except Superseded as error:
            return str(error)

    def slipstream_prepare_adapter(self, handle: PublishHandle) -> None:
        """Start to load a version's adapter; `slipstream_checksums` then reads this adapter."""
        from slipstream.generators.vllm.lora_worker import AdapterLoader

        if not isinstance(getattr(self, "_slipstream", None), AdapterLoader):
            if hasattr(self, "_slipstream"):
                self.slipstream_close()
            self.slipstream_track_tokens()
            self._slipstream = AdapterLoader(self.model_runner.lora_manager, lambda: self.model_runner.input_batch)
        self._slipstream.prepare(handle)

    def slipstream_remove_adapter(self, name: str) -> bool:
        """Unload an adapter of a server, unless a sequence uses it."""
        removed: bool = self._slipstream.remove(name)
        return removed

    def slipstream_adapter_prepared(self) -> float | str | None:
        """Seconds that forward passes waited for the adapter, once it is in its slot, or why it did not arrive."""
        try:
            seconds: float | None = self._slipstream.prepared()
        except Superseded as error:
            return str(error)
        return seconds

    def slipstream_apply(self) -> None:
        """Swap the weights, and count the tokens that each request has sampled by all earlier passes."""
        self._slipstream_rolled_back = False
        try:
            self._slipstream.apply()
        except RolledBack:
            self._slipstream_rolled_back = True
        self._slipstream_counts = self._slipstream_tokens.count()
        self._slipstream_tokens.forget_finished()  # the caller of a swap remembers them

    def slipstream_swapped(self) -> list[Any] | None:
        """Pause in seconds, token counts before the swap, and whether the worker serves the version before it.

        None until the device has swapped.
        """
        if not self._slipstream.applied():
            return None
        return [self._slipstream.pause_s(), self._slipstream_counts(), self._slipstream_rolled_back]

    def slipstream_count_tokens(self) -> TokenCounts:
        """Tokens that each request has sampled."""
        return self._slipstream_tokens.count()()

    def slipstream_start_checksums(self, names: list[str]) -> None:
        """Start to compute checksums of these parameters."""
        self._slipstream.start_checksums(names)

    def slipstream_checksums(self) -> dict[str, str] | None:
        """The checksums as decimal text, since they exceed msgpack's 64 bits; None until they are computed."""
        sums = self._slipstream.checksums()
        return None if sums is None else {name: str(value) for name, value in sums.items()}

    def slipstream_close(self) -> None:
        """Close this worker's end of the link and free its staging memory."""
        self._slipstream.close()
        del self._slipstream


def _tensor_parallel(worker: WorkerMethods) -> tuple[int, int]:
    size: int = worker.model_runner.parallel_config.tensor_parallel_size
    return worker.rank % size, size


def _validate_layout(runner: Any, shards: Mapping[str, ParameterShard]) -> None:
    """Compare each shard with the model's files, as vLLM itself has loaded them.

    Raises `InvalidInput` that names the first parameter which vLLM stores in another format.
    """
    from vllm.model_executor.model_loader import get_model_loader

    if runner.load_config.load_format == "dummy":
        return
    loader: Any = get_model_loader(runner.load_config)
    for name, tensor in loader.get_all_weights(runner.model_config, runner.get_model()):
        shard = shards.get(name)
        values, shard = tensor[shard.index if shard else ()], shard or expert_shard(name, shards)
        if shard and not shard.holds(values):
            raise InvalidInput(
                f"vLLM stores {name} in a different layout: this model can't be updated in place; {USE_RESTART}"
            )

"""Everything that differs between vLLM releases (tested: 0.25 and 0.32), or lies below vLLM's documented interface.

A feature is detected by its presence, never by a version number.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from slipstream.config.schema import ConfigError
from slipstream.generators.vllm.preload import start_core_server
from slipstream.runtime.worker_main import LOG, write_to

if TYPE_CHECKING:
    from slipstream.generators.vllm.worker_methods import WorkerMethods

P = ParamSpec("P")
R = TypeVar("R")
CORE_CHECK_INTERVAL_S = 0.5
FORK_LIMIT_S = 300.0  # for a process of the fork server, which imports vLLM first
CUDA_BROKEN = 3  # exit code of a process that can't use CUDA


def refusals() -> tuple[type[Exception], ...]:
    """Exceptions by which vLLM refuses a request. Those of 0.32 are no `ValueError`."""
    from vllm import exceptions

    return ValueError, getattr(exceptions, "VLLMClientError", ValueError)


def quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values `[rows, columns]` of a bfloat16 matrix, and the float32 scale of each row, `[rows, 1]`.

    Calls vLLM's functions for "fp8_per_channel".
    """
    from vllm.model_executor.layers.quantization.online import fp8

    if not scales_span_ranks():  # 0.25
        values, scale = fp8.ops.scaled_fp8_quant(matrix, scale=None, use_per_token_if_dynamic=True)
        return values, scale
    scale = fp8._fp8_channel_scale(fp8.weight_amax(matrix, dim=-1, keepdim=True))
    return fp8._fp8_quant_per_channel(matrix, scale), scale


def scales_span_ranks() -> bool:
    """Whether the scale of an FP8 row is computed from the columns of all tensor-parallel ranks."""
    from vllm.model_executor.layers.quantization.online import fp8

    return hasattr(fp8, "amax_for_tp_weight_quant")


class _CoreProcess(ForkServerProcess):
    """A process with the environment variables and the log of the process that starts it, not of the fork server."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        if log := os.environ.get(LOG):
            write_to(log)
        super().run()


class _CoreContext(ForkServerContext):
    Process = _CoreProcess


def fork_core() -> None:
    """Let vLLM fork its engine core from the fork server. A spawned core would import vLLM after this process has."""
    start_core_server()
    from vllm.v1.engine import utils

    utils.get_mp_context = partial(_core_context, utils.get_mp_context)


def _core_context(spawning: Callable[[], Any]) -> Any:
    """The context in which vLLM starts its core: that of the fork server, if its children can use CUDA.

    Some libraries that vLLM imports if they are installed, such as torchao, initialize CUDA when they are imported.
    """
    probe = _CoreContext().Process(target=_exit_unless_cuda_works)
    probe.start()
    probe.join(FORK_LIMIT_S)
    if probe.exitcode == 0:
        return _CoreContext()
    probe.kill()
    why = (
        "an import of vLLM initializes CUDA" if probe.exitcode == CUDA_BROKEN else "a process forked for a test failed"
    )
    print(f"{why}, so vLLM's core can't be forked and starts later", file=sys.stderr)
    return spawning()


def _exit_unless_cuda_works() -> None:
    sys.exit(CUDA_BROKEN if torch.cuda._is_in_bad_fork() else 0)


def core_has_own_process(llm: Any) -> bool:
    """Whether vLLM's engine core is a separate process."""
    return hasattr(llm.engine_core, "call_utility")


def core_died(llm: Any) -> bool:
    """Whether vLLM's engine core is a separate process and has ended."""
    return bool(getattr(getattr(llm.engine_core, "resources", None), "engine_dead", False))


def exit_when_core_dies(llm: Any) -> threading.Event:
    """Exit this process soon after vLLM's core has died: calls into vLLM would never return.

    Set the returned event before vLLM is shut down.
    """
    closing = threading.Event()

    def watch() -> None:
        while not closing.wait(CORE_CHECK_INTERVAL_S):
            if not closing.is_set():
                exit_if_core_died(llm)

    threading.Thread(target=watch, name="exit when vLLM's core dies", daemon=True).start()
    return closing


def exit_if_core_died(llm: Any) -> None:
    """Exit this process if vLLM's core has died, so that the run sees a dead engine instead of failing requests."""
    if core_died(llm):
        print("vLLM's engine core died; its error is above", file=sys.stderr, flush=True)
        os._exit(1)


def cpu_head_sizes() -> list[int]:
    """Head dimensions that vLLM's attention on a CPU supports; empty if this build doesn't list them."""
    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    except (ImportError, AttributeError):
        return []
    return sizes


def has_mamba_kernel() -> bool:
    """Whether this build of vLLM can compute the layers of the first version of Mamba; 0.32 for CPUs can't."""
    from vllm import _custom_ops  # noqa: F401  loads vLLM's kernels into `torch.ops`

    return hasattr(torch.ops._C, "selective_scan_fwd")


def call_workers(llm: Any, method: Callable[Concatenate[WorkerMethods, P], R], *args: P.args, **_: P.kwargs) -> list[R]:
    """Result of a `WorkerMethods` method from each worker, called between two forward passes."""
    results: list[R] = llm.collective_rpc(method.__name__, args=args)
    return results


def call_workers_nowait(
    llm: Any, method: Callable[Concatenate[WorkerMethods, P], R], *args: P.args, **_: P.kwargs
) -> Future[list[R]]:
    """Send the request of `call_workers`. Returns a future of the results, which workers compute between two passes.

    Waits for the results where vLLM lacks the parts for that, or runs in this process.
    """
    core = llm.engine_core
    future: Future[list[R]] = Future()
    if hasattr(core, "utility_results") and hasattr(core, "_send_input"):
        from vllm.v1.engine import EngineCoreRequestType

        number = uuid.uuid1().int >> 64
        core.utility_results[number] = future
        call = (method.__name__, None, args, None)
        core._send_input(EngineCoreRequestType.UTILITY, (0, number, "collective_rpc", call))
    else:
        future.set_result(call_workers(llm, method, *args))  # type: ignore[call-arg]
    return future


def is_known_runner(runner: Any) -> bool:
    """Whether `count_tokens` supports this model runner; vLLM has two."""
    return hasattr(runner, "requests") or hasattr(runner, "req_states")


def count_tokens(runner: Any) -> Callable[[], dict[str, int]]:
    """Tokens sampled by each request of a model runner as of now, by vLLM's request id. Calling the result may wait.

    The first runner has the counts on the host when it launches a pass. The second one has them on the device, so
    they are copied in the stream of the passes, and the result waits for the copy.
    """
    if not hasattr(runner, "req_states"):
        counts = {name: len(request.output_token_ids) for name, request in runner.requests.items()}
        return lambda: counts
    states = runner.req_states
    totals = torch.empty(states.total_len.gpu.shape, dtype=states.total_len.gpu.dtype, pin_memory=True)
    totals.copy_(states.total_len.gpu, non_blocking=True)
    prompts, rows = states.prompt_len.np.copy(), dict(states.req_id_to_index)
    copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def counts_on_device() -> dict[str, int]:
        copied.synchronize()
        return {name: int(totals[i]) - int(prompts[i]) for name, i in rows.items()}

    return counts_on_device


def validate_experts_returned(on_cpu: bool) -> None:
    """Raise `ConfigError` if this vLLM can't return the chosen experts of each token."""
    from vllm import EngineArgs

    if on_cpu or not hasattr(EngineArgs, "enable_return_routed_experts"):
        where = "on a CPU" if on_cpu else "of this release"
        raise ConfigError(
            f"algorithm.replay_routing = true is impossible: vLLM {where} does not return the experts that it chose; "
            'set it to false, or generator.engine = "torch"'
        )


def routed_experts(output: Any) -> Any:
    """Experts that each token of a completion was routed to; None if this release doesn't return them."""
    return getattr(output, "routed_experts", None)


def caches_were_reset(response: Mapping[str, Any]) -> bool:
    """Whether a server has dropped its keys and values, by its response; release 0.25 responds with nothing."""
    return response.get("success", True) is True

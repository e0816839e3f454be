"""What is not the same in every release of vLLM (0.25 and 0.32 are tried), or is below what vLLM calls its interface.

Nothing else of Slipstream asks which release it has before it, so what another one changes is mended here. What a
release has is found by looking for it, never by its number.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from slipstream.config import ConfigError


def core_is_apart(llm: Any) -> bool:
    """Whether vLLM's core is a process of its own."""
    return hasattr(llm.engine_core, "call_utility")


def cpu_head_sizes() -> list[int]:
    """Head dimensions that vLLM's attention on a CPU supports; empty if this build does not say."""
    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    except (ImportError, AttributeError):
        return []
    return sizes


def core_died(llm: Any) -> bool:
    """Whether vLLM's core, if it is a process of its own, has ended."""
    return bool(getattr(getattr(llm.engine_core, "resources", None), "engine_dead", False))


def post(llm: Any, method: str, *arguments: Any) -> Future[list[Any]]:
    """Have all workers call a method between two passes, without waiting for the pass that is under way.

    It is `LLMEngine.collective_rpc` without its wait. Where vLLM lacks the parts for that, or runs in this process, it
    is called and waited for.
    """
    core = llm.engine_core
    answer: Future[list[Any]] = Future()
    if hasattr(core, "utility_results") and hasattr(core, "_send_input"):
        from vllm.v1.engine import EngineCoreRequestType

        number = uuid.uuid1().int >> 64
        core.utility_results[number] = answer
        core._send_input(EngineCoreRequestType.UTILITY, (0, number, "collective_rpc", (method, None, arguments, None)))
    else:
        answer.set_result(llm.collective_rpc(method, args=arguments))
    return answer


def counts_tokens(runner: Any) -> bool:
    """Whether `drawn` knows this model runner, of which vLLM has two."""
    return hasattr(runner, "requests") or hasattr(runner, "req_states")


def drawn(runner: Any) -> Callable[[], dict[str, int]]:
    """Counts, as of now, the tokens of the requests that a runner has, by vLLM's names for them; the result can be had
    once the device is there.

    The first runner knows the count when it launches a pass; the second keeps it on the device, where a copy in the
    stream of the passes tells it as of now.
    """
    if not hasattr(runner, "req_states"):
        counts = {name: len(request.output_token_ids) for name, request in runner.requests.items()}
        return lambda: counts
    states = runner.req_states
    totals = torch.empty(states.total_len.gpu.shape, dtype=states.total_len.gpu.dtype, pin_memory=True)
    totals.copy_(states.total_len.gpu, non_blocking=True)
    prompts, places = states.prompt_len.np.copy(), dict(states.req_id_to_index)
    copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def count() -> dict[str, int]:
        copied.synchronize()
        return {name: int(totals[i]) - int(prompts[i]) for name, i in places.items()}

    return count


def refuse_unrecorded_experts(on_cpu: bool) -> None:
    """Raise `ConfigError` where this vLLM does not tell which experts it chose."""
    from vllm import EngineArgs

    if on_cpu or not hasattr(EngineArgs, "enable_return_routed_experts"):
        where = "on a CPU" if on_cpu else "of this release"
        raise ConfigError(
            f"algorithm.keep_routing = true can't be: vLLM {where} does not tell which experts it chose; set it to "
            'false, or generator.kind = "torch"'
        )


def experts_of(output: Any) -> Any:
    """The experts that a completion's tokens went through, if it tells."""
    return getattr(output, "routed_experts", None)


def transfer() -> tuple[Callable[[Mapping[str, Any]], Any], Callable[[Any, Iterator[tuple[str, torch.Tensor]]], None]]:
    """The trainer's half of vLLM's NCCL transfer: what opens a communicator as rank 0, and what sends tensors by it.

    Raises `ConfigError` where vLLM has neither."""
    try:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
    except ModuleNotFoundError as error:
        raise ConfigError(f'sync.link = "nccl_direct" needs vLLM in the trainer, too: {error}') from None
    except ImportError as error:
        raise ConfigError(
            f'sync.link = "nccl_direct" does not know this vLLM\'s transfer ({error}); use sync.link = "nccl"'
        ) from None

    def send(group: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        packed_nccl_broadcast_producer(tensors, group, src=0, post_iter_func=lambda named: named[1])

    return trainer_init, send


def told_packed(engine: Any, address: Mapping[str, Any], update: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a worker's transfer engine is told when it connects and when it receives, for tensors packed into messages:
    the one says so from 0.32 on, the other did in 0.25."""
    kinds = (engine.init_info_cls, address), (engine.update_info_cls, update)
    packed = [{**told} | ({"packed": True} if "packed" in kind.__dataclass_fields__ else {}) for kind, told in kinds]
    if sum("packed" in told for told in packed) != 1:
        raise ValueError('this vLLM\'s transfer engine is told otherwise how tensors are sent; use sync.link = "nccl"')
    return packed


def caches_were_reset(answer: Mapping[str, Any]) -> bool:
    """Whether a server says that it has dropped its keys and values; 0.25 does not say."""
    return answer.get("success", True) is True

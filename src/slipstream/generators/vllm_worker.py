"""What Slipstream adds to vLLM's workers, by vLLM's own option for that (`worker_extension_cls`).

Every method is called by `LLMEngine.collective_rpc` and runs in each worker between two forward passes.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from slipstream.generators.vllm_places import expert_part, places_of
from slipstream.generators.vllm_requests import CLAIM, Drawn
from slipstream.generators.weights import Place, ServedWeights, side_stream
from slipstream.heap import collect_seldom
from slipstream.models import end_of_sequence, generation_config, sizes_of
from slipstream.sync.link import Ticket
from slipstream.sync.nccl_direct import NativeReceiver
from slipstream.sync.single_copy import lend
from slipstream.vllm_releases import counts_tokens, drawn

ENDED = 1 << 12  # requests that ended since the last swap and are remembered; answers of those before are long read

if not torch.cuda.is_available():
    # On a CPU vLLM packs weights into a form of its own and forgets them, unless a layer asks it not to.
    from vllm.model_executor.layers.linear import LinearBase

    LinearBase._cpu_skip_gemm_dispatch = True


class HeldWeights(ServedWeights):
    """Weights that arrive while the engine is held, by vLLM's own means."""

    def __init__(self, receiver: NativeReceiver, places: Mapping[str, Place]) -> None:
        self._native, self._places = receiver, places
        self._stream = side_stream(next(iter(places.values())).tensor.device)

    def prepare(self, ticket: Ticket) -> None: ...

    def prepared(self) -> bool:
        return True

    def apply(self) -> None:
        began = time.perf_counter()
        self._native.receive()
        self._held = time.perf_counter() - began

    def applied(self) -> bool:
        return True

    def held(self) -> float:
        return self._held

    def check(self, names: Sequence[str]) -> None:
        self._found = self._checksums(names)

    def checked(self) -> dict[str, int]:
        return self._found

    def close(self) -> None: ...


class Tokens:
    """The tokens that requests have drawn, those too that the model runner has let go.

    Both runners forget a request that has ended, and the second one that is preempted, until it is resumed. Each pass
    begins with that, so it is noted right before.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._preempted: dict[str, Callable[[], dict[str, int]]] = {}  # the last counts of it, known when they arrive
        self._ended: deque[str] = deque(maxlen=ENDED)
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *more: Any, **named: Any) -> Any:
            self._note(scheduler_output)
            return execute(scheduler_output, *more, **named)

        runner.execute_model = execute_model

    def count(self) -> Callable[[], Drawn]:
        """Counts, as of now; the result can be had once the device is that far."""
        running, preempted, ended = drawn(self._runner), dict(self._preempted), list(self._ended)

        def counted() -> Drawn:
            away = {name: tokens for name, before in preempted.items() if (tokens := before().get(name)) is not None}
            return dict.fromkeys(ended) | away | running()  # one that was resumed runs

        return counted

    def forget(self) -> None:
        """Forget who has ended."""
        self._ended.clear()

    def _note(self, scheduler_output: Any) -> None:
        ended = scheduler_output.finished_req_ids
        self._ended.extend(ended)
        for name in ended:
            self._preempted.pop(name, None)
        if preempted := (scheduler_output.preempted_req_ids or set()) - ended:
            self._preempted |= dict.fromkeys(preempted, cache(drawn(self._runner)))


class WorkerExtension:
    """Mixed into the worker, whose `model_runner`, `rank` and `vllm_config` it uses."""

    model_runner: Any
    rank: int
    vllm_config: Any
    _slipstream: Any  # `ServedWeights`, or the `AdapterLoader`
    _tokens: Tokens

    def slipstream_ask(self, method: str, *arguments: Any) -> list[Any] | str:
        """What another method answers, as the one member of a list, or a text that says why it could not: of what is
        raised a server tells its log alone, and what is no list, dictionary or None reaches who asked as a text."""
        try:
            return [getattr(self, f"slipstream_{method}")(*arguments)]
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"

    def slipstream_describe(self) -> dict[str, Any]:
        """What a run has to know of a server that it did not start."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        return {
            "logprobs_mode": model.logprobs_mode,
            "dtype": str(model.dtype).removeprefix("torch."),
            "context": model.max_model_len,
            "vocabulary": model.get_vocab_size(),
            "sizes": sizes_of(model.hf_config),
            "max_logprobs": model.max_logprobs,
            "eos": sorted(end_of_sequence(generation_config(model.model), model.hf_config)),
            "replicas": parallel.data_parallel_size * parallel.pipeline_parallel_size,
            "counts": counts_tokens(self.model_runner),
            "slots": self.vllm_config.scheduler_config.max_num_seqs,
        }

    def slipstream_claim(self, run: str, address: str, anew: bool) -> str | None:
        """Let a run have this worker, unless another has said within `CLAIM` seconds that it has; or, if not `anew`,
        see whether it still has it, which it has not after a restart. None says no, else it is told by which address
        the run has it."""
        holder, first, said = getattr(self, "_claimed", ("", "", -CLAIM))
        if holder != run and (not anew or time.monotonic() - said < CLAIM):
            return None
        self._claimed = run, first if holder == run else address, time.monotonic()
        return self._claimed[1]

    def slipstream_release(self, run: str) -> None:
        """Let others have it, if this run did."""
        if getattr(self, "_claimed", ("",))[0] == run:
            del self._claimed

    def slipstream_lend(self, shapes: dict[str, list[int]]) -> dict[str, str]:
        """This worker's tensors for parameters of these shapes, for a trainer of this host to compute on."""
        size = self.model_runner.parallel_config.tensor_parallel_size
        places = places_of(self.model_runner.get_model(), shapes, self.rank % size, size)
        return lend({name: place.tensor for name, place in places.items()})

    def slipstream_watch(self) -> None:
        """From here on, know what requests have drawn."""
        if not hasattr(self, "_tokens"):
            self._tokens = Tokens(self.model_runner)

    def slipstream_collect_seldom(self) -> None:
        """In this process, which is that of the core, too, unless several workers have one each."""
        collect_seldom()

    def slipstream_connect(self, link: str, offer: Ticket, rank: int) -> None:
        """Open this worker's end of a link. Raises `ValueError` for a model that can't be written in place."""
        self.slipstream_watch()
        model = self.model_runner.get_model()
        for module in model.modules():
            if hasattr(module, "cpu_linear"):  # the head, packed beside its weights
                module.cpu_linear = torch.nn.functional.linear
        size = self.model_runner.parallel_config.tensor_parallel_size
        places = places_of(model, offer["shapes"], self.rank % size, size)
        if not getattr(self, "_checked", False):  # afterwards the values may be a run's
            _refuse_other_values(self.model_runner, places)
            self._checked = True
        if link == "nccl_direct":
            self._slipstream = HeldWeights(NativeReceiver(offer, self, rank), places)
        else:
            staged = not self.vllm_config.model_config.enable_sleep_mode
            self._slipstream = ServedWeights(link, offer, places, rank + self.rank % size, rebind=False, staged=staged)
        if hasattr(self, "_claimed"):  # all this time the run could not say that it still has it
            self.slipstream_claim(*self._claimed[:2], anew=False)

    def slipstream_prepare(self, ticket: Ticket) -> None:
        self._slipstream.prepare(ticket)

    def slipstream_prepared(self) -> bool | None:
        """True once the version is here."""
        return self._slipstream.prepared() or None

    def slipstream_load(self, ticket: Ticket) -> None:
        """Begin to read a version's adapter; what is to be checked is then of that."""
        from slipstream.generators.vllm_loader import AdapterLoader

        if not hasattr(self, "_slipstream"):
            self._slipstream = AdapterLoader(self.model_runner.lora_manager)
        self._slipstream.prepare(ticket)

    def slipstream_loaded(self) -> float | None:
        """Once it is in its slot, how long passes waited for that."""
        seconds: float | None = self._slipstream.prepared()
        return seconds

    def slipstream_apply(self) -> None:
        """Swap the weights, and count what each request has drawn by all passes before this."""
        self._slipstream.apply()
        self._drawn = self._tokens.count()
        self._tokens.forget()  # who asks for a swap remembers it

    def slipstream_swapped(self) -> list[Any] | None:
        """How long the swap took and the tokens that each request had drawn before it; None while it is going on."""
        return [self._slipstream.held(), self._drawn()] if self._slipstream.applied() else None

    def slipstream_drawn(self) -> Drawn:
        """Tokens that each request has drawn by now."""
        return self._tokens.count()()

    def slipstream_check(self, names: list[str]) -> None:
        self._slipstream.check(names)

    def slipstream_checked(self) -> dict[str, str] | None:
        """The checksums that were asked for, as text: they have more bits than a message may carry."""
        sums = self._slipstream.checked()
        return None if sums is None else {name: str(value) for name, value in sums.items()}

    def slipstream_close(self) -> None:
        self._slipstream.close()
        del self._slipstream  # with what it holds for the next version


def _refuse_other_values(runner: Any, places: Mapping[str, Place]) -> None:
    """See that every place holds what vLLM itself has loaded there from the model's files.

    Raises `ValueError` that names a parameter which vLLM keeps in another form: written in place it would be garbled.
    """
    from vllm.model_executor.model_loader import get_model_loader

    if runner.load_config.load_format == "dummy":
        return
    loader: Any = get_model_loader(runner.load_config)
    for name, tensor in loader.get_all_weights(runner.model_config, runner.get_model()):
        place = places.get(name)
        held = place.tensor if place else expert_part(name, places)
        if held is not None and not torch.equal(tensor[place.index if place else ()].to(held), held):
            raise ValueError(f"vLLM keeps {name} in a form of its own; this model can't be updated in place")

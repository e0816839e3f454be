"""What runs inside a generator's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from slipstream.actor import Reply
from slipstream.config import Config
from slipstream.generators.base import GenerationError, Interruption
from slipstream.generators.weights import ServedWeights, local_places
from slipstream.models import device_here, dtype_of, load_model, load_tokenizer, trained_parameters
from slipstream.rollout import Completion, Sampling
from slipstream.runtime.placement import threads
from slipstream.sync.link import Ticket


class Engine(Protocol):
    """What draws tokens, one `step` at a time; see `generators.torch.Engine`."""

    version: int
    draining: bool
    asleep: bool
    tokens_generated: int
    tokens_wasted: int
    busy_seconds: float

    @property
    def busy(self) -> bool: ...
    @property
    def settled(self) -> bool: ...
    @property
    def running(self) -> int: ...
    def submit(self, key: Hashable, prompt_ids: Sequence[int], sampling: Sampling) -> None: ...
    def abort(self, key: Hashable) -> None: ...
    def drawn(self) -> int: ...
    def lend(self, shapes: dict[str, list[int]]) -> list[dict[str, str]]: ...
    def step(self) -> Sequence[tuple[Hashable, Completion | GenerationError]]: ...
    def swap(self, version: int, apply: Callable[[], Any], how: Interruption) -> float: ...
    def sleep(self, level: int) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...


class Weights(Protocol):
    """What an engine serves, as the end of a link; see `generators.weights.ServedWeights`."""

    def prepare(self, ticket: Ticket) -> None: ...
    def prepared(self) -> bool: ...
    def apply(self) -> Any: ...
    def held(self) -> float: ...
    def check(self, names: Sequence[str]) -> None: ...
    def checked(self) -> dict[str, int] | None: ...
    def close(self) -> None: ...


OpenWeights = Callable[[str, Ticket, int], Weights]


class GeneratorService:
    """An engine and its end of the weight link."""

    def __init__(self, config: Config, log: Path | None = None, sharers: int = 1) -> None:
        torch.set_num_threads(threads(config.generator.threads, config))
        self._config, self._log, self._sharers = config, log, sharers
        self._engine, self._open_weights = self._load()
        self._weights: Weights | None = None
        self._replies: dict[Hashable, Reply] = {}
        self._awaited: tuple[Callable[[], Any], Reply] | None = None  # of the weights: a question, and who asked
        self._swap: tuple[int, Reply] | None = None
        self._swapped: tuple[float, Reply] | None = None
        self._sleep: tuple[int, Reply] | None = None
        self.progress = 0  # steps of the engine
        self._unknown = False  # whether a swap has failed: nobody knows what is served, and no step is taken any more

    def _load(self) -> tuple[Engine, OpenWeights]:
        """The engine, and how the weights that it serves are opened for a link, an offer and a rank."""
        from slipstream.generators.torch import Engine

        config = self._config
        device = device_here()
        model = load_model(config.model, config.lora, device=device, dtype=dtype_of(config))
        for parameter in trained_parameters(model).values():
            parameter.data = parameter.data.to(
                dtype_of(config)
            )  # in which it is published; peft makes adapters float32
        engine = Engine(
            model.get_base_model() if config.lora.rank else model,
            slots=config.generator.slots,
            context=config.generator.context,
            tokenizer=load_tokenizer(config.model.path),
        )
        places = local_places(trained_parameters(model))
        return engine, lambda link, offer, rank: ServedWeights(link, offer, places, rank, rebind=True)

    @property
    def busy(self) -> bool:
        asked = any((self._awaited, self._swap, self._swapped, self._sleep))
        return asked or (self._engine.busy and not self._engine.asleep and not self._unknown)

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Reply) -> None:
        if method == "generate":
            key, prompt_ids, sampling = arguments
            self._engine.submit(key, prompt_ids, sampling)
            self._replies[key] = reply
        elif method == "abort":
            (key,) = arguments
            self._engine.abort(key)
            self._replies.pop(key, None)
        elif method == "prepare":
            self._served.prepare(*arguments)
            self._awaited = (lambda: self._served.prepared() or None, reply)
        elif method == "checksums":
            self._served.check(*arguments)
            self._awaited = (self._served.checked, reply)
        elif method == "swap":
            self._swap = (*arguments, reply)
        elif method == "sleep":
            self._sleep = (*arguments, reply)
        else:
            reply(getattr(self, method)(*arguments))

    def tick(self) -> None:
        """Swap weights or fall asleep if that is asked for, and the engine drained where it has to be; then take one
        step, if it is awake. After a swap that failed none is taken: weights may be in place in part."""
        how = self._config.sync.interruption
        if (self._awaited and self._answer_when_known(*self._awaited)) or self._answer_a_swap():
            return  # who asked is told before the next step ends
        if self._swap or self._sleep:
            self._engine.draining = how == "drain" and self._engine.running > 0
        if self._swap and not self._engine.draining:
            version, reply = self._swap
            self._swap = None
            try:
                self._swapped = (self._engine.swap(version, self._served.apply, how), reply)
            except Exception as error:
                self._unknown = True
                reply(error)
        if self._sleep and not self._engine.draining and not self._swapped:
            level, reply = self._sleep
            self._sleep = None
            try:
                self._engine.sleep(level)
                reply(None)
            except Exception as error:
                reply(error)
        if self._unknown or self._answer_a_swap():
            return
        drawing = self._engine.running > 0
        for key, answer in self._engine.step():
            self._replies.pop(key)(answer)
        self.progress += drawing

    def _answer_a_swap(self) -> bool:
        """Tell who asked for a swap what it cost, once it is known which version drew which token."""
        if not self._swapped or not self._engine.settled:
            return False
        held, reply = self._swapped
        self._swapped = None
        reply((max(held, self._served.held()), self.stats()))
        return True

    def _answer_when_known(self, ask: Callable[[], Any], reply: Reply) -> bool:
        """Tell who asked, if it is known. Returns whether it was."""
        try:
            answer = ask()
        except Exception as error:
            answer = error
        if answer is not None:
            self._awaited = None
            reply(answer)
        elif not self._engine.busy:
            time.sleep(0.001)
        return answer is not None

    def lend(self, shapes: dict[str, list[int]]) -> list[dict[str, str]]:
        """Handles of the served weights of each rank, for a trainer that computes on them (`sync.single_copy`)."""
        return self._engine.lend(shapes)

    def wake(self, tags: Sequence[str]) -> None:
        """Take memory for "weights" or for the "kv_cache" again; with both, go on."""
        self._engine.wake(tags)

    def begin(self, version: int) -> None:
        """The engine was started on this version's files."""
        self._engine.version = version

    def connect(self, offer: Ticket, rank: int) -> None:
        """Open this end of the link, anew if the one before was broken; `rank` is the first of this generator's among
        all that hold weights."""
        if self._weights:
            self._weights.close()
            self._awaited = self._swap = None  # nobody waits for that any more
            self._engine.draining = False
        self._weights = self._open_weights(self._config.sync.link, offer, rank)

    def drawn(self) -> int:
        """Tokens that the furthest sequence in flight has drawn."""
        return self._engine.drawn()

    def stats(self) -> dict[str, float]:
        """Totals since the start."""
        engine = self._engine
        return {"tokens": engine.tokens_generated, "wasted": engine.tokens_wasted, "busy": engine.busy_seconds}

    def close(self) -> None:
        if self._weights:
            self._weights.close()

    @property
    def _served(self) -> Weights:
        assert self._weights is not None, "connect comes first"
        return self._weights

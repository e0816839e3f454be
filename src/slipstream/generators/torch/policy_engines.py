"""Several embedded engines as one: each has a model of its own, and serves the policies that train on that model.

They take turns step by step in one thread. A swap replaces the weights of all of them between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from slipstream.generators.base import GenerationError, Interruption
from slipstream.generators.torch.engine import Engine
from slipstream.rollout import Completion, Sampling


class PolicyEngines:
    """Engines with the methods of one `Engine`, which are documented there. A request goes to that of its policy."""

    versions_known = True

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._by_policy = {policy: engine for engine in engines for policy in engine.policies}

    @property
    def version(self) -> int:
        return self._engines[0].version

    @version.setter
    def version(self, value: int) -> None:
        self._set("version", value)

    @property
    def draining(self) -> bool:
        return self._engines[0].draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._set("draining", value)

    @property
    def asleep(self) -> bool:
        return self._engines[0].asleep

    @property
    def busy(self) -> bool:
        return any(engine.busy for engine in self._engines)

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self._engines)

    @property
    def tokens_generated(self) -> int:
        return sum(engine.tokens_generated for engine in self._engines)

    @property
    def tokens_discarded(self) -> int:
        return sum(engine.tokens_discarded for engine in self._engines)

    @property
    def busy_seconds(self) -> float:
        return sum(engine.busy_seconds for engine in self._engines)

    def longest_in_flight(self) -> int:
        return max(engine.longest_in_flight() for engine in self._engines)

    def export_ipc_handles(self, shapes: dict[str, list[int]]) -> list[dict[str, str]]:
        raise NotImplementedError("sync.link = single_copy is refused with several policies")

    def submit(self, key: Hashable, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        if sampling.policy not in self._by_policy:
            raise GenerationError(f"this engine serves no policy {sampling.policy!r}")
        self._by_policy[sampling.policy].submit(key, prompt_ids, sampling)

    def abort(self, key: Hashable) -> None:
        for engine in self._engines:
            engine.abort(key)

    def step(self) -> list[tuple[Hashable, Completion | GenerationError]]:
        return [result for engine in self._engines for result in engine.step()]

    def swap(self, version: int, apply: Callable[[], None], how: Interruption = "continue") -> float:
        """As `Engine.swap`: `apply` replaces the weights of all engines."""
        first, *others = self._engines
        seconds = first.swap(version, apply, how)
        return seconds + sum(engine.swap(version, lambda: None, how) for engine in others)

    def sleep(self, level: int) -> None:
        for engine in self._engines:
            engine.sleep(level)

    def wake(self, tags: Sequence[str]) -> None:
        for engine in self._engines:
            engine.wake(tags)

    def _set(self, name: str, value: Any) -> None:
        for engine in self._engines:
            setattr(engine, name, value)

"""A vLLM engine inside a generator's process."""

from __future__ import annotations

from slipstream.generators.vllm import VllmEngine
from slipstream.heap import collect_seldom
from slipstream.runtime.generating import Engine, GeneratorService, OpenWeights


class VllmService(GeneratorService):
    """`GeneratorService` with vLLM in the place of the embedded engine."""

    def _load(self) -> tuple[Engine, OpenWeights]:
        engine = VllmEngine(self._config, sharers=self._sharers, log=self._log)
        collect_seldom()
        self._over = engine.end_with_core()
        return engine, engine.open_weights

    def close(self) -> None:
        self._over.set()
        super().close()

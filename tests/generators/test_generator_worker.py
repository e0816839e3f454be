"""An engine's worker, whose calls may be cancelled, as by the death of the trainer."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from slipstream.config.loading import load_config
from slipstream.generators.generator_worker import GeneratorWorker
from slipstream.generators.served_weights import BackgroundWorker


class SlowSwap:
    """An engine, and its end of a link, whose swap takes place in a thread and ends when `arrive` is set."""

    running, version, asleep, draining = 1, 0, False, False
    busy = True
    tokens_generated = tokens_discarded = busy_seconds = 0

    def __init__(self) -> None:
        self.arrive, self.events = threading.Event(), list[str]()
        self._swap: Future[None] | None = None

    @property
    def versions_known(self) -> bool:
        return self._swap is None or self._swap.done()

    def step(self) -> list[Any]:
        return []

    def swap(self, version: int, apply: Any, how: str) -> float:
        self._swap = apply()
        return 0.0

    def open(self, link: str, connection_info: Any, rank: int) -> SlowSwap:
        self.events.append("open")
        return self

    def apply(self) -> Future[None]:
        def receive() -> None:
            self.arrive.wait(60)
            self.events.append("swapped")

        return BackgroundWorker("weights").submit(receive)

    def close(self) -> None:
        self.events.append("close")


def test_a_new_link_waits_for_the_swap_of_a_trainer_that_died(tiny: Path, monkeypatch: Any) -> None:
    """The controller cancels the call when the trainer dies; the engine's workers swap all the same."""
    engine = SlowSwap()
    monkeypatch.setattr(GeneratorWorker, "_load", lambda worker: (engine, engine.open))

    async def main() -> None:
        worker = GeneratorWorker(load_config(None, [f"--model.path={tiny}", "--environment.name=addition"]))
        decoding = asyncio.ensure_future(worker.run())
        await worker.connect({}, 0)
        swap = asyncio.ensure_future(worker.swap(1))
        while engine.versions_known:
            await asyncio.sleep(0)
        swap.cancel()
        connect = asyncio.ensure_future(worker.connect({}, 0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert swap.cancelled() and engine.events == ["open"]
        engine.arrive.set()
        await asyncio.wait_for(connect, 60)
        assert engine.events == ["open", "swapped", "close", "open"]
        decoding.cancel()

    asyncio.run(main())

"""What the sender of `delta` sends to a receiver: the changes since the version that it has, or all weights."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.sync.blocks import Block
from slipstream.sync.changes import Changes, encode_rows, entries_of
from slipstream.sync.frames import PLAIN, Refused, Stream


class ChangeSource:
    """The changes of consecutive steps."""

    done = False  # it takes memory, and no receiver reads it any more
    rate = 0.0

    def __init__(self, state: int, base: int | None, steps: list[Stream]) -> None:
        self._header, self._steps, self.used = {"base": base, "state": state}, steps, time.monotonic()

    def wait_header(self) -> dict[str, Any]:
        """The header, without a wait: it is known from the start."""
        return self._header

    @property
    def trailer(self) -> dict[str, Any]:
        return self._steps[-1].trailer

    def frames(self, start: int = 0) -> Iterator[bytes]:
        for frame in islice(chain.from_iterable(step.frames() for step in self._steps), start, None):
            self.used = time.monotonic()
            yield frame


class WeightsSource(ChangeSource):
    """All weights of a state. They are read when they are sent, without what later versions have changed since."""

    def __init__(
        self, state: int, step: Stream, served: list[Tensor], blocks: Sequence[Block], lock: threading.Lock,
        written: Any,
    ) -> None:  # fmt: skip
        super().__init__(state, None, [step])
        self.state, self._served, self._blocks, self._lock, self._written = state, served, blocks, lock, written
        self.undo: defaultdict[int, list[Tensor | Changes]] = defaultdict(list)
        self._readers = 0
        device = served[0].device if served else torch.device("cpu")
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def frames(self, start: int = 0) -> Iterator[bytes]:
        self._readers, complete = self._readers + 1, False
        try:
            yield from self._frames(start)
            complete = True
        finally:
            self._readers -= 1
            self.done = complete and not self._readers

    def _frames(self, start: int) -> Iterator[bytes]:
        self._steps[-1].wait_end()
        frame = 0
        for number, block in enumerate(self._blocks):
            count = entries_of(block)
            if start < frame + count:
                words = self._read(number)
                entries = chain.from_iterable(encode_rows(segment, words) for segment in block.segments)
                for entry in islice(entries, max(0, start - frame), None):
                    self.used = time.monotonic()
                    yield PLAIN + entry
            frame += count

    def _read(self, number: int) -> Any:
        """The words of a block as this state has them, in NumPy's array."""
        with self._lock, torch.cuda.stream(self._stream):
            if not self._served:
                raise Refused("a newer version is published")
            if self._stream:
                self._stream.wait_event(self._written)
            words = np.array(self._served[number].cpu().numpy())
            undo = list(self.undo[number])
        for change in reversed(undo):
            if isinstance(change, Tensor):
                words = np.array(change.cpu().numpy())
            else:
                words[change.indices] -= change.differences.astype(words.dtype)
        return words

"""Codes the changed blocks of one version in a thread, for the `delta` link."""

from __future__ import annotations

import math
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.sync import arrays
from slipstream.sync.blocks import Block
from slipstream.sync.changes import (
    HEADER,
    Changes,
    Coding,
    choose_coding,
    count_small,
    encode,
    encode_rows,
    entries_of,
)
from slipstream.sync.frames import PLAIN, Stream

FRAME = 2**16  # bytes from which entries make a frame
MIN_FRAME = 2**12
HOP_S = 0.02  # that a frame may take: each receiver of a chain delays the next one by this time


def largest_frame(rate: float) -> float:
    """Bytes of the largest frame for networks of `rate` bytes per second (0.0: unknown)."""
    return max(MIN_FRAME, rate * HOP_S) if rate else math.inf


class _BlockChanges(NamedTuple):
    """A changed block: `changes`, or None if its new words are sent. `coding` is of the changes, from `measure` on."""

    number: int
    block: Block
    words: Tensor
    changes: Changes | None
    coding: Coding | None = None


class Coder:
    """Adds the entries of changed blocks to `stream`, in the order of `add`.

    `ended` is called in the thread with the trailer of the stream, and with what failed, or "".
    """

    def __init__(self, stream: Stream, device: torch.device, ended: Callable[[dict[str, Any], str], None]) -> None:
        self.changed = self.size = 0  # elements, and bytes of the entries; complete after `measure`
        self._stream, self._ended, self._device = stream, ended, device
        self._blocks = deque[_BlockChanges]()
        self._numbers: list[arrays.Array] = []  # of each block's changes: rises of checksums, those of `count_small`
        self._thread: threading.Thread | None = None
        self._own: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def add(self, number: int, block: Block, words: Tensor, changes: Changes | None) -> None:
        """Queue a block for the thread that `start` starts. `number` is its index among the blocks of the weights.

        `words` are its new values as integers. With `changes` only the changed words are sent. Without, all `words` are
        sent, and must not change until `join`.
        """
        if changes is None:
            self.changed += block.length
            self.size += entries_of(block) * HEADER.size + words.nbytes
        else:
            self._numbers += [block.rises(*changes), *count_small(changes)]
        self._blocks.append(_BlockChanges(number, block, words, changes))

    def measure(self) -> Counter[str]:
        """Complete `changed` and `size`. Returns by how much the changes raise the checksum of each parameter."""
        rises, numbers = Counter[str](), iter(arrays.to_ints(self._numbers))
        for at, changed in enumerate(self._blocks):
            _, block, words, changes, _ = changed
            if changes is None:
                continue
            for segment in block.segments:
                rises[segment.name] += next(numbers)
            count, small = len(changes.indices), (next(numbers), next(numbers))
            coding = choose_coding(block.length, count, small, words.element_size())
            self.changed += count
            self.size += HEADER.size + coding.size
            self._blocks[at] = changed._replace(coding=coding)
        return rises

    def start(self, trailer: dict[str, Any], rate: float = 0.0) -> None:
        """Start a thread that codes the added blocks and then ends the stream with `trailer`.

        `rate`: bytes per second of the receivers' networks (0.0: unknown), which bounds the size of frames.
        """
        if self._own:
            self._own.wait_stream(torch.cuda.current_stream(self._device))
        run = (trailer, largest_frame(rate))
        self._thread = threading.Thread(target=self._run, args=run, name="delta coder", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread:
            self._thread.join()

    def _run(self, trailer: dict[str, Any], largest: float) -> None:
        failure = ""
        try:
            self._code(largest)
        except Exception as error:  # such as a full GPU
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
        self._ended(trailer, failure)

    def _code(self, largest: float) -> None:
        entries, size = [PLAIN], 0
        while self._blocks:
            for entry in self._entries(self._blocks.popleft()):  # to free its memory once it is coded
                entries.append(entry)
                size += len(entry)
                if size >= min(FRAME, largest):
                    self._add(b"".join(entries), largest)
                    entries, size = [PLAIN], 0
        if size:
            self._add(b"".join(entries), largest)

    def _add(self, frame: bytes, largest: float) -> None:
        """Add a frame, or several if it is larger."""
        if len(frame) <= largest + 1:
            self._stream.add(frame)
            return
        for at in range(1, len(frame), int(largest)):
            self._stream.add(PLAIN + frame[at : at + int(largest)])

    @torch.no_grad()
    def _entries(self, changed: _BlockChanges) -> list[bytes]:
        number, block, words, changes, coding = changed
        with torch.cuda.stream(self._own):  # None changes nothing
            if changes is None:
                whole = arrays.on_host(words)
                return [entry for segment in block.segments for entry in encode_rows(segment, whole)]
            assert coding
            return [encode(number, block.length, changes, words.element_size(), coding)]

"""Codes the changed blocks of one version in a thread, on the device that holds them, for the `delta` link."""

from __future__ import annotations

import queue
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.sync import arrays
from slipstream.sync.changes import HEADER, Changes, Matrix, choose_coding, count_small, encode, raised
from slipstream.sync.frames import PLAIN, Stream

FRAME = 2**16  # bytes from which entries make a frame


class _Block(NamedTuple):
    """A changed block: `changes`, or None if its new words are sent; `ready` on a GPU when they are there."""

    parameter: int
    matrix: Matrix
    row: int
    words: Tensor
    changes: Changes | None
    ready: Any


class Coder:
    """Adds the entries of changed blocks to `stream`, in the order of `add`, and ends it.

    `ended` is called in the thread with the trailer of the stream, and whether all was coded.
    """

    def __init__(self, stream: Stream, device: torch.device, ended: Callable[[dict[str, Any], bool], None]) -> None:
        self.changed = self.size = 0  # elements, and bytes of the entries; complete after `measure`
        self._stream, self._ended, self._device = stream, ended, device
        self._blocks: queue.SimpleQueue[_Block | dict[str, Any] | None] = queue.SimpleQueue()
        self._counted: list[tuple[str, int, int, int]] = []  # name, words, changed words and word size of a block
        self._numbers: list[arrays.Array] = []  # three for each: rise of the checksum, and those of `count_small`
        self._thread = threading.Thread(target=self._code, name="delta coder", daemon=True)
        self._thread.start()

    def add(self, name: str, parameter: int, matrix: Matrix, row: int, words: Tensor, changes: Changes | None) -> None:
        """Code a block. Without `changes` all its `words` are sent, and may not change until `join`."""
        if changes is None:
            self.changed += len(words)
            self.size += matrix.pieces(len(words)) * HEADER.size + words.nbytes
        else:
            self._counted.append((name, len(words), len(changes.indices), words.element_size()))
            self._numbers += [raised(changes, matrix.columns, row), *count_small(changes)]
        ready = torch.cuda.current_stream(words.device).record_event() if words.device.type == "cuda" else None
        self._blocks.put(_Block(parameter, matrix, row, words, changes, ready))

    def measure(self) -> Counter[str]:
        """Complete `changed` and `size`. Returns by how much the changes raise the checksum of each parameter."""
        rises, numbers = Counter[str](), arrays.to_ints(self._numbers)
        for at, (name, length, count, word) in enumerate(self._counted):
            rise, *small = numbers[3 * at : 3 * at + 3]
            rises[name] += rise
            self.changed += count
            self.size += HEADER.size + choose_coding(length, count, small, word).size
        return rises

    def end(self, trailer: dict[str, Any] | None) -> None:
        """No more blocks follow. Without a trailer the stream is left to the caller."""
        self._blocks.put(trailer)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    @torch.no_grad()
    def _code(self) -> None:
        own: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        context: AbstractContextManager[Any] = torch.cuda.stream(own) if own else nullcontext()
        entries, size, coded = [PLAIN], 0, True
        with context:
            while isinstance(block := self._blocks.get(), _Block):
                try:
                    for entry in self._entries(block, own) if coded else ():
                        entries.append(entry)
                        size += len(entry)
                        if size >= FRAME:
                            self._stream.add(b"".join(entries))
                            entries, size = [PLAIN], 0
                except Exception:  # such as a full GPU
                    traceback.print_exc()
                    coded = False
        if block is None:
            return
        if coded and size:
            self._stream.add(b"".join(entries))
        self._ended(block, coded)

    def _entries(self, block: _Block, own: Any) -> Iterator[bytes]:
        if own:
            own.wait_event(block.ready)
        if block.changes is None:
            yield from block.matrix.encode(block.parameter, block.row, block.words.cpu().numpy())
        else:
            yield encode(block.parameter, block.row, len(block.words), block.changes, block.words.element_size())

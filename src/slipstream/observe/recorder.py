"""The record of a run that other tools read: a line of metrics and a file of rollouts a step, a line an evaluation.

Writing happens in order, in one thread of its own; the event loop only queues, and says when there is time to write. If
a write fails, nothing after it is written, so the record is whole up to there, and every later call here raises.

The queue is bounded: where steps come faster than the disk takes them, `room` holds the run back.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.directory import PARTIAL, write_atomically
from slipstream.disk import describe_full_disk
from slipstream.rollout import Batch, Group, mean, numbers

Decode = Callable[[Sequence[int]], str]
INT, FLOAT, TEXT = pa.int32(), pa.float64(), pa.string()
SCHEMA = pa.schema({
    "step": INT, "entry": pa.int64(), "task_id": TEXT, "rollout": INT, "role": TEXT, "turn": INT,
    "prompt": TEXT, "completion": TEXT, "prompt_ids": pa.list_(INT), "completion_ids": pa.list_(INT),
    "reward": FLOAT, "advantage": FLOAT, "spans": pa.list_(pa.struct({"version": INT, "start": INT, "end": INT})),
    "logprobs": pa.list_(pa.float32()),  # what generators compute, so nothing is lost
    "finish_reason": TEXT, "temperature": FLOAT, "metrics": pa.map_(TEXT, FLOAT),
    "steps": pa.list_(pa.struct({"end": INT, "reward": FLOAT})),
    "teacher": pa.list_(pa.float32()),
})  # fmt: skip


SMALL = pa.schema([field for field in SCHEMA if field.name not in (
    "prompt_ids", "completion_ids", "logprobs", "teacher"
)])  # fmt: skip
# What may wait for the disk while the run goes on: so many steps or evaluations, and more of them if they are small.
QUEUE, QUEUED_TOKENS = 2, 1_000_000


class RecordError(RuntimeError):
    """The record can't be written any further. What was queued before the failed write is on disk."""


class Recorder:
    """Writes `metrics.jsonl`, `evaluations.jsonl` and `rollouts/step_N.parquet` into a run's directory.

    `decode` turns a prompt's token ids into text; it is called in the writing thread. `warn` is told once if the disk
    holds the run back.
    """

    def __init__(self, directory: Path, decode: Decode, warn: Callable[[str], None] = lambda text: None) -> None:
        self._directory, self._warn = directory, warn
        self._metrics, self._evaluations = directory / "metrics.jsonl", directory / "evaluations.jsonl"
        self._rollouts = directory / "rollouts"
        self._decode = decode
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._jobs: list[tuple[Callable[[], None], int]] = []  # with the tokens of each
        self._written: list[tuple[Future[None], int]] = []  # in order; those that are over are taken out now and then
        self._warned = False
        self._failure: Exception | None = None

    def step(self, record: Mapping[str, Any], batch: Batch) -> None:
        """Queue a step's line and its rollouts. Raises `RecordError` if an earlier write failed."""
        self._queue(functools.partial(self._write_step, record["step"], batch, _line(record)), batch.tokens)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Queue an evaluation's line. Raises `RecordError` if an earlier write failed."""
        self._queue(functools.partial(_append, self._evaluations, _line(record)))

    def write(self) -> None:
        """Begin to write what is queued. It competes with the event loop for the interpreter."""
        self._written += [(self._thread.submit(self._try, job), tokens) for job, tokens in self._jobs]
        self._jobs.clear()

    async def room(self) -> None:
        """Wait until at most `QUEUE` steps or evaluations, or `QUEUED_TOKENS` tokens, are not written yet."""
        self._written = [(future, tokens) for future, tokens in self._written if not future.done()]
        queued = [tokens for _, tokens in (*self._written, *self._jobs)]
        if len(queued) <= QUEUE or sum(queued) <= QUEUED_TOKENS:
            return
        if not self._warned:
            self._warned = True
            self._warn(
                f"{self._directory} is written more slowly than steps are taken: from now on the run waits for the "
                "disk; use a faster one for run.dir"
            )
        self.write()
        oldest = asyncio.wrap_future(self._written[-QUEUE - 1][0])
        await asyncio.wait((oldest,))  # whoever is cancelled here does not cancel the write

    async def flush(self) -> None:
        """Wait until all that was queued is in its files. Raises `RecordError` if it is not."""
        self.write()
        await asyncio.wrap_future(self._thread.submit(lambda: None))  # one thread: when this has run, all before has
        self._raise_failure()

    def truncate(self, step: int, evaluations: int) -> None:
        """Forget what lies after `step` and the first `evaluations`: a run that goes on from there writes it again."""
        for path, most in ((self._metrics, step), (self._evaluations, evaluations)):
            if path.exists():
                write_atomically(path, "".join(f"{line}\n" for line in _lines(path, step)[:most]))
        later = [p for p in self._rollouts.glob("step_*.parquet") if int(p.stem.removeprefix("step_")) > step]
        for path in [*later, *self._rollouts.glob(f"step_*{PARTIAL}")]:
            path.unlink()

    def close(self) -> None:
        """Write what is queued and stop. Raises `RecordError` if that failed and no other error is on its way out."""
        self.write()
        self._thread.shutdown(wait=True)
        if sys.exception() is None:
            self._raise_failure()

    def _queue(self, job: Callable[[], None], tokens: int = 0) -> None:
        self._raise_failure()
        self._jobs.append((job, tokens))

    def _try(self, job: Callable[[], None]) -> None:
        """In the thread: write, unless an earlier write failed, which would leave a hole in the record."""
        if self._failure is None:
            try:
                job()
            except Exception as error:
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            full = describe_full_disk(self._failure, self._directory)
            what = full or f"{self._directory} can't be written: {self._failure}"
            raise RecordError(
                f"{what}; mend that, then: slipstream train --resume {self._directory}"
            ) from self._failure

    def _write_step(self, step: int, batch: Batch, line: str) -> None:
        """The rollouts first, so that a step that has a line has its rollouts, too."""
        pairs = zip(batch.groups, batch.advantages, strict=True)
        # One group at a time, since the event loop runs only between two calls that hold the interpreter.
        columns = [_columns(step, group, advantages, self._decode) for group, advantages in pairs]
        self._rollouts.mkdir(exist_ok=True)
        path = self._rollouts / f"step_{step:06d}.parquet"
        partial = path.with_name(path.name + PARTIAL)
        pq.write_table(pa.Table.from_batches(columns, SCHEMA), partial)
        partial.replace(path)
        _append(self._metrics, line)


def _columns(step: int, group: Group, advantages: Sequence[float | Sequence[float]], decode: Decode) -> pa.RecordBatch:
    """One row per completion of a group, in the order of its rollouts and their turns. Tokens are copied as bytes."""
    small = pa.RecordBatch.from_pylist(_rows(step, group, advantages, decode), SMALL)
    turns = [(rollout, turn, c) for rollout in group.rollouts for turn, c in enumerate(rollout.completions)]
    large = {
        "prompt_ids": _lists([c.prompt_ids for _, _, c in turns], INT),
        "completion_ids": _lists([c.token_ids for _, _, c in turns], INT),
        "logprobs": _lists([c.logprobs for _, _, c in turns], pa.float32()),
        "teacher": _lists([r.teacher[turn] if r.teacher else numbers(()) for r, turn, _ in turns], pa.float32()),
    }
    return pa.RecordBatch.from_arrays([large.get(f.name) or small.column(f.name) for f in SCHEMA], schema=SCHEMA)


def _lists(parts: Sequence[array[Any]], kind: pa.DataType) -> pa.ListArray:
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    return pa.ListArray.from_arrays(ends, pa.array(np.concatenate([np.asarray(part) for part in parts]), kind))


def _rows(
    step: int, group: Group, advantages: Sequence[float | Sequence[float]], decode: Decode
) -> list[dict[str, Any]]:
    """What a row holds but for its tokens."""
    texts: dict[bytes, str] = {}  # the rollouts of a group share their prompt
    for completion in (c for rollout in group.rollouts for c in rollout.completions):
        if (key := completion.prompt_ids.tobytes()) not in texts:
            texts[key] = decode(completion.prompt_ids)
    return [
        {
            "step": step, "entry": group.entry, "task_id": group.task_id,
            "rollout": index, "role": rollout.role, "turn": turn,
            "prompt": texts[completion.prompt_ids.tobytes()], "completion": completion.text,
            "reward": rollout.reward, "advantage": advantage if isinstance(advantage, int | float) else mean(advantage),
            "spans": [span._asdict() for span in completion.spans],
            "finish_reason": completion.finish_reason, "temperature": completion.temperature,
            "metrics": list(rollout.metrics.items()),
            "steps": [step._asdict() for step in rollout.steps[turn]] if rollout.steps else [],
        }
        for index, (rollout, advantage) in enumerate(zip(group.rollouts, advantages, strict=True))
        for turn, completion in enumerate(rollout.completions)
    ]  # fmt: skip


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def _line(record: Mapping[str, Any]) -> str:
    """The record as JSON, which has null alone for NaN and infinities."""
    finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
    return json.dumps(finite) + "\n"


def _lines(path: Path, step: int) -> list[str]:
    """The complete lines of a file up to and including those of `step`."""
    return [line for line in path.read_text("utf-8", "replace").splitlines() if _step_of(line) <= step]


def _step_of(line: str) -> float:
    """The step of a line; a line cut short by a kill belongs to none, and so lies after them all."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf

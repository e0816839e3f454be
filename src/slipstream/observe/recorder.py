"""Writes the records of a run: metrics and rollouts of each step, evaluations, and events.

One thread writes in order; the event loop queues records and chooses when writing starts. After a failed write nothing
more is written, so the record has no gaps, and every later call raises. The queue is bounded: `room` waits if steps
end faster than the disk can write them.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.errors import UserError
from slipstream.observe.events import EventLog, strict_json, truncate_lines
from slipstream.rollout import Batch, Group, float32_array, mean
from slipstream.runtime.disk import describe_full_disk, free_bytes
from slipstream.runtime.event_loop import lower_priority, yield_to_loop
from slipstream.runtime.run_directory import PARTIAL

Decode = Callable[[Sequence[int]], str]
INT, FLOAT, TEXT = pa.int32(), pa.float64(), pa.string()
SCHEMA = pa.schema({
    "step": INT, "visit_id": pa.int64(), "task_id": TEXT, "environment": TEXT,
    "rollout": INT, "role": TEXT, "turn": INT,
    "prompt": TEXT, "completion": TEXT, "prompt_ids": pa.list_(INT), "completion_ids": pa.list_(INT),
    "reward": FLOAT, "advantage": FLOAT, "spans": pa.list_(pa.struct({"version": INT, "start": INT, "end": INT})),
    "logprobs": pa.list_(pa.float32()),  # the precision in which engines compute them
    "finish_reason": TEXT, "temperature": FLOAT, "metrics": pa.map_(TEXT, FLOAT),
    "steps": pa.list_(pa.struct({"end": INT, "reward": FLOAT})),
    "teacher": pa.list_(pa.float32()),
    "engine": TEXT, "started_s": FLOAT, "ended_s": FLOAT,
})  # fmt: skip

# Bound of the queue: this many steps or evaluations, or more if they hold fewer tokens.
MAX_QUEUED, MAX_QUEUED_TOKENS = 2, 1_000_000


class RecordError(UserError):
    """A write failed. Everything queued before it is on disk."""


class Recorder:
    """Writes `metrics.jsonl`, `evaluations.jsonl`, `events.jsonl` and `rollouts/step_N.parquet` into a run's directory.

    `decode` turns a prompt's token ids into text, in the writing thread. `warn` is called once if the disk is too slow.
    """

    def __init__(self, directory: Path, decode: Decode, warn: Callable[[str], None] = lambda text: None) -> None:
        self._directory, self._warn = directory, warn
        self._metrics, self._evaluations = directory / "metrics.jsonl", directory / "evaluations.jsonl"
        self._rollouts = directory / "rollouts"
        self.events = EventLog(directory / "events.jsonl")
        self._decode = decode
        self._thread = ThreadPoolExecutor(1, "recorder", lower_priority)
        self._jobs: list[tuple[Callable[[], None], int]] = []  # with the tokens of each
        self._written: list[tuple[Future[None], int]] = []  # in order, with completed ones until the next `room`
        self._warned = False
        self._failure: Exception | None = None
        self.free_gb: float | None = None  # on the disk, after the last write

    def step(self, record: Mapping[str, Any], batch: Batch) -> None:
        """Queue a step's line and its rollouts. Raises `RecordError` if an earlier write failed."""
        self._queue(functools.partial(self._write_step, record["step"], batch, strict_json(record)), batch.tokens)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Queue an evaluation's line. Raises `RecordError` if an earlier write failed."""
        self._queue(functools.partial(_append, self._evaluations, strict_json(record)))

    def write(self) -> None:
        """Start to write the queue. The thread competes with the event loop for the interpreter."""
        if self._jobs or self.events.due:
            self._thread.submit(self._try, self.events.write)  # first, so that a step's events precede its record
        self._written += [(self._thread.submit(self._try, job), tokens) for job, tokens in self._jobs]
        self._jobs.clear()

    async def room(self) -> None:
        """Wait until at most `MAX_QUEUED` records, or `MAX_QUEUED_TOKENS` tokens, are unwritten."""
        self._written = [(future, tokens) for future, tokens in self._written if not future.done()]
        queued = [tokens for _, tokens in (*self._written, *self._jobs)]
        if len(queued) <= MAX_QUEUED or sum(queued) <= MAX_QUEUED_TOKENS:
            return
        if not self._warned:
            self._warned = True
            self._warn(
                f"{self._directory} is written more slowly than steps are taken: from now on the run waits for the "
                "disk; use a faster one for run.dir"
            )
        self.write()
        oldest = asyncio.wrap_future(self._written[-MAX_QUEUED - 1][0])
        await asyncio.wait((oldest,))  # cancelling this wait does not cancel the write

    async def flush(self) -> None:
        """Wait until the queue is written. Raises `RecordError` if a write failed."""
        self.write()
        # One thread, so all earlier jobs are done.
        await asyncio.wrap_future(self._thread.submit(self._try, self.events.write))
        self._raise_failure()

    def load_libraries(self) -> None:
        """Import the 1,000 modules that pyarrow imports with the first array, which takes tenths of a second."""
        pa.array(np.empty(0, np.int32))

    def truncate(self, step: int, evaluations: int) -> list[str]:
        """Remove records after `step` and after the first `evaluations`: a resumed run writes them again.

        Returns a text for each file that lacks earlier records.
        """
        lacking = []
        for path, most in ((self._metrics, step), (self._evaluations, evaluations)):
            kept = truncate_lines(path, lambda record: float(record["step"]), step, most)
            if kept < most:
                lacking.append(f"{path} lacked {most - kept} of {most} records: lines were damaged or removed")
        later = [p for p in self._rollouts.glob("step_*.parquet") if int(p.stem.removeprefix("step_")) > step]
        for path in [*later, *self._rollouts.glob(f"step_*{PARTIAL}")]:
            path.unlink()
        return lacking

    def close(self) -> None:
        """Write the queue and stop. Raises `RecordError` if a write failed, unless another error is propagating."""
        self.write()
        self._thread.submit(self._try, self.events.write)
        self._thread.shutdown(wait=True)
        if sys.exception() is None:
            self._raise_failure()

    def _queue(self, job: Callable[[], None], tokens: int = 0) -> None:
        self._raise_failure()
        self._jobs.append((job, tokens))

    def _try(self, job: Callable[[], None]) -> None:
        """Run a job, unless an earlier one failed: the record must not have gaps. Keeps the error for the next call."""
        if self._failure is None:
            try:
                job()
                self.free_gb = free_bytes(self._directory) / 1e9
            except Exception as error:
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            full = describe_full_disk(self._failure, self._directory)
            what = full or f"{self._directory} can't be written: {self._failure}"
            raise RecordError(f"{what}; fix that, then: slipstream train --resume {self._directory}") from self._failure

    def _write_step(self, step: int, batch: Batch, line: str) -> None:
        """The rollouts first, so that a step that has a line has its rollouts, too."""
        self._rollouts.mkdir(exist_ok=True)
        write_rollouts(self._rollouts / f"step_{step:06d}.parquet", step, batch, self._decode)
        _append(self._metrics, line)


def write_rollouts(path: Path, step: int, batch: Batch, decode: Decode) -> None:
    """Write one row for each completion of a batch."""
    pairs = zip(batch.groups, batch.advantages, strict=True)
    # One group at a time, since the event loop runs only between two calls that hold the interpreter.
    columns = [_record_batch(step, group, advantages, decode) for group, advantages in pairs]
    partial = path.with_name(path.name + PARTIAL)
    pq.write_table(pa.Table.from_batches(columns, SCHEMA), partial)
    partial.replace(path)


def _record_batch(
    step: int, group: Group, advantages: Sequence[float | Sequence[float]], decode: Decode
) -> pa.RecordBatch:
    """A group's table: one row per completion, ordered by rollout and turn.

    Token ids and log-probabilities are copied as whole buffers, without a Python object for each. It calls
    `yield_to_loop` between columns.
    """
    turns = [(rollout, turn, c) for rollout in group.rollouts for turn, c in enumerate(rollout.completions)]
    large = {
        "prompt_ids": _lists([c.prompt_ids for _, _, c in turns], INT),
        "completion_ids": _lists([c.token_ids for _, _, c in turns], INT),
        "logprobs": _lists([c.logprobs for _, _, c in turns], pa.float32()),
        "teacher": _lists([r.teacher[turn] if r.teacher else float32_array(()) for r, turn, _ in turns], pa.float32()),
    }
    other = pa.schema([field for field in SCHEMA if field.name not in large])
    yield_to_loop()
    small = pa.RecordBatch.from_pylist(_rows(step, group, advantages, decode), other)
    return pa.RecordBatch.from_arrays([large.get(f.name) or small.column(f.name) for f in SCHEMA], schema=SCHEMA)


def _lists(parts: Sequence[array[Any]], kind: pa.DataType) -> pa.ListArray:
    yield_to_loop()
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    return pa.ListArray.from_arrays(ends, pa.array(np.concatenate([np.asarray(part) for part in parts]), kind))


def _rows(
    step: int, group: Group, advantages: Sequence[float | Sequence[float]], decode: Decode
) -> list[dict[str, Any]]:
    """The columns of a row except tokens and log-probabilities."""
    texts: dict[bytes, str] = {}  # the rollouts of a group share their prompt
    for completion in (c for rollout in group.rollouts for c in rollout.completions):
        if (key := completion.prompt_ids.tobytes()) not in texts:
            texts[key] = decode(completion.prompt_ids)
    return [
        {
            "step": step, "visit_id": group.visit_id, "task_id": group.task_id, "environment": group.environment,
            "rollout": index, "role": rollout.role, "turn": turn,
            "prompt": texts[completion.prompt_ids.tobytes()], "completion": completion.text,
            "reward": rollout.reward, "advantage": advantage if isinstance(advantage, int | float) else mean(advantage),
            "spans": [span._asdict() for span in completion.spans],
            "finish_reason": completion.finish_reason, "temperature": completion.temperature,
            "metrics": list(rollout.metrics.items()),
            "steps": [step._asdict() for step in rollout.steps[turn]] if rollout.steps else [],
            "engine": completion.engine or None, "started_s": completion.started_s, "ended_s": completion.ended_s,
        }
        for index, (rollout, advantage) in enumerate(zip(group.rollouts, advantages, strict=True))
        for turn, completion in enumerate(rollout.completions)
    ]  # fmt: skip


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")

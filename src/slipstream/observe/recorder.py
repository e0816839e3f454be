"""The record of a run that other tools read: a line of metrics and a file of rollouts a step, a line an evaluation.

Writing happens in one thread of its own, in order; the event loop only queues. What goes wrong there is raised by the
next call here.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.rollout import Batch

PARTIAL = ".partial"
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("entry", pa.int64()),
        ("task_id", pa.string()),
        ("rollout", pa.int32()),
        ("turn", pa.int32()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("spans", pa.list_(pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())]))),
        ("logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("temperature", pa.float64()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
    ]
)


class Recorder:
    """Writes into a run's directory. `decode` turns a prompt's token ids into text."""

    def __init__(self, directory: Path, decode: Callable[[Sequence[int]], str]) -> None:
        self._metrics = directory / "metrics.jsonl"
        self._evaluations = directory / "evaluations.jsonl"
        self._rollouts = directory / "rollouts"
        self._decode = decode
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._pending: list[Future[None]] = []

    def step(self, record: Mapping[str, Any], batch: Batch) -> None:
        """Queue a step's line and its rollouts."""
        self._queue(self._write_rollouts, record["step"], batch)
        self._queue(_append, self._metrics, dict(record))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Queue an evaluation's line."""
        self._queue(_append, self._evaluations, dict(record))

    async def flush(self) -> None:
        """Wait until all that was queued is on disk."""
        pending, self._pending = self._pending, []
        for future in pending:
            await asyncio.wrap_future(future)

    def truncate(self, step: int) -> None:
        """Forget what lies after `step`: a run that goes on from there will write it again."""
        for path in (self._metrics, self._evaluations):
            if path.exists():
                kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
                partial = path.with_name(path.name + PARTIAL)
                partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
                partial.replace(path)
        for path in self._rollouts.glob("*"):
            if path.suffix == PARTIAL or int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _queue(self, function: Callable[..., None], *arguments: Any) -> None:
        still = []
        for future in self._pending:
            if future.done():
                future.result()
            else:
                still.append(future)
        self._pending = [*still, self._thread.submit(function, *arguments)]

    def _write_rollouts(self, step: int, batch: Batch) -> None:
        decode = functools.lru_cache(maxsize=1)(self._decode)  # the rollouts of a group share their prompt
        rows = [
            {
                "step": step,
                "entry": group.entry,
                "task_id": group.task_id,
                "rollout": index,
                "turn": turn,
                "prompt": decode(completion.prompt_ids),
                "completion": completion.text,
                "prompt_ids": completion.prompt_ids,
                "completion_ids": completion.token_ids,
                "reward": rollout.reward,
                "advantage": advantage,
                "spans": [span._asdict() for span in completion.spans],
                "logprobs": completion.logprobs,
                "finish_reason": completion.finish_reason,
                "temperature": completion.temperature,
                "metrics": list(rollout.metrics.items()),
            }
            for group, advantages in zip(batch.groups, batch.advantages, strict=True)
            for index, (rollout, advantage) in enumerate(zip(group.rollouts, advantages, strict=True))
            for turn, completion in enumerate(rollout.completions)
        ]
        self._rollouts.mkdir(exist_ok=True)
        path = self._rollouts / f"step_{step:06d}.parquet"
        partial = path.with_name(path.name + PARTIAL)
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), partial)
        partial.rename(path)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The metrics lines of a run, oldest first."""
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(record)) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _step_of(line: str) -> float:
    """The step of a line; a line cut short by a kill belongs to no step."""
    try:
        step: float = json.loads(line)["step"]
        return step
    except (ValueError, KeyError):
        return math.inf

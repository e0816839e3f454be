"""Trackers for tests: one that writes what it gets to a file, one that raises, one that hangs; and records for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.runtime.run_directory import write_atomically

TEXTS = "4", "<script>alert(1)</script>", "**bold**\n\n<b>x</b>\r\n# y", "\x1b[31mred\x00", "", "é🙂\u2028z"


class Writes:
    """Appends each call to `calls.jsonl` of the run directory."""

    def start(self, run: Any, project: str, run_id: str) -> str:
        self._file = run.path / "calls.jsonl"
        self._write("start", project, run_id)
        return run_id or "an id"

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._write("metrics", step, values)

    def table(self, name: str, step: int, rows: Sequence[Any]) -> None:
        self._write(name, step, rows)

    def rewind(self, step: int) -> bool:
        self._write("rewind", step)
        return True

    def finish(self, report: Path | None, complete: bool) -> None:
        self._write("finish", report and report.name, complete)

    def _write(self, *call: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(call) + "\n")


class Keeps(Writes):
    """Can't discard steps."""

    def rewind(self, step: int) -> bool:
        return False


class Raises(Writes):
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("no route to the tracker")


class Hangs(Writes):
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        threading.Event().wait()


class Records:
    """A run directory as a run writes it."""

    def __init__(self, path: Path, steps: int = 0) -> None:
        self.path = path
        (path / "rollouts").mkdir(parents=True)
        (path / "config.toml").write_text("[loop]\nsteps = 4\n[observe]\ntrackers = []\n")
        self.evaluate(0)
        for step in range(1, steps + 1):
            self.step(step)

    def step(self, step: int, reward: float = 0.0, **more: Any) -> None:
        names = {"step": step, "version": step, "time/wall_s": step * 1.5, "reward/mean": reward or 1 / step, **more}
        rows = [
            {"task_id": str(i), "rollout": 0, "turn": 0, "prompt": f"{step}+{i}=", "completion": TEXTS[i % len(TEXTS)],
             "reward": i / 20, "advantage": 0.5, "finish_reason": "stop"}
            for i in range(20)
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), self.path / "rollouts" / f"step_{step:06d}.parquet")
        self._append("metrics.jsonl", names)

    def evaluate(self, step: int) -> None:
        samples = [{"id": "1", "prompt": "1+1=", "completion": "2", "reward": 1.0}, {"id": "2", "failed": "timeout"}]
        names = {"step": step, "versions": [step, step], "eval/score": step / 8, "eval/failures": {"timeout": 1}}
        self._append("evaluations.jsonl", names | {"samples": samples})

    def truncate(self, step: int) -> None:
        """As at a resume from the checkpoint of `step`."""
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            lines = (self.path / name).read_text().splitlines()
            write_atomically(self.path / name, "".join(f"{x}\n" for x in lines if json.loads(x)["step"] <= step))

    def end(self, steps: int) -> None:
        (self.path / "summary.json").write_text(json.dumps({"steps": steps, "stopped": None}))
        (self.path / "report.html").write_text("<!doctype html>")

    def calls(self, *kinds: str) -> list[list[Any]]:
        """The calls that `Writes` got."""
        lines = map(json.loads, (self.path / "calls.jsonl").read_text().splitlines())
        return [call for call in lines if not kinds or call[0] in kinds]

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

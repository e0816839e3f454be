"""The commands `slipstream status`, `runs`, `scale`, `pause`, `resume`, `checkpoint` and `stop`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.client import RunHandle
from slipstream.config.schema import ConfigError
from slipstream.observe.formatting import duration, number
from slipstream.runtime.control_socket import FOLDER, Gone
from slipstream.runtime.run_files import read_options, read_summary

PROBE_TIMEOUT_S = 5.0
CALLS: dict[str, Callable[[RunHandle], Any]] = {
    "status": RunHandle.status, "pause": RunHandle.pause, "resume": RunHandle.resume,
    "checkpoint": RunHandle.checkpoint, "stop": RunHandle.stop,
}  # fmt: skip


def command(name: str, run: str, address: str, as_json: bool, engines: str | None = None) -> None:
    """Send a command to a run and print its answer."""
    if engines is not None and not engines.isdecimal():
        raise ConfigError(f"scale: {engines!r} is not a number of engines; give a whole number, 1 or more")
    handle = RunHandle(run, address)
    change = f"; engines: {len(handle.status()['engines'])} before, {engines} now" if engines else ""
    answer: Any = handle.scale(int(engines)) if engines else CALLS[name](handle)
    lines = _status_lines(answer) if name == "status" else [f"{run}: {answer}{change}"]
    print(json.dumps(answer, indent=1, default=str) if as_json else "\n".join(lines))


def list_runs(folder: Path, address: str, as_json: bool) -> None:
    """Print the runs under `folder`, or those on a Ray cluster: name, state, step, reward and age."""
    if address:
        from slipstream.runtime.ray.mailbox import names

        found = [_probe(RunHandle(name, address, PROBE_TIMEOUT_S)) for name in names(address)]
    else:
        known = (path for path in folder.glob("*") if (path / "config.toml").exists() or (path / FOLDER).exists())
        found = [_describe_run(path) for path in known]
    found = sorted((run for run in found if run), key=lambda run: run["age_s"])
    if as_json:
        print(json.dumps(found, indent=1))
    elif not found:
        print(
            f"no runs on the cluster at {address}" if address else f"no runs in {folder}/; --dir names another folder"
        )
    else:
        rows = [("name", "state", "step", "reward", "age")]
        for r in found:
            step, age = f"{number(r['step'])}/{number(r['steps'])}", _age(r["age_s"])
            rows.append((r["name"], r["state"], step, number(r["reward"], 3), age))
        print("\n".join(_table(rows)))


def _probe(run: RunHandle) -> dict[str, Any]:
    """The row of a run that answers, else {}."""
    try:
        status = run.status()
    except Gone:
        return {}
    except ConfigError:
        status = {"name": Path(run.run).name, "state": "silent", "started_at": time.time()}
    names = ("name", "state", "step", "steps", "reward")
    return {name: status.get(name) for name in names} | {"age_s": time.time() - status["started_at"]}


def _describe_run(path: Path) -> dict[str, Any]:
    """The row of a run directory. The age of a run that is over is the time since its last step, or its start."""
    if (path / FOLDER).exists() and (row := _probe(RunHandle(str(path), timeout=PROBE_TIMEOUT_S))):
        return row
    summary, metrics = read_summary(path), path / "metrics.jsonl"
    ended = "stopped" if summary.get("stopped") else "complete"
    try:
        record = dict(json.loads(metrics.read_text().rstrip().rpartition("\n")[2]))
    except (OSError, ValueError):
        record = {}
    changed = next((file for file in (metrics, path / "config.toml") if file.exists()), path).stat().st_mtime
    return {
        "name": path.name, "state": ended if summary and not (path / FOLDER).exists() else "dead",
        "step": record.get("step"), "steps": read_options(path).get("loop", {}).get("steps"),
        "reward": record.get("reward/mean"), "age_s": time.time() - changed,
    }  # fmt: skip


def _status_lines(s: dict[str, Any]) -> Iterator[str]:
    left, age = duration(s["eta_s"]), duration(time.time() - s["started_at"])
    yield f"{s['name']}: {s['state']}, step {s['step']}/{s['steps']}, version {s['version']}, {left} left"
    lag = f"lag {number(s['lag_mean'], 2)} (max {number(s['lag_max'])})"
    rates = f"gen {number(s['tokens_per_s'])} tok/s  train {number(s['train_tokens_per_s'])} tok/s"
    yield f"reward {number(s['reward'], 3)}  {lag}  {rates}"
    yield f"groups: {s['groups_ready']} ready, {s['groups_in_flight']} in flight"
    yield f"controller: process {s['pid']} on {s['host']}, for {age}, in {s['directory']}"
    engines = {engine["name"]: engine for engine in s["engines"]}
    rows: list[Sequence[Any]] = [("worker", "version", "queue", "pending calls", "last progress")]
    for worker in s["workers"]:
        engine = engines.pop(worker["name"], {})
        progress = f"{worker['seconds_since_progress']:.0f} s ago"
        version, queue = engine.get("version", ""), engine.get("pending_requests", "")
        rows.append((worker["name"], version, queue, worker["pending_calls"] or "-", progress))
    rows += [(e["name"], e["version"], e["pending_requests"], e["died_of"] or "-", "") for e in engines.values()]
    yield from _table(rows) if rows[1:] else ()


def _table(rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Lines of left-aligned columns."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"

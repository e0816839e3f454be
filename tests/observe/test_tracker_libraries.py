"""The built-in trackers hold what the run directory holds, by their own readers, also after a resume."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe.run_data import load_run
from slipstream.observe.trackers import Follower, numbers
from tests.observe.tracker_doubles import TEXTS, Records

pytestmark = pytest.mark.trackers

Series = dict[str, list[tuple[int, float]]]  # (step, value) by name


def follow(records: Records, name: str) -> None:
    asyncio.run(Follower(records.path, name, "").follow(lambda: True))


def resumed(path: Path, name: str) -> Records:
    """A run of three steps that is resumed after its first, and then takes four."""
    records = Records(path / "run #1", 3)
    follow(records, name)
    records.truncate(1)
    follow(records, name)
    for step in (2, 3, 4):
        records.step(step, reward=9.0 + step)
    records.evaluate(3)  # later than the metrics of step 4
    records.end(4)
    follow(records, name)
    return records


def expected(records: Records, lost: bool) -> Series:
    """What the run directory holds; with the `lost` values of steps 2 and 3, which most trackers can't discard."""
    run, series = load_run(records.path), Series()
    for record in (*run.metrics, *run.evaluations):
        for name, value in numbers(record):
            replaced = lost and name == "reward/mean" and record["step"] in (2, 3)
            series.setdefault(name, []).append((record["step"], 1 / record["step"] if replaced else value))
    return series


def completions(records: Records, step: int) -> list[str]:
    return [TEXTS[row % len(TEXTS)] for row in (0, 2, 5, 7, 10, 12, 15, 17)]


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: a LevelDB log of protocol buffers behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no header begins in the last bytes of a block
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part, at = data[at + 7 : at + 7 + length], at + 7 + length
        assert zlib.crc32(part) or not part
        parts += part
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "sums")
    records = resumed(tmp_path, "wandb")
    wandb.teardown()  # as at the end of a process: its service closes all files
    files = sorted(records.path.glob("wandb/offline-run-*/*.wandb"))
    found = [record for file in files for record in wandb_records(file)]
    runs = [record.run for record in found if record.HasField("run")]
    assert len({run.run_id for run in runs}) == 1 and runs[0].run_id.startswith("run__1-")
    assert {run.project for run in runs} == {"sums"} and {run.display_name for run in runs} == {"run #1"}
    assert {item.key: json.loads(item.value_json) for item in runs[0].config.update}["loop"] == {"steps": 4}
    series, tables = Series(), dict[int, str]()
    for history in (record.history for record in found if record.HasField("history")):
        row = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in history.item}
        [step] = (value for name, value in row.items() if name == ("step",))
        for name, value in row.items():
            if name == ("rollouts", "path"):
                tables[step] = value
            elif len(name) == 1 and not name[0].startswith("_") and name != ("step",):
                series.setdefault(name[0], []).append((step, value))
    assert series == expected(records, lost=True)
    assert sorted(tables) == [1, 2, 3, 4]
    [file] = records.path.glob(f"wandb/offline-run-*/files/{tables[4]}")
    table = json.loads(file.read_text())
    column = table["columns"].index("completion")
    assert [row[column] for row in table["data"]] == completions(records, 4)
    assert "report.html" in {entry.path for record in found for entry in record.artifact.manifest.contents}
    assert [record.exit.exit_code for record in found if record.HasField("exit")] == [1, 1, 0]


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which its import reads
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setenv("TRACKIO_PROJECT", "sums")
    records = resumed(tmp_path, "trackio")
    [name] = SQLiteStorage.get_runs("sums")
    assert name.startswith("run__1-")
    config = SQLiteStorage.get_run_config("sums", name)
    assert config and config["loop"] == {"steps": 4}
    series = Series()
    for row in SQLiteStorage.get_logs("sums", name):
        for key, value in row.items():
            if key not in ("step", "timestamp"):
                series.setdefault(key, []).append((row["step"], value))
    assert series == expected(records, lost=True)
    traces = [trace for trace in SQLiteStorage.get_traces("sums", name) if trace["step"] == 4]
    said = {trace["metadata"]["task_id"]: trace["messages"][1]["content"] for trace in traces}
    assert [said[str(i)] for i in (0, 2, 5, 7, 10, 12, 15, 17)] == completions(records, 4)
    assert [artifact["name"] for artifact in SQLiteStorage.get_artifacts("sums")] == [f"report-{name}"]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = resumed(tmp_path, "tensorboard")
    events = EventAccumulator(str(records.path / "tensorboard"), {"tensors": 0, "scalars": 0}).Reload()
    series = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    wanted = expected(records, lost=False)
    assert series.keys() == wanted.keys()
    for name, values in wanted.items():
        assert [step for step, _ in series[name]] == [step for step, _ in values]
        assert [value for _, value in series[name]] == pytest.approx([value for _, value in values], rel=1e-7)
    texts = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("rollouts")}
    assert sorted(texts) == [1, 2, 3, 4] and "    completion: <script>alert(1)</script>" in texts[4]
    assert all(line.startswith("    ") for text in texts.values() for line in text.splitlines())
    assert "steps = 4" in events.Tensors("config")[0].tensor_proto.string_val[0].decode()


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)  # mlruns/ of the artifacts
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "sums")
    records = resumed(tmp_path, "mlflow")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("sums")
    assert experiment
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run #1" and run.info.status == "FINISHED"
    assert run.data.params == {"loop.steps": "4", "observe.trackers": "[]"}
    series = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    assert series == expected(records, lost=True)
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"rollouts", "eval", "report.html"}
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "rollouts/step_000004.json")).read_text())
    column = table["columns"].index("completion")
    assert [row[column] for row in table["data"]] == completions(records, 4)

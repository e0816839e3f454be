"""The built-in trackers: wandb, trackio, tensorboard and mlflow. Each imports its package when it starts.

Methods are those of `Tracker`; `start` returns the id of the tracker's run, by which a resumed run continues it.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.observe.run_data import Record, Run
from slipstream.observe.trackers import Tracker

PROJECT = "slipstream"
MLFLOW_PARAMETERS, MLFLOW_VALUE = 100, 6000  # most parameters in a request; most characters of one


class Wandb(Tracker):
    """One wandb run. Charts have the metric `step` as x axis: wandb drops a row if its own step went back."""

    def start(self, run: Run, project: str, run_id: str) -> str:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id or _new_id(run),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=os.environ.get("WANDB_DIR", str(run.path)),
            config=run.config, resume="allow", allow_val_change=True,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def table(self, name: str, step: int, rows: Sequence[Record]) -> None:
        self._run.log({"step": step, name: self._wandb.Table(**_columns(rows), allow_mixed_types=True)})

    def finish(self, report: Path | None, complete: bool) -> None:
        if report:
            self._run.log_artifact(report, name=f"report-{self._run.id}", type="report")
        self._run.finish(exit_code=0 if complete else 1)


class Trackio(Tracker):
    """One trackio run, whose name is unique in its project. Rollouts are traces."""

    def start(self, run: Run, project: str, run_id: str) -> str:
        import trackio

        self._trackio, name = trackio, run_id or _new_id(run)
        project = project or os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = trackio.init(project, name, config=run.config, resume="allow", embed=False)
        return name

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, name: str, step: int, rows: Sequence[Record]) -> None:
        self._run.log({name: [self._trace(**row) for row in rows]}, step=step)

    def _trace(self, prompt: str = "", completion: str = "", **others: Any) -> Any:
        texts = {"user": prompt, "assistant": completion}
        return self._trackio.Trace([{"role": role, "content": text} for role, text in texts.items()], others)

    def finish(self, report: Path | None, complete: bool) -> None:
        if report:
            self._run.log_artifact(report, name=f"report-{self._run.name}", type="report")
        self._run.finish()


class Tensorboard(Tracker):
    """Event files in `tensorboard/` of the run directory, for `tensorboard --logdir runs`. Reports are not stored."""

    def start(self, run: Run, project: str, run_id: str) -> str:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._tensor = event_pb2, summary_pb2.Summary, tensor_pb2.TensorProto
        self._text = create_summary_metadata(display_name="", description="")
        self._writer = EventFileWriter(str(run.path / "tensorboard"))
        if not run_id:
            self.rewind(-1)  # readers discard nothing at the first start of a session
            self._log_text("config", 0, (run.path / "config.toml").read_text(errors="replace"))
        return "tensorboard"

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        shown = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=self._summary(value=shown))

    def table(self, name: str, step: int, rows: Sequence[Record]) -> None:
        shown = ("\n".join(f"{key}: {value}" for key, value in row.items()) for row in rows)
        self._log_text(name, step, "\n---\n".join(shown))

    def rewind(self, step: int) -> bool:
        """Write a session start at `step + 1`, at which readers discard the events from that step on. Returns True."""
        self._add(step + 1, session_log=self._event.SessionLog(status=self._event.SessionLog.START))
        return True

    def finish(self, report: Path | None, complete: bool) -> None:
        self._writer.close()

    def _log_text(self, tag: str, step: int, text: str) -> None:
        """Log text as a block of code, since the reader takes it for Markdown."""
        code = "\n".join(f"    {line}" for line in text.splitlines())
        tensor = self._tensor(dtype="DT_STRING", string_val=[code.encode()])
        self._add(step, summary=self._summary(value=[self._summary.Value(tag=tag, metadata=self._text, tensor=tensor)]))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(step=step, wall_time=time.time(), **content))
        self._writer.flush()


class Mlflow(Tracker):
    """One mlflow run. Rollouts are artifacts."""

    def start(self, run: Run, project: str, run_id: str) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric, self._id = MlflowClient(), Metric, run_id
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        parameters = [Param(name, str(value)[:MLFLOW_VALUE]) for name, value in run.options.items()]
        for first in range(0, len(parameters), MLFLOW_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + MLFLOW_PARAMETERS])
        return self._id

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in values.items()}
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in named.items()])

    def table(self, name: str, step: int, rows: Sequence[Record]) -> None:
        self._client.log_dict(self._id, _columns(rows), f"{name}/step_{step:06d}.json")

    def finish(self, report: Path | None, complete: bool) -> None:
        if report:
            self._client.log_artifact(self._id, str(report))
        self._client.set_terminated(self._id, "FINISHED" if complete else "FAILED")


def _new_id(run: Run) -> str:
    """A random id that begins with the run's name: run directories of one name are different runs."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', run.name)[:80]}-{secrets.token_hex(4)}"


def _columns(rows: Sequence[Record]) -> dict[str, list[Any]]:
    """Rows as `columns` and `data`."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return {"columns": columns, "data": [[row.get(column) for column in columns] for row in rows]}

"""A run on two environments: each has its sampling, its scores and its place in the epochs, also after a kill."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kill
from work import save_model

from slipstream.cli import main
from slipstream.observe.run_data import load_run
from tests import warm

pytestmark = pytest.mark.e2e
CONFIG = """
[model]
path = "{model}"
[environment]
evaluation_tasks = 6
[[environments]]
name = "{work}"
label = "short"
weight = 3
options = {{ tasks = 20 }}
sampling = {{ max_tokens = 3 }}
curriculum = {{ drop_after = 1, focus = 0.5 }}
[[environments]]
name = "{work}"
label = "long"
options = {{ tasks = 30 }}
sampling = {{ max_tokens = 6, temperature = 0.7 }}
evaluation_tasks = 4
[loop]
steps = 12
groups_per_step = 4
group_size = 4
max_lag = 0
[trainer]
threads = 1
learning_rate = 1e-3
[generator]
threads = 1
[evaluation]
every = 6
[checkpoint]
every = 3
[run]
dir = "{run}"
"""


def command(*arguments: Any) -> subprocess.Popen[str]:
    return warm.Command(
        [sys.executable, "-m", "slipstream.cli", "train", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def configured(model: Path, run: Path) -> Path:
    path = run.with_suffix(".toml")
    path.write_text(CONFIG.format(model=model, work=f"{kill.WORK}:Work", run=run))
    return path


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


def rows(run: Path) -> list[dict[str, Any]]:
    data = load_run(run)
    return [row for step in data.rollout_steps for row in data.rollouts(step)]


BROKEN = """
from slipstream.environments.base import Task

class Broken:
    test = []
    train = [Task(str(i), "w1 w2") for i in range(9)]
    async def rollout(self, task, policy):
        raise KeyError("no answer")
"""


def test_a_broken_environment_ends_a_run_whose_other_environment_works(tmp_path: Path) -> None:
    save_model("tiny", tmp_path / "model")
    (tmp_path / "broken.py").write_text(BROKEN)
    path = configured(tmp_path / "model", tmp_path / "run")
    path.write_text(path.read_text().replace(f'name = "{kill.WORK}:Work"\nlabel = "long"\noptions = {{ tasks = 30 }}',
                                             f'name = "{tmp_path / "broken.py"}:Broken"'))  # fmt: skip
    process = command(path)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in said
    assert re.search(r"\d+ rollouts of \d+ tasks in a row failed, the last with: KeyError", said), said


def test_a_run_does_not_continue_on_other_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model("tiny", tmp_path / "model")
    path = configured(tmp_path / "model", tmp_path / "run")
    path.write_text(path.read_text().replace("steps = 12", "steps = 3").replace("tasks = 6", "tasks = 0"))
    ended(command(path))
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('label = "long"', 'label = "longer"'))
    assert main(["train", "--resume", str(tmp_path / "run"), "--loop.steps=6"]) == 2
    found = "started on 20 training tasks of short, 30 training tasks of long, and now there are 20 training tasks of"
    assert found in capsys.readouterr().err


def test_a_killed_run_on_two_environments_continues_as_if_it_were_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, whole, killed = (tmp_path / name for name in ("model", "whole", "killed"))
    save_model("tiny", model)
    said = ended(command(configured(model, whole)))

    process = command(configured(model, killed))
    due = random.Random(1).randint(4, 8)
    while process.poll() is None and kill.steps_done(killed) < due:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (killed / "summary.json").exists()
    ended(command("--resume", killed))
    assert kill.same_bits(kill.weights(killed), kill.weights(whole))
    names = ("step", "visit_id", "task_id", "rollout", "completion_ids", "reward")
    assert [[row[n] for n in names] for row in rows(killed)] == [[row[n] for n in names] for row in rows(whole)]
    kill.audit(killed, 12)

    visits = {row["visit_id"]: row["task_id"] for row in rows(whole)}
    assert Counter(task.partition("/")[0] for task in visits.values()) == {"short": 36, "long": 12}
    assert len({task for task in visits.values() if task.startswith("long/")}) == 12, "an epoch has 30 tasks"
    lengths = {label: {len(row["completion_ids"]) for row in rows(whole) if row["environment"] == label}
               for label in ("short", "long")}  # fmt: skip
    assert max(lengths["short"]) == 3 and max(lengths["long"]) == 6
    assert {row["temperature"] for row in rows(whole) if row["environment"] == "long"} == {0.7}
    last = load_run(whole).metrics[-1]
    assert last["environments/short/groups"] == 3 and last["environments/long/groups"] == 1
    assert last["environments/short/mean_length"] <= 3 and last["environments/long/reward"] is not None
    assert last["environments/short/tasks_active"] + last["environments/short/tasks_dropped"] == 20

    evaluation = json.loads((whole / "evaluations.jsonl").read_text().splitlines()[-1])
    assert [evaluation[f"eval/environments/{label}/tasks"] for label in ("short", "long")] == [6, 4]
    scores = [evaluation[f"eval/environments/{label}/score"] for label in ("short", "long")]
    assert evaluation["eval/score"] == pytest.approx((6 * scores[0] + 4 * scores[1]) / 10)
    assert f"short {scores[0]:.3f} on 6, long {scores[1]:.3f} on 4" in said
    assert [sample["id"].partition("/")[0] for sample in evaluation["samples"]] == ["short", "long"] * 4 + ["short"] * 2

    assert load_run(whole).options["environments.1.sampling"] == {"max_tokens": 6, "temperature": 0.7}

    assert main(["eval", str(whole)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"short and long: score {evaluation['eval/score']:.3f} [")
    for label, score, tasks in (("short", scores[0], 6), ("long", scores[1], 4)):
        low, high = evaluation["intervals"][f"eval/environments/{label}/score"]
        assert f"\n  {label} {score:.3f} [{low:.3f}, {high:.3f}] ({tasks} tasks)" in out
    assert main(["eval", str(whole), "--environment", "long"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"long: score {scores[1]:.3f} [") and "] on 4 held-out tasks (" in out

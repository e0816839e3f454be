"""Commands in child processes, as a user runs them."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kill
from work import save_model

from slipstream.cli import main
from slipstream.config.loading import load_config
from slipstream.errors import RunError
from slipstream.observe.figures import figures
from slipstream.observe.run_data import load_run
from slipstream.observe.timeline import length, timeline
from slipstream.run import train as run_training
from slipstream.scheduling.loop_state import TOO_FEW
from tests import warm
from tests.observe import tracker_doubles
from tests.processes import descendants, lives, workers

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
WORK = f"{kill.WORK}:Work"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("work") / "model"
    save_model("tiny", path)
    return path


def options(model: Path, directory: Path, **more: Any) -> list[str]:
    values = {
        "model.path": model, "environment.name": WORK, "environment.options": "{ tasks = 40 }", "run.dir": directory,
        "loop.steps": 6, "loop.groups_per_step": 3, "loop.group_size": 4, "loop.max_lag": 1, "sampling.max_tokens": 6,
        "trainer.learning_rate": 1e-3, "trainer.threads": 1, "generator.threads": 1, "checkpoint.every": 2,
        "evaluation.tasks": 10, "evaluation.every": 2, **{k.replace("__", "."): v for k, v in more.items()},
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in values.items()]


def start(
    *arguments: Any, cwd: Path | None = None, popen: type[subprocess.Popen[str]] = warm.Command
) -> subprocess.Popen[str]:
    """Start a command. With `subprocess.Popen` it imports all that it needs, as for users."""
    command = [sys.executable, "-m", "slipstream.cli", *map(str, arguments)]
    return popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd)


def end(process: subprocess.Popen[str], status: int = 0, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Wait until a command exits. All processes that it started must have exited too."""
    started: set[int] = set()
    last = time.monotonic() + seconds
    while True:
        started |= descendants(process.pid)
        try:
            out, err = process.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            assert time.monotonic() < last, "the command hangs"
    assert process.returncode == status, out + err
    assert "Traceback" not in err, err
    assert not {pid for pid in started if lives(pid)}
    return subprocess.CompletedProcess(process.args, status, out, err)


def slipstream(*arguments: Any, status: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    return end(start(*arguments, **more), status)


def refused(capfd: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """Run a failing command in this process. Returns its error message."""
    capfd.readouterr()
    assert main([*map(str, arguments)]) == 2
    return capfd.readouterr().err


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(model: Path, directory: Path, popen: Any = warm.Command, **more: Any) -> dict[str, Any]:
    config = directory.parent / "empty.toml"
    config.write_text("")
    slipstream("train", config, *options(model, directory, **more), cwd=directory.parent, popen=popen)
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


def events_agree_with_the_records(directory: Path, kills: int = 0) -> None:
    run = load_run(directory)
    found, last = timeline(run), run.metrics[-1]
    engine, close = found.tracks["engine 0"], functools.partial(pytest.approx, rel=0.01, abs=0.005)
    assert found.window_s == close(last["time/window_s"])
    assert length(engine.busy) + length(engine.paused) == close(last["gen/busy_s"])
    assert length(found.trainer.busy) == close(last["train/busy_s"])
    assert length(found.trainer.waiting) == close(sum(m["time/batch_wait_s"] for m in run.metrics))
    forward_s = sum(event["forward_s"] for event in run.events if event["kind"] == "engine")
    assert 0 < forward_s <= length(engine.busy) <= found.window_s, "forward passes without a request"
    assert sum(found.fractions(engine).values()) == close(1)
    publishes = [event for event in run.events if event["kind"] == "publish"]
    pauses = [1000 * max(end - start for _, start, end in event["pauses"]) for event in publishes]
    recorded = [m["sync/pause_ms"] for m in run.metrics if m["sync/pause_ms"]]
    assert recorded and all(any(pause == close(found) for found in pauses) for pause in recorded)
    # A checkpoint may be written before the publish of its version has ended, and a kill ends both.
    published, versions = {event["version"] for event in publishes}, {*range(last["version"] + 1)}
    assert published <= versions and len(versions - published) <= kills
    visits = {e["visit_id"]: e for e in run.events if e["kind"] == "group"}
    steps = {e["step"]: e for e in run.events if e["kind"] == "step"}
    assert list(steps) == [m["step"] for m in run.metrics] == [e["step"] for e in run.events if e["kind"] == "step"]
    for row in (row for step in run.rollout_steps for row in run.rollouts(step)):
        step = steps[row["step"]]
        completions = [c for c in visits[row["visit_id"]]["rollouts"] if c[8] == row["rollout"]]
        name, began, ended, tokens, oldest, newest, reward, reason, _ = completions[row["turn"]]
        assert row["visit_id"] in step["visit_ids"] and oldest <= newest <= step["version"]
        assert (oldest, newest) == (row["spans"][0]["version"], row["spans"][-1]["version"])
        assert (name, tokens, reason) == (row["engine"], len(row["completion_ids"]), None)
        assert (reward, began, ended) == pytest.approx((row["reward"], row["started_s"], row["ended_s"]), abs=1e-5)
        assert began < ended <= step["start"]
    groups = [
        {c[8] for c in e["rollouts"]} for e in run.events if e["kind"] == "group" and e["end"] <= last["time/wall_s"]
    ]
    assert sum(map(len, groups)) == last["rollout/generated"]


def test_a_run_leaves_what_other_tools_read(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path / "run"
    summary = train(model, directory, subprocess.Popen)
    assert 'id="texts-0-6"' in (directory / "report.html").read_text()
    assert summary["steps"] == 6 and summary["version"] == 6 and summary["seed"] == 0
    assert summary["rollouts"]["trained"] == 6 * 3 * 4
    assert summary["tokens_trained"] == 6 * 3 * 4 * 6 <= summary["tokens_generated"]
    assert set(summary["lag"]) == {"mean", "max", "histogram"} and summary["lag"]["max"] <= 1
    assert sum(summary["lag"]["histogram"].values()) == summary["tokens_trained"]
    assert 0 < summary["busy"]["generator"] <= 1 and 0 < summary["busy"]["trainer"] <= 1
    metrics = lines(directory / "metrics.jsonl")
    assert metrics[-1]["train/busy_s"] == pytest.approx(sum(m["time/step_s"] for m in metrics))
    assert 0 < metrics[0]["gen/busy_s"] < metrics[-1]["gen/busy_s"] <= summary["window_s"]
    table = (ROOT / "docs" / "metrics.md").read_text()
    documented = {name for cell in re.findall(r"^\| (`[^|]*)\|", table, re.M) for name in re.findall(r"`(.+?)`", cell)}
    found = {re.sub(r"\d+$", "N", name).replace("/Work/", "/LABEL/") for name in metrics[0]}
    assert found <= documented, "records have names that are not documented"
    assert {name.replace("/Work/", "/LABEL/") for name in lines(directory / "evaluations.jsonl")[0]} <= documented
    assert summary["sync"]["publishes"] == 6 and summary["sync"]["pause_ms"]["median"] > 0
    assert 0 <= summary["eval"]["initial"] <= 1 and 0 <= summary["eval"]["final"] <= 1
    assert [e["step"] for e in summary["eval"]["history"]] == [0, 2, 4, 6]
    assert summary["eval"]["history"][-1]["versions"] == [6, 6]
    assert {p.name for p in (directory / "checkpoints").iterdir()} == {"step_4", "step_6"}
    events_agree_with_the_records(directory)
    rows = pq.read_table(directory / "rollouts").to_pylist()
    for row in rows:
        assert len(row["completion_ids"]) == len(row["logprobs"]) == 6 and row["finish_reason"] == "length"
        assert row["spans"][-1]["end"] == 6 and row["prompt"].startswith("w")
        assert all(row["step"] - 1 - span["version"] <= 1 for span in row["spans"])
    policy = AutoModelForCausalLM.from_pretrained(directory / "policy")
    assert AutoTokenizer.from_pretrained(directory / "policy").encode("w7 w9") == [7, 9]
    start = AutoModelForCausalLM.from_pretrained(model)
    assert any((a != b).any() for a, b in zip(policy.parameters(), start.parameters(), strict=True))
    assert (directory / "config.toml").read_text().count("groups_per_step = 3") == 1

    said = slipstream("eval", directory, "--tasks", 5, "--json").stdout
    assert json.loads(said)["eval/tasks"] == 5
    said = slipstream("generate", directory / "policy", "--prompt", "w1 w2", "--max-tokens", 4).stdout
    assert said.startswith("w1 w2") and said.count("w") == 6
    again = refused(capfd, "train", tmp_path / "empty.toml", *options(model, directory))
    assert "holds a run; resume it with" in again
    config = (directory / "config.toml").read_text()
    for flags, said in (
        (["--loop.groups_per_step", "1"], "loop.groups_per_step = 1 can't be changed"),
        (["--generator.device", "cuda:9"], "cuda:9"),
        (["--model.path", "gone"], "model.path = 'gone'"),
    ):
        assert said in refused(capfd, "train", "--resume", directory, *flags)
        assert (directory / "config.toml").read_text() == config, "a run that did not go on has another configuration"

    last = directory / "checkpoints" / "step_6"
    half_written = last.with_name("step_8.partial")
    shutil.copytree(last, half_written)
    shutil.copytree(last, last.with_name("step_6.mine"))
    weights = next((last / "trainer").glob("*.distcp"))
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2)
        file.write(b"\xff" * 64)
    said = slipstream("train", "--resume", directory).stderr
    told = f"checkpoint step_6 is damaged (trainer/{weights.name} has other bytes than were written): renamed to"
    assert told in said and "resumed after step 4" in said
    assert last.exists() and last.with_name("step_6.damaged").exists() and not half_written.exists()
    said = refused(capfd, "train", "--resume", directory, "--loop.steps=4")
    assert f"loop.steps = 4 is below step 6 of {last}; give 6 or more" in said
    shutil.rmtree(directory / "checkpoints")
    said = refused(capfd, "train", "--resume", directory)
    assert f"its checkpoints are gone: start a new run with --model.path {directory / 'policy'}" in said
    assert len(lines(directory / "metrics.jsonl")) == 6


@pytest.mark.parametrize(("seed", "max_lag"), [(1, 0), (4, 2)])
def test_killed_and_resumed_runs_lose_nothing(model: Path, tmp_path: Path, seed: int, max_lag: int) -> None:
    """Two runs; benchmarks/kill.py does thirty. A synchronous run ends with bitwise the weights of an uninterrupted
    one.
    """
    rng = random.Random(seed)
    killed = kill.run_with_kills(model, tmp_path / "killed", max_lag, rng, 2, warm.Command, workers)
    assert len(killed) == 2 and any(step > 4 for _, step in killed), "no kill came after the first checkpoint"
    kill.audit(tmp_path / "killed")
    events_agree_with_the_records(tmp_path / "killed", kills=2)
    if max_lag == 0:
        kill.run_with_kills(model, tmp_path / "undisturbed", 0, rng, 0, warm.Command)
        assert kill.same_bits(kill.weights(tmp_path / "killed"), kill.weights(tmp_path / "undisturbed"))
        assert not kill.same_bits(kill.weights(tmp_path / "killed"), dict(kill.load_file(model / "model.safetensors")))


def test_a_stop_is_clean_and_can_be_resumed(model: Path, tmp_path: Path) -> None:
    """By either signal: one stops a new run, the other a resumed run. A tracker gets each step once."""
    directory, config = tmp_path / "run", tmp_path / "empty.toml"
    config.write_text("")
    metrics, steps, version = directory / "metrics.jsonl", 0, 0
    endless = {"loop__steps": 2000, "sync__every": 3, "checkpoint__every": 2001, "evaluation__every": 0}
    endless["observe__trackers"] = json.dumps([f"{tracker_doubles.__file__}:{name}" for name in ("Writes", "Raises")])
    command: list[Any] = ["train", config, *options(model, directory, **endless)]
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(*command)
        last = time.monotonic() + 60
        while kill.steps_done(directory) < steps + 5 and time.monotonic() < last:
            time.sleep(0.02)
        os.kill(process.pid, number)
        done = end(process, seconds=60)
        assert f"{number.name}: stopping after this step" in done.stderr
        assert done.stderr.count("warning: tracker Raises failed: ConnectionError: no route to the tracker.") == 1
        assert f"slipstream train --resume {directory}" in done.stdout
        summary = json.loads((directory / "summary.json").read_text())
        assert summary["stopped"] == number.name
        before, steps = steps, summary["steps"]
        saved = json.loads((directory / "checkpoints" / f"step_{steps}" / "run.json").read_text())
        # A stop between two publishes publishes the last step, so weights and version in the checkpoint match.
        version += steps // 3 - before // 3 + (steps % 3 > 0)
        assert saved["version"] == summary["version"] == summary["sync"]["publishes"] == version
        command = ["train", "--resume", directory]

    slipstream("train", "--resume", directory, "--loop.steps", steps + 4, "--loop.max_lag", 0)
    resumed = json.loads((directory / "summary.json").read_text())
    assert resumed["steps"] == steps + 4 and resumed["stopped"] is None
    assert [line["step"] for line in lines(metrics)] == list(range(1, resumed["steps"] + 1))
    assert "max_lag = 0" in (directory / "config.toml").read_text()
    calls = lines(directory / "calls.jsonl")
    tracked = [call[1] for call in calls if call[0] == "metrics" and "reward/mean" in call[2]]
    assert tracked == list(range(1, resumed["steps"] + 1))
    assert [call[2] for call in calls if call[0] == "finish"] == [True] * 3


@pytest.mark.parametrize(
    "more",
    [
        {"sync__link": "checkpoint", "sync__every": 2, "loop__steps": 5, "model__dtype": "bfloat16"},
        {"sync__link": "checkpoint", "sync__restart": "true", "sync__in_flight": "drain", "loop__steps": 2},
        {"lora__rank": 4, "algorithm__kl_coef": 0.1, "model__dtype": "bfloat16"},
        {"sync__link": "delta", "loop__steps": 4, "model__dtype": "bfloat16", "trainer__learning_rate": 1e-5},
        {
            "generator__replicas": 2,
            "algorithm__filter_zero_advantage": "true",
            "loop__max_lag": 3,
            "sampling__top_p": 0.8,
            "sampling__top_k": 20,
        },
    ],
    ids=["checkpoint in bfloat16", "restarted engines", "lora", "delta", "two generators, truncated sampling"],
)
def test_the_modes_of_the_table(model: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    directory = tmp_path / "run"
    summary = train(model, directory, **more)
    every = more.get("sync__every", 1)
    assert summary["steps"] == more.get("loop__steps", 6)
    assert summary["sync"]["publishes"] == summary["version"] == -(-summary["steps"] // every)
    assert summary["lag"]["max"] <= more.get("loop__max_lag", 1)
    metrics = lines(directory / "metrics.jsonl")
    if (
        "model__dtype" not in more and every == 1
    ):  # the trainer's log-probability of each token is the behaviour log-probability
        assert all(m["policy/mismatch_kl"] < 1e-9 for m in metrics if m["lag/max"] == 0)
    if "lora__rank" in more:
        assert (directory / "policy" / "adapter_config.json").exists()
        assert slipstream("generate", directory, "--prompt", "w1", "--max-tokens", 3).stdout
    if more.get("sync__link") == "delta":
        published = [m for m in metrics if m["sync/changed_fraction"]]  # the first version changes nothing
        weights = sum(p.nbytes for p in load_file(directory / "policy" / "model.safetensors").values())
        assert len(published) >= 2
        for m in published:
            assert 0 < m["sync/changed_fraction"] < 0.5 and 0 < m["sync/bytes"] < weights / 2
            assert 0 < m["sync/transfer_s"] < m["sync/ready_s"] < 60
            assert 0 < m["sync/pause_ms"] < 1000 * m["sync/ready_s"]
    assert not list(directory.glob("weights*"))


def test_adapters_that_a_run_has_trained_are_evaluated(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Scores match those at the end of the run, from another working directory too."""
    directory = tmp_path / "run"
    lora = {"lora__rank": 4, "lora__alpha": 16.0, "trainer__learning_rate": 0.05}
    (tmp_path / "start").symlink_to(model)
    (tmp_path / "work.py").symlink_to(kill.WORK)
    trained = train(
        Path("start"), directory, environment__name="work.py:Work", loop__steps=2, evaluation__every=0, **lora
    )
    capfd.readouterr()
    assert main(["eval", str(directory), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    last = lines(directory / "evaluations.jsonl")[-1]
    assert found["eval/score"] == trained["eval"]["final"] and found["samples"] == last["samples"]
    assert last["samples"] != lines(directory / "evaluations.jsonl")[0]["samples"], "nothing was learned to be seen"
    assert main(["generate", str(directory), "--prompt", "w1 w2", "--max-tokens", "4"]) == 0
    assert capfd.readouterr().out.count("w") == 6


def test_a_run_starts_from_the_adapter_of_another(model: Path, tmp_path: Path) -> None:
    """Its first evaluation is the other's last one. The base is the adapter's. It is resumed, and read without it."""
    first, second = tmp_path / "first", tmp_path / "second"
    train(model, first, loop__steps=2, evaluation__every=0, lora__rank=4, trainer__learning_rate=0.05)
    flags = [f for f in options(model, second, loop__steps=2, trainer__learning_rate=0.05) if "model.path" not in f]
    slipstream("train", tmp_path / "empty.toml", *flags, f"--lora.path={first / 'policy'}")
    before, after = lines(first / "evaluations.jsonl")[-1], lines(second / "evaluations.jsonl")
    assert before["samples"] == after[0]["samples"] != after[-1]["samples"]
    found = load_run(second).options
    assert (found["model.path"], found["lora.rank"], found["lora.alpha"]) == (str(model), 4, 32.0)
    slipstream("train", "--resume", second, "--loop.steps=3")
    shutil.rmtree(first)
    assert slipstream("generate", second, "--prompt", "w1", "--max-tokens", 3).stdout
    assert "no such directory; give that of a PEFT adapter" in slipstream("train", "--resume", second, status=2).stderr


def test_the_last_checkpoint_holds_the_last_version_and_evaluation(model: Path, tmp_path: Path) -> None:
    """Whether a checkpoint of that step was written before (4, of 4) or not (5); resuming from it (5 again) repeats
    no work.
    """
    directory = tmp_path / "run"
    train(model, directory, loop__steps=4, sync__every=2, checkpoint__every=2)
    for steps, evaluated in ((4, [0, 2, 4]), (5, [0, 2, 4, 5]), (5, [0, 2, 4, 5])):
        if steps > 4:
            slipstream("train", "--resume", directory, "--loop.steps", steps)
        summary = json.loads((directory / "summary.json").read_text())
        saved = json.loads((directory / "checkpoints" / f"step_{steps}" / "run.json").read_text())
        assert summary["steps"] == steps and summary["version"] == saved["version"] == -(-steps // 2)
        assert [e["step"] for e in saved["totals"]["evaluations"]] == evaluated
        assert [e["step"] for e in lines(directory / "evaluations.jsonl")] == evaluated
        assert summary["eval"]["history"][-1]["versions"] == [summary["version"]] * 2


BROKEN = """
import math, time
calls = 0

def tasks():
    from slipstream.environments.base import Task
    return [Task(str(i), "w1 " * (5000 if i == 7 else 3)) for i in range(20)]

class Sometimes:
    test = []
    def __init__(self): self.train = tasks()
    async def rollout(self, task, policy):
        global calls
        calls, mine = calls + 1, calls
        if task.id == "3": raise KeyError("no answer")
        completion = await policy.sample(task.prompt)
        if mine % 5 == 1: raise ValueError("a bad day")
        if mine % 5 == 3: return math.nan
        if mine == 20: time.sleep(600)
        return float(completion.token_ids[0] % 3)

class Equal(Sometimes):
    # All groups have zero advantages, and `close` is not async.
    async def rollout(self, task, policy):
        await policy.sample(task.prompt)
        return 1.0
    def close(self): print("closed")

class Always(Sometimes):
    async def rollout(self, task, policy):
        await policy.sample(task.prompt)
        raise RuntimeError("never works")
"""


def test_a_broken_environment_costs_rollouts_or_stops_with_its_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    named = {"environment__options": "{}", "environment__timeout": 3}
    (tmp_path / "empty.toml").write_text("")
    some = options(model, tmp_path / "some", environment__name=f"{tmp_path / 'broken.py'}:Sometimes", **named)
    said = " ".join(slipstream("train", tmp_path / "empty.toml", *some).stderr.split())
    assert "warning: 1 of 20 training tasks are left out" in said and "task 7 (5000 tokens)" in said
    last = "failed in each of 4 tries, the last with: KeyError: 'no answer'"
    assert f"warning: task 3 is left out from now on: it {last}" in said
    blocked = r"warning: an episode blocked the event loop: it held up all others for 1 s at \S+broken\.py, line \d+"
    assert len(re.findall(blocked, said)) == 1
    summary = json.loads((tmp_path / "some" / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["tasks_retired"] == {"7": "prompt of 5000 tokens", "3": "KeyError"}
    assert summary["failures"]["ValueError"] > 5 and summary["failures"]["reward is nan"] > 5
    assert summary["failures"]["blocked the event loop"] == 1
    counts = summary["rollouts"]
    assert counts["failed"] == sum(summary["failures"].values())
    fates = ("trained", "dropped_stale", "failed", "filtered", "ready")
    assert counts["generated"] == sum(counts[fate] for fate in fates)

    directory = tmp_path / "all"
    never = options(model, directory, environment__name=f"{tmp_path / 'broken.py'}:Always", **named)
    said = slipstream("train", tmp_path / "empty.toml", *never, status=1).stderr
    why = r"\d+ rollouts of \d+ tasks in a row failed, the last with: RuntimeError"
    assert re.search(why, said)
    assert re.search(f"the run ended: {why}", figures(load_run(directory))["Faults"]), "its records say why"
    assert "never works" in said and f"slipstream train --resume {directory}" in said


def test_a_run_grades_programs_in_sandboxes(tiny: Path, tmp_path: Path) -> None:
    """Programs of the tiny model's few symbols: valid Python, such as `7`, or not."""
    problems = [{"prompt": f"{n} + 1 =", "tests": [{"input": "", "output": ""}]} for n in range(10)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    named = {"environment__name": "code", "environment__options": '{ train = "problems.jsonl", instruction = "" }'}
    sizes = {"loop__steps": 2, "loop__groups_per_step": 6, "loop__max_lag": 0, "evaluation__tasks": 1}
    summary = train(tiny, tmp_path / "run", **named, **sizes, sampling__max_tokens=1)
    assert summary["steps"] == 2 and summary["rollouts"]["trained"] == 48 and not summary["failures"]
    shares = [record["env/passed"] for record in lines(tmp_path / "run" / "metrics.jsonl") if "env/passed" in record]
    assert shares and 0 < sum(shares) < len(shares)


FLAKY = """
import zlib
from collections import Counter
from slipstream.environments.base import Task

tried = Counter()

class Flaky:
    test = []
    train = [Task(str(i), "w1 w2") for i in range(20)]
    async def rollout(self, task, policy):
        completion = await policy.sample(task.prompt)
        tried[policy._seed] += 1
        assert tried[policy._seed] == 1, "a draw was repeated with the same seed"
        if zlib.crc32(policy._seed.encode()) % 3 == 0: raise ValueError("a bad day")
        return float(completion.token_ids[0] % 3)
"""


def test_a_failed_rollout_is_drawn_again_in_its_group(model: Path, tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    named = {"environment__name": f"{tmp_path / 'flaky.py'}:Flaky", "environment__options": "{}"}
    sizes = {}
    for retries in (0, 8):
        run = tmp_path / str(retries)
        counted = {"loop__steps": 99, "loop__epochs": 0.9}  # of 20 tasks: 6 steps of 3
        summary = train(model, run, loop__max_lag=0, environment__rollout_retries=retries, **counted, **named)
        rows = [row for step in load_run(run).rollout_steps for row in load_run(run).rollouts(step)]
        groups = {row["visit_id"]: row["task_id"] for row in rows}
        sizes[retries] = {sum(row["visit_id"] == visit for row in rows) for visit in groups}
        counts = summary["rollouts"]
        assert {"ValueError"} <= {*summary["failures"]} <= {"ValueError", TOO_FEW}
        assert summary["failures"]["ValueError"] > 10 and sum(summary["failures"].values()) == counts["failed"]
        assert counts["generated"] == counts["trained"] + counts["failed"]
    assert min(sizes[0]) < 4 and sizes[8] == {4}
    assert counts["trained"] == 6 * 3 * 4 and counts["failed"] == summary["failures"]["ValueError"]


def test_groups_without_signal_are_warned_of_once(model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "empty.toml").write_text("")
    late = {"environment__name": f"{tmp_path / 'broken.py'}:Equal", "environment__options": "{}"}
    flags = options(model, tmp_path / "run", **late, algorithm__filter_zero_advantage="true", loop__steps=2)
    done = slipstream("train", tmp_path / "empty.toml", *flags)
    said = (
        "warning: the last 60 groups had advantages of 0 and were replaced; after "
        "algorithm.max_filtered_in_a_row = 60 in a row"
    )
    assert " ".join(done.stderr.split()).count(said) == 1
    counts = json.loads((tmp_path / "run" / "summary.json").read_text())["rollouts"]
    assert (counts["filtered"], counts["trained"]) == (60 * 4, 2 * 3 * 4), "generation did not end"
    assert done.stdout.startswith("closed\n")


HELD_OUT = """
import time
from slipstream.environments.base import Task

class Some:
    train = test = [Task(str(i), f"w{i} w2") for i in range(6)]
    async def rollout(self, task, policy):
        await policy.sample(task.prompt)
        if task.id in self.bad: raise KeyError("no answer to " + task.id)
        return 1.0
    bad = ("2", "4")

class None_(Some):
    bad = tuple("012345")

class Blocks(Some):
    async def rollout(self, task, policy):
        await policy.sample(task.prompt)
        return time.sleep(3600 * (task.id == "3")) or 1.0

class Empty(Some):
    test = []
"""


def test_an_evaluation_says_why_episodes_failed_and_fails_if_all_did(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "held.py").write_text(HELD_OUT)

    def evaluated(thing: str, *more: str) -> tuple[int, str, str]:
        capfd.readouterr()
        named = ["--environment", f"{tmp_path / 'held.py'}:{thing}", "--sampling.max_tokens=3"]
        status = main(["eval", str(model), *named, *more])
        return status, *capfd.readouterr()

    status, out, err = evaluated("Some")
    assert status == 0 and "score 0.667 [0.300, 0.903] on 6 held-out tasks (2 failed: KeyError 2)" in out
    line = HELD_OUT[: HELD_OUT.index("raise KeyError")].count("\n") + 1
    last = f"KeyError: 'no answer to 4' ({tmp_path / 'held.py'}:{line})"
    assert err.splitlines()[-1] == f"slipstream: 2 of 6 held-out tasks failed, the last with: {last}"
    status, out, err = evaluated("Some", "--json")
    found = json.loads(out)
    assert status == 0 and found["eval/failures"] == {"KeyError": 2} and found["last_failure"] == last
    status, out, err = evaluated("None_")
    assert status == 1 and not out
    assert err.splitlines()[-1].startswith("slipstream: all 6 held-out tasks failed, the last with: KeyError: 'no")
    status, out, err = evaluated("Blocks", "--environment.timeout=10")
    assert status == 0 and "(1 failed: blocked the event loop 1)" in out
    assert re.search(r"blocked the event loop: it held up all others for 1 s at \S+held.py, line \d+; await there", err)
    status, out, err = evaluated("Empty")
    assert status == 2 and "there is nothing to evaluate on" in err


SLOW_TEST = """
from slipstream.environments.base import Task

class Slow:
    train = [Task(str(i), f"w{i}") for i in range(40)]
    test = [Task(f"t{i}", f"w{i}") for i in range(6)]

    async def rollout(self, task, policy):
        for _ in range(40 if task.id.startswith("t") else 1):
            completion = await policy.sample(task.prompt)
        return float(completion.token_ids[0] % 2)
"""


def test_an_evaluation_of_a_snapshot_has_one_version(model: Path, tmp_path: Path) -> None:
    """Its episodes take longer than a step. Steps wait for it, rollouts do not."""
    (tmp_path / "slow.py").write_text(SLOW_TEST)
    train(
        model, tmp_path / "run", environment__name=f"{tmp_path / 'slow.py'}:Slow", environment__options="{}",
        loop__steps=8, loop__max_lag=2, evaluation__every=2, evaluation__samples=2, evaluation__temperature=1.0,
        evaluation__snapshot="true",
    )  # fmt: skip
    versions = {e["step"]: e["versions"] for e in lines(tmp_path / "run" / "evaluations.jsonl")}
    assert versions == {step: [step, step] for step in (0, 2, 4, 6, 8)}
    assert {record["lag/max"] for record in lines(tmp_path / "run" / "metrics.jsonl")} - {0}, "rollouts went on"


AGENT = """
import asyncio, json, sys, urllib.request
from slipstream.environments.base import Task

def agent(url, prompt):
    said = ""
    for _ in range(2):
        body = json.dumps({"prompt": f"{prompt} {said}", "max_tokens": 3, "top_p": 0.9, "temperature": 0.8}).encode()
        with urllib.request.urlopen(f"{url}/completions", body) as reply:
            said = json.load(reply)["choices"][0]["text"]
    return said

class Agent:
    def __init__(self, missing=False):
        self.train = self.test = [Task(str(i), f"w{i} w2") for i in range(20)]
        if missing: sys.modules["aiohttp"] = None
    async def rollout(self, task, policy):
        return float(len(await asyncio.to_thread(agent, await policy.base_url(), task.prompt)) % 3)
"""


def test_an_agent_that_gets_only_a_url_is_trained(model: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    named = {"environment__name": f"{tmp_path / 'agent.py'}:Agent", "environment__options": "{}"}
    directory = tmp_path / "run"
    summary = train(model, directory, **named, loop__max_lag=2)
    assert summary["steps"] == 6 and not summary["failures"]
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert all(
        m["policy/mismatch_kl"] < 1e-9 for m in metrics if m["lag/max"] == 0
    )  # temperature and top-p are replayed
    missing = options(model, tmp_path / "missing", **named | {"environment__options": "{ missing = true }"})
    said = slipstream("train", tmp_path / "empty.toml", *missing, status=2).stderr
    assert said.strip().splitlines()[-1].endswith("needs aiohttp: pip install 'slipstream-rl[endpoint]'")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_an_agent_is_trained_with_vllm_behind_its_url(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model("1M", model)
    (tmp_path / "agent.py").write_text(AGENT)
    named = {"environment__name": f"{tmp_path / 'agent.py'}:Agent", "environment__options": "{}"}
    vllm = {"generator__engine": "vllm", "generator__max_num_seqs": 8, "sampling__top_k": 8, "loop__max_lag": 1}
    directory = tmp_path / "run"
    summary = train(model, directory, **named, **vllm)
    assert summary["steps"] == 6 and not summary["failures"]
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert all(m["policy/mismatch_kl"] < 1e-9 for m in metrics if m["lag/max"] == 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "train needs a CONFIG.toml, or --resume RUN_DIR"),
        (["train", "gone.toml"], "gone.toml: No such file or directory"),
        (["train", "--resume", "gone"], "gone holds no run to resume"),
        (["train", "empty.toml", "--model.path=gone", "--environment.name=addition"], "model.path = 'gone'"),
        (
            ["train", "empty.toml", "--model.path=.", "--environment.name=addition"],
            "model.path = '.' has no config.json",
        ),
        (["train", "empty.toml", "--model.path=MODEL", "--environment.name=additon"], "did you mean addition"),
        (
            [
                "train",
                "empty.toml",
                "--model.path=MODEL",
                "--environment.name=WORK",
                "--generator.max_model_len=16",
                "--sampling.max_tokens=8",
            ],
            "the prompts of all training tasks leave no room in the context of 16 tokens; shorten them",
        ),
        (["eval", "MODEL"], "of a model, name an environment, too: --environment NAME"),
        (["generate", "gone", "--prompt", "x"], "model.path = 'gone'"),
        (["generate", "MODEL", "--prompt", "x", "--temperature", "-1"], "evaluation.temperature = -1: it must be"),
        (["generate", "MODEL", "--prompt", "x", "--max-tokens", "0"], "sampling.max_tokens = 0: it must be"),
        (["eval", "MODEL", "--environment", "addition", "--tasks", "-1"], "evaluation.tasks = -1: it must be"),
        (["train", "--resume", "gone", "--lr", "3"], "unknown option --lr"),
        (["train", "empty.toml", "--model.path=MODEL", "--environment.name=WORK", "--run.dir=taken"], "Is a directory"),
        (["config", "--loop.step=3"], "unknown option loop.step (did you mean loop.steps?)"),
        (
            ["train", "empty.toml", "--model.path=MODEL", "--environment.name=WORK", "--generator.device=cuda:9"],
            "cuda:9",
        ),
    ],
)
def test_a_users_mistake_is_one_line(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "taken" / "lock").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    swapped = [a.replace("MODEL", str(model)).replace("WORK", WORK) for a in arguments]
    shown = refused(capfd, *swapped)
    assert shown.startswith("slipstream: ") and said in shown
    assert shown.strip().count("\n") == 0, shown


def test_an_error_found_late_is_the_only_output_of_a_process(model: Path, tmp_path: Path) -> None:
    """The error is printed on one line, although all modules are imported by then."""
    (tmp_path / "empty.toml").write_text("")
    done = slipstream(
        "train",
        "empty.toml",
        *options(model, tmp_path / "run", generator__device="cuda:9"),
        status=2,
        cwd=tmp_path,
        popen=subprocess.Popen,
    )
    assert done.stderr.startswith("slipstream: ") and "cuda:9" in done.stderr and not done.stdout
    assert done.stderr.strip().count("\n") == 0, done.stderr


def test_a_start_that_fails_leaves_its_directory_free(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise RunError("no engine starts")

    monkeypatch.setattr("slipstream.controller.launch.Cluster.start", fail)
    config = load_config(None, options(model, tmp_path / "run"))
    for _ in range(2):  # a directory that stayed behind would be refused the second time
        with pytest.raises(RunError, match="no engine starts"):
            run_training(config, quiet=True)


def test_help_and_config_are_for_people() -> None:
    assert "examples:" in slipstream("--help", popen=subprocess.Popen).stdout
    assert "--resume" in slipstream("train", "--help", popen=subprocess.Popen).stdout
    shown = slipstream("config", "--loop.max_lag", "3").stdout
    assert "max_lag = 3" in shown and "# Most versions between sampling and training of a token" in shown


def test_episodes_of_several_turns_and_roles_are_trained_on(model: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.py").write_text(
        "from slipstream.environments.base import Task\n"
        "class Pairs:\n"
        "    train = test = [Task(str(n), f'{n}+', {}) for n in range(9)]\n"
        "    async def rollout(self, task, policy):\n"
        "        asks, answers = policy.conversation(turns=2), policy.conversation()\n"
        "        said = await asks.ask(task.prompt)\n"
        "        reply = await answers.ask(f'{said}=')\n"
        "        while not asks.ended:\n"
        "            await asks.ask(reply)\n"
        "        return [asks.rollout(len(said), role='asks'), answers.rollout(-len(reply), role='answers')]\n"
    )
    summary = train(
        model, tmp_path / "run", environment__name=f"{tmp_path / 'pairs.py'}:Pairs", environment__options="{}"
    )
    rows = pq.read_table(tmp_path / "run" / "rollouts").to_pylist()
    assert {(r["role"], r["turn"]) for r in rows} == {("asks", 0), ("asks", 1), ("answers", 0)}
    for entry in {(r["step"], r["visit_id"]) for r in rows}:
        for role in ("asks", "answers"):
            own = [r["advantage"] for r in rows if (r["step"], r["visit_id"]) == entry and r["role"] == role]
            assert sum(own) == pytest.approx(0.0, abs=1e-6)
    last = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["env/reward/asks"] >= 0 >= last["env/reward/answers"] and last["env/ended/turns"] == 1.0
    counts = summary["rollouts"]
    assert counts["generated"] == sum(v for k, v in counts.items() if k != "generated")

"""Workers on a real Ray cluster of several nodes, all of them on this host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from slipstream.cli import main
from slipstream.config.schema import ConfigError, RuntimeConfig
from slipstream.controller.node_checks import examine
from slipstream.runtime.placement import Placement
from slipstream.runtime.runtime import current_runtime, open_runtime
from tests import warm

pytest.importorskip("ray")
from slipstream.runtime.ray import connection
from slipstream.runtime.ray.runtime import Group, Slot, plan_groups

FLAGS = ["--environment.name=addition", "--loop.groups_per_step=2", "--loop.group_size=4", "--sampling.max_tokens=4",
         "--evaluation.tasks=4", "--trainer.device=cpu", "--generator.device=cpu", "--runtime.kind=ray"]  # fmt: skip


def train(tiny: Path, path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (path / "empty.toml").write_text("")
    command = [sys.executable, "-m", "slipstream", "train", "empty.toml", f"--model.path={tiny}", "--run.dir=run",
               *FLAGS, *flags]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    run = warm.Command(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=path, env=environment)
    out, err = run.communicate(timeout=240)
    return subprocess.CompletedProcess(command, run.returncode, out, err)


@pytest.mark.e2e
def test_ranks_and_engines_of_a_run_are_on_several_nodes(cluster: str, tiny: Path, tmp_path: Path) -> None:
    """The same configuration as on one host; weights go over TCP."""
    flags = ["--loop.steps=4", "--trainer.ranks=2", "--generator.replicas=2", f"--runtime.address={cluster}"]
    done = train(tiny, tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 4 and 'sync.link = "nccl"' in done.stdout + done.stderr


def writers(log: Path) -> list[int]:
    """Processes of this host whose output goes to this log."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "fd" / "1").readlink() == log:
                found.append(int(process.name))
    return found


REWARD = """
import os, pathlib, signal

def score(task, completion):
    if not (done := pathlib.Path(__file__).with_name("killed")).exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(completion.text))
"""


@pytest.mark.e2e
def test_dead_ranks_and_reward_workers_are_replaced(cluster: str, tiny: Path, tmp_path: Path) -> None:
    """All ranks of the trainer are, in their places; engines stay up."""
    (tmp_path / "reward.py").write_text(REWARD)
    metrics, logs = tmp_path / "run" / "metrics.jsonl", tmp_path.resolve() / "run" / "logs"
    engines: list[list[int]] = []

    def kill_rank() -> None:
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            time.sleep(0.01)
        engines.append(writers(logs / "generator_0.log"))
        for process in writers(logs / "trainer_1.log"):
            os.kill(process, signal.SIGKILL)
        while metrics.read_text().count("\n") < 6:
            time.sleep(0.01)
        engines.append(writers(logs / "generator_0.log"))

    threading.Thread(target=kill_rank, daemon=True).start()
    flags = ["--loop.steps=40", "--trainer.ranks=2", "--checkpoint.every=2", f"--runtime.address={cluster}",
             f"--scoring.kind={tmp_path / 'reward.py'}:score", "--environment.reward_workers=1"]  # fmt: skip
    done = train(tiny, tmp_path, *flags)
    assert done.returncode == 0 and "trainer rank 1 died" in done.stderr, done.stderr
    assert (tmp_path / "killed").exists()
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 41)) and records[-1]["train/restarts"] == 1
    before, after = engines
    assert len(before) == 1 and before == after


PLACED = """
import os, pathlib, signal
from slipstream.environments.addition import Addition

class Placed(Addition):
    async def rollout(self, task, policy):
        process = pathlib.Path(__file__).parent / "processes" / str(os.getpid())
        process.write_text(os.environ["RAY_RAYLET_PID"])
        reward = await super().rollout(task, policy)
        if len(list(process.parent.iterdir())) < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return reward
"""


@pytest.mark.e2e
def test_environment_workers_are_on_several_nodes_and_replaced(cluster: str, tiny: Path, tmp_path: Path) -> None:
    """The first two that play an episode die."""
    (tmp_path / "own.py").write_text(PLACED)
    (tmp_path / "processes").mkdir()
    flags = ["--loop.steps=4", f"--runtime.address={cluster}", "--environment.name=own.py:Placed",
             "--environment.workers=2", "--environment.rollout_retries=3", "--environment.max_failures=99",
             "--evaluation.tasks=0"]  # fmt: skip
    done = train(tiny, tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4 and set(summary["failures"]) == {"environment worker died"}
    nodes = [process.read_text() for process in (tmp_path / "processes").iterdir()]
    assert len(nodes) >= 3 and len(set(nodes)) >= 2
    logs = sorted((tmp_path.resolve() / "run" / "logs").glob("*-worker-*.log"))
    assert len(logs) == 2 and not any(map(writers, logs))


EVEN = """
from slipstream.environments.addition import Addition

class Even(Addition):
    async def rollout(self, task, policy):
        completion = await policy.sample(task.prompt)
        return float(sum(completion.token_ids) % 2 == 0)
"""

MEASURED = re.compile("(_s|_ms|_gb|tflops)$|^engines/busy_s/")  # metrics of time and memory


def test_a_ray_that_does_not_start_in_time_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(ConfigError, match=r"^Ray can't start on this machine \(The current node timed out during"):
        connection.connect("", "runtime.address")


@pytest.mark.e2e
def test_both_runtimes_train_the_same_policy(tiny: Path, tmp_path: Path) -> None:
    """At `loop.max_lag = 0` the same seed: all records but durations, and every bit of the policy."""
    (tmp_path / "own.py").write_text(EVEN)
    records, policies = [], []
    for kind in ("local", "ray"):
        flags = ["--environment.name=own.py:Even", f"--runtime.kind={kind}", f"--run.dir={kind}"]
        done = train(tiny, tmp_path, "--loop.steps=3", "--loop.max_lag=0", *flags)
        assert done.returncode == 0, done.stderr
        assert "Token authentication" not in done.stderr
        lines = map(json.loads, (tmp_path / kind / "metrics.jsonl").read_text().splitlines())
        records.append([{k: v for k, v in line.items() if not MEASURED.search(k)} for line in lines])
        policies.append((tmp_path / kind / "policy" / "model.safetensors").read_bytes())
    assert records[0] == records[1] and policies[0] == policies[1]
    assert policies[0] != (tiny / "model.safetensors").read_bytes() and records[0][0]["train/grad_norm"] > 0


@pytest.mark.e2e
def test_what_no_node_can_hold_is_named(cluster: str, tiny: Path, tmp_path: Path) -> None:
    flags = ["--loop.steps=1", "--trainer.ranks=3", "--runtime.placement=one_node", "--runtime.start_timeout=3"]
    done = train(tiny, tmp_path, f"--runtime.address={cluster}", *flags)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "was not placed within runtime.start_timeout = 3 s" in done.stderr and "has 2 CPUs" in done.stderr


@pytest.mark.e2e
def test_an_address_without_a_cluster_is_refused(tiny: Path, tmp_path: Path) -> None:
    done = train(tiny, tmp_path, "--loop.steps=1", "--runtime.address=127.0.0.1:1")
    assert done.returncode == 2 and "no Ray cluster answers there" in done.stderr and "Traceback" not in done.stderr


CLIENT = """
import sys, time, slipstream
name, address = sys.argv[1:]
run = slipstream.attach(name, address=address)
while run.status()["step"] < 2:
    time.sleep(0.2)
assert run.generate("1+1=", max_tokens=2).versions[0] >= 1
for wrong in (lambda: run.scale(0), lambda: run.generate("1", bogus=1), lambda: run.generate("1" * 2**20)):
    try:
        wrong()
        raise SystemExit("it was not refused")
    except slipstream.ConfigError as error:
        print(error)
assert run.pause() == "paused" and run.checkpoint().exists() and run.resume() == "running"
print(run.stop())
"""


@pytest.mark.e2e
def test_a_run_is_controlled_by_its_name(cluster: str, tiny: Path, tmp_path: Path) -> None:
    """From a process that has no access to its directory's socket."""
    (tmp_path / "empty.toml").write_text("")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "slipstream", *arguments]
        done = warm.Command(words, stdout=PIPE, stderr=PIPE, text=True, env=environment, cwd="/")
        out, err = done.communicate(timeout=60)
        return subprocess.CompletedProcess(words, done.returncode, out, err)

    flags = [*FLAGS, "--loop.steps=100000", f"--runtime.address={cluster}", f"--model.path={tiny}"]
    train = [sys.executable, "-m", "slipstream", "train", "empty.toml", *flags]
    run = warm.Command([*train, "--run.dir=named"], cwd=tmp_path, env=environment, stderr=PIPE, text=True)
    (tmp_path / "other").mkdir()
    try:
        while not command("runs", "--address", cluster, "--json").stdout.startswith("[\n"):
            assert run.poll() is None, run.stderr and run.stderr.read()
        twin = warm.Command([*train, "--run.dir=other/named"], cwd=tmp_path, env=environment, stderr=PIPE, text=True)
        said = twin.communicate()[1]
        assert twin.returncode == 2 and 'a run named "named" is on this Ray cluster already' in said
        client = [sys.executable, "-c", CLIENT, "named", cluster]
        subprocess.run(client, env=environment, cwd="/", check=True, timeout=120)
        assert run.wait(120) == 0
    finally:
        run.kill()
    assert json.loads((tmp_path / "named" / "summary.json").read_text())["stopped"] == "slipstream stop"
    over = command("status", "named", "--address", cluster)
    assert over.returncode == 2 and 'no run named "named" is on the Ray cluster' in over.stderr
    assert command("runs", "--address", cluster).stdout.startswith("no runs on the cluster")


@pytest.mark.e2e
def test_the_nodes_of_a_cluster_are_checked_together(
    cluster: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Connections, bandwidth and an all-reduce between all nodes."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("")
    flags = [f"--model.path={tiny}", "--environment.name=addition", f"--runtime.address={cluster}"]
    status = main(["doctor", "run.toml", "--json", "--runtime.kind=ray", *flags])
    found = json.loads(capsys.readouterr().out)
    assert status == 0 and not found["faults"] and set(found["checks"].values()) == {"ok"}
    assert len(found["nodes"]) == 4 and len({node["node"] for node in found["nodes"]}) == 4
    assert len(found["bandwidth"]) == 6 and all(rate["bytes_per_s"] > 1e7 for rate in found["bandwidth"])


@pytest.mark.e2e
def test_a_node_that_does_not_see_the_run_directory_is_named(cluster: str, tmp_path: Path) -> None:
    with open_runtime(RuntimeConfig(kind="ray", address=cluster)):
        names = [node.name for node in current_runtime().nodes()]
        elsewhere = {names[2]: tmp_path / "none"}
        found = asyncio.run(examine(current_runtime(), None, tmp_path, all_nodes=False, elsewhere=elsewhere))
    missing = f"{tmp_path} is not there; mount one file system for run.dir on all nodes"
    named = [fault.text for fault in found.faults if str(tmp_path) in fault.text]  # a busy host may have other faults
    assert named == [f"node {names[2]}: {missing}"]


def test_the_trainer_is_one_group_and_each_engine_another() -> None:
    groups, slots = plan_groups(Placement(((0, 1), (2, 3)), (4, 5)), 2, "PACK")
    assert groups == [
        Group("trainer", (1, 1), "PACK"), Group("generator 0", (2,), "STRICT_PACK"),
        Group("generator 1", (2,), "STRICT_PACK"),
    ]  # fmt: skip
    assert slots["trainer 1"] == Slot("trainer", 1, 1.0) and slots["generator 1"] == Slot("generator 1", 0, 2)


def test_an_engine_that_shares_a_gpu_is_in_the_trainers_group() -> None:
    groups, slots = plan_groups(Placement(((0,), (1,)), (0, 1)), 2, "PACK")
    assert groups == [Group("trainer", (1, 1), "PACK")]
    assert slots["generator 1"] == slots["trainer 1"] == Slot("trainer", 1, 0.5)
    with pytest.raises(ConfigError, match="tensor_parallel_size = 1"):
        plan_groups(Placement(((0, 1),), (0, 1)), 2, "PACK")

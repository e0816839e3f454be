"""A run on Ray leaves no processes and no placement groups, for any end of the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.runtime.conftest import MEMORY

pytest.importorskip("ray")
MARK = "SLIPSTREAM_TEST_RUN"  # environment variable that the processes of one test inherit
END_S = 30.0  # after the end of the controller
TABLES = """
import ray, sys
ray.init(sys.argv[1], log_to_driver=False, logging_level="critical", configure_logging=False)
groups = ray.util.placement_group_table().values()
actors = ray._private.state.actors().values()
print(sum(g["state"] != "REMOVED" for g in groups), sum(a["State"] != "DEAD" for a in actors))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, str]]:
    """The address of a cluster of two nodes, and the mark of its processes."""
    from ray.cluster_utils import Cluster

    os.environ[MARK] = mark = uuid.uuid4().hex
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=3, object_store_memory=MEMORY)
    del os.environ[MARK]
    yield cluster.address, mark
    cluster.shutdown()


@contextlib.contextmanager
def run(tiny: Path, path: Path, mark: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A run of two engines without an end, once it has taken a step."""
    (path / "empty.toml").write_text("")
    command = [
        sys.executable, "-m", "slipstream", "train", "empty.toml", f"--model.path={tiny}", "--run.dir=run",
        "--environment.name=addition", "--loop.groups_per_step=2", "--loop.group_size=4", "--sampling.max_tokens=4",
        "--evaluation.tasks=4", "--trainer.device=cpu", "--generator.device=cpu", "--generator.replicas=2",
        "--loop.steps=1000000", "--runtime.kind=ray", *flags,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path), MARK: mark}
    process = warm.Command(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=path, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_step(process: subprocess.Popen[str], path: Path) -> None:
    records = path / "run" / "metrics.jsonl"
    while not (records.exists() and records.read_text()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


def marked(mark: str, *names: str) -> set[str]:
    """Command lines of living processes with this mark, of those that contain one of the names."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if not names or any(name in line for name in names):
                    found.add(f"{path.name} {line}")
    return found


def wait_for_none(mark: str, *names: str, limit: float = END_S) -> None:
    last = time.monotonic() + limit
    while left := marked(mark, *names):
        assert time.monotonic() < last, left
        time.sleep(0.2)


def lines_of_ray(printed: str) -> list[str]:
    """Lines that are none of the run's: Ray's or Python's."""
    return [line for line in printed.splitlines() if any(t in line for t in ("ray", "Ray", "Traceback", "Token"))]


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_ray_of_the_run_ends_with_it(number: int, tiny: Path, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with run(tiny, tmp_path, mark) as process:
        wait_for_step(process, tmp_path)
        assert marked(mark, "worker_main") and marked(mark, "raylet")
        process.send_signal(number)
        printed = process.communicate(timeout=60)[0]
        assert process.returncode == (-number if number == signal.SIGKILL else 0), printed
        assert lines_of_ray(printed) == []
        wait_for_none(mark, "worker_main", "WorkerActor", "raylet/raylet", "gcs_server")
        if number != signal.SIGKILL:  # then Ray's agents first try to report the end of Ray to it, for minutes
            wait_for_none(mark)


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_leaves_nothing_on_a_cluster(number: int, cluster: tuple[str, str], tiny: Path, tmp_path: Path) -> None:
    address, mark = cluster
    with run(tiny, tmp_path, uuid.uuid4().hex, f"--runtime.address={address}") as process:
        wait_for_step(process, tmp_path)
        assert len(marked(mark, "worker_main")) == 3 and len(marked(mark, "WorkerActor")) == 3
        process.send_signal(number)
        printed = process.communicate(timeout=60)[0]
        assert process.returncode == (-number if number == signal.SIGKILL else 0), printed
        assert lines_of_ray(printed) == []
        wait_for_none(mark, "worker_main", "WorkerActor")
        assert leftovers(address) == "0 0"


def leftovers(address: str) -> str:
    """Number of placement groups and of actors."""
    done = subprocess.run([sys.executable, "-c", TABLES, address], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.e2e
def test_a_run_that_fails_leaves_nothing_on_a_cluster(cluster: tuple[str, str], tiny: Path, tmp_path: Path) -> None:
    address, mark = cluster
    (tmp_path / "own.py").write_text("def reward(task, completion):\n    raise SystemExit('enough')\n")
    flags = ["--environment.name=own.py:Broken", f"--runtime.address={address}"]
    source = "from slipstream.environments.addition import Addition\nclass Broken(Addition):\n"
    source += "    async def rollout(self, task, policy):\n        raise KeyError('enough')\n"
    (tmp_path / "own.py").write_text(source)
    with run(tiny, tmp_path, uuid.uuid4().hex, *flags) as process:
        printed = process.communicate(timeout=120)[0]
        assert process.returncode == 1 and "enough" in printed, printed
        wait_for_none(mark, "worker_main", "WorkerActor")
        assert leftovers(address) == "0 0"


@pytest.mark.e2e
def test_a_killed_run_that_is_started_again_resumes(cluster: tuple[str, str], tiny: Path, tmp_path: Path) -> None:
    """The same command, as Kubernetes or Slurm starts it again."""
    flags = [f"--runtime.address={cluster[0]}", "--auto-resume", "--checkpoint.every=2"]
    with run(tiny, tmp_path, uuid.uuid4().hex, *flags) as process:
        while not list(tmp_path.glob("run/checkpoints/step_*[0-9]")):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
    with run(tiny, tmp_path, uuid.uuid4().hex, *flags, "--loop.steps=40") as process:
        printed = process.communicate(timeout=120)[0]
        assert process.returncode == 0 and "resumed after step" in printed, printed
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.e2e
def test_a_node_lost_in_the_start_is_named(tiny: Path, tmp_path: Path) -> None:
    """Ray's own report of a lost node, a hundred lines of its log, is not printed."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=3, object_store_memory=MEMORY)
    try:
        with run(tiny, tmp_path, uuid.uuid4().hex, f"--runtime.address={cluster.address}") as process:
            while not list(tmp_path.glob("run/logs/*.log")):
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.05)
            cluster.remove_node(node, allow_graceful=False)
            printed = process.communicate(timeout=120)[0]
        assert process.returncode == 1 and "Its node was lost" in printed, printed
        assert lines_of_ray(printed) == [line for line in printed.splitlines() if "Its node was lost" in line], printed
    finally:
        cluster.shutdown()

"""A run on two hosts: two network namespaces, with a Ray node in each, started by the Slurm script."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.test_ray_ends import MARK, marked, wait_for_none

pytest.importorskip("ray")
SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "run.sbatch"
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") printf 'node0\\nnode1\\n' ;;
    "show node") echo "   NodeAddr=10.213.7.$((${3#node} + 1)) NodeHostName=$3" ;;
    *) echo "$@" >> requeued ;;
esac
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
for node in 0 1; do
    SLURM_NODEID=$node ip netns exec "$SPACE$node" "$@" &
done
trap 'kill $(jobs -p)' TERM
wait
wait
"""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


@pytest.fixture
def space() -> Iterator[str]:
    """The prefix of two network namespaces, joined by a pair of virtual devices."""
    if not shutil.which("ip"):
        pytest.skip("no `ip` here, which makes network namespaces")
    prefix = f"s{uuid.uuid4().hex[:6]}"
    try:
        for side in "01":
            ip("netns", "add", prefix + side)
        ip(
            "link",
            "add",
            "veth0",
            "netns",
            f"{prefix}0",
            "type",
            "veth",
            "peer",
            "name",
            "veth1",
            "netns",
            f"{prefix}1",
        )
        for side in "01":
            inside = ("netns", "exec", prefix + side, "ip")
            ip(*inside, "address", "add", f"10.213.7.{int(side) + 1}/24", "dev", f"veth{side}")
            ip(*inside, "link", "set", f"veth{side}", "up")
            ip(*inside, "link", "set", "lo", "up")
        yield prefix
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for side in "01":
            with contextlib.suppress(OSError):
                ip("netns", "del", prefix + side)


@pytest.mark.e2e
def test_the_slurm_script_runs_on_two_hosts(space: str, tiny: Path, tmp_path: Path) -> None:
    """Trainer and engine are on different hosts, weights go over TCP, and nothing is left."""
    mark = uuid.uuid4().hex
    for name, source in (("scontrol", SCONTROL), ("srun", SRUN)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        path.chmod(0o755)
    (tmp_path / "empty.toml").write_text("")
    flags = [f"--model.path={tiny}", "--run.dir=run", "--environment.name=addition", "--loop.groups_per_step=2",
             "--loop.group_size=4", "--sampling.max_tokens=4", "--evaluation.tasks=4", "--trainer.device=cpu",
             "--generator.device=cpu", "--loop.steps=40"]  # fmt: skip
    environment = os.environ | {
        "PATH": f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}", "SPACE": space, MARK: mark,
        "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path), "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_NODELIST": "node[0-1]", "START_TIMEOUT_S": "120",
    }  # fmt: skip
    job = subprocess.Popen(
        ["ip", "netns", "exec", f"{space}0", "bash", str(SCRIPT), "empty.toml", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    try:
        spaces: set[str] = set()
        while job.poll() is None and len(spaces) < 2:
            for line in marked(mark, "worker_main"):
                with contextlib.suppress(OSError):
                    spaces.add(str(Path(f"/proc/{line.split()[0]}/ns/net").readlink()))
            time.sleep(0.2)
        printed = job.communicate(timeout=200)[0]
    finally:
        job.kill()
        job.communicate()
    log = tmp_path / "ray-7.log"
    assert job.returncode == 0, printed + (log.read_text() if log.exists() else "")
    link = r'sync.link = "(nccl|delta)" \([\d.]+ Gbit/s between the slowest hosts'  # by the load of this machine
    assert len(spaces) == 2 and re.search(link, printed), printed
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 40 and not (tmp_path / "requeued").exists()
    wait_for_none(mark)

"""A run on a Ray cluster, controlled by its name from a process that has no access to its directory's socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from tests import warm
from tests.runtime.test_ray import FLAGS

pytest.importorskip("ray")
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

"""Checks between hosts: three network namespaces on one bridge, of which two can't talk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from slipstream.controller import node_checks
from slipstream.runtime.process import Launch, LocalProcess
from slipstream.runtime.worker_process import WorkerProcess

NAMES = [f"slip{os.getpid() % 100000}-{i}" for i in range(3)]
NET = f"10.{os.getpid() % 200 + 20}.7."
SERVE = """
import json, sys, time
from slipstream.runtime.addresses import private_store
store = private_store(sys.argv[1])
print(store.port, flush=True)
time.sleep(200)
"""
PORT = 6399
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path), "CUDA_VISIBLE_DEVICES": ""}


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=check, capture_output=True, text=True)


def start(namespace: str, *command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *command], env=ENVIRONMENT | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def start_nodes(hosts: list[str], folder: Path, **environment: str) -> None:
    """Start Ray's head in the first namespace, and then a node in each of the others. Each has its own directory."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--object-store-memory=80000000"]
    for numbers in ((0,), (1, 2)):
        starting = {}
        for i in numbers:
            role = (
                ["--head", f"--port={PORT}", "--include-dashboard=false"] if not i else [f"--address={hosts[0]}:{PORT}"]
            )
            own = [f"--node-ip-address={hosts[i]}", f"--temp-dir={folder}/{i}"]
            starting[i] = start(NAMES[i], *ray, *role, *own, **environment)
        for i, process in starting.items():  # a node has joined when this ends
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, f"Ray's node {i} did not start:\n{out}\n{err}"


def end_all() -> None:
    """End all processes in the namespaces."""
    for name in NAMES:
        while pids := run("ip", "netns", "pids", name, check=False).stdout.split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)


class Inside(LocalProcess):
    """A worker's process in a namespace."""

    def __init__(self, namespace: str, launch: Launch) -> None:
        self._namespace = namespace
        super().__init__(launch)

    def _start(self, launch: Launch, theirs: socket.socket) -> subprocess.Popen[bytes]:  # type: ignore[override]
        worker = [sys.executable, "-m", "slipstream.runtime.worker_main", str(theirs.fileno())]
        return subprocess.Popen(
            ["ip", "netns", "exec", self._namespace, *worker], env=ENVIRONMENT | launch.environment,
            pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Addresses of three namespaces. The second and the third have no route to each other."""
    if not shutil.which("ip") or os.geteuid() or run("ip", "netns", "add", NAMES[0], check=False).returncode:
        pytest.skip("network namespaces need ip and root")
    bridge, addresses = NAMES[0].replace("-0", "br"), [f"{NET}{i + 1}" for i in range(3)]
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        for i, name in enumerate(NAMES):
            if i:
                run("ip", "netns", "add", name)
            run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", name, "master", bridge, "up")
            run("ip", "-n", name, "addr", "add", f"{addresses[i]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
        run("ip", "-n", NAMES[1], "route", "add", "blackhole", f"{addresses[2]}/32")
        yield addresses
    finally:
        for name in NAMES:
            run("ip", "netns", "del", name, check=False)
        run("ip", "link", "del", bridge, check=False)


@pytest.mark.e2e
def test_an_all_reduce_names_the_hosts_that_cannot_talk(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_checks, "GROUP_S", 6.0)
    monkeypatch.setattr(node_checks, "PAIR_S", (1.5, 3.0))
    store = start(NAMES[0], sys.executable, "-c", SERVE, hosts[0])
    assert store.stdout
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": ""}
    ranks = {i: WorkerProcess(name, None, partial(Inside, name), environment) for i, name in enumerate(NAMES)}
    try:
        port, began = int(store.stdout.readline()), time.monotonic()
        error, pairs = asyncio.run(node_checks.all_reduce(ranks, f"{hosts[0]}:{port}", "cpu"))
    finally:
        store.kill()
        store.wait()
    assert time.monotonic() - began < 60
    assert pairs == [(1, 2)] and error


@pytest.mark.e2e
def test_a_ray_cluster_names_the_hosts_that_cannot_talk(hosts: list[str]) -> None:
    pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path, for sockets
    (token := folder / "token").write_text(secrets.token_hex(32))  # of this cluster alone
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    try:
        start_nodes(hosts, folder, **access)
        begun = time.monotonic()
        doctor = [sys.executable, "-m", "slipstream", "doctor", "--json", "--runtime.kind=ray"]
        done = start(NAMES[0], *doctor, f"--runtime.address={hosts[0]}:{PORT}", **access)
        out, err = done.communicate(timeout=120)
        duration = time.monotonic() - begun
    finally:
        end_all()
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 1, out + err
    found = json.loads(out)
    assert len(found["nodes"]) == 3 and duration < 60
    [fault] = found["faults"]
    assert fault["text"].startswith(f"nodes {hosts[1]} and {hosts[2]} can't connect to each other")
    assert len(found["bandwidth"]) == 2 and found["checks"]["all-reduce"].startswith("skipped: not all nodes")

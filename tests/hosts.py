"""Hosts for tests: network namespaces on one bridge, and processes in them that answer calls."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Thread
from typing import Any

import pytest

NETWORKS = itertools.count(11)  # of this process: several may exist at once
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path), "CUDA_VISIBLE_DEVICES": ""}


def ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {words}: {done.stderr.strip()}")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[tuple[str, str]]]:
    """Namespace and address of each host. `eth1` joins them and this process; `eth0` of each leads nowhere.

    Skips the test where namespaces can't be made.
    """
    if not shutil.which("ip") or os.geteuid():
        pytest.skip("network namespaces need ip and root")
    prefix, net = f"sh{uuid.uuid4().hex[:6]}", f"10.{os.getpid() % 200 + 20}.{next(NETWORKS)}."
    names = [f"{prefix}{i}" for i in range(count)]
    try:
        try:
            ip(f"link add {prefix}b type bridge")
            for name in names:
                ip(f"netns add {name}")
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        ip(f"addr add {net}254/24 dev {prefix}b")
        ip(f"link set {prefix}b up")
        for i, name in enumerate(names):
            ip(f"link add {name} type veth peer name eth1 netns {name}")
            ip(f"link set {name} master {prefix}b up")
            ip(f"-n {name} link add eth0 type veth peer name other")
            ip(f"-n {name} addr add 192.0.2.{i + 1}/32 dev eth0")
            ip(f"-n {name} addr add {net}{i + 1}/24 dev eth1")
            for device in ("lo", "eth0", "eth1"):
                ip(f"-n {name} link set {device} up")
        yield [(name, f"{net}{i + 1}") for i, name in enumerate(names)]
    finally:
        for words in (*(f"netns del {name}" for name in names), f"link del {prefix}b"):
            with contextlib.suppress(OSError):
                ip(words)


def limit_rate(host: str, rate: str) -> None:
    """Limit what a host receives from the others: `rate` as in "10mbit"."""
    words = f"tc qdisc add dev {host} root tbf rate {rate} burst 32kb latency 500ms"
    subprocess.run(words.split(), check=True)


class Remote:
    """A Python process on a host, which runs `module` and answers calls by `serve`."""

    def __init__(self, host: str, module: str, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=ENVIRONMENT | environment,
        )  # fmt: skip

    def start(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method. The future has its result or a `RuntimeError`; an `EOFError` if the process ended."""
        answer: Future[Any] = Future()
        assert self.process.stdin
        self.process.stdin.write(json.dumps((method, arguments)) + "\n")
        Thread(target=self._read, args=(answer,), daemon=True).start()
        return answer

    def call(self, method: str, *arguments: Any, limit: float = 100.0) -> Any:
        return self.start(method, *arguments).result(limit)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self, answer: Future[Any]) -> None:
        assert self.process.stdout
        if not (line := self.process.stdout.readline()):
            answer.set_exception(EOFError("the process ended"))
            return
        result, error = json.loads(line)
        if error:
            answer.set_exception(RuntimeError(error))
        else:
            answer.set_result(result)


def serve(end: Any) -> None:
    """Answer the calls of a `Remote` by methods of `end`."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = [getattr(end, method)(*arguments), ""]
        except Exception as error:
            answer = [None, f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), file=answers)

"""The Ray actor of a worker: starts the worker's process on its node, and relays messages to and from it.

The worker runs in a child process of the actor, so that a worker that computes or hangs does not block the actor.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from slipstream.runtime.addresses import ADDRESS, interface_of
from slipstream.runtime.process import Launch, LocalProcess

GATHER_S = 0.001  # in which further messages of a worker join the first: a call of Ray costs as much


class WorkerActor:
    """Relays messages between the controller and one worker's process.

    Calls of `send` carry a number, since Ray may run calls of several threads in another order.
    """

    def __init__(self) -> None:
        self._process: Future[LocalProcess] = Future()
        self._received: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._early: dict[int, bytes] = {}
        self._next = 0

    @ray.method(concurrency_group="control")
    def start(self, launch: Launch, path: Sequence[str], directory: str) -> int:
        """Start the worker's process and return its process id.

        `path` and `directory` are the controller's import path and working directory, which the process inherits.

        Raises `OSError` if the run directory is missing on this node.
        """
        try:
            sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
            if Path(directory).is_dir():
                os.chdir(directory)
            process = LocalProcess(_on_this_node(launch))
        except OSError as error:
            self._process.set_exception(error)
            raise
        self._process.set_result(process)
        threading.Thread(target=self._receive, args=(process,), daemon=True).start()
        return process.pid

    @ray.method(concurrency_group="send")
    def send(self, number: int, data: bytes) -> None:
        """Send a message to the worker, once the messages of lower numbers are sent."""
        if self._failed():
            return
        process = self._process.result()
        self._early[number] = data
        while self._next in self._early:
            process.connection.send_bytes(self._early.pop(self._next))
            self._next += 1

    @ray.method(concurrency_group="receive")
    def receive(self) -> list[bytes]:
        """Wait for messages of the worker. An empty list is the end of the connection."""
        messages = []
        message = self._received.get()
        time.sleep(GATHER_S)
        while message is not None:
            messages.append(message)
            if self._received.empty():
                return messages
            message = self._received.get()
        self._received.put(None)  # the end stays the end
        return messages

    @ray.method(concurrency_group="control")
    def control(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """The result of this method of the worker's process; None if its start failed."""
        return None if self._failed() else method(self._process.result(), *arguments)

    def _failed(self) -> bool:
        """Wait for the start. Returns whether it failed."""
        return self._process.exception() is not None

    def _receive(self, process: LocalProcess) -> None:
        try:
            while True:
                self._received.put(process.connection.recv_raw())
        except (EOFError, OSError):
            self._received.put(None)


ACTOR: Any = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"send": 1, "receive": 1, "control": 8})(
    WorkerActor
)


def _on_this_node(launch: Launch) -> Launch:
    """The launch with this node's devices and addresses. Raises `FileNotFoundError` without the run directory."""
    if launch.log and not launch.log.parent.parent.is_dir():
        raise FileNotFoundError(
            f"run directory {launch.log.parent.parent.absolute()} is not on node {socket.gethostname()}: put "
            "run.dir on a file system that all nodes mount at the same path"
        )
    address = ray.util.get_node_ip_address()
    environment = {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, ray.get_gpu_ids())),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", interface_of(address)),
        ADDRESS: address,
    }
    return replace(launch, environment=environment | dict(launch.environment))

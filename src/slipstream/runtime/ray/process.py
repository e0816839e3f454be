"""A worker's process on a Ray cluster: the controller's end, and the actor that starts it on its node.

The worker runs in a child process of the actor, so that a worker that computes or hangs does not block the actor. On
the controller's node it gets the controller's socket. On other nodes calls of Ray carry the bytes of the connection.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from slipstream.runtime.addresses import ADDRESS, interface_of
from slipstream.runtime.process import NOT_PLACED, TERMINATION_GRACE_S, Launch, LocalProcess, Process
from slipstream.runtime.ray.socket_server import Offer, SocketServer

READS, READ_BYTES = 8, 2**18  # of the socket, for one call of Ray
GATHER_MS = 1  # in which further bytes join the first: a call of Ray costs as much
CONTROL_TIMEOUT_S = 30.0  # for the answer of a node to a call that ends a worker; the node may be lost


class RayProcess(Process):
    """A worker's process, started by its own actor. `limit` is in seconds; `pending` says why it is not placed yet."""

    def __init__(
        self, actor: Any, launch: Launch, limit: float, pending: Callable[[], str], sockets: SocketServer
    ) -> None:
        path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109
        self.connection, self._theirs = socket.socketpair()
        offer = sockets.offer(self._theirs)
        self._actor, self._started = actor, actor.start.remote(launch, path, os.getcwd(), offer)  # noqa: PTH109
        self._limit, self._pending = limit, pending
        self._end = ""  # why the actor can relay no messages
        threading.Thread(target=self._receive, name=f"from {launch.name}'s node", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id on its node."""
        pid, _ = ray.get(self._started)
        return int(pid)

    def describe_end(self) -> str:
        return self._end or self._call(LocalProcess.describe_end) or ""

    def terminate(self, grace: float = 0.0) -> None:
        self._stop(LocalProcess.terminate, grace)

    def kill(self) -> None:
        self._stop(LocalProcess.kill)

    def _receive(self) -> None:
        """Relay the messages of the worker to the controller, and end the connection as the worker or its node ends.

        A worker that has the controller's socket sends its messages there, and only its end arrives here. For other
        workers this starts `_send`.
        """
        try:
            _, has_socket = ray.get(self._started, timeout=self._limit)
            if not has_socket:
                threading.Thread(target=self._send, daemon=True).start()
            while data := ray.get(self._actor.receive.remote()):
                self._theirs.sendall(data)
        except GetTimeoutError:
            self._end = f"{NOT_PLACED} runtime.start_timeout = {self._limit:g} s: {self._pending()}\n"
        except RayTaskError as error:
            self._end = f"{error.cause}\n"
        except RayError as error:  # whose last line may be that of an import that failed
            reason = str(error).strip().splitlines()[-1]
            self._end = f"Its node was lost, or its actor ended (`ray status` shows the nodes): {reason}\n"
        except OSError:  # the controller has disconnected
            pass
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)

    def _send(self) -> None:
        """Relay what the controller sends. One call at a time: later messages wait in the socket and form the next."""
        with contextlib.suppress(OSError, RayError):
            while data := _read(self._theirs):
                ray.get(self._actor.send.remote(data))
        self._actor.control.remote(LocalProcess.disconnect)

    def _stop(self, method: Callable[..., None], *grace: float) -> None:
        self._call(method, *grace)
        with contextlib.suppress(RayError):
            ray.kill(self._actor)

    def _call(self, method: Callable[..., Any], *grace: float) -> Any:
        """Result of a call, or None if the node does not answer, or no process was started yet, or its start failed."""
        if not ray.wait([self._started], timeout=0)[0]:
            return None
        with contextlib.suppress(RayError):
            ray.get(self._started)  # a call to an actor that was killed before its start can wait for its whole limit
            limit = CONTROL_TIMEOUT_S + sum(grace) + TERMINATION_GRACE_S
            return ray.get(self._actor.control.remote(method, *grace), timeout=limit)
        return None


class WorkerActor:
    """Starts one worker's process, and relays bytes to and from it. Other calls follow a `start` that succeeded."""

    @ray.method(concurrency_group="control")
    def start(self, launch: Launch, path: Sequence[str], directory: str, offer: Offer) -> tuple[int, bool]:
        """Start the worker's process, with the controller's import path and working directory.

        Returns its id, and whether it has the offered socket. Raises `OSError` if the run directory is missing on this
        node.
        """
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        if Path(directory).is_dir():
            os.chdir(directory)
        taken = offer.take(ray.get_runtime_context().get_node_id())
        self._process = LocalProcess(_on_this_node(launch), taken)
        return self._process.pid, taken is not None

    @ray.method(concurrency_group="send")
    def send(self, data: bytes) -> None:
        """Send bytes to the worker, unless it has ended."""
        with contextlib.suppress(OSError):
            self._process.connection.sendall(data)

    @ray.method(concurrency_group="receive")
    def receive(self) -> bytes:
        """Wait for bytes of the worker. Empty bytes mark the end of the connection."""
        with contextlib.suppress(OSError):
            return _read(self._process.connection)
        return b""

    @ray.method(concurrency_group="control")
    def control(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """The result of this method of the worker's process."""
        return method(self._process, *arguments)


ACTOR: Any = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"send": 1, "receive": 1, "control": 8})(
    WorkerActor
)


def _read(connection: socket.socket) -> bytes:
    """Wait for bytes, and add bytes that follow within `GATHER_MS`. Empty bytes mark the end of the connection."""
    data, arriving = connection.recv(READ_BYTES), select.poll()
    arriving.register(connection, select.POLLIN)
    for _ in range(READS - 1):
        if not arriving.poll(GATHER_MS):
            break
        data += connection.recv(READ_BYTES)
    return data


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

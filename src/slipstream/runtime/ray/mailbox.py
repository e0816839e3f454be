"""The mailbox of a run on a Ray cluster: an actor named after the run, through which other nodes control it.

The actor is on the controller's node, forwards requests to the socket in the run directory, and ends with the run.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slipstream.config.schema import ConfigError
from slipstream.runtime.control_socket import MAX_CLIENTS, ControlError, Gone
from slipstream.runtime.control_socket import request as request_locally
from slipstream.runtime.ray.connection import connect

NAMESPACE = "slipstream"
ACTOR_S = 5.0  # for the actor's answer, after the controller's timeout
_connecting = threading.Lock()


class Mailbox:
    """Forwards requests to the socket of a run."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def ask(self, line: bytes, timeout: float | None) -> bytes:
        """As `control_socket.request`; an error is an answer."""
        try:
            return request_locally(self._run, line, timeout)
        except ControlError as error:
            return json.dumps({"error": str(error)}).encode()


@asynccontextmanager
async def serve_mailbox(run: Path) -> AsyncIterator[None]:
    """Context in which a run has its mailbox. Raises `ConfigError` if its name is taken."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"namespace": NAMESPACE, "scheduling_strategy": here, "num_cpus": 0, "max_restarts": -1}
    try:
        mailbox = ray.remote(Mailbox).options(name=run.name, max_concurrency=2 * MAX_CLIENTS, **options).remote(run)
    except ValueError:
        raise ConfigError(
            f'a run named "{run.name}" is on this Ray cluster already; stop it with `slipstream stop {run.name} '
            "--address auto`, or give this one another run.dir"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(RayError):
            ray.kill(mailbox)


def request(address: str, name: str, line: bytes, timeout: float | None) -> bytes:
    """As `control_socket.request`, to the run of this name on the cluster at `address`."""
    listing = f"`slipstream runs --address {address}` lists them"
    _connect_client(address)
    try:
        asked = ray.get_actor(name, NAMESPACE).ask.remote(line, timeout)
        return bytes(ray.get(asked, timeout=None if timeout is None else timeout + ACTOR_S))
    except ValueError:
        raise Gone(f'no run named "{name}" is on the Ray cluster at {address}; {listing}') from None
    except GetTimeoutError:
        raise ControlError(f"the mailbox of {name} did not answer within {timeout:g} s; see its terminal") from None
    except RayActorError:
        raise Gone(f"the run {name} ended before it answered") from None


def names(address: str) -> list[str]:
    """Names of the runs on a cluster."""
    _connect_client(address)
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in found if actor["namespace"] == NAMESPACE)


def _connect_client(address: str) -> None:
    """Connect once; Ray stays connected until this process ends."""
    with _connecting:
        if not ray.is_initialized():
            connect(address, "address")

"""Sockets that are passed to other processes of this host, and workers of a Ray on this host, which get one."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from slipstream.config.schema import RuntimeConfig
from slipstream.runtime.runtime import current_runtime, open_runtime
from slipstream.runtime.worker import WorkerDied
from slipstream.runtime.worker_process import WorkerProcess
from tests.runtime.test_worker import REFERENCE, Echo, alive

pytest.importorskip("ray")
import ray

from slipstream.runtime.ray.socket_server import SocketServer


def test_a_socket_is_taken_once_on_its_node_while_its_owner_has_it() -> None:
    server = SocketServer("here")
    ours, theirs = socket.socketpair()
    offer = server.offer(theirs)
    assert offer.take("elsewhere") is None
    taken = offer.take("here")
    assert taken is not None
    with ours, taken:
        theirs.close()
        taken.sendall(b"hello")
        assert ours.recv(5) == b"hello"
    assert offer.take("here") is None
    with socket.socket() as dropped:
        offer = server.offer(dropped)
    del dropped
    assert offer.take("here") is None
    directory = Path(offer.server).parent
    assert directory.stat().st_mode & 0o077 == 0
    server.close()
    assert offer.take("here") is None and not directory.exists()


@pytest.mark.e2e
def test_a_worker_on_the_controllers_node_speaks_to_it_directly_and_ends_with_its_actor() -> None:
    async def main() -> None:
        worker = WorkerProcess("echo", launcher=current_runtime().service("cpu"))
        echo = await worker.start(Echo, REFERENCE, "")
        assert worker.process is not None
        pid, direct = ray.get(worker.process._started)  # type: ignore[attr-defined]
        assert direct and worker.process.pid == pid
        assert await echo.say("x" * 2**20) == "x" * 2**20
        ray.kill(worker.process._actor)  # type: ignore[attr-defined]
        with pytest.raises(WorkerDied, match="its actor ended"):
            await worker.raise_death()
        async with asyncio.timeout(20):
            while alive(pid):
                await asyncio.sleep(0.02)

    with open_runtime(RuntimeConfig(kind="ray")):
        asyncio.run(main())

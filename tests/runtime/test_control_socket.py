"""The socket of a run, with clients that send garbage, too much, too little, or leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.runtime.control_socket import FOLDER, MAX_CLIENTS, SOCKET, ControlError, Gone, request, serve_socket

cancelled: list[bytes] = []


async def echo(line: bytes) -> bytes:
    """Answers the request itself; "wait" never."""
    if b"wait" in line:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(line)
    return line.strip()


def connect(run: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str((run / FOLDER / SOCKET).resolve()))
    return connection


async def ask(run: Path, line: bytes) -> bytes:
    return await asyncio.to_thread(request, run, line, 10.0)


def test_only_the_owner_can_enter(tmp_path: Path) -> None:
    async def main() -> None:
        async with serve_socket(tmp_path, echo):
            folder = tmp_path / FOLDER
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_IMODE((folder / SOCKET).stat().st_mode) == 0o600
            assert await ask(tmp_path, b"1") == b"1\n"
        assert not folder.exists()

    asyncio.run(main())


def test_a_long_path_becomes_a_link(tmp_path: Path) -> None:
    run = tmp_path / ("long" * 30)
    run.mkdir()

    async def main() -> None:
        async with serve_socket(run, echo):
            target = (run / FOLDER / SOCKET).resolve().parent
            assert target != run / FOLDER and stat.S_IMODE(target.stat().st_mode) == 0o700
            assert await ask(run, b"1") == b"1\n"
        assert not target.exists() and not (run / FOLDER).exists()

    asyncio.run(main())


def test_bad_clients_disturb_no_other(tmp_path: Path) -> None:
    def misbehave() -> None:
        for sent in (b"\x00\xff garbage", b"half a requ", b""):
            with connect(tmp_path) as client:
                client.sendall(sent)
        with connect(tmp_path) as client:  # a line that is too long is answered before it has arrived whole
            with contextlib.suppress(OSError):
                client.sendall(b"x" * 10 * 2**20)
            answer = client.makefile("rb").readline()
        assert "longer than 1048576 bytes" in json.loads(answer)["error"]

    async def main() -> None:
        async with serve_socket(tmp_path, echo):
            with connect(tmp_path) as silent:
                silent.sendall(b"half")
                await asyncio.to_thread(misbehave)
                assert await ask(tmp_path, b"still there") == b"still there\n"

    asyncio.run(main())


def test_a_client_that_leaves_cancels_its_request(tmp_path: Path) -> None:
    async def main() -> None:
        cancelled.clear()
        async with serve_socket(tmp_path, echo):
            with connect(tmp_path) as client:
                client.sendall(b"wait\n")
                await asyncio.sleep(0.2)
                assert not cancelled
            async with asyncio.timeout(5):
                while not cancelled:
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_too_many_clients_are_told_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with serve_socket(tmp_path, echo):
            clients = [connect(tmp_path) for _ in range(MAX_CLIENTS)]
            for client in clients:
                client.sendall(b"wait\n")
            await asyncio.sleep(0.2)
            assert b"try again" in await ask(tmp_path, b"1")
            for client in clients:
                client.close()
            await asyncio.sleep(0.2)
            assert await ask(tmp_path, b"1") == b"1\n"

    asyncio.run(main())


def test_a_stale_socket_is_gone_and_replaced(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / FOLDER / SOCKET))
    with pytest.raises(Gone, match="no controller answers"):
        request(tmp_path, b"1", 5.0)

    async def main() -> None:
        async with serve_socket(tmp_path, echo):
            assert await ask(tmp_path, b"1") == b"1\n"

    asyncio.run(main())


def test_a_controller_that_is_stopped_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with serve_socket(tmp_path, echo):
            with pytest.raises(ControlError, match="did not answer within"):
                await asyncio.to_thread(request, tmp_path, b"wait", 0.2)

    asyncio.run(main())


OTHER = """
import asyncio, concurrent.futures.thread, os, sys  # the other user may not read where Python is installed
from pathlib import Path
from slipstream.runtime.control_socket import serve_socket
os.chdir(sys.argv[1])
os.setuid(65534)
async def answer(line):
    return b"{}"
async def main():
    async with serve_socket(Path(), answer):
        print("ready", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_users_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    os.chown(run, 65534, 65534)
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, run], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
    )  # fmt: skip
    assert process.stdout and process.stdout.readline() == "ready\n"
    try:
        with pytest.raises(ControlError, match="run of user 65534; only that user can control it"):
            request(run, b"1", 5.0)
    finally:
        process.kill()
        process.communicate()

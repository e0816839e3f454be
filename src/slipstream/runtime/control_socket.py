"""The Unix socket of a run, over which other processes of its user control it: both ends.

A client sends one line of JSON, and gets one as the answer. Both ends compare the user of their peer with their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from slipstream.config.schema import ConfigError

Answer = Callable[[bytes], Awaitable[bytes]]  # answers one line of JSON with another

MAX_REQUEST, MAX_ANSWER = 2**20, 2**26  # bytes of a line
MAX_CLIENTS = 32  # whose requests are answered at the same time
FOLDER, SOCKET, HOST = "control", "socket", "host"
PREFIX = "slipstream-"  # of folders in the temporary directory
TOO_LONG = f"the request is longer than {MAX_REQUEST} bytes; shorten the prompt"
TOO_MANY = f"{MAX_CLIENTS} other requests are being answered; try again when they have ended"


class ControlError(ConfigError):
    """A run that can't be reached, or a command that it refused."""


class Gone(ControlError):
    """No controller answers at this socket."""


@asynccontextmanager
async def serve_socket(run: Path, answer: Answer) -> AsyncIterator[None]:
    """Context in which `answer` serves the socket of this run directory: one request a connection, of the run's user.

    A client that disconnects cancels its request. The caller holds the run's lock.
    """
    clients: set[asyncio.Task[None] | None] = set()
    free = asyncio.Semaphore(MAX_CLIENTS)

    async def answer_if_free(line: bytes) -> bytes:
        if free.locked():
            return _error(TOO_MANY)
        async with free:
            return await answer(line)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(task := asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.CancelledError):  # the client is gone, or the run ends
            if _peer_user(writer.get_extra_info("socket")) == os.getuid():
                writer.write(await _serve_client(reader, answer_if_free) + b"\n")
                await writer.drain()
        clients.discard(task)
        writer.close()

    _remove_folder(folder := run / FOLDER)  # of a killed controller
    folder.mkdir(mode=0o700)
    (folder / HOST).write_text(socket.gethostname())
    try:
        server = await _listen(folder / SOCKET, serve)
    except OSError:  # the path is too long for a socket, or its file system has none
        private = Path(tempfile.mkdtemp(prefix=PREFIX)) / SOCKET  # a folder that only its owner can enter
        (folder / SOCKET).symlink_to(private)
        server = await _listen(private, serve)
    try:
        yield
    finally:
        server.close()
        ending = [client for client in clients if client and client.cancel()]
        if ending:
            await asyncio.wait(ending, timeout=1.0)
        _remove_folder(folder)


async def _listen(path: Path, serve: Callable[..., Awaitable[None]]) -> asyncio.Server:
    server = await asyncio.start_unix_server(serve, path, limit=MAX_REQUEST)
    path.chmod(0o600)
    return server


async def _serve_client(reader: asyncio.StreamReader, answer: Answer) -> bytes:
    """The answer to the client's request, which is cancelled when the client disconnects."""
    try:
        line = await reader.readline()
    except ValueError:  # longer than the limit
        return _error(TOO_LONG)
    if not line.endswith(b"\n"):
        return b""
    answering, leaving = asyncio.ensure_future(answer(line)), asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else b""
    finally:
        answering.cancel()
        leaving.cancel()


def _error(text: str) -> bytes:
    return b'{"error": "%s"}' % text.encode()


def request(run: Path, line: bytes, timeout: float | None) -> bytes:
    """The answer to one line at the run's socket, within `timeout` seconds (None: as long as the controller lives).

    Raises `Gone` or `ControlError`.
    """
    if len(line) >= MAX_REQUEST:
        raise ControlError(TOO_LONG)
    path = (run / FOLDER / SOCKET).resolve()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            if (user := _peer_user(connection)) != os.getuid():
                raise ControlError(f"{run} is the run of user {user}; only that user can control it")
            connection.sendall(line + b"\n")
            answer = connection.makefile("rb").readline(MAX_ANSWER)
    except PermissionError:
        raise ControlError(f"{run} is the run of another user; only that user can control it") from None
    except TimeoutError:
        raise ControlError(f"the controller of {run} did not answer within {timeout:g} s; see its terminal") from None
    except OSError:
        raise Gone(f"no controller answers in {run}") from None
    if not answer.endswith(b"\n"):
        raise Gone(f"the controller of {run} ended before it answered")
    return answer


def _peer_user(connection: socket.socket) -> int:
    """User id of the process at the other end."""
    if hasattr(socket, "SO_PEERCRED"):
        return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])
    return int(struct.unpack("2I", connection.getsockopt(0, 1, 8))[1])  # LOCAL_PEERCRED of macOS


def _remove_folder(folder: Path) -> None:
    """Remove the folder, and the one that its socket is a link to."""
    target = (folder / SOCKET).resolve().parent
    if target.name.startswith(PREFIX) and (folder / SOCKET).is_symlink():
        shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)

"""Rendezvous of a group across hosts: a store at the trainer's loopback address, behind authenticated tunnels.

torch's store answers every client, and vLLM reads pickles from it, so the store listens at the loopback address. A
`Gate` listens at an address that other hosts reach. It connects clients that prove the link's secret to the store. Each
receiver opens a tunnel: a loopback port of its own host, whose connections lead to the gate.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from slipstream.errors import InvalidInput
from slipstream.runtime.addresses import LOOPBACK
from slipstream.sync.channel import RETRY_S, Channel, Listener

CONNECT_TIMEOUT_S = 20.0  # of a receiver to the gate
STORE_TIMEOUT_S = 60.0  # for the store to listen, and for a silent gate to answer
BYTES = 2**16  # read at once


class Relay(Listener):
    """Listens at a free port of `address`. Bytes of each client pass to and from the socket that `connect` returns."""

    def __init__(self, address: str, connect: Callable[[socket.socket], socket.socket]) -> None:
        self._connect = connect
        super().__init__(address, self._relay, "rendezvous")

    def _relay(self, client: socket.socket) -> None:
        """Pass bytes on until one end closes."""
        with client, contextlib.suppress(OSError, EOFError, ValueError), self._connect(client) as other:
            back = threading.Thread(target=_copy, args=(other, client), name="rendezvous", daemon=True)
            back.start()
            _copy(client, other)
            back.join()


class Gate(Relay):
    """Leads clients that have `secret` to the port of a store at this host's loopback address."""

    def __init__(self, address: str, store: int) -> None:
        self._secret, self._store = secrets.token_bytes(32), store
        self._address = address
        super().__init__(address, self._admit)

    @property
    def info(self) -> dict[str, Any]:
        """What `open_tunnel` needs, as plain data."""
        return {"host": self._address, "port": self.port, "secret": self._secret.hex()}

    def _admit(self, client: socket.socket) -> socket.socket:
        _authenticate(client, self._secret, b"gate", b"tunnel")
        store = LOOPBACK, self._store  # vLLM opens it later than the gate
        return _without_timeout(_retry(lambda: socket.create_connection(store), ConnectionRefusedError), client)


def open_tunnel(gate: dict[str, Any]) -> Relay:
    """A loopback port that leads to the gate's store. Raises `InvalidInput` if the gate can't be reached or refuses."""

    def connect(client: socket.socket | None = None) -> socket.socket:
        other = socket.create_connection((gate["host"], gate["port"]), CONNECT_TIMEOUT_S)
        _authenticate(other, bytes.fromhex(gate["secret"]), b"tunnel", b"gate")
        return _without_timeout(other, client)

    try:
        _retry(connect, BlockingIOError).close()  # a trainer without a processor accepts, and is silent for `SILENCE_S`
    except (OSError, EOFError) as error:
        silent = isinstance(error, BlockingIOError)
        found = f"no answer within {STORE_TIMEOUT_S:g} s" if silent else error
        raise InvalidInput(
            f"{socket.gethostname()} can't reach the trainer at {gate['host']}:{gate['port']} ({found}); set "
            "sync.interface to the interface of their common network, and open all TCP ports between them"
        ) from None
    return Relay(LOOPBACK, connect)


def _retry(connect: Callable[[], socket.socket], failure: type[OSError]) -> socket.socket:
    """The connected socket. Tries again after this failure, and raises it once `STORE_TIMEOUT_S` have passed."""
    last = time.monotonic() + STORE_TIMEOUT_S
    while True:
        try:
            return connect()
        except failure:
            if time.monotonic() > last:
                raise
            time.sleep(RETRY_S)


def _authenticate(connected: socket.socket, secret: bytes, own: bytes, other: bytes) -> None:
    """Exchange a message, whose MAC proves that the sender has the secret. Raises `PermissionError`."""
    channel = Channel(connected)
    channel.authenticate(secret, own, other)
    channel.send_bytes(b"")
    channel.recv_bytes()


def _without_timeout(other: socket.socket, *more: socket.socket | None) -> socket.socket:
    """Let reads and writes of these sockets wait without a limit: members of a group are silent between transfers.

    Keepalive then finds dead peers. Returns the first socket.
    """
    for one in filter(None, (other, *more)):
        one.settimeout(None)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            one.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
    return other


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until the end of either socket, then end both."""
    with contextlib.suppress(OSError):
        while data := source.recv(BYTES):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)

"""Processes of `torchrun` on other hosts: how they find the controller of a run, and how both see that one is gone.

The controller opens a door, and says where it is in the store by which the processes of `torchrun` find each other. Who
knocks has to know the word that lies beside it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from slipstream.actor import ORPHANED, be_guest
from slipstream.config import ConfigError
from slipstream.runtime.wire import PlainLine

ARRIVAL = 300.0  # seconds that the processes of `torchrun` have to import what they need
DOOR = "slipstream/door"
SERVICE = "slipstream.runtime.training:TrainerService"  # the only one that a controller may ask another host for
LONGEST = 1024  # bytes that a visitor may say before it is known
IDLE, AGAIN, TRIES = 5, 2, 5  # seconds without a word after which a host is asked for one, how often, and how long


def receive(count: int) -> dict[int, PlainLine]:
    """Wait for so many processes on other hosts, by rank. Raises `ConfigError` if they don't come."""
    store, word = _store(), secrets.token_hex(16)
    bound, named, family = _own_address(os.environ["MASTER_ADDR"])
    guests: dict[int, PlainLine] = {}
    with socket.create_server((bound, 0), family=family) as door:
        store.set(DOOR, f"{word} {door.getsockname()[1]} {named}")
        last = time.monotonic() + ARRIVAL
        while len(guests) < count:
            door.settimeout(max(0.01, last - time.monotonic()))
            try:
                visitor, _ = door.accept()
            except TimeoutError:
                came = f"of {count} ranks on other hosts {len(guests)} came in {ARRIVAL:.0f} s"
                raise ConfigError(f"{came}; see what torchrun said there") from None
            said, _, who = _said(visitor).partition(b" ")
            if not hmac.compare_digest(said, word.encode()):
                visitor.close()
                continue
            rank, _, host = who.decode().partition(" ")
            guests[int(rank)] = _line(visitor, host)
    return guests


def visit() -> None:
    """In a process on another host, be a rank of the trainer until the run is over. Raises `ConfigError` if none is."""
    try:
        word, port, host = _store().get(DOOR).decode().split(" ", 2)
        visitor = socket.create_connection((host, int(port)), ARRIVAL)
        visitor.sendall(f"{word} {os.environ['RANK']} {socket.gethostname()}\n".encode())
    except (RuntimeError, OSError):  # the store's are RuntimeErrors, with all that C++ knows
        raise ConfigError(f"no run began on {os.environ['MASTER_ADDR']}; see what torchrun said there") from None
    line = _line(visitor, host)
    threading.Thread(target=_end_after, args=(line.fileno(),), daemon=True).start()
    be_guest(line, SERVICE)


def _said(visitor: socket.socket) -> bytes:
    """The first line of a visitor, or nothing if it does not come soon."""
    said, last = b"", time.monotonic() + IDLE
    with contextlib.suppress(OSError):
        while not said.endswith(b"\n") and len(said) < LONGEST:
            visitor.settimeout(max(0.01, last - time.monotonic()))
            if not (more := visitor.recv(LONGEST)):
                break
            said += more
    return said.removesuffix(b"\n")


def _store() -> Any:
    """Where the processes of `torchrun` find each other; `get` waits for what is not there yet."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ARRIVAL))


def _own_address(other: str) -> tuple[str, str, socket.AddressFamily]:
    """What to listen on so that whoever reaches the host `other` reaches this one, what to call it, and its family.

    Of a host that knows itself as a loopback address by that name, others know more than it does.
    """
    family, kind, _, _, address = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # nothing is sent
        probe.connect(address)
        own = str(probe.getsockname()[0])
    loopback = own == "::1" or own.startswith("127.")
    return ("", other, family) if loopback and own != other and other != "localhost" else (own, own, family)


def _line(connected: socket.socket, host: str) -> PlainLine:
    """A line to a host that breaks when that host is gone, too."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    patience = {"TCP_KEEPIDLE": IDLE, "TCP_KEEPINTVL": AGAIN, "TCP_KEEPCNT": TRIES,
                "TCP_USER_TIMEOUT": 1000 * (IDLE + AGAIN * TRIES)}  # fmt: skip
    for name, value in patience.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    line = PlainLine(connected.detach())
    line.host = host
    return line


def _end_after(line: int) -> None:
    """End this process some time after its controller: one that waits for other ranks does not see that it has none."""
    watched = select.poll()
    watched.register(os.dup(line), select.POLLRDHUP)
    watched.poll()
    time.sleep(ORPHANED)
    os._exit(1)

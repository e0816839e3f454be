"""Processes of `torchrun` on other hosts: how they find the controller of a run, and how both see that one is gone.

The controller opens a door, and says where it is in the store by which the processes of `torchrun` find each other. Who
knocks has to know the word that lies beside it. So whoever can reach that store is trusted, as by torch itself.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from slipstream.actor import ORPHANED, be_guest
from slipstream.config import ConfigError
from slipstream.runtime.wire import PlainLine

ARRIVAL = 300.0  # seconds that the processes of `torchrun` have to import what they need
STARTS = timedelta(days=1)  # the longest that a run may take to begin; without its first host nobody waits for it
SERVICE = "slipstream.runtime.training:TrainerService"  # the only one that a controller may ask another host for
LONGEST = 1024  # bytes that a visitor may say before it is known
AT_ONCE = 64  # visitors that are not known yet
IDLE, AGAIN, TRIES = 5, 2, 5  # seconds without a word after which a host is asked for one, how often, and how long


def receive(wanted: Collection[int]) -> dict[int, PlainLine]:
    """Wait for these ranks on other hosts. Raises `ConfigError` if they don't come."""
    store, word = _store(), secrets.token_hex(16)
    bound, named, family = _own_address(os.environ["MASTER_ADDR"])
    known: queue.SimpleQueue[tuple[int, PlainLine]] = queue.SimpleQueue()
    strangers: deque[socket.socket] = deque()
    guests: dict[int, PlainLine] = {}

    def greet(visitor: socket.socket) -> None:
        said, _, who = _said(visitor).partition(b" ")
        rank, _, host = who.decode(errors="replace").partition(" ")
        with contextlib.suppress(ValueError):  # those that newer ones have pushed out are gone
            strangers.remove(visitor)
            if hmac.compare_digest(said, word.encode()) and rank.isdecimal() and int(rank) in wanted:
                known.put((int(rank), _line(PlainLine, visitor, host)))
                return
        visitor.close()

    with socket.create_server((bound, 0), family=family) as door:
        store.set(_door(), f"{word} {door.getsockname()[1]} {named}")
        last = time.monotonic() + ARRIVAL
        door.settimeout(0.1)
        while len(guests) < len(wanted):
            with contextlib.suppress(TimeoutError):
                visitor, _ = door.accept()
                strangers.append(visitor)
                threading.Thread(target=greet, args=(visitor,), daemon=True).start()
                with contextlib.suppress(OSError, IndexError):  # some leave by themselves
                    if len(strangers) > AT_ONCE:
                        strangers.popleft().shutdown(socket.SHUT_RDWR)  # who has the word says it at once
            while not known.empty():
                rank, line = known.get()
                if guests.setdefault(rank, line) is not line:
                    line.close()
            if time.monotonic() > last and len(guests) < len(wanted):
                missing = ", ".join(map(str, sorted(set(wanted) - guests.keys())))
                raise ConfigError(f"ranks {missing} did not come in {ARRIVAL:.0f} s; see what torchrun said there")
    return guests


def visit() -> None:
    """In a process on another host, be a rank of the trainer until the run is over. Raises `ConfigError` if none is."""
    try:
        word, port, host = _store().get(_door()).decode().split(" ", 2)
        visitor = socket.create_connection((host, int(port)), ARRIVAL)
        visitor.sendall(f"{word} {os.environ['RANK']} {socket.gethostname()}\n".encode())
    except (RuntimeError, OSError):  # the store's are RuntimeErrors, with all that C++ knows
        raise ConfigError(f"no run began on {os.environ['MASTER_ADDR']}; see what torchrun said there") from None
    be_guest(_line(ReadLine, visitor, host), SERVICE)


class ReadLine(PlainLine):
    """A line that is read all the time: who waits for a busy process to read takes its host for lost in the end.

    When the other end is gone this process ends, some time after what it is in the middle of should have ended too.
    """

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self._arrived: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def poll(self, timeout: float | None = 0.0) -> bool:
        with self._arrived.not_empty:
            return self._arrived.not_empty.wait_for(lambda: bool(self._arrived.queue), timeout)

    def recv_raw(self) -> bytes:
        message = self._arrived.get()
        if message is None:
            self._arrived.put(None)
            raise EOFError
        return message

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._arrived.put(self.recv_bytes())
        self._arrived.put(None)
        time.sleep(ORPHANED)
        os._exit(1)


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
    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=STARTS)


def _door() -> str:
    """Where in that store; it outlives processes that `torchrun` starts anew."""
    return f"slipstream/door/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


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


def _line(kind: type[PlainLine], connected: socket.socket, host: str) -> PlainLine:
    """A line to a host that breaks when that host is gone, too."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    patience = {"TCP_KEEPIDLE": IDLE, "TCP_KEEPINTVL": AGAIN, "TCP_KEEPCNT": TRIES,
                "TCP_USER_TIMEOUT": 1000 * (IDLE + AGAIN * TRIES)}  # fmt: skip
    for name, value in patience.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    line = kind(connected.detach())
    line.host = host
    return line

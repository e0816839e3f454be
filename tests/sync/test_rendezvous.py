"""Tunnels to the store of a trainer that answers late, or never."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator

import pytest

from slipstream.errors import InvalidInput
from slipstream.runtime.addresses import LOOPBACK
from slipstream.sync.channel import Listener
from slipstream.sync.rendezvous import Gate, open_tunnel


@contextlib.contextmanager
def gate_silent_for(attempts: float) -> Iterator[dict[str, object]]:
    """What a receiver needs to reach a gate that accepts so many connections without an answer."""
    store = socket.create_server((LOOPBACK, 0))
    gate, numbers, end = Gate(LOOPBACK, store.getsockname()[1]), itertools.count(), threading.Event()

    def serve(client: socket.socket) -> None:
        if next(numbers) < attempts:
            end.wait()
        else:
            gate._relay(client)

    listener = Listener(LOOPBACK, serve, "late")
    try:
        yield gate.info | {"port": listener.port}
    finally:
        end.set()
        for each in (listener, gate, store):
            each.close()


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.sync.channel.SILENCE_S", 1.0)


def test_a_trainer_that_answers_late_is_reached() -> None:
    with gate_silent_for(2) as info:
        open_tunnel(info).close()


def test_a_trainer_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.sync.rendezvous.STORE_TIMEOUT_S", 0.5)
    with (
        gate_silent_for(float("inf")) as info,
        pytest.raises(
            InvalidInput, match=r"can't reach the trainer at .* \(no answer within 0.5 s\); set sync.interface"
        ),
    ):
        open_tunnel(info)

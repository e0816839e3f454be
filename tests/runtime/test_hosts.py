"""How ranks on other hosts are called: without pickles, and by nobody who does not know the word."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.actor import serve
from slipstream.config import load_config
from slipstream.rollout import Batch
from slipstream.runtime import hosts
from slipstream.runtime.wire import PlainLine
from tests.trainers.test_trainer import random_batch

KEYS = st.text() | st.integers()
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    LEAVES | st.builds(Path, st.text("ab./", min_size=1)),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


def arrived(value: Any) -> Any:
    return PlainLine.loads(PlainLine.dumps(value))


@given(VALUES)
def test_plain_values_arrive_as_they_are(value: Any) -> None:
    assert repr(arrived(value)) == repr(value)


def test_batches_arrive_with_all_that_is_replayed() -> None:
    batch = random_batch(kept=True)
    completion = batch.groups[0].rollouts[0].completions[0]
    experts = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(5, 3, 2)
    changed = replace(batch.groups[0].rollouts[0], completions=(replace(completion, experts=experts),))
    first = replace(batch.groups[0], rollouts=(changed, *batch.groups[0].rollouts[1:]))
    sent = replace(batch, groups=(first, *batch.groups[1:]))
    found = arrived((sent, 3))[0]
    assert isinstance(found, Batch) and found.advantages == sent.advantages and found.samples()
    got = found.groups[0].rollouts[0].completions[0]
    assert got.spans == completion.spans and got.versions == completion.versions
    assert got.experts.dtype == np.uint8 and np.array_equal(got.experts, experts)
    assert all(
        np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(got.kept, completion.kept or (), strict=True)
    )


def test_a_configuration_arrives() -> None:
    config = load_config(None, ["--model.path=m", "--environment.name=addition", "--trainer.betas=[0.8,0.9]"])
    assert arrived((config, "run")) == (config, "run")


@pytest.mark.parametrize("value", [print, object(), {1, 2}, np.array([object()]), 1j])
def test_what_has_no_plain_form_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="can't be written as JSON"):
        PlainLine.dumps((value,))


def test_a_pickle_is_no_message() -> None:
    for data in (pickle.dumps(1), b'{"os": [1]}', b"[" * 10_000, b'{"Sampling": [-1]}', b"{}"):
        with pytest.raises(EOFError):
            PlainLine.loads(data)


class Store(dict[str, bytes]):
    """What the processes of `torchrun` have in common."""

    def __init__(self, opened: Callable[[str], None]) -> None:
        super().__init__()
        self._opened = opened

    def set(self, name: str, value: str) -> None:
        self[name] = value.encode()
        self._opened(value)


def test_who_does_not_know_the_word_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many knock with another one, with a pickle, or with nothing, before the rank does that is waited for."""
    threads = []

    def knock(said: bytes | None, port: str) -> socket.socket:
        visitor = socket.create_connection(("127.0.0.1", int(port)))
        visitor.sendall(said) if said is not None else visitor.close()
        return visitor

    def opened(value: str) -> None:
        word, port, _ = value.split(" ", 2)
        half = word[:-1]
        sayings = [None, pickle.dumps("x") + b"\n", b"\n", f"{half} 1 a\n".encode(), half.encode(), b"x" * 5000,
                   f"{word} 0 a\n".encode(), f"{word} one a\n".encode(), f"{word}\n".encode(), *[b"w"] * 200,
                   f"{word} 1 there\n".encode(), f"{word} 1 there\n".encode()]  # fmt: skip
        threads.append(threading.Thread(target=lambda: kept.extend(knock(said, port) for said in sayings)))
        threads[0].start()

    kept: list[socket.socket] = []
    monkeypatch.setattr(hosts, "IDLE", 1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(hosts, "_store", lambda: Store(opened))
    guests = hosts.receive([1])
    threads[0].join()
    assert list(guests) == [1] and guests[1].host == "there"


def test_another_host_is_asked_for_a_trainer_and_nothing_else() -> None:
    ours, theirs = (PlainLine(end.detach()) for end in socket.socketpair())
    serving = threading.Thread(target=serve, args=(theirs, hosts.SERVICE))
    serving.start()
    ours.send(("os:system", PlainLine.dumps(("true",)), 5.0))
    ((_, failed, (said, kind, *_)),) = ours.recv()
    serving.join()
    assert failed and kind == "ValueError" and said.startswith("os:system is asked for, and this process is there for")


BUSY = """
import socket, sys, time
from slipstream.runtime import hosts
line = hosts._line(hosts.ReadLine, socket.create_connection(("127.0.0.1", int(sys.argv[1]))), "")
time.sleep(5)
line.send(len(line.recv()))
"""


def test_a_rank_may_be_busy_for_longer_than_a_lost_host_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IDLE", "AGAIN", "TRIES"):
        monkeypatch.setattr(hosts, name, 1)
    with socket.create_server(("127.0.0.1", 0)) as door:
        command = [sys.executable, "-c", BUSY, str(door.getsockname()[1])]
        rank = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)})
        line = hosts._line(hosts.PlainLine, door.accept()[0], "")
    try:
        line.send("x" * 30_000_000)
        assert line.recv() == 30_000_000
    finally:
        rank.kill()
        rank.wait()

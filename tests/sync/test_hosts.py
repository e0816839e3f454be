"""Links between hosts: network namespaces, with a process for each end."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slipstream.config.loading import load_config
from slipstream.errors import InvalidInput
from slipstream.runtime import addresses
from slipstream.runtime.addresses import ADDRESS, INTERFACE, LOOPBACK, private_store
from slipstream.sync import rendezvous
from slipstream.sync.rendezvous import Gate, open_tunnel
from tests.hosts import Remote, hosts, limit_rate

ENDS = "tests.sync.link_ends"


@pytest.fixture(scope="module")
def three() -> Iterator[list[tuple[str, str]]]:
    with hosts(3) as found:
        yield found


@contextlib.contextmanager
def processes() -> Iterator[list[Remote]]:
    """A list whose processes end with the block."""
    started: list[Remote] = []
    try:
        yield started
    finally:
        for one in started:
            one.kill()


def publish(trainer: Remote, engines: list[Remote], version: int) -> list[bool]:
    """Whether each engine serves the version afterwards."""
    handle = trainer.call("stage", version)
    received = [engine.start("publish", handle) for engine in engines]
    trainer.call("send")
    return [one.result(60) for one in received]


@pytest.mark.e2e
@pytest.mark.parametrize("link", ["nccl", "delta"])
def test_engines_on_other_hosts_come_and_go(link: str, three: list[tuple[str, str]], tmp_path: Path) -> None:
    """One engine of two ranks and one of one, on two hosts; one dies, and two take its place, while others stay."""
    with processes() as started:
        trainer = Remote(three[0][0], ENDS, "trainer", link, str(tmp_path), **{ADDRESS: three[0][1]})
        started.append(trainer)

        def add(host: int) -> Remote:
            started.append(Remote(three[host][0], ENDS, "engine", link))
            return started[-1]

        def connect() -> None:
            info = trainer.call("open", len(engines))
            joining = [split[i].start("connect", info, 1 + i, i, 2) for i in range(2)]
            joining += [engine.start("connect", info, 3 + i) for i, engine in enumerate(engines[2:])]
            for one in joining:
                one.result(60)

        split = [add(1), add(1)]
        engines = [*split, add(2)]
        connect()
        assert all(publish(trainer, engines, version) == [True] * 3 for version in (0, 1))
        engines.pop().kill()
        engines += [add(2), add(0)]
        connect()
        assert all(publish(trainer, engines, version) == [True] * 4 for version in (1, 2))


@pytest.mark.e2e
def test_an_engine_does_not_wait_for_one_whose_network_is_ten_times_slower(tmp_path: Path) -> None:
    """Two versions of 2 MB reach the fast engine while the slow one, which asks first, receives the first of them."""
    with hosts(3) as found, processes() as started:

        def start(host: int, end: str, *flags: str) -> Remote:
            name, address = found[host]
            started.append(Remote(name, ENDS, end, "delta", *flags, ROWS="16384", **{ADDRESS: address}))
            return started[-1]

        limit_rate(found[1][0], "50mbit")
        limit_rate(found[2][0], "4mbit")
        trainer, fast, slow = start(0, "trainer", str(tmp_path)), start(1, "engine"), start(2, "engine")
        info = trainer.call("open", 2)
        for rank, engine in enumerate((fast, slow), 1):
            engine.call("connect", info, rank)
        assert publish(trainer, [slow, fast], 0) == [True] * 2  # the fast one waits, since no network is known
        handle = trainer.call("stage", 10)
        late = slow.start("publish", handle)
        trainer.call("send")
        time.sleep(0.2)  # for the slow one to ask first; the test is weaker, not wrong, if it does not
        assert fast.call("publish", handle)
        assert publish(trainer, [fast], 20) == [True] and not late.done()
        assert late.result(60)
        assert publish(trainer, [slow, fast], 21) == [True] * 2


@pytest.mark.e2e
@pytest.mark.parametrize("link", ["delta", "lora"])
def test_an_engine_and_then_the_trainer_are_killed_in_a_transfer(
    link: str, three: list[tuple[str, str]], tmp_path: Path
) -> None:
    """The other engine gets the version; then it keeps that, until another trainer brings the next."""
    with processes() as started:

        def start_publish(version: int) -> list[Future[bool]]:
            """Versions 10 and 20 take about a second: return in the middle of it."""
            handle = trainer.call("stage", version)
            received = [engine.start("publish", handle) for engine in engines]
            trainer.call("send")
            if not version % 10:
                time.sleep(0.2)
                assert not any(one.done() for one in received)
            return received

        flags = ["trainer", link, str(tmp_path), "--sync.max_mb_per_s=0.06"]
        trainer, successor = (Remote(three[0][0], ENDS, *flags, **{ADDRESS: three[0][1]}) for _ in range(2))
        engines = [Remote(three[1][0], ENDS, "engine", link, SILENCE_LIMIT_S="0.5") for _ in range(2)]
        started.extend([trainer, successor, *engines])
        info = trainer.call("open", 2)
        for rank, engine in enumerate(engines, 1):
            engine.call("connect", info, rank)
        received = start_publish(10)
        engines.pop(0).kill()
        assert received[1].result(60)
        (lost,) = start_publish(20)
        trainer.kill()
        with pytest.raises(RuntimeError, match=r"no byte from"):
            lost.result(60)
        assert engines[0].call("serves", 10)
        trainer = successor
        engines[0].call("connect", trainer.call("open", 1), 1)
        assert start_publish(21)[0].result(60)


@pytest.mark.e2e
def test_sync_interface_chooses_the_network(three: list[tuple[str, str]], tmp_path: Path) -> None:
    """Also if the runtime's address is another; an engine that can't reach it says what to set."""
    with processes() as started:
        environment = {ADDRESS: "192.0.2.1", INTERFACE: "eth1"}
        good = Remote(three[0][0], ENDS, "trainer", "nccl", str(tmp_path), **environment)
        bad = Remote(three[0][0], ENDS, "trainer", "nccl", str(tmp_path), **environment | {INTERFACE: "eth0"})
        lost = Remote(three[0][0], ENDS, "trainer", "nccl", str(tmp_path), **environment | {INTERFACE: "eth7"})
        engine = Remote(three[1][0], ENDS, "engine", "nccl")
        started += [good, bad, lost, engine]
        with pytest.raises(RuntimeError, match=r'sync.interface = "eth7" has no IPv4 address on .* has eth0, eth1, lo'):
            lost.call("open", 1)
        engine.call("connect", bad.call("open", 1), 1)
        with pytest.raises(RuntimeError, match=r"can't reach the trainer at 192.0.2.1:\d+ .*set sync.interface"):
            engine.call("publish", bad.call("stage", 0))
        info = good.call("open", 1)
        assert info["gate"]["host"] == three[0][1]
        engine.call("connect", info, 1)
        assert publish(good, [engine], 1) == [True]


@pytest.mark.e2e
def test_adapters_reach_engines_on_other_hosts(three: list[tuple[str, str]], tmp_path: Path) -> None:
    """Several at once; a version that was replaced is refused, and so is another secret."""
    with processes() as started:
        trainer = Remote(three[0][0], ENDS, "trainer", "lora", str(tmp_path), **{ADDRESS: three[0][1]})
        started.append(trainer)
        engines = [Remote(three[i][0], ENDS, "engine", "lora", TMPDIR=str(tmp_path)) for i in (1, 1, 2)]
        started.extend(engines)
        trainer.call("open", 3)
        for version in range(3):
            assert publish(trainer, engines, version) == [True] * 3
            assert not list(tmp_path.glob("slipstream-adapter-*"))
        old = trainer.call("stage", 3)
        trainer.call("stage", 4)
        with pytest.raises(RuntimeError, match="version 3 of the adapter is not staged"):
            engines[0].call("publish", old)


def test_workers_get_the_network_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `sync.interface`, or of the route to servers on other hosts."""

    def environment(*flags: str) -> dict[str, str]:
        engine = ["--model.path=m", "--environment.name=e", "--generator.engine=vllm", "--sync.link=checkpoint"]
        return addresses.link_environment(load_config(None, [*engine, *flags]))

    assert environment() == environment("--generator.servers=['http://localhost:8000']") == {}
    assert environment("--generator.servers=['http://127.0.0.2:8000']") == {ADDRESS: "127.0.0.1"}
    chosen = environment("--sync.interface=lo")
    assert chosen["NCCL_SOCKET_IFNAME"] == "=lo" and chosen["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv(INTERFACE, chosen[INTERFACE])
    assert addresses.own_address() == "127.0.0.1"
    with pytest.raises(ValueError, match=r"no.such.host:8000 can't be reached"):
        environment("--generator.servers=['http://no.such.host:8000']")


def client(port: int) -> Any:
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=20))


def test_a_store_is_reached_with_the_secret_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = private_store(LOOPBACK)
    store.set("key", "value")
    gate = Gate(LOOPBACK, store.port)
    tunnels = [open_tunnel(gate.info) for _ in range(2)]
    clients = [client(tunnel.port) for tunnel in tunnels]
    assert [one.get("key") for one in clients] == [b"value"] * 2
    clients[0].set("other", "x" * 100_000)
    assert clients[1].get("other") == store.get("other") == b"x" * 100_000
    with pytest.raises(InvalidInput, match=r"can't reach the trainer at 127.0.0.1.*does not have the secret"):
        open_tunnel(gate.info | {"secret": os.urandom(32).hex()})
    with socket.create_connection((LOOPBACK, gate.port)) as stranger:
        stranger.settimeout(20)
        stranger.sendall(bytes(4096))
        seen = b""
        with contextlib.suppress(ConnectionResetError):
            while data := stranger.recv(4096):
                seen += data
        assert len(seen) <= 32 + 8 + 16 + 16, "a nonce and an empty message, and nothing of the store"
    gate.close()
    monkeypatch.setattr(rendezvous, "CONNECT_TIMEOUT_S", 2.0)
    with pytest.raises(InvalidInput, match="can't reach"):
        open_tunnel(gate.info)
    assert clients[0].get("key") == b"value", "members that have joined stay"


def test_a_receiver_may_come_before_the_store_listens() -> None:
    """vLLM opens its store after the gate."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    listening.close()
    gate = Gate(LOOPBACK, port)
    tunnel = open_tunnel(gate.info)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(client(tunnel.port).get("key")))
    waiting.start()
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    waiting.join(20)
    assert found == [b"value"]
    gate.close()

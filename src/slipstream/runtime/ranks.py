"""The ranks of a trainer as one process: every call goes to all of them, and what rank 0 answers is the answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.actor import TORCHRUN, Actor, ActorDied, ActorError, Large, Line, be_guest
from slipstream.config import Config, ConfigError
from slipstream.runtime import hosts
from slipstream.runtime.placement import Placement, ranks_here, under_torchrun, visible

DEATH_SHOWS = 1.0  # seconds after a failure in which a process whose death may be behind it is known to be dead


class Ranks:
    """Processes that take part in everything together, called like the one `Actor` that they stand for.

    One that dies, or fails, leaves the others waiting for it in a collective operation: the first to do so ends the
    call with its own error, and `stop` waits for none of them then.
    """

    def __init__(self, actors: Sequence[Actor], store: Any = None) -> None:
        """`store` is where they meet; it lives as long as they do."""
        self.actors, self._store = actors, store
        self._broken = False
        self.name = actors[0].name

    @property
    def dead(self) -> ActorDied | None:
        """What became of the first that died."""
        return next((actor.dead for actor in self.actors if actor.dead), None)

    async def start(self, service: str, *arguments: Any) -> None:
        """Start all of them; they find each other by the addresses in their environments."""
        await asyncio.gather(*(actor.start(service, *arguments) for actor in self.actors))

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """As `Actor.call`; calls reach all ranks in the same order."""
        dumped = {dumps: dumps(arguments) for dumps in {actor.dumps for actor in self.actors}}
        calls = [actor.call_dumped(method, dumped[actor.dumps]) for actor in self.actors]
        return asyncio.ensure_future(self._answer(calls))

    def call_large(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """As `Actor.call_large`."""
        large = {pieces: Large(pieces, arguments) for pieces in {actor.pieces for actor in self.actors}}
        calls = [actor.call_dumped(method, large[actor.pieces]) for actor in self.actors]
        return asyncio.ensure_future(self._answer(calls))

    async def _answer(self, calls: Sequence[asyncio.Future[Any]]) -> Any:
        try:
            return (await asyncio.gather(*calls))[0]
        except (ActorDied, ActorError):
            self._broken = True
            await raise_a_death(self.actors)
            raise

    async def stop(self, grace: float = 10.0) -> None:
        """Let all of them end by themselves, or end them after `grace` seconds; at once where one has failed."""
        if self._broken or self.dead:
            for actor in self.actors:
                actor.kill()
        await asyncio.gather(*(actor.stop(grace) for actor in self.actors))


async def raise_a_death(ends: Sequence[Any]) -> None:
    """Raise `ActorDied` if what failed at one of these is but the death of another, which may show a little later."""
    last = asyncio.get_running_loop().time() + DEATH_SHOWS
    while asyncio.get_running_loop().time() < last:
        if dead := next((end.dead for end in ends if end.dead), None):
            raise dead from None
        await asyncio.sleep(DEATH_SHOWS / 20)


async def trainer_actor(
    directory: Path, placement: Placement, ranks: int, progress_timeout: float | None = None
) -> Actor | Ranks:
    """The trainer's process, or as many as it has ranks, each with its GPU and the addresses that `torchrun` gives.

    Under `torchrun` the others are its processes, here and on other hosts, which wait in `join`.
    """
    actor = partial(Actor, progress_timeout=progress_timeout)
    if ranks == 1:
        return actor("trainer", directory / "logs" / "trainer.log", visible(placement.trainer))
    gpus = [visible(placement.trainer[rank : rank + 1]) for rank in range(ranks_here(ranks))]
    if under_torchrun():
        here = ranks_here(ranks)
        gpus += [{} if placement.trainer else visible(())] * (ranks - here)  # those elsewhere have their own
        guests = await asyncio.to_thread(_receive, here - 1)
        if ranks > here:
            guests |= await asyncio.to_thread(hosts.receive, range(here, ranks))
        address = {name: os.environ[name] for name in TORCHRUN if name in os.environ}
        return Ranks(
            [
                actor("trainer", directory / "logs" / "trainer.log", gpus[0] | address),
                *(actor(_name(rank, guest.host), None, gpus[rank], guest) for rank, guest in sorted(guests.items())),
            ]
        )
    from slipstream.sync.nccl import loopback_store

    store = loopback_store()
    actors = []
    for rank in range(ranks):
        address = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        log = "trainer.log" if rank == 0 else f"trainer_{rank}.log"
        actors.append(actor(_name(rank), directory / "logs" / log, gpus[rank] | address))
    return Ranks(actors, store)


def _name(rank: int, host: str = "") -> str:
    return f"trainer rank {rank}{f' on {host}' if host else ''}" if rank else "trainer"


def refuse_torchrun(config: Config) -> None:
    """Raise `ConfigError` unless `torchrun` started as many processes as the trainer has ranks, for what only ranks of
    this host can do, and in a process that is not to control a run."""
    ranks, started = config.trainer.ranks, int(os.environ["WORLD_SIZE"])
    if os.environ.get("RANK", "0") != "0":
        raise ConfigError(
            "the first process of torchrun controls the run; call slipstream.runtime.ranks.join() in others"
        )
    if started != ranks:
        raise ConfigError(f"torchrun started {started} processes, but trainer.ranks = {ranks}; make them the same")
    if ranks_here(ranks) == ranks:
        return
    for name, value, goes in (
        ("sync.link", config.sync.link, config.sync.link != "single_copy"),
        ("trainer.kind", config.trainer.kind, config.trainer.kind == "pytorch"),
        ("trainer.device", config.trainer.device, config.trainer.device.partition(":")[1] == ""),
    ):
        if not goes:
            raise ConfigError(f'{name} = "{value}" needs all ranks on one host, and torchrun started some on others')


def join() -> bool:
    """In a process of `torchrun` but the first, be a rank of the trainer of the run that the first controls.

    Returns whether this was one, when that run is over. Those of another host find it over the network.
    """
    if not under_torchrun() or os.environ["RANK"] == "0":
        return False
    if os.environ["GROUP_RANK"] != "0":
        hosts.visit()
        return True
    while True:  # torchrun ends this process if the first fails before it opens
        place, visitor = _meeting_place(), socket.socket(socket.AF_UNIX)
        try:
            refuse_public(place)
            visitor.connect(str(place / "door"))
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.1)
            continue
        refuse_other_user(visitor)
        visitor.sendall(bytes([int(os.environ["RANK"])]))
        be_guest(Line(visitor.detach()))
        return True


def _receive(count: int) -> dict[int, Line]:
    """Wait for so many processes of `torchrun` on this host, by rank. Raises `ConfigError` where another user holds
    the place where they meet."""
    place = _meeting_place()
    shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(FileExistsError):  # which is refused below
        place.mkdir(mode=0o700)
    refuse_public(place)
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(hosts.ARRIVAL)
            door.bind(str(place / "door"))
            door.listen(count)
            arrived = [door.accept()[0] for _ in range(count)]
            for guest in arrived:
                refuse_other_user(guest)
            return {guest.recv(1)[0]: Line(guest.detach()) for guest in arrived}
    finally:
        shutil.rmtree(place)


def _meeting_place() -> Path:
    """A directory that the processes of one `torchrun` know."""
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(parent) / f"slipstream-{os.getuid()}-{os.getppid()}"


def refuse_public(place: Path) -> None:
    """Raise `ConfigError` unless this is a directory of this user that no other user can write into: messages through a
    socket in it are unpickled. Raises `FileNotFoundError` where there is nothing."""
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{place} is not a private directory of this user, so ranks of the trainer can't meet there: remove it, or "
            "set XDG_RUNTIME_DIR to a directory that only you can write into"
        )


def refuse_other_user(connected: socket.socket) -> None:
    """Raise `ConfigError` if the process at the other end is another user's, on systems that tell."""
    if hasattr(socket, "SO_PEERCRED"):
        size = struct.calcsize("3i")  # process, user, group
        _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if user != os.getuid():
            raise ConfigError(f"user {user} answers where ranks of the trainer of user {os.getuid()} meet")

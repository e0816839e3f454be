"""The ranks of a trainer as one process: every call goes to all of them, and what rank 0 answers is the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.actor import Actor, ActorDied, ActorError
from slipstream.runtime.placement import Placement, visible

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
        return asyncio.ensure_future(self._answer([actor.call(method, *arguments) for actor in self.actors]))

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


def trainer_actor(directory: Path, placement: Placement, ranks: int) -> Actor | Ranks:
    """The trainer's process, or as many as it has ranks, each with its GPU and the addresses that `torchrun` gives."""
    if ranks == 1:
        return Actor("trainer", directory / "logs" / "trainer.log", visible(placement.trainer))
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    actors = []
    for rank in range(ranks):
        address = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        name, log = ("trainer", "trainer.log") if rank == 0 else (f"trainer rank {rank}", f"trainer_{rank}.log")
        gpu = visible(placement.trainer[rank : rank + 1])
        actors.append(Actor(name, directory / "logs" / log, gpu | address))
    return Ranks(actors, store)

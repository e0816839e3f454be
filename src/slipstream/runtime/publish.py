"""A publish, as the controller drives it: a version goes from the trainer to every generator, or they leave the pool.

A generator that can't be brought to a version, or serves other values than were published, is ended: nothing is ever
drawn by a mixture. The run goes on with the others, and a publish fails only where there are none.

Generators go on drawing while checksums are compared, but what a version has drawn is kept back until it was found to
be right. If it was not, it is thrown away with the generator, and drawn again by another.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from typing import Any

from slipstream.actor import Actor, ActorDied, ActorError, went_well
from slipstream.config import SyncConfig
from slipstream.runtime.pool import GeneratorPool, ProcessGenerator
from slipstream.runtime.ranks import Ranks
from slipstream.sync.checksum import chosen
from slipstream.sync.link import PublishStats, find_link

ANSWERS = 15.0  # seconds in which generators answer, or work, once a transfer to them has failed
DEATH_SHOWS = 1.0  # seconds after a failed publish in which a process that died at its other end is known to have
ASKED = 1.0  # seconds after which the trainer is asked whether its end can be what generators wait for

# How long generators may take. One that is stopped is noticed sooner, see `actor.HEARTBEAT_TIMEOUT_S`; these are for
# one that works for ever, and must not end one that is slow.
CONNECT = 900.0  # seconds: NCCL meets all ranks, and engines compare all that they serve with the model's files
PASS = 300.0  # seconds of the pass that any question waits for: on a CPU, one that computes all prompts anew
WIDEST = 4  # bytes of a number
RATE = 1e8  # bytes a second of the slowest way that a version goes: files over a network

Answers = dict[ProcessGenerator, Any]


class PublishError(RuntimeError):
    """New weights did not reach a generator as they are."""


async def nothing() -> None:
    """What happens between staging and sending where both sides run at once."""


class WeightLink:
    """The controller's view of a link: it carries tickets from one end to the other, and commits a version.

    `hand_over` is called once a version is staged and before any generator takes it. No sequence takes longer than
    `sequence` seconds, which generators that are drained wait for.
    """

    def __init__(
        self,
        trainer: Actor | Ranks,
        pool: GeneratorPool,
        sync: SyncConfig,
        hand_over: Callable[[], Awaitable[None]] = nothing,
        sequence: float = 0.0,
    ) -> None:
        self._trainer, self._pool, self._sync, self._hand_over = trainer, pool, sync, hand_over
        sender = find_link(sync.link)[0]
        self._collective: bool = getattr(sender, "collective", False)
        self._at_swap: bool = getattr(sender, "at_swap", False)
        self._lets_go: bool = getattr(sender, "lets_go", False)
        self._released: asyncio.Future[None] | None = None
        self._names: list[str] = []
        self._travel = 0.0  # seconds that a version may be under way
        self._drain = sequence if sync.interruption == "drain" else 0.0
        self._members = list(pool.generators)
        self._joined: list[ProcessGenerator] = []  # those that the ends are connected for; none once that broke
        self._connected = False
        self._failed: dict[ProcessGenerator, Exception] = {}  # at the last question
        self._lost: list[str] = []

    async def connect(self, version: int) -> None:
        """Connect both ends and publish for the first time: every generator serves the trainer's weights."""
        if self._sync.link == "single_copy":
            shapes = await self._trainer.call("shapes")
            await self._trainer.call("compute_on", await self._members[0].actor.call("lend", shapes))
        await self._join()
        lost = (await self.publish(version, "off" if self._sync.verify == "off" else "full")).lost
        if lost:  # nothing has been drawn yet: whoever started the run can mend it
            raise PublishError(lost[0])
        self._connected = True

    async def publish(self, version: int, verify: str = "", free: asyncio.Event | None = None) -> PublishStats:
        """Bring every generator to the trainer's weights. Raises if none of them can be, or the trainer can't.

        `verify` says which parameters are compared then, in the place of `sync.verify`. `free` is set as soon as the
        trainer may take its next step, while generators are still being brought there.
        """
        free = free or asyncio.Event()
        began = time.perf_counter()
        if self._released:
            await self._released
        try:
            holds, sending, ready = await self._bring(version, verify or self._sync.verify, free)
        except Exception as error:
            for generator in self._members:
                if generator.doubted is not None:  # nobody knows by now whether what it serves is right
                    generator.give_up(f"{generator.actor.name} was taken out of the pool: {error}")
            raise
        lost, self._lost = tuple(self._lost), []
        return PublishStats(version, max(holds), sending, ready - began, time.perf_counter() - began, lost)

    async def close(self) -> None:
        """Both ends close with their processes."""

    async def _join(self) -> None:
        """Connect both ends, of those generators that are there."""
        ranks = [g.ranks for g in self._members]
        offer = await self._trainer.call("open_link", sum(ranks))
        self._names = list(offer["shapes"])
        self._travel = sum(math.prod(shape) for shape in offer["shapes"].values()) * WIDEST / RATE
        firsts = itertools.accumulate(ranks, initial=1)
        calls = [g.actor.call("connect", offer, first) for g, first in zip(self._members, firsts, strict=False)]
        connecting = asyncio.gather(
            *(g.answer(call, "connect", CONNECT) for g, call in zip(self._members, calls, strict=True))
        )
        connecting.add_done_callback(went_well)  # the trainer's failure may be told
        try:
            while self._collective and not (await asyncio.wait((connecting,), timeout=ASKED))[0]:
                await self._trainer.call("connecting")
            await connecting
        finally:
            connecting.cancel()
        self._joined = list(self._members)

    async def _bring(self, version: int, verify: str, free: asyncio.Event) -> tuple[list[float], float, float]:
        """Publish to all members, and where some of them fail to those that are left. Returns what `_attempt` does.

        Once the trainer is free, its weights may be others, and nothing can be sent again.
        """
        self._lose(g for g in self._members if g.actor.dead)
        while True:
            self._failed = {}
            try:
                if self._collective and self._joined != self._members:  # it waits for all that have joined
                    await self._join()
                return await self._attempt(version, verify, free)
            except (ActorError, ActorDied) as error:
                self._joined = []
                if free.is_set():
                    raise
                self._lose(await self._guilty(error))

    async def _attempt(self, version: int, verify: str, free: asyncio.Event) -> tuple[list[float], float, float]:
        """Publish to all members. Returns how long each was held, how long sending took, and when all drew by it."""
        names = chosen(self._names, version, verify)
        ticket = await self._trainer.call("stage", version)
        await self._hand_over()
        sent = asyncio.ensure_future(_seconds(self._trainer.call("send", ticket)))
        sent.add_done_callback(lambda done: free.set() if went_well(done) and self._lets_go else None)
        # Asked for at once: the trainer reads it before any step that it is told to take from now on.
        wanted = self._trainer.call("checksums", names) if names else _answered({})
        wanted.add_done_callback(went_well)  # another failure may be told
        # All have the whole version beside what they serve before the first of them swaps.
        try:
            prepares = [g.actor.call("prepare", ticket) for g in self._members]
            receive = f"receive version {version}"
            await _unless(sent, self._each(prepares, receive, lambda: self._collective and not free.is_set()))
            swaps = [self._swap(g, version) for g in self._members]
            swap = f"swap in version {version}"
            holds = await _unless(sent, self._each(swaps, swap, lambda: self._at_swap, self._drain))
            ready = time.perf_counter()
            sending = await sent
        finally:
            sent.cancel()
        # Not waited for, but on its way: the trainer reads it before any call that is made after this.
        self._released = self._trainer.call("release", ticket)
        self._released.add_done_callback(went_well)  # the next publish tells
        free.set()
        await self._compare(names, wanted, version)
        for generator in self._members:
            generator.trust()
        return list(holds.values()), sending, ready

    async def _each(
        self,
        calls: Iterable[Awaitable[Any]],
        doing: str,
        together: Callable[[], bool] = lambda: False,
        more: float = 0.0,
    ) -> Answers:
        """What each member answers. Who fails is lost if others don't; of what they do together, all have failed. It
        may take `more` seconds than a pass and the way of a version."""

        async def answer(generator: ProcessGenerator, call: Awaitable[Any]) -> Any:
            try:
                return await generator.answer(call, doing, PASS + self._travel + more)
            except (ActorError, ActorDied) as error:
                self._failed[generator] = error
                if together():
                    raise
                return error

        self._failed = {}
        pairs = list(zip(self._members, calls, strict=True))
        answers = await asyncio.gather(*(answer(*pair) for pair in pairs))
        if len(self._failed) == len(pairs):
            raise next(iter(self._failed.values()))
        answered = {g: a for (g, _), a in zip(pairs, answers, strict=True) if g not in self._failed}
        self._lose(self._failed)
        return answered

    async def _guilty(self, error: ActorError | ActorDied) -> list[ProcessGenerator]:
        """The generators without which a collective that failed may be tried again. Raises where it can't be.

        What fails at one end may be but the death of another, which shows a little later. A transfer into what is being
        served can't be: those that took part have some of it, and the trainer waits in it for those that failed.
        """
        last = time.perf_counter() + DEATH_SHOWS
        while not (self._trainer.dead or any(g.actor.dead for g in self._members)) and time.perf_counter() < last:
            await asyncio.sleep(DEATH_SHOWS / 20)
        if self._collective and not (self._trainer.dead or self._failed or self._at_swap):
            await self._look_for_silent()
        dead = [g for g in self._members if g.actor.dead]
        guilty = dead or list(self._failed)
        others = self._connected and self._collective and 0 < len(guilty) < len(self._members)
        halfway = self._at_swap and any(g.doubted is not None for g in self._members)
        if self._trainer.dead or halfway or not others:
            raise self._trainer.dead or (dead[0].actor.dead if dead else None) or error
        return guilty

    async def _look_for_silent(self) -> None:
        """Give up who stands still: at the other end that looks like a failure of its own."""
        await asyncio.gather(*(g.look(ANSWERS, "in a transfer, which failed") for g in self._members))

    def _lose(self, generators: Iterable[ProcessGenerator]) -> None:
        """End these for good, and remember why. Raises if none is left."""
        for generator in list(generators):
            if generator not in self._members:
                continue
            why = generator.actor.dead or self._failed.get(generator)
            generator.give_up(f"{generator.actor.name} was taken out of the pool: {why}")
            self._members.remove(generator)
            first = str(why).splitlines()[0]
            named = first if first.startswith(generator.actor.name) else f"{generator.actor.name} failed: {first}"
            self._lost.append(f"{named}; {len(self._members)} of {len(self._pool.generators)} generators are left")
        if not self._members and self._pool.dead:
            raise self._pool.dead

    async def _swap(self, generator: ProcessGenerator, version: int) -> float:
        hold: float
        generator.doubt(version)
        with generator.slots.closed() if self._sync.interruption == "drain" else nullcontext():
            hold, generator.totals = await generator.actor.call("swap", version)
        generator.version = version
        return hold

    async def _compare(self, names: list[str], wanted: Awaitable[dict[str, int]], version: int) -> None:
        """See that what is served is what the trainer published, parameter by parameter."""
        if not names:
            return
        sums = [g.actor.call("checksums", names) for g in self._members]
        served = await self._each(sums, f"tell the checksums of version {version}")
        published = await wanted
        for generator, its in served.items():
            other = next((name for name in names if its[name] % 2**64 != published[name]), "")
            if other:
                self._failed[generator] = PublishError(
                    f"{generator.actor.name} serves {other} with other values than the trainer published as version "
                    f"{version}; nothing was trained on them. Try another sync.link"
                )
        if self._failed and all(g in self._failed for g in self._members):
            raise self._failed[self._members[0]]
        self._lose(self._failed)


async def _unless(sent: asyncio.Future[float], receiving: Awaitable[Answers]) -> Answers:
    """What the receivers answer. Raises at once if sending fails: they may wait for ever for what it does not send."""
    received = asyncio.ensure_future(receiving)
    received.add_done_callback(went_well)  # this raises another's failure
    try:
        await asyncio.wait((sent, received), return_when=asyncio.FIRST_COMPLETED)
        if sent.done() and not received.done():
            sent.result()
        return await received
    finally:
        received.cancel()


def _answered(answer: Any) -> asyncio.Future[Any]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(answer)
    return future


async def _seconds(call: asyncio.Future[Any]) -> float:
    """How long a call takes from now on."""
    began = time.perf_counter()
    await call
    return time.perf_counter() - began

"""Several generators as one: each an engine in a process of its own, or a server of the user's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from slipstream.actor import Actor, ActorDied, ActorError, went_well
from slipstream.closing import close_at_once
from slipstream.config import Config
from slipstream.generators.base import ContextFull, GenerationError
from slipstream.generators.clock import Clock, Slots
from slipstream.rollout import Completion, Sampling, ids
from slipstream.runtime.servers import Server

SLACK = 8  # requests that a session's generator may have above the one with the fewest
TELL = 300.0  # seconds of the step, or of the pass over all prompts on a CPU, that any question waits for
GRACE = 20.0  # seconds in which an engine ends, with the processes that it has started
REFUSALS = {kind.__name__: kind for kind in (GenerationError, ContextFull)}  # what an engine says of a request

Result = TypeVar("Result")
Start = Callable[[], Coroutine[Any, Any, None]]
Begin = Callable[[Config], tuple[Actor, Start]]


class ProcessGenerator:
    """An engine in a process of its own or a server, as a `Generator`. `ranks` of its processes hold weights, and
    `begin` starts another in its place. While a version is `doubted`, what it draws is kept back. It decodes as many
    sequences at once as it has `slots` (0: unknown)."""

    def __init__(self, actor: Actor | Server, ranks: int = 1, begin: Begin | None = None, slots: int = 0) -> None:
        self.actor = actor
        self.ranks = ranks
        self.slots = Slots(slots)
        self._begin = begin
        self._before: dict[str, float] = {}  # totals of those that were in this one's place
        self.outstanding = 0
        self.awake = asyncio.Event()  # its pool's, which it shares: else its sequences wait, perhaps with it
        self.awake.set()
        self._limited = 0  # answers that it owes and that have a time limit of their own
        self._excuse(actor)
        self._keys = itertools.count()
        self.version = 0
        self.doubted: int | None = None
        self._judged = asyncio.Event()
        self.totals: dict[str, float] = {"tokens": 0, "busy": 0.0}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, clock: Clock | None = None) -> Completion:
        """As `Generator.generate`. The episode's `clock` is stopped while the request waits for a slot."""
        self.outstanding += 1
        key, actor = next(self._keys), self.actor
        try:
            call: Awaitable[Completion] = actor.call("generate", key, ids(prompt_ids), sampling)
            with self.slots.request(clock or Clock()):
                completion = await call
            while any(span.version == self.doubted for span in completion.spans):
                await self._judged.wait()
                if actor.dead:
                    raise actor.dead
        except asyncio.CancelledError:
            actor.post("abort", key)
            raise
        except ActorError as error:
            raise REFUSALS[error.kind](str(error)) if error.kind in REFUSALS else error from None
        finally:
            self.outstanding -= 1
        return completion

    def _excuse(self, actor: Actor | Server) -> None:
        """Ask for no progress of an engine that is held, nor with what has a limit of its own."""
        if isinstance(actor, Actor):
            actor.excused = lambda method: not self.awake.is_set() if method == "generate" else self._limited > 0

    async def look(self, seconds: float, doing: str) -> None:
        """Give it up if it answers nothing and sends no heartbeat for so long."""
        before, asked = self._heartbeats(), asyncio.ensure_future(self.actor.call("drawn"))
        asked.add_done_callback(went_well)  # whatever it answers, it does
        answered, _ = await asyncio.wait((asked,), timeout=seconds)
        asked.cancel()
        if not answered and before is not None and before == self._heartbeats():
            self.give_up(f"{self.actor.name} was silent {doing}")

    def _heartbeats(self) -> int | None:
        """Number of heartbeats so far; None of a server, which has limits of its own."""
        return self.actor.heartbeats if isinstance(self.actor, Actor) else None

    async def answer(self, call: Awaitable[Result], doing: str, limit: float = math.inf) -> Result:
        """What `call` returns. Gives the generator up, and raises `ActorDied`, after `limit` seconds without it."""
        answered, limited = asyncio.ensure_future(call), limit < math.inf
        answered.add_done_callback(went_well)  # raised here, if still wanted
        self._limited += limited
        try:
            if not (await asyncio.wait((answered,), timeout=limit if limited else None))[0]:
                self.give_up(f"{self.actor.name} did not {doing} within {limit:.3g} s")
                assert self.actor.dead
                raise self.actor.dead
            return await answered
        finally:
            self._limited -= limited
            answered.cancel()

    def doubt(self, version: int) -> None:
        """Keep back what this version draws: it is not known yet whether what is served is what was published."""
        self.doubted = version
        self._judged.clear()

    def trust(self) -> None:
        """It is: hand out what was kept back."""
        self.doubted = None
        self._judged.set()

    def give_up(self, why: str) -> None:
        """End it for good. Who waits for it, or for what was kept back, is told `ActorDied`."""
        self.actor.give_up(why)
        self._judged.set()

    async def stats(self) -> dict[str, float]:
        """Tokens generated and seconds busy since the start."""
        stats: dict[str, float] = await self.answer(self.actor.call("stats"), "tell what it has done", TELL)
        self.totals = {name: value + self._before.get(name, 0.0) for name, value in stats.items()}
        return self.totals

    async def replace(self, config: Config) -> Start:
        """End this engine, whose requests fail with `ActorDied`. Returns what starts the one in its place, which may
        be called when all that share its GPU have ended. The pool is held.

        The old one has `GRACE` seconds to end by itself, since one that is killed leaves its workers' memory behind.
        """
        assert self._begin is not None
        old = self.actor
        with contextlib.suppress(ActorDied):  # what it did since it was last asked is not known then
            await self.stats()
        self._before = dict(self.totals)
        self.actor, start = self._begin(config)  # first: who looks for one that lives finds it
        self._excuse(self.actor)
        await old.stop(GRACE)
        return start

    async def close(self) -> None:
        await self.actor.stop()


class Session:
    """A pool as one episode sees it: what it draws stays on one generator, which has the keys of what was said before.

    Where that has more than `SLACK` requests above the one with the fewest, and above a quarter more, the session
    moves there for good. What a generator was drawing when it died, another draws again.
    """

    def __init__(self, pool: GeneratorPool) -> None:
        self.clock = Clock(pool.clock)  # the episode's
        self._pool = pool
        self._home: ProcessGenerator | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """As `Generator.generate`."""
        while True:
            await self._pool.awake.wait()
            self._home = self._pool.choose(self._home)
            try:
                return await self._home.generate(prompt_ids, sampling, self.clock)
            except ActorDied:
                if self._pool.dead:
                    raise


class GeneratorPool:
    """Several generators as one: each request goes to the one with the fewest outstanding of those that live, but those
    of a `session` go to the same. `living` are those that have not died. While the pool is held (not `awake`), requests
    wait and `clock` stands still.
    """

    def __init__(self, generators: Sequence[ProcessGenerator]) -> None:
        self.generators = generators
        self.clock = Clock()
        self.awake = asyncio.Event()
        self.awake.set()
        for generator in generators:
            generator.awake = self.awake

    def hold(self) -> None:
        """Let requests wait from now on: generators are going to sleep, or to start anew."""
        self.awake.clear()
        self.clock.stop()

    def resume(self) -> None:
        """Generators are there again."""
        self.clock.go_on()
        self.awake.set()

    @property
    def slots(self) -> int:
        """Sequences that all generators decode at once; 0 if that is unknown of one of them."""
        counts = [g.slots.count for g in self.generators]
        return sum(counts) if all(counts) else 0

    @property
    def living(self) -> list[ProcessGenerator]:
        return [g for g in self.generators if not g.actor.dead]

    @property
    def version(self) -> int:
        return min(g.version for g in self.living or self.generators)

    @property
    def dead(self) -> ActorDied | None:
        """What became of the generator that died first, if none of them lives."""
        return None if self.living else self.generators[0].actor.dead

    def session(self) -> Session:
        """For the requests of one episode."""
        return Session(self)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Draw a completion that belongs to no session."""
        return await self.session().generate(prompt_ids, sampling)

    def choose(self, home: ProcessGenerator | None) -> ProcessGenerator:
        """The generator for the next request of a session that has been at `home`."""
        living = self.living or self.generators
        least = min(living, key=lambda g: g.outstanding)
        most = least.outstanding + max(SLACK, least.outstanding // 4)  # loads differ by chance, large ones by more
        return home if home and home in living and home.outstanding <= most else least

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """What each that lives answers. One that dies meanwhile does not; raises if none is left, or one refuses."""
        calls = (g.answer(g.actor.call(method, *arguments), f"answer `{method}`") for g in self.living)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ActorDied):
                raise answer
        if self.dead:
            raise self.dead
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def stats(self) -> dict[str, float]:
        """Tokens of all generators, and seconds busy of the average one."""
        await asyncio.gather(*(g.stats() for g in self.living), return_exceptions=True)
        return self.totals

    @property
    def totals(self) -> dict[str, float]:
        """The same as of the last publish or call of `stats`."""
        totals = [g.totals for g in self.generators]
        return {"tokens": sum(t["tokens"] for t in totals), "busy": sum(t["busy"] for t in totals) / len(totals)}

    async def drawn(self) -> int:
        """Tokens that the furthest sequence in flight has drawn."""
        drawn: list[int] = await self.ask("drawn")
        return max(drawn)

    async def close(self) -> None:
        await close_at_once(*(g.close for g in self.generators))

"""Several generators as one: each an engine in a process of its own, or a server of the user's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from slipstream.actor import Actor, ActorDied, ActorError, went_well
from slipstream.config import Config
from slipstream.generators.base import ContextFull, GenerationError
from slipstream.generators.clock import Clock, Slots
from slipstream.rollout import Completion, Sampling
from slipstream.runtime.servers import Server

SLACK = 8  # requests that a session's generator may have above the one with the fewest
TELL = 300.0  # seconds of the step, or of the pass over all prompts on a CPU, that any question waits for
QUIET = 45.0  # seconds for which one that owes an answer may use no processor: any work or wait of an engine uses some
LOOK = 1.5  # seconds between two looks at that; they are counted, so that time for which all stood still does not
LOOKS = 10  # as many pass between two at one that draws, which is most of the time
IDLE = 0.05  # of a processor, that any process which waits for a frozen one uses at most; one that draws uses more
GRACE = 20.0  # seconds in which an engine ends, with the processes that it has started
REFUSALS = {kind.__name__: kind for kind in (GenerationError, ContextFull)}  # what an engine says of a request

Result = TypeVar("Result")
Start = Callable[[], Coroutine[Any, Any, None]]
Begin = Callable[[Config], tuple[Actor, Start]]


class ProcessGenerator:
    """An engine in a process of its own or a server, as a `Generator`. `ranks` of its processes hold weights, and
    `begin` starts another in its place. While a version is `doubted`, what it draws is kept back. None of its processes
    uses more than `idle` of a processor while it stands still. It decodes as many sequences at once as it has `slots`
    (0: unknown)."""

    def __init__(
        self,
        actor: Actor | Server,
        ranks: int = 1,
        begin: Begin | None = None,
        idle: float = IDLE,
        slots: int = 0,
    ) -> None:
        self.actor = actor
        self.ranks = ranks
        self.slots = Slots(slots)
        self._begin, self._idle = begin, idle
        self._before: dict[str, float] = {}  # totals of those that were in this one's place
        self.outstanding = 0
        self.awake = asyncio.Event()  # its pool's, which it shares: else its sequences wait, perhaps with it
        self.awake.set()
        self._drawing = self._asked = 0  # completions, and other answers, that it owes
        self._watching: asyncio.Task[None] | None = None
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
            call: Awaitable[Completion] = actor.call("generate", key, tuple(prompt_ids), sampling)
            with self.slots.request(clock or Clock()):
                completion = await self._draw(call)
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

    async def _draw(self, call: Awaitable[Completion]) -> Completion:
        self._drawing += 1
        if isinstance(self.actor, Actor) and (not self._watching or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())
        try:
            return await call
        finally:
            self._drawing -= 1

    async def _watch(self) -> None:
        """As long as it draws, give it up if all its processes stand still for `QUIET` seconds, as if one is stopped.

        What else is asked of it has limits of its own, and one that is held has nothing to do.
        """
        quiet, worked = 0, await asyncio.to_thread(self._worked)
        while self._drawing and not self.actor.dead:
            await asyncio.sleep(LOOK * LOOKS)
            before, worked = worked, await asyncio.to_thread(self._worked)
            stands = self._stood(before, worked, LOOK * LOOKS)
            owes_that_alone = self._drawing and self.awake.is_set() and not self._asked
            quiet = quiet + LOOKS if stands and owes_that_alone else 0
            if quiet * LOOK >= QUIET:
                owed = f"with {self._drawing} completion{'s' * (self._drawing > 1)} to draw"
                self.give_up(f"{self.actor.name} stood still for {quiet * LOOK:.3g} s, {owed}")

    def _stood(self, before: dict[int, float], worked: dict[int, float], seconds: float) -> bool:
        """Whether it stood still for so long, by what its processes had used before and after."""
        used = [now - before.get(number, 0.0) for number, now in worked.items()]
        return bool(used) and max(used) <= self._idle * seconds

    async def look(self, seconds: float, doing: str) -> None:
        """Give it up if it answers nothing and stands still for so long."""
        before, asked = self._worked(), asyncio.ensure_future(self.actor.call("drawn"))
        asked.add_done_callback(went_well)  # whatever it answers, it does
        answered, _ = await asyncio.wait((asked,), timeout=seconds)
        asked.cancel()
        if not answered and self._stood(before, self._worked(), seconds):
            self.give_up(f"{self.actor.name} stood still {doing}")

    async def answer(
        self, call: Awaitable[Result], doing: str, limit: float = math.inf, quiet: float | None = None
    ) -> Result:
        """What `call` returns. Gives the generator up, and raises `ActorDied`, if it does not do so in `limit` seconds,
        or its processes use no processor for `quiet` seconds (by default `QUIET`), as those that are stopped.
        """
        answered, quiet = asyncio.ensure_future(call), QUIET if quiet is None else quiet
        answered.add_done_callback(went_well)  # raised here, if still wanted
        looks, since = 0, 0
        worked: dict[int, float] = {}  # who answers before the first look is not looked at, which costs some time
        self._asked += 1
        try:
            while not (await asyncio.wait((answered,), timeout=LOOK))[0]:
                looks, before, worked = looks + 1, worked, self._worked()
                if not worked or worked != before:
                    since = looks
                if looks * LOOK >= limit or (looks - since) * LOOK >= quiet:
                    self.give_up(f"{self.actor.name} did not {doing} within {looks * LOOK:.3g} s")
                    assert self.actor.dead
                    raise self.actor.dead
            return await answered
        finally:
            self._asked -= 1
            answered.cancel()

    def _worked(self) -> dict[int, float]:
        """Processor time used so far, by process. Nothing of a server, which has limits of its own."""
        return self.actor.worked() if isinstance(self.actor, Actor) else {}

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
        await asyncio.gather(*(g.close() for g in self.generators))

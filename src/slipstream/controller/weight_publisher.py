"""Publishes: bring one version of the weights from the trainer to every engine of the pool.

An engine that fails to load a version, or serves different weights than were published, is removed from the pool, so
that no token is sampled from a mixture of versions. Engines sample while checksums are compared; completions of the new
version are withheld until then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from slipstream.config.schema import Config, SyncConfig
from slipstream.controller.colocation import ColocatedScheduler
from slipstream.controller.engine_calls import (
    NotServed,
    Pause,
    PublishError,
    Replies,
    duration,
    find_difference,
    prepare_version,
    receive_while_sending,
    swap_version,
)
from slipstream.generators.pool import EngineReplica, GeneratorPool
from slipstream.runtime.closing import gather_all
from slipstream.runtime.event_loop import throttle
from slipstream.runtime.rank_group import RankGroup, detect_death
from slipstream.runtime.worker import WorkerDied, WorkerError, handle, succeeded
from slipstream.runtime.worker_process import WorkerProcess
from slipstream.sync.checksum import chosen
from slipstream.sync.link import PublishHandle, PublishStats, find_link, link_name
from slipstream.trainers.base import TrainerWorker

PROGRESS_TIMEOUT_S = 15.0  # for engines to respond or make progress after a failed transfer
CONNECT_POLL_S = 1.0  # interval at which the trainer reports errors while engines connect

# Time limits of calls to engines. They end a call that hangs and must not end one that is slow; an engine whose process
# is stopped is detected sooner, see `worker_process.HEARTBEAT_TIMEOUT_S`.
CONNECT_TIMEOUT_S = 900.0  # NCCL meets all ranks, and engines compare all that they serve with the model's files
CALL_TIMEOUT_S = 300.0  # includes the current forward pass, which on a CPU may prefill all prompts again
BYTES_PER_PARAMETER = 4  # of the widest dtype
MIN_BYTES_PER_S = 1e8  # of the slowest transfer: files over a network


class WeightPublisher:
    """Drives the weight link: passes publish handles from sender to receivers, and commits a version.

    `turns` is given where trainer and engines alternate: engines allocate their weights after a version is staged.
    `sequence` is the time limit of a sequence in seconds, which an engine may take to drain.
    """

    def __init__(
        self, trainer: WorkerProcess | RankGroup, pool: GeneratorPool, sync: SyncConfig,
        turns: ColocatedScheduler | None = None, sequence: float = 0.0,
    ) -> None:  # fmt: skip
        self._process, self._pool, self._sync, self._turns = trainer, pool, sync, turns
        self._trainer = handle(TrainerWorker, trainer)
        self._sender = find_link(link_name(sync))[0]
        self._lock = asyncio.Lock()  # one publish at a time
        self._released: asyncio.Future[None] | None = None
        self._names: list[str] = []
        self._travel = 0.0  # seconds that the transfer of a version may take
        self._drain = sequence if sync.in_flight == "drain" else 0.0
        self._in_transfer = False  # the last transfer, or the connection before it, is unfinished
        self._members = pool.running
        self._joined: list[EngineReplica] = []  # engines connected to the sender; empty after a failure
        self._joining: list[EngineReplica] = []  # started since the last publish
        self._connection_info: dict[str, Any] = {}
        self._published: PublishHandle = {}
        self._next_rank = 1  # on the link
        self._connected = False
        self._failed: dict[EngineReplica, Exception] = {}  # in the last call to all members
        self._lost: list[str] = []  # removed since the last publish
        self._late: set[EngineReplica] = set()  # left behind by the last publish
        self._sending = False  # the sender waits for engines, whose calls have time limits
        waiting = TrainerWorker.send.__name__, TrainerWorker.checksums.__name__
        for process in trainer.processes if isinstance(trainer, RankGroup) else (trainer,):
            process.excused = lambda method: self._sending and method in waiting

    async def connect(self, version: int) -> PublishStats:
        """Connect both ends and publish for the first time. Raises `PublishError` if any engine fails."""
        if self._sync.link == "single_copy":
            shapes = await self._trainer.shapes()
            found = await gather_all(g.worker.export_ipc_handles(shapes) for g in self._members)
            await self._trainer.compute_on([handles for engine in found for handles in engine])
        await self._connect_ends()
        async with self._turns.trainer_turn(publishes=True) if self._turns else nullcontext():
            stats = await self.publish(version, "off" if self._sync.verify == "off" else "full")
        if stats.engines_lost and not self._pool.supervised:  # nothing is sampled yet: the user can start again
            raise PublishError(stats.engines_lost[0])
        self._connected = True
        return stats

    async def publish(self, version: int, verify: str = "", free: asyncio.Event | None = None) -> PublishStats:
        """Publish the trainer's weights to every engine. Raises if the trainer or all engines fail.

        `verify` overrides `sync.verify`. `free` is set as soon as the trainer may take its next step, which may be
        before engines have swapped.
        """
        async with self._lock:
            return await self._publish(version, verify, free or asyncio.Event())

    async def join(self, generator: EngineReplica) -> None:
        """Let a started engine take part from the next publish on."""
        if self._turns:  # by then it sleeps, and has no weights to compare with the model's files
            await asyncio.gather(*self._connect([generator]))
        self._joining.append(generator)

    async def leave(self, generator: EngineReplica) -> None:
        """Let an engine take part in no further publish."""
        async with self._lock:
            for engines in (self._members, self._joining):
                engines[:] = [g for g in engines if g is not generator]

    def start_config(self, config: Config) -> Config:
        """The configuration on which an engine starts: the run's, since a publish brings the weights."""
        return config

    async def publish_again(self, version: int) -> PublishStats | None:
        """Bring engines that wait to join to the last published version, whose weights the trainer still has.

        Engines that can't be brought to it are terminated. Raises only if the trainer fails. None without a publish.
        """
        async with self._lock:
            if not (self._joining and self._connected):  # the first publish brings all
                return None
            new, others = list(self._joining), list[EngineReplica]()
            if self._sender.independent_receivers:
                self._members, others = [], self._members
            try:
                return await self._publish(version, "", asyncio.Event())
            except (WorkerError, WorkerDied, PublishError) as error:
                if self._process.dead:
                    raise
                for generator in new:
                    generator.terminate(f"{generator.process.name} did not receive version {version}: {error}")
                return None
            finally:
                self._members = others + self._members

    async def _publish(self, version: int, verify: str, free: asyncio.Event) -> PublishStats:
        began = self._pool.now()
        if self._released:
            await self._released
        try:
            pauses, sending, ready = await self._publish_version(version, verify or self._sync.verify, free)
        except Exception as error:
            for generator in self._members:
                # It may serve a mixture of versions. A dead trainer's staged version is whole, and is replaced.
                if generator.quarantined is not None and (self._sender.receives_in_place or not self._process.dead):
                    generator.terminate(f"{generator.process.name} was removed from the pool: {error}")
            raise
        lost, self._lost = tuple(self._lost), []
        pauses = self._turns.pauses_from_sleep(pauses) if self._turns else pauses
        longest, total = max(end - start for _, start, end in pauses), self._pool.now() - began
        return PublishStats(
            version, longest, sending, ready - began, total, lost, began, tuple(pauses),
            self._published.get("bytes"), self._published.get("changed"), len(self._late),
        )  # fmt: skip

    def engines_can_reconnect(self, on_gpus: bool) -> bool:
        """Whether engines can connect to another trainer, after the death of this one.

        False if the link is for one trainer, or if engines may be in a transfer that waits for this trainer (NCCL), or
        that has left them with a part of a version.
        """
        interrupted = self._in_transfer and (self._sender.receives_in_place or (self._sender.collective and on_gpus))
        return not (self._sender.one_trainer or interrupted)

    async def close(self) -> None:
        """Do nothing: both ends close with their processes."""

    async def _connect_ends(self) -> None:
        """Connect the trainer to all members of the pool."""
        self._in_transfer, self._next_rank = True, 1
        self._connection_info = info = await self._trainer.open_link(sum(g.ranks for g in self._members))
        self._names = list(info["shapes"])
        self._travel = sum(map(math.prod, info["shapes"].values())) * BYTES_PER_PARAMETER / MIN_BYTES_PER_S
        connecting = asyncio.ensure_future(gather_all(self._connect(self._members)))
        connecting.add_done_callback(succeeded)  # an error of the trainer takes precedence
        try:
            while self._sender.collective and not (await asyncio.wait((connecting,), timeout=CONNECT_POLL_S))[0]:
                await self._trainer.check_connection()
            await connecting
        finally:
            connecting.cancel()
        self._joined, self._in_transfer = list(self._members), False

    def _connect(self, generators: Sequence[EngineReplica]) -> list[Coroutine[Any, Any, None]]:
        """Call `connect` of these engines, with the next ranks of the link. Returns the waits for their replies."""
        waits = []
        for generator in generators:
            call = generator.worker.connect(self._connection_info, self._next_rank)
            waits.append(self._wait_for(generator, call, "connect", CONNECT_TIMEOUT_S))
            self._next_rank += generator.ranks
        return waits

    async def _wait_for(self, generator: EngineReplica, call: Awaitable[Any], doing: str, limit: float) -> Any:
        """The reply of an engine. Records its failure, and raises it."""
        try:
            return await generator.wait_for(call, doing, limit)
        except (WorkerError, WorkerDied, NotServed) as error:
            self._failed[generator] = error
            raise

    async def _admit(self) -> bool:
        """Make the engines that wait to join members. Returns whether there were any.

        A collective link connects all members in the same publish. Other links connect the new ones here.
        """
        new, self._joining, self._failed = [g for g in self._joining if not g.process.dead], [], {}
        self._members += new
        if not self._sender.collective and not self._turns:
            await asyncio.gather(*self._connect(new), return_exceptions=True)
            self._remove_members(self._failed)
        return bool(new)

    async def _publish_version(
        self, version: int, verify: str, free: asyncio.Event
    ) -> tuple[list[Pause], float, float]:
        """Publish to all members; after a failure, remove the failed ones and try again. Returns as `_try_publish`.

        A version can't be sent again once the trainer is free, because its weights may have changed.
        """
        self._remove_members(g for g in self._members if g.process.dead)
        if await self._admit() and verify != "off":
            verify = "full"
        while True:
            if not self._members:
                raise self._pool.dead or WorkerDied("no engine is alive")
            self._failed = {}
            try:
                if self._sender.collective and self._joined != self._members:  # it waits for all connected engines
                    await self._connect_ends()
                return await self._try_publish(version, verify, free)
            except (WorkerError, WorkerDied) as error:
                self._joined = []
                if free.is_set():
                    raise
                self._remove_members(await self._failed_members(error))

    async def _try_publish(self, version: int, verify: str, free: asyncio.Event) -> tuple[list[Pause], float, float]:
        """Publish once. Returns each member's pause, the duration of the send, and when the last swap ended.

        Compares the checksums that `verify` chooses. Sets `free` once the trainer may step. Removes members that fail.
        Raises if all fail, or one does in a collective transfer.
        """
        names = chosen(self._names, version, verify)
        publish_handle = self._published = await self._trainer.stage(version)
        if self._turns:
            await self._turns.before_publish(self._sender.receives_in_place)
        sent, sums = self._begin_send(publish_handle, names, free)
        try:
            pauses, sending, ready = await self._exchange(publish_handle, sent, version, free)
        finally:
            self._sending = False
            sent.cancel()
        self._release(publish_handle)
        free.set()
        if names:
            await self._verify_checksums(names, sums, version)
        for generator in self._members:
            generator.release()
            self._pool.serve(generator)
        return pauses, sending, ready

    def _begin_send(
        self, publish_handle: PublishHandle, names: list[str], free: asyncio.Event
    ) -> tuple[asyncio.Future[float], asyncio.Future[dict[str, int]]]:
        """Begin to send a staged version. Returns the duration of the send, and the trainer's checksums of `names`.

        Sets `free` after the send if the link allows a step then.
        """
        sent = asyncio.ensure_future(duration(self._send(publish_handle)))
        if self._sender.trainer_free_after_send:
            sent.add_done_callback(lambda done: free.set() if succeeded(done) else None)
        # Called before any further step, so the trainer computes it on the published weights.
        sums = asyncio.ensure_future(self._trainer.checksums(names) if names else asyncio.sleep(0, {}))
        for call in (sent, sums):
            call.add_done_callback(succeeded)  # another error may take precedence
        return sent, sums

    def _release(self, publish_handle: PublishHandle) -> None:
        """Let the trainer free the version, without waiting: it handles this before any later call."""
        self._released = asyncio.ensure_future(self._trainer.release(publish_handle))
        self._released.add_done_callback(succeeded)  # the next publish raises its error

    def _send(self, publish_handle: PublishHandle) -> Coroutine[Any, Any, None]:
        """Let the trainer send a version, and add what it returns to the handle."""
        sending: Awaitable[Any] = self._trainer.send(publish_handle)  # called now, before the checksums

        async def complete() -> None:
            publish_handle.update(await sending or {})

        return complete()

    async def _exchange(
        self, publish_handle: PublishHandle, sent: asyncio.Future[float], version: int, free: asyncio.Event
    ) -> tuple[list[Pause], float, float]:
        """Every member receives the whole version before the first one swaps. Returns as `_try_publish`."""
        self._sending, self._in_transfer = self._sender.collective or self._sender.receives_in_place, True
        written = version if self._sender.receives_in_place and not self._sender.collective else None  # by `prepare`
        prepares = self._call_members(
            lambda g: prepare_version(g, publish_handle, written), f"receive version {version}",
            lambda: self._sender.collective and not free.is_set(),
        )  # fmt: skip
        await receive_while_sending(sent, prepares)
        swaps = self._call_members(
            lambda g: swap_version(g, version, self._sync.in_flight), f"swap in version {version}",
            lambda: self._sender.receives_in_place and self._sender.collective, self._drain,
        )  # fmt: skip
        pauses = await receive_while_sending(sent, swaps)
        ready, self._sending = self._pool.now(), False
        sending, self._in_transfer = await sent, False
        return list(pauses.values()), sending, ready

    async def _call_members(
        self, call: Callable[[EngineReplica], Awaitable[Any]], doing: str, together: Callable[[], bool] = lambda: False,
        more: float = 0.0,
    ) -> Replies:  # fmt: skip
        """Call each member. Returns the replies, and removes members that fail while others succeed.

        Only a few calls begin in one iteration of the event loop: beginning hundreds would block it.
        If `together()` is true, the call is collective: one failure fails it for all. `more` adds to its time limit.
        """

        async def reply(generator: EngineReplica) -> Any:
            await throttle()
            try:
                return await self._wait_for(generator, call(generator), doing, CALL_TIMEOUT_S + self._travel + more)
            except (WorkerError, WorkerDied, NotServed):
                if together():
                    raise
                return None

        self._failed = {}
        members = list(self._members)
        # An error cancels the other calls: a later error of theirs would count as one of the next try.
        replies = await gather_all(map(reply, members))
        if len(self._failed) == len(members):
            raise next(iter(self._failed.values()))
        replied = {g: r for g, r in zip(members, replies, strict=True) if g not in self._failed}
        self._remove_members(self._failed)
        return replied

    async def _failed_members(self, error: WorkerError | WorkerDied) -> list[EngineReplica]:
        """Members to remove before a failed collective transfer is tried again. Raises if it can't be tried again.

        An error at one end may be caused by a peer that died; wait briefly to find out which. A transfer directly into
        served weights can't be tried again: the members that took part hold parts of two versions.
        """
        await detect_death([self._process, *(g.process for g in self._members)])
        if self._sender.collective and not (self._process.dead or self._failed or self._sender.receives_in_place):
            # In the trainer, a hung peer appears as an error of the trainer.
            await asyncio.gather(*(g.probe(PROGRESS_TIMEOUT_S, "in a transfer, which failed") for g in self._members))
        dead = [g for g in self._members if g.process.dead]
        failed = dead or list(self._failed)
        others = self._connected and self._sender.collective and 0 < len(failed) < len(self._members)
        halfway = self._sender.receives_in_place and any(g.quarantined is not None for g in self._members)
        if self._process.dead or halfway or not others:
            raise self._process.dead or (dead[0].process.dead if dead else None) or error
        return failed

    def _remove_members(self, generators: Iterable[EngineReplica]) -> None:
        """Terminate these engines and record why. Raises if no engine is left."""
        for generator in list(generators):
            self._lose(generator)
        if not (self._members or self._joining) and self._pool.dead:
            raise self._pool.dead

    def _lose(self, generator: EngineReplica) -> None:
        """Terminate a member and record why."""
        if generator not in self._members:
            return
        name, why = generator.process.name, generator.process.dead or self._failed.get(generator)
        generator.terminate(f"{name} was removed from the pool: {why}")
        self._members.remove(generator)
        first = str(why).splitlines()[0]
        named = first if first.startswith(name) else f"{name} failed: {first}"
        self._lost.append(f"{named}; {len(self._members)} of {len(self._pool.generators)} generators are left")

    async def _verify_checksums(self, names: list[str], wanted: Awaitable[dict[str, int]], version: int) -> None:
        """Compare checksums of served and published parameters, and remove members that differ."""
        doing = f"return the checksums of version {version}"
        served = await self._call_members(lambda g: g.worker.checksums(names), doing)
        published = await wanted
        for generator, its in served.items():
            if error := find_difference(generator, its, published, version):
                self._failed[generator] = error
        if self._failed and all(g in self._failed for g in self._members):
            raise self._failed[self._members[0]]
        self._remove_members(self._failed)

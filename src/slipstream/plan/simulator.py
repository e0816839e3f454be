"""A discrete-event simulation of a run: the scheduling code of runs under a virtual clock, with simulated workers.

Ledger, gate and buffer are those of `scheduling`; this module reports to them the events that `run.py` and
`controller/` report, in the same order. It also serves as a test bed: `observe` sees the state after each event.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import json
import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slipstream.config.schema import LoopConfig
from slipstream.plan.engine import Request, SimulatedEngine
from slipstream.plan.scenario import Scenario, StepRecord
from slipstream.rollout import Completion, Group, Rollout, float32_array, int32_array
from slipstream.scheduling.curriculum import TaskStream
from slipstream.scheduling.ledger import Visit
from slipstream.scheduling.loop_state import LoopState, max_episodes

TASKS = 64
NONE, NO_LOGPROBS = int32_array(()), float32_array(())  # spans say how many tokens there are


@dataclass(eq=False, slots=True)
class GroupInFlight:
    """A group in flight."""

    visit: Visit
    epoch: int
    prompt: int
    left: int
    failed: int = 0
    rollouts: list[Rollout] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Episode:
    """A rollout in flight: tokens of the turns that are left, and what was sampled."""

    group: GroupInFlight
    turns: list[int]
    context: int
    engine: SimulatedEngine | None = None
    completions: list[Completion] = field(default_factory=list)
    version: int = -1  # that has computed the keys of its earlier turns


class Simulation:
    """A simulated run. `run` plays it to its end; `records` are its steps."""

    def __init__(self, scenario: Scenario, observe: Callable[[Simulation], None] = lambda simulation: None) -> None:
        self.scenario, self.work, self.observe = scenario, scenario.work, observe
        self.rng = random.Random(scenario.seed)
        self.options = LoopConfig(
            steps=self.work.steps, groups_per_step=self.work.groups, group_size=self.work.group_size,
            max_lag=scenario.max_lag, force_max_lag=scenario.force_max_lag, buffer_size=scenario.buffer_size,
            retries=scenario.retries, seed=scenario.seed,
        )  # fmt: skip
        self.state = self._new_state()
        self.engines = [
            SimulatedEngine(scenario.engine, scenario.slots, scenario.kv_tokens, scenario.keeps_version)
            for _ in range(scenario.engines)
        ]
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.records: list[StepRecord] = []
        self.processed = self.in_flight = self.epoch = 0
        self.training = self.held = self.publishing = self.publish_waits = False
        self._numbers = itertools.count()
        self._pending: deque[Episode] = deque()
        self._loads = [(0, index) for index in range(scenario.engines)]
        self._index = {engine: index for index, engine in enumerate(self.engines)}
        self._scorers = [0.0] * self.work.scorers
        slots = scenario.slots * scenario.engines
        limit = max_episodes(scenario.max_lag, self.work.group_size, slots, self.work.max_concurrent)
        self._limit = limit or sys.maxsize
        self._synchronous = not scenario.max_lag or scenario.force_max_lag or scenario.placement == "colocated"
        self._saved = self._save()

    def run(self) -> list[StepRecord]:
        """Simulate until the last step ends. Raises `RuntimeError` if there are no more events before that."""
        collects = gc.isenabled()
        gc.disable()  # a third of the time, and nothing that ends is part of a cycle
        try:
            return self._run()
        finally:
            if collects:
                gc.enable()

    def _run(self) -> list[StepRecord]:
        self._schedule_faults()
        self._admit()
        while self.state.step < self.work.steps:
            if not self.events:
                raise RuntimeError(f"the simulated run hangs after step {self.state.step}")
            self.now, _, act, arguments = heapq.heappop(self.events)
            act(*arguments)
            self.processed += 1
            self.observe(self)
        return self.records

    # groups and rollouts

    def _admit(self) -> None:
        """Start the groups that the gate admits, as `controller.rollouts.admit_groups`."""
        for _ in range(self.state.startable()):
            visit = self.state.ledger.start()
            group = GroupInFlight(visit, self.epoch, self.work.prompt.draw(self.rng), self.work.group_size)
            for _ in range(self.work.group_size):
                self._pending.append(Episode(group, self._turns(), group.prompt))
        self._fill()

    def _turns(self) -> list[int]:
        length, turns = self.work.completion.draw(self.rng), self.work.turns
        return [length] if turns == 1 else [max(1, length // turns)] * turns

    def _fill(self) -> None:
        """Start pending episodes while fewer than twice the slots are in flight."""
        touched: dict[SimulatedEngine, None] = {}  # in order, so that a seed gives one run
        while self._pending and self.in_flight < self._limit and (engine := self._least_loaded()):
            episode = self._pending.popleft()
            self.in_flight += 1
            self._request(episode, engine)
            touched[engine] = None
        for engine in touched:
            self._step_engine(engine)

    def _least_loaded(self) -> SimulatedEngine | None:
        """The living engine with the fewest requests. Entries of the heap are older than loads, and replaced here."""
        if len(self._loads) > 4 * len(self.engines):
            self._loads = sorted((engine.load, index) for index, engine in enumerate(self.engines) if engine.alive)
        while self._loads:
            load, index = self._loads[0]
            engine = self.engines[index]
            if not engine.alive:
                heapq.heappop(self._loads)
            elif load != engine.load:
                heapq.heapreplace(self._loads, (engine.load, index))
            else:
                return engine
        return None

    def _request(self, episode: Episode, engine: SimulatedEngine) -> None:
        """Queue an episode's next turn at an engine, without letting the engine act."""
        first, kept = not episode.completions, episode.version == engine.version and episode.engine is engine
        prefix: object = (episode.group.epoch, episode.group.visit.id) if first else episode
        cached = episode.context if first else episode.context - self.work.tool_tokens
        if not first and kept:
            engine.keep_prefix(episode)
        episode.engine = engine
        engine.add(Request(episode, episode.context, episode.turns[0], prefix, cached))

    def _step_engine(self, engine: SimulatedEngine) -> None:
        """Bring an engine to the present, handle what ended, and schedule its next event."""
        self._advance(engine)
        self._schedule(engine)

    def _schedule(self, engine: SimulatedEngine) -> None:
        engine.epoch += 1
        if (at := engine.next_event()) is not None:
            self._at(max(at, self.now), self._engine_event, engine, engine.epoch)

    def _engine_event(self, engine: SimulatedEngine, epoch: int) -> None:
        if epoch == engine.epoch:
            self._step_engine(engine)

    def _end_turn(self, request: Request) -> None:
        episode: Episode = request.owner
        engine = episode.engine
        assert engine
        heapq.heappush(self._loads, (engine.load, self._index[engine]))
        if episode.group.epoch != self.epoch:  # of before a restart of the trainer
            return
        length = episode.turns.pop(0)
        episode.completions.append(Completion(NONE, NONE, NO_LOGPROBS, tuple(request.spans), "stop"))
        episode.context += length + self.work.tool_tokens
        episode.version = engine.version
        if episode.turns:
            self._at(self.now + self.work.tool.draw(self.rng), self._next_turn, episode)
            return
        self.in_flight -= 1
        if not self.work.scoring.mean:
            self._end_rollout(episode)
            return
        done = max(self.now, self._scorers[0]) + self.work.scoring.draw(self.rng)
        heapq.heapreplace(self._scorers, done)
        self._at(done, self._end_rollout, episode)

    def _next_turn(self, episode: Episode) -> None:
        """Request the episode's next turn from an engine; retry after 1 s while none is alive."""
        if episode.group.epoch != self.epoch:
            return
        engine = episode.engine if episode.engine and episode.engine.alive else self._least_loaded()
        if engine is None:
            self._at(self.now + 1.0, self._next_turn, episode)
            return
        self._request(episode, engine)
        self._step_engine(engine)

    def _end_rollout(self, episode: Episode) -> None:
        group = episode.group
        if group.epoch != self.epoch:
            return
        group.left -= 1
        if self.scenario.faults.rollout and self.rng.random() < self.scenario.faults.rollout:
            group.failed += 1
        else:
            group.rollouts.append(Rollout(tuple(episode.completions), self.rng.random()))
        if not group.left:
            self.state.end(group.visit, "task", group.rollouts, failures=[""] * group.failed)
            self._admit()
            self._try_step()
        else:
            self._fill()

    # the trainer, as `run.train_steps`

    def _try_step(self) -> None:
        """Take a step if the trainer is free and enough groups are fresh."""
        if self.training or self.held or not any(engine.alive for engine in self.engines):
            return
        groups = self.state.take_batch()
        if not groups:
            if self._pending or self.state.startable():
                self._admit()  # tasks of stale groups
            return
        lags = self._lags(groups)
        sampled = sum(lags.values())
        self.training = True
        self._share_gpus()
        seconds = self.scenario.trainer.step(sampled, sampled + self.work.unsampled) * self._slowdown
        seconds += 0.0 if self.state.step else self.scenario.first_step_s
        self._at(self.now + seconds, self._end_step, self.epoch, self.now, sampled, lags)

    def _lags(self, groups: list[Group]) -> Counter[int]:
        """Trained tokens by lag."""
        lags: Counter[int] = Counter()
        for completion in (c for g in groups for r in g.rollouts for c in r.completions):
            for span in completion.spans:
                lags[self.state.version - span.version] += span.end - span.start
        return lags

    @property
    def _slowdown(self) -> float:
        """Factor of the times of both sides during a step on shared GPUs. With a lag of 0 engines have no work then."""
        return self.scenario.shared_slowdown if self.scenario.overlaps and self.scenario.max_lag else 1.0

    def _share_gpus(self) -> None:
        """Engines on the trainer's GPUs slow down during a step, or sleep."""
        if self.scenario.placement == "disaggregated":
            return
        for engine in self.engines:
            self._advance(engine)
            engine.slow = self._slowdown if self.training else 1.0
            engine.awake = self.scenario.overlaps or not self.training
            self._step_engine(engine)

    def _advance(self, engine: SimulatedEngine) -> None:
        for request in engine.advance(self.now):
            self._end_turn(request)

    def _end_step(self, epoch: int, start: float, tokens: int, lags: Counter[int]) -> None:
        if epoch != self.epoch:
            return
        self.state.step += 1
        publishes, self.held = self.state.step % self.work.every == 0, True
        self.training = publishes and self.scenario.placement == "colocated"  # engines sleep until the publish
        self._share_gpus()
        self.training = False
        if self.scenario.placement == "disaggregated":
            for engine in self.engines:  # their totals are those of the time that they have reached
                self._step_engine(engine)
        record = StepRecord(start, self.now, tokens, lags)
        record.sampled = sum(engine.sampled for engine in self.engines)
        record.engine_busy = sum(engine.busy_s for engine in self.engines)
        self.records.append(record)
        if publishes:
            self._publish()
        else:
            self._at(self.now + self.scenario.step_overhead_s, self._free_trainer, self.epoch)

    def _publish(self) -> None:
        """Start a publish; one at a time."""
        if self.publishing:
            self.publish_waits = True
            return
        self.state.stage()
        self.publishing, cost = True, self.scenario.publish
        arrives = self.now + (cost.hold if self.scenario.placement == "colocated" else cost.transfer)
        self._at(arrives, self._arrive, self.epoch, self.state.version, self.state.step)
        if self.records:
            self.records[-1].publish = self.now, arrives
        if not self._synchronous:
            self._at(self.now + cost.hold + self.scenario.step_overhead_s, self._free_trainer, self.epoch)

    def _arrive(self, epoch: int, version: int, step: int) -> None:
        """All engines swap to the version."""
        if epoch != self.epoch:
            return
        self._share_gpus()
        for engine in self.engines:
            for request in engine.swap(self.now, version, self.scenario.publish.pause, self.scenario.at_swap):
                self._end_turn(request)
            self._schedule(engine)
        self.state.publish(step)
        self.publishing = False
        if self._synchronous:
            pause = self.scenario.publish.pause + self.scenario.step_overhead_s
            self._at(self.now + pause, self._free_trainer, self.epoch)
        else:
            self._admit()
        if self.publish_waits:
            self.publish_waits = False
            self._publish()

    def _free_trainer(self, epoch: int) -> None:
        if epoch != self.epoch:
            return
        self.held = False
        if self.state.step % self.scenario.faults.checkpoint_steps == 0 and self.state.staged == self.state.step:
            self._saved = self._save()
        self._admit()
        self._try_step()

    # faults

    def _schedule_faults(self) -> None:
        faults = self.scenario.faults
        if faults.engine_s:
            for engine in self.engines:
                self._at(self.rng.expovariate(1 / faults.engine_s), self._kill_engine, engine)
        if faults.trainer_s:
            self._at(self.rng.expovariate(1 / faults.trainer_s), self._kill_trainer)

    def _kill_engine(self, engine: SimulatedEngine) -> None:
        """Its requests start again on others, and it returns with the newest version."""
        for request in engine.kill(self.now):
            episode: Episode = request.owner
            if episode.group.epoch == self.epoch:
                self.in_flight -= 1
                self._pending.appendleft(episode)
        self._at(self.now + self.scenario.faults.restart_s, self._revive, engine)
        self._fill()

    def _revive(self, engine: SimulatedEngine) -> None:
        served = self.state.version - self.publishing
        engine.alive, engine.at = True, self.now
        engine.swap(self.now, served, 0.0, "continue")
        heapq.heappush(self._loads, (engine.load, self._index[engine]))
        self._at(self.now + self.rng.expovariate(1 / self.scenario.faults.engine_s), self._kill_engine, engine)
        self._fill()
        self._try_step()

    def _kill_trainer(self) -> None:
        """Training continues from the last checkpoint; everything in flight is cancelled."""
        self.epoch += 1
        data, ready = self._saved
        self.state = self._new_state()
        self.state.restore(json.loads(data), list(ready))
        self._pending.clear()
        self.in_flight = 0
        for engine in (engine for engine in self.engines if engine.alive):
            engine.kill(self.now)
            engine.alive = True
            engine.slow, engine.awake = 1.0, True
        for engine in self.engines:
            engine.swap(self.now, self.state.version, 0.0, "continue")
        self._loads = [(engine.load, index) for index, engine in enumerate(self.engines)]
        self.training = self.publishing = self.publish_waits = False
        self.held = True
        faults = self.scenario.faults
        self._at(self.now + faults.restart_s, self._free_trainer, self.epoch)
        self._at(self.now + faults.restart_s + self.rng.expovariate(1 / faults.trainer_s), self._kill_trainer)

    def _new_state(self) -> LoopState:
        return LoopState(self.options, self.work.every, [TaskStream("task", TASKS)])

    def _save(self) -> tuple[str, tuple[Group, ...]]:
        return json.dumps(self.state.snapshot()), tuple(self.state.ready)

    def _at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (time, next(self._numbers), act, arguments))

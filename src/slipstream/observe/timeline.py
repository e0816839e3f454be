"""When each worker was busy, waiting or paused, which side waited for the other, and what would help.

All is computed from a run's events, as are the times of scoring, evaluations, checkpoints and publishes. The window is
that of `time/window_s`: from the first rollout to the last recorded step of each process of the run, of which a resumed
run has several. Steps that a restart of the trainer has lost lie outside of it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slipstream.observe.events import SCORING, TRAINER
from slipstream.observe.run_data import Record, Run

Interval = tuple[float, float]
STATES = ("busy", "waiting", "paused")
PUBLISH = "publish"
NOTABLE = 0.1  # fraction of the window above which a wait is worth a remedy
WELL_USED = 0.5  # fraction of the window in which a well used worker is busy


@dataclass
class Track:
    """What one worker did, as sorted intervals that do not overlap, in seconds on the clock of `time/wall_s`.

    `busy`: an engine has requests in flight, the trainer takes a step, or work of another track is in progress.
    `paused`: an engine samples nothing because of a publish, or sleeps. `waiting`: the rest of the window of an engine,
    and the trainer's wait for batches. `alive` is the part of the window in which an engine was alive; None: all.
    """

    name: str
    busy: list[Interval] = field(default_factory=list)
    waiting: list[Interval] = field(default_factory=list)
    paused: list[Interval] = field(default_factory=list)
    alive: list[Interval] | None = None


@dataclass
class Timeline:
    """`tracks` by name: engines, trainer ranks, then scoring, evaluation, checkpoint and publish.

    `window` are the intervals of `time/window_s`, and `paused` those in which the user had paused the run.
    """

    window: list[Interval]
    paused: list[Interval]
    tracks: dict[str, Track]
    max_lag: int | None = None
    colocated: bool = False

    @property
    def window_s(self) -> float:
        return length(self.window)

    @property
    def engines(self) -> list[Track]:
        return [track for name, track in self.tracks.items() if name.startswith("engine ")]

    @property
    def trainer(self) -> Track:
        """Rank 0."""
        return self.tracks.get(TRAINER) or Track(TRAINER)

    def fractions(self, *tracks: Track) -> dict[str, float]:
        """Fractions of the tracks' time in the window, pauses by the user left out: "busy", "waiting" and "paused"."""
        found = dict.fromkeys(STATES, 0.0)
        total = 0.0
        for track in tracks:
            there = subtract(self.window if track.alive is None else track.alive, self.paused)
            total += length(there)
            for state in STATES:
                found[state] += length(intersect(getattr(track, state), there))
        return {state: seconds / max(total, 1e-9) for state, seconds in found.items()}

    def verdict(self) -> str:
        """One sentence: which side waited for the other, and what to do about it."""
        if not (self.window_s and self.engines):
            return "No step is recorded yet, so there is nothing to compare."
        trainer, engines = self.fractions(self.trainer), self.fractions(*self.engines)
        scoring = self.tracks[SCORING].busy if SCORING in self.tracks else []
        scored = [replace(track, waiting=intersect(scoring, track.waiting)) for track in self.engines]
        remedy = self._remedy(trainer, engines, self.fractions(*scored)["waiting"])
        waited = f"the trainer waited {trainer['waiting']:.0%} for rollouts"
        idle = f"the engines {engines['waiting']:.0%} for work"
        return f"Of the time since the first rollout, {waited}, {idle}: {remedy}."

    def _remedy(self, trainers: dict[str, float], engines: dict[str, float], scored: float) -> str:
        """The cause of the idle time, and the remedy if there is one.

        `trainers` and `engines` are fractions of time by state. `scored` is the fraction of the engines' time in which
        they were idle while rollouts were scored.
        """
        trainer, idle = trainers["waiting"], engines["waiting"]
        if self.colocated:
            return "they share GPUs, so one waits while the other works; separate GPUs would let both work at once"
        if min(trainer, scored) >= NOTABLE and scored > idle / 2:
            return "both wait for scores; use a faster scorer, or raise scoring.concurrency if scores are queued"
        if self.max_lag == 0 and max(trainer, idle) >= NOTABLE:
            return "with loop.max_lag = 0 they take turns; raise it to let both work at the same time"
        busy = f"the trainer was busy {trainers['busy']:.0%}, the engines {engines['busy']:.0%}"
        if 1 - trainers["busy"] - trainer > max(trainers["busy"], trainer, idle):
            return f"{busy}; {self._rest()}"
        if min(trainer, idle) >= NOTABLE:
            return "both wait, for each other in turn or for tools and rewards; raise loop.max_lag, or speed those up"
        if trainer >= NOTABLE:
            return "generation is the slower side; add an engine (generator.replicas) or raise loop.max_lag"
        if idle >= NOTABLE and trainers["busy"] >= WELL_USED:
            return "training is the slower side; give the trainer more GPUs (trainer.ranks) or use fewer engines"
        if min(trainers["busy"], engines["busy"]) >= WELL_USED:
            return "both are well used"
        return f"{busy}; {self._rest()}"

    def _rest(self) -> str:
        """What the trainer did while it neither took a step nor waited for rollouts."""
        other = subtract(subtract(self.window, self.trainer.busy), self.trainer.waiting)
        publishes = self.tracks[PUBLISH].busy if PUBLISH in self.tracks else []
        share = self.fractions(Track(PUBLISH, intersect(publishes, other)))["busy"]
        if share >= NOTABLE:
            return f"publishes kept the trainer from its next step for {share:.0%}; raise sync.every"
        return "the rest went to evaluations, publishes, checkpoints and the controller"


class Shares(NamedTuple):
    """Fractions of the window by track, of all engines and of the trainer, and the verdict."""

    tracks: dict[str, dict[str, float]]
    engines: dict[str, float]
    trainer: dict[str, float]
    verdict: str


def measure(run: Run) -> Shares | None:
    """The shares of a run; None without events."""
    if not run.events:
        return None
    found = timeline(run)
    tracks = {name: found.fractions(track) for name, track in found.tracks.items()}
    return Shares(tracks, found.fractions(*found.engines), found.fractions(found.trainer), found.verdict())


def timeline(run: Run) -> Timeline:
    """The timeline of a run, as far as its events are recorded."""
    lost = [(float(e["rewound_to"]), float(e["end"])) for e in run.events if "rewound_to" in e]
    by_kind: dict[str, list[Record]] = {}
    for event in run.events:
        kind = str(event.get("kind"))
        is_lost = kind in ("engine", "step") and any(start < event["end"] <= end for start, end in lost)
        if not is_lost:
            by_kind.setdefault(kind, []).append(event)
    window = union(map(_times, by_kind.get("engine", ())))
    tracks = {track.name: track for track in _engine_tracks(by_kind, window)}
    trainer, options = _trainer_track(by_kind, window), run.options
    for rank in range(options.get("trainer.ranks", 1)):  # which take each step together
        name = f"{TRAINER} rank {rank}" if rank else TRAINER
        tracks[name] = replace(trainer, name=name)
    for kind, name in (("score", SCORING), *((kind, kind) for kind in ("evaluation", "checkpoint", PUBLISH))):
        if kind in by_kind:
            tracks[name] = Track(name, union(map(_times, by_kind[kind])))
    paused = union(map(_times, by_kind.get("paused", ())))
    return Timeline(window, paused, tracks, options.get("loop.max_lag"), options.get("sync.placement") == "colocated")


def _engine_tracks(by_kind: dict[str, list[Record]], window: Sequence[Interval]) -> Iterator[Track]:
    pauses = [pause for event in by_kind.get("publish", ()) for pause in event.get("pauses", ())]
    activities: dict[str, list[Record]] = {}
    for event in by_kind.get("engine", ()):
        activities.setdefault(event["track"], []).append(event)
    for name, events in sorted(activities.items(), key=lambda pair: (len(pair[0]), pair[0])):
        asleep = [interval for event in events for interval in event["asleep"]]
        paused = union([*((start, end) for track, start, end in pauses if track == name), *asleep])
        requests = union(interval for event in events for interval in event["requests"])
        # It may have joined, left or died during the run.
        alive = subtract(intersect(window, union(map(_times, events))), _dead(name, by_kind))
        waiting = subtract(subtract(alive, requests), paused)
        busy = intersect(subtract(requests, paused), alive)
        yield Track(name, busy, waiting, intersect(paused, alive), alive)


def _dead(name: str, by_kind: dict[str, list[Record]]) -> list[Interval]:
    """From each fault of a worker to its next recovery."""
    faults, recoveries = ([_times(e) for e in by_kind.get(k, ()) if e["track"] == name] for k in ("fault", "recovery"))
    return union((at, min((end for _, end in recoveries if end > at), default=math.inf)) for at, _ in faults)


def _trainer_track(by_kind: dict[str, list[Record]], window: Sequence[Interval]) -> Track:
    steps = by_kind.get("step", ())
    # The wait for a step's batch begins when the step before is recorded.
    records = sorted({float(event["start"]) for event in by_kind.get("engine", ())})
    waiting = []
    for step in steps:
        if before := bisect.bisect_right(records, step["start"]):
            waiting.append((records[before - 1], records[before - 1] + step["wait_s"]))
    return Track(TRAINER, union(map(_times, steps)), intersect(union(waiting), window))


def _times(event: Record) -> Interval:
    start = float(event["start"])
    return start, start if event["end"] is None else float(event["end"])


def union(intervals: Iterable[Sequence[float]]) -> list[Interval]:
    """The intervals sorted, with overlapping ones joined."""
    joined: list[Interval] = []
    for start, end in sorted((float(start), float(end)) for start, end in intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def subtract(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The parts of sorted `intervals` outside of sorted `others`."""
    rest: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at, position = start, first
        while position < len(others) and others[position][0] < end:
            if others[position][0] > at:
                rest.append((at, others[position][0]))
            at = max(at, others[position][1])
            position += 1
        if at < end:
            rest.append((at, end))
    return rest


def intersect(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The parts of sorted `intervals` inside of sorted `others`."""
    return subtract(intervals, subtract(intervals, others))


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)

"""The JSON data of the page in the browser: results, configuration, metrics, events and rollouts of runs.

A live page gets all data once, then only new records.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from slipstream.config.schema import SECTIONS
from slipstream.observe.events import TRAINER
from slipstream.observe.figures import facts, faults, name_engines, warnings
from slipstream.observe.formatting import is_finite
from slipstream.observe.page.rollouts import TokenTexts, describe_rollouts
from slipstream.observe.run_data import Record, Run
from slipstream.observe.score import compare_scores
from slipstream.observe.timeline import Shares, measure

MAX_ROLLOUTS = 200_000  # of a run in a file; of more, evenly spaced steps and groups
MAX_RANKS = 8  # of more, only the first has a track
POLL_S = 0.5  # between two looks at the files, for any number of live pages
READ_S = 0.3  # for rollouts of earlier steps in one answer, so that metrics don't wait for them
WAITS = {"slow-rewards", "trainer-idle", "engines-idle"}  # rules whose warnings say who waited
CURSORS = 1000  # answers that are remembered; a page that asks with an older one gets all data
MEASURE_SHARE = 0.02  # of the time, at most, in which the timeline of a growing run is measured again

Sizes = tuple[int, int, int, int]  # numbers of metrics, evaluations and events, and of steps with rollouts


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """All that the page shows except the texts of rollouts: JSON types only."""
    return {"whole": True, "runs": [run_data(run) for run in runs], "options": list(describe_options())}


def run_data(run: Run) -> dict[str, Any]:
    """The data of one run; of more rollouts than `MAX_ROLLOUTS` a part."""
    rollouts = (run.metrics[-1] if run.metrics else {}).get("rollout/generated") or 0
    data = RunData(run, every=max(1, -(-rollouts // MAX_ROLLOUTS)))
    data.update()
    return data.since((0, 0, 0, 0))


class RunData:
    """The data of one run, which may grow: rollouts of each `every`th step, and events of each `every`th group."""

    def __init__(self, run: Run, every: int = 1) -> None:
        self.run, self.every = run, every
        self._texts: TokenTexts | None = None
        self.described: dict[str, Any] = {}
        self.rollouts: list[dict[str, list[Any]]] = []  # by step
        self.unread: list[int] = []  # steps whose rollouts were not read
        self._last_step = -1  # whose rollouts are read or in `unread`
        self._shares: Shares | None = None
        self._measured, self._measure_at = -1, 0.0  # events in the shares, and the time of the next measurement

    @property
    def texts(self) -> TokenTexts | None:
        """The text of tokens, by the run's tokenizer if it is at hand by now."""
        self._texts = self._texts or TokenTexts.of(self.run)
        return self._texts

    @property
    def sizes(self) -> Sizes:
        return len(self.run.metrics), len(self.run.evaluations), len(self.run.events), len(self.rollouts)

    def update(self, changed: bool = True, read_s: float = math.inf) -> bool:
        """Describe the records of `run` if they `changed`. Returns whether the data changed.

        Rollouts are read for `read_s` seconds; steps that are left are in `unread`.
        """
        run, state = self.run, self.run.state
        changed |= not self.described or state != self.described["state"]
        if changed:
            last = run.metrics[-1].get("step") if run.metrics and state == "running" else None
            # A step's rollouts may be written again until its line is there.
            new = [step for step in run.rollout_steps if self._last_step < step <= (last or math.inf)]
            self.unread += new[:: self.every]
            self._last_step = new[-1] if new else self._last_step
        read = self._read_rollouts(time.monotonic() + read_s)
        measured = self._measure()
        if changed or read or measured:
            self.described = self._describe(state)
        return changed or read or measured

    def _read_rollouts(self, end: float) -> bool:
        found = bool(self.unread)
        while self.unread and time.monotonic() < end:
            if columns := describe_rollouts(self.run, self.unread.pop(0)):
                self.rollouts.append(columns)
        return found

    def _measure(self) -> bool:
        """Measure the timeline, which needs all events, unless that was done a short time ago."""
        began = time.monotonic()
        if self._measured == len(self.run.events) or began < self._measure_at:
            return False
        self._shares, self._measured = measure(self.run), len(self.run.events)
        self._measure_at = began + (time.monotonic() - began) / MEASURE_SHARE
        return True

    def _describe(self, state: str) -> dict[str, Any]:
        """What the page shows of a run besides its records, which only grow."""
        run, found, shares = self.run, warnings(self.run), self._shares
        rules, tracks = {warning.get("rule") for warning in found}, shares.tracks if shares else {}
        verdict = shares and shares.verdict
        if verdict and found:  # the remedies are those of the warnings, which may have the facts, too
            verdict = None if rules & WAITS else re.sub(r"; [^;]*\.$", ".", verdict)
        if sum(name.startswith(TRAINER) for name in tracks) > MAX_RANKS:
            tracks = {name: fractions for name, fractions in tracks.items() if not name.startswith(f"{TRAINER} rank")}
        return {
            "name": run.name,
            "state": state,
            "every": self.every,
            "score": compare_scores(run.evaluations),
            "facts": list(facts(run, shares, "slow-rewards" not in rules)),
            "faults": list(faults(run, found)),
            "config": run.options,
            "samples": run.summary.get("samples"),
            "warnings": found,
            "problems": run.problems,
            "fractions": tracks,
            "verdict": verdict,
        }

    def since(self, sizes: Sizes) -> dict[str, Any]:
        """The description of the run, and the records after the first `sizes` of each kind."""
        metrics, evaluations, events, steps = sizes
        return self.described | {
            "metrics": columns(self.run.metrics[metrics:]),
            "evaluations": columns(self.run.evaluations[evaluations:]),
            "events": list(self._timeline_events(self.run.events[events:])),
            "rollouts": self.rollouts[steps:],
        }

    def _timeline_events(self, events: Sequence[Record]) -> Iterator[Record]:
        """The events that the timeline draws: each `every`th of kind "group", none of kind "engine", and all others."""
        groups = 0
        for event in events:
            if event.get("kind") == "engine" or not is_finite(event.get("start")):
                continue
            groups += event.get("kind") == "group"
            if event.get("kind") != "group" or groups % self.every == 0:
                yield event | {"what": name_engines(str(event["what"]))} if "what" in event else event


class LivePage:
    """The data of a live page on `runs` for any number of readers."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = [RunData(run) for run in runs]
        self._polled, self._began, self._version = -math.inf, time.time_ns(), 0
        self._sizes: dict[str, list[Sizes]] = {}  # of each run, by the cursor of an answer

    def poll(self) -> None:
        """Read new records: a limited number a call, and again after `POLL_S`, or at once if some are still unread."""
        if not any(data.unread for data in self.runs) and time.monotonic() - self._polled < POLL_S:
            return
        for index, run in enumerate([data.run for data in self.runs]):
            replacements = run.replacements
            changed = run.poll()
            if run.replacements != replacements:
                self.runs[index] = RunData(run)
                self._sizes.clear()
            self._version += self.runs[index].update(changed, READ_S)
        self._polled = time.monotonic()

    def changes(self, since: str) -> dict[str, Any]:
        """What is newer than the cursor `since`, with the next cursor: {} if nothing is.

        All data (`whole`) for an unknown cursor, or after a resume replaced records. `more`: rollouts of some steps are
        not read yet, so ask again.
        """
        self.poll()
        cursor = f"{self._began}-{self._version}"
        if since == cursor:
            return {}
        whole = since not in self._sizes
        known = [(0, 0, 0, 0)] * len(self.runs) if whole else self._sizes[since]
        self._sizes[cursor] = [data.sizes for data in self.runs]
        if len(self._sizes) > CURSORS:
            del self._sizes[next(iter(self._sizes))]
        found = [data.since(sizes) for data, sizes in zip(self.runs, known, strict=True)]
        options = {"options": list(describe_options())} if whole else {}
        more = any(data.unread for data in self.runs)
        return {"cursor": cursor, "whole": whole, "more": more, "runs": found} | options


def columns(records: Sequence[Record]) -> dict[str, list[float | None]]:
    """Numbers by metric, one for each record, with 7 significant digits; None for NaN, infinities and other types."""
    names = dict.fromkeys(name for record in records for name, value in record.items() if is_finite(value))
    return {name: [_short(record.get(name)) for record in records] for name in names}


def _short(value: Any) -> float | None:
    return (value if isinstance(value, int) else float(f"{value:.7g}")) if is_finite(value) else None


def describe_options() -> Iterator[dict[str, Any]]:
    """Name, default and description of every option; a required option has no default."""
    for section, model in SECTIONS.items():
        for name, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True, validated_data={})
            known = {} if default is PydanticUndefined else {"default": to_jsonable_python(default)}
            yield {"name": f"{section}.{name}", **known, "description": info.description}

"""The data of the page: what a run changed, its configuration, metrics, warnings, timeline and rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from pydantic_core import PydanticUndefined

from slipstream.config.schema import SECTIONS
from slipstream.observe import timeline as intervals
from slipstream.observe.formatting import counts, duration, is_finite, number
from slipstream.observe.health import RULES, check
from slipstream.observe.page.events import name_engines, timeline
from slipstream.observe.page.rollouts import describe_rollouts
from slipstream.observe.page.score import compare_scores
from slipstream.observe.run_data import Record, Run


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """All that the page shows except the texts of rollouts: JSON types only, numbers that are not finite as None."""
    return {"runs": [run_data(run) for run in runs], "options": list(describe_options())}


def run_data(run: Run) -> dict[str, Any]:
    """The data of one run. `problems` is last, since it names files that turned out to be damaged."""
    data = described(run) | {
        "metrics": columns(run.metrics),
        "evaluations": columns(run.evaluations),
        "timeline": timeline(run),
        "rollouts": describe_rollouts(run),
    }
    return data | {"problems": run.problems}


def described(run: Run) -> dict[str, Any]:
    """What the page shows of a run besides its records, which only grow."""
    found = warnings(run)
    return {
        "name": run.name,
        "state": run.state,
        "score": compare_scores(run.evaluations),
        "facts": [list(fact) for fact in facts(run)],
        "faults": list(faults(run, found)),
        "config": {f"{name}.{key}": value for name, part in run.config.items() for key, value in _items(part)},
        "samples": run.summary.get("samples"),
        "warnings": found,
        "problems": run.problems,
    }


def warnings(run: Run) -> list[Record]:
    """The health warnings that the run recorded, or those of its metrics if it recorded no events.

    The worst come first, then those that `follows` explains: a rule of another warning. `detail` are further lines.
    """
    found = [event for event in run.events if event.get("kind") == "warning"]
    if not run.events:
        found = [dict(warning._asdict()) for warning in check(run)]
    rules: dict[Any, Any] = {rule.name: (position, rule.follows) for position, rule in enumerate(RULES)}
    present = {warning.get("rule") for warning in found}
    described = []
    for warning in found:
        position, follows = rules.get(warning.get("rule"), (len(rules), ()))
        cause = next((rule for rule in follows if rule in present), None)
        detail = engines_lost(run) if warning.get("rule") == "engine-lost" else []
        described.append((cause is not None, position, warning | {"follows": cause, "detail": detail}))
    return [warning for *_, warning in sorted(described, key=lambda found: found[:2])]


def engines_lost(run: Run) -> list[str]:
    """Engines that died, one line each."""
    return [name_engines(line) for line in run.summary.get("engines_lost") or ()]


def _items(part: Any) -> Iterator[tuple[str, Any]]:
    yield from part.items() if isinstance(part, dict) else [("", part)]


def columns(records: Sequence[Record]) -> dict[str, list[float | None]]:
    """Numbers by metric, one for each record, with 7 significant digits."""
    names = dict.fromkeys(name for record in records for name, value in record.items() if is_finite(value))
    return {name: [_short(record.get(name)) for record in records] for name in names}


def _short(value: Any) -> float | None:
    return (value if isinstance(value, int) else float(f"{value:.7g}")) if is_finite(value) else None


def facts(run: Run) -> Iterator[tuple[str, str, str]]:
    """Label, value and note of what the run did, from the last record of its metrics."""
    last: Mapping[str, Any] = run.metrics[-1] if run.metrics else {}
    rewards = [r["reward/mean"] for r in run.metrics if is_finite(r.get("reward/mean"))]
    tenth = max(1, len(rewards) // 10)
    first_last = (fmean(rewards[:tenth]), fmean(rewards[-tenth:])) if rewards else (None, None)
    yield "Reward", f"{number(first_last[0], 3)} → {number(first_last[1], 3)}", "first and last tenth of the steps"
    window = last.get("time/window_s") or 0
    since = f"without stops; {duration(window)} since the first rollout"
    yield "Steps", f"{number(last.get('step'))} in {duration(last.get('time/wall_s'))}", since
    measured = intervals.timeline(run)
    sides = (("Generated", "gen", "engines", measured.engines), ("Trained on", "train", "trainer", [measured.trainer]))
    for label, total, side, tracks in sides:
        tokens = last.get(f"{total}/total_tokens")
        rate = number(tokens / window) if tokens and window else "–"
        used = f", {side} busy {measured.fractions(*tracks)['busy']:.0%}" if measured.window_s else ""
        yield label, f"{_count(tokens)} tokens", f"{rate} tokens/s{used} of the time since the first rollout"
    lags = [r["lag/mean"] for r in run.metrics if is_finite(r.get("lag/mean"))]
    largest = max((r["lag/max"] for r in run.metrics if is_finite(r.get("lag/max"))), default=None)
    yield "Lag", f"{number(fmean(lags), 2) if lags else '–'} versions", f"mean; at most {number(largest)}"
    ended, trained = last.get("rollout/generated"), last.get("rollout/trained")
    yield "Rollouts", number(ended), f"{number(trained)} trained on"


def _count(value: Any) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if is_finite(value) and value >= size:
            return f"{value / (1000 if unit == 'k' else size):.3g} {unit}"
    return number(value)


def faults(run: Run, found: Sequence[Record]) -> Iterator[str]:
    """What failed in the run, one line each. `found` are its warnings: those have the deaths of engines as details."""
    last: Mapping[str, Any] = run.metrics[-1] if run.metrics else {}
    summary = run.summary
    if not any(warning["detail"] for warning in found):
        yield from engines_lost(run)
    if restarts := last.get("train/restarts"):
        yield f"the trainer restarted {restarts} times and lost {number(last.get('train/steps_lost'))} steps"
    if failures := last.get("rollout/failures"):
        yield f"{number(last.get('rollout/failed'))} rollouts failed: {counts(failures)}"
    if errors := last.get("reward/errors"):
        yield f"the reward function raised: {counts(errors)}"
    if stale := last.get("rollout/dropped_stale"):
        yield f"{number(stale)} rollouts were dropped because they were too old"
    if skipped := last.get("train/skipped_steps"):
        yield f"{number(skipped)} steps were skipped because loss or gradient was not finite"
    if retired := summary.get("tasks_retired"):
        yield f"{len(retired)} tasks are no longer visited because each try failed"


def describe_options() -> Iterator[dict[str, Any]]:
    """Name, default and description of every option; a required option has no default."""
    for section, model in SECTIONS.items():
        for name, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True, validated_data={})
            known = {} if default is PydanticUndefined else {"default": _plain(default)}
            yield {"name": f"{section}.{name}", **known, "description": info.description}


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple | set) else value

"""Summary values of a run from its records: for the terminal report, the page and comparisons of runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

from slipstream.observe.events import CONTROLLER
from slipstream.observe.formatting import by_label, counts, duration, is_finite, number, plural
from slipstream.observe.health import RULES, WHILE_RUNNING, check
from slipstream.observe.run_data import Record, Run
from slipstream.observe.score import compare_scores
from slipstream.observe.timeline import Shares, measure

FATES = (("trained", "trained on"), ("filtered", "filtered"), ("dropped_stale", "stale"), ("failed", "failed"),
         ("ready", "ready"))  # fmt: skip
LEFT = re.compile(r"; \d+ of \d+ engines are left")  # which the warning says


def figures(run: Run) -> dict[str, str]:
    """The figures of a run as texts by label, from its records; "–" means not recorded."""
    score, warned = compare_scores(run.evaluations) or {}, warnings(run)
    scores = [_interval(score[when]) for when in ("before", "after") if score.get(when)]
    return {
        "State": run.state,
        "Score": " → ".join(scores) or "–",
        **{label: f"{value}, {note}" if note else value for label, value, note in facts(run, measure(run))},
        "Faults": "; ".join(faults(run, warned)) or "none",
        "Warnings": ", ".join(sorted({str(warning.get("rule")) for warning in warned})) or "none",
    }


def _interval(score: Sequence[float | None]) -> str:
    value, low, high = score
    return number(value, 3) + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")


def facts(run: Run, shares: Shares | None, scoring: bool = True) -> Iterator[tuple[str, str, str]]:
    """Label, value and note of each figure; "–" means not recorded. `shares` are those of the timeline.

    `scoring`: whether times of scores are noted.
    """
    last = run.last
    rewards, window = run.values("reward/mean"), last.get("time/window_s") or 0
    tenth = max(1, len(rewards) // 10)
    yield "Reward", arrow(_mean(rewards[:tenth]), _mean(rewards[-tenth:])), "first and last tenth of the steps"
    yield from _environments(run)
    yield from _policies(run)
    stopped = f", stopped by {run.summary['stopped']}" if run.summary.get("stopped") else ""
    steps = f"{number(last.get('step'))} in {duration(last.get('time/wall_s'))}"
    yield "Steps", steps, f"without stops; {duration(window)} since the first rollout{stopped}"
    for label, total, side in (("Generated", "gen", "engines"), ("Trained on", "train", "trainer")):
        tokens = last.get(f"{total}/total_tokens")
        rate = number(tokens / window) if tokens and window else "–"
        used = f", {side} busy {getattr(shares, side)['busy']:.0%}" if shares and window else ""
        yield label, f"{count(tokens)} tokens", f"{rate} tokens/s{used} of the time since the first rollout"
    most, pauses = max(run.values("lag/max"), default=None), run.values("sync/pause_ms")
    paused = f"; {number(last.get('version'))} publishes paused engines {median(pauses):,.2f} ms each" if pauses else ""
    lag = f"on average over trained tokens, at most {number(most)}{paused}"
    yield "Lag", f"{number(_mean_lag(run), 2)} versions", lag
    fates = [f"{number(last[key])} {text}" for fate, text in FATES if last.get(key := f"rollout/{fate}")]
    scored = _scoring(run) if scoring else ""
    yield "Rollouts", f"{number(last.get('rollout/generated'))} ended", ", ".join(fates) + scored


def _mean_lag(run: Run) -> float | None:
    """The mean lag of all trained tokens, as in the summary; of all steps if their tokens are not recorded."""
    steps = [m for m in run.metrics if is_finite(m.get("lag/mean"))]
    tokens = [m["train/tokens"] if is_finite(m.get("train/tokens")) else 0 for m in steps]
    lags = [m["lag/mean"] for m in steps]
    return fmean(lags, tokens) if any(tokens) else _mean(lags)


def _environments(run: Run) -> Iterator[tuple[str, str, str]]:
    """First and last score of each environment of a run on several."""
    scores = [by_label(record, "eval/score") for record in run.evaluations]
    last = run.last
    for label in scores[0] if scores else ():
        tasks = by_label(run.evaluations[-1], "eval/tasks").get(label)
        rewards = run.values(f"environments/{label}/reward")
        tenth = max(1, len(rewards) // 10)
        trained = f"reward {arrow(_mean(rewards[:tenth]), _mean(rewards[-tenth:]))}"
        dropped = last.get(f"environments/{label}/tasks_dropped")
        note = f"on {number(tasks)} held-out tasks; {trained}" + f"; {number(dropped)} tasks dropped" * bool(dropped)
        yield f"Score of {label}", arrow(scores[0][label], scores[-1].get(label)), note


def _policies(run: Run) -> Iterator[tuple[str, str, str]]:
    """First and last reward of each of several policies on held-out tasks, also against the others at the start."""
    each = [by_label(record, "eval/reward", "policies") for record in run.evaluations]
    against = [by_label(record, "eval/against_start", "policies") for record in run.evaluations]
    for name in each[0] if each else ():
        first, last = against[0][name], against[-1].get(name)
        note = "on held-out tasks" + ("" if first is None else f"; others as at the start: {arrow(first, last)}")
        yield f"Reward of {name}", arrow(each[0][name], each[-1].get(name)), note


def _scoring(run: Run) -> str:
    """Mean time of a score and of its wait, for a run with a scorer or a teacher; else ""."""
    records = [record for record in run.metrics if record.get("scoring/scored")]
    scored = sum(record["scoring/scored"] for record in records)
    took, queued = (
        sum(r["scoring/scored"] * r[f"scoring/{name}"] for r in records) / max(1, scored)
        for name in ("mean_s", "mean_wait_s")
    )
    return f"; scored in {took:.2f} s each, queued {queued:.2f} s" if records else ""


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def arrow(first: Any, last: Any) -> str:
    """Two values and their difference: "0.100 → 0.722 (+0.622)"."""
    gain = f" ({last - first:+.3f})" if is_finite(first) and is_finite(last) else ""
    return f"{number(first, 3)} → {number(last, 3)}{gain}"


def count(value: Any) -> str:
    """A count with three digits and k, M, G or T from 10,000 on; "–" if it is not recorded."""
    if not is_finite(value) or value < 1e4:
        return number(value)
    value = float(f"{value:.3g}")  # before the choice of the unit: 999,999 is 1 M
    size, unit = next((size, unit) for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= size)
    return f"{value / size:.3g} {unit}"


def warnings(run: Run) -> list[Record]:
    """The health warnings that the run recorded, or those computed from its metrics if it recorded no events.

    In the order of their steps, but consequences of another warning come last, and `follows` is the rule of that
    warning. `detail` has further lines. A remedy of a run that ended names nothing that needs the run.
    """
    found = [event for event in run.events if event.get("kind") == "warning"]
    if not run.events:
        found = [dict(warning._asdict()) for warning in check(run)]
    follows: dict[Any, Any] = {rule.name: rule.follows for rule in RULES}
    present, running = {warning.get("rule") for warning in found}, run.state == "running"
    described = []
    for warning in found:
        rule, remedy = warning.get("rule"), str(warning.get("remedy") or "")
        cause = next((other for other in follows.get(rule, ()) if other in present), None)
        detail = [LEFT.sub("", line) for line in engines_lost(run)] if rule == "engine-lost" else []
        remedy = remedy if running else remedy.partition(WHILE_RUNNING)[0]
        described.append(warning | {"remedy": remedy, "follows": cause, "detail": detail})
    return sorted(described, key=lambda warning: (warning["follows"] is not None, warning.get("step") or 0))


def engines_lost(run: Run) -> list[str]:
    """Engines that died, one line each."""
    return [name_engines(line) for line in run.summary.get("engines_lost") or ()]


def name_engines(text: str) -> str:
    """The text of a fault with engines named as in the timeline: their processes are called generators."""
    return re.sub(r"\bgenerator(s?)(?=[\s,;:]|$)", r"engine\1", text)


def faults(run: Run, found: Sequence[Record]) -> Iterator[str]:
    """What failed in the run, one line each. `found` are its warnings: those have the deaths of engines as details."""
    last = run.last
    if not any(warning["detail"] for warning in found):
        yield from engines_lost(run)
    ends = {"kind": "fault", "track": CONTROLLER}
    yield from (str(event.get("what")) for event in run.events if event.items() >= ends.items())
    if restarts := last.get("train/restarts"):
        yield f"the trainer restarted {plural(restarts, 'time')} and lost {number(last.get('train/steps_lost'))} steps"
    if failures := last.get("rollout/failures"):
        yield f"{number(last.get('rollout/failed'))} rollouts failed: {counts(failures)}"
    if errors := last.get("reward/errors"):
        share = sum(errors.values()) / max(1, sum(errors.values()), last.get("rollout/generated") or 0)
        yield f"the reward function raised: {counts(errors)} ({share:.0%} of the rewards)"
    if stale := last.get("rollout/dropped_stale"):
        yield f"{number(stale)} rollouts were dropped because they were too old"
    if skipped := last.get("train/skipped_steps"):
        yield f"{number(skipped)} steps were skipped because loss or gradient was not finite"
    if retired := run.summary.get("tasks_retired"):
        yield f"{len(retired)} tasks are no longer visited: each try failed, or the prompt is too long"

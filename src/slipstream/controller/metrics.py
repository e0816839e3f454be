"""The metrics of a step, as written to `metrics.jsonl` and shown in the terminal.

Names are defined here, in `observe/run_totals.py` or in `step_stats.StepStats`; `docs/metrics.md` has unit and meaning.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.controller.run_context import RunContext
from slipstream.generators.pool import EngineReplica, GeneratorPool
from slipstream.observe.advice import advice_in_process
from slipstream.observe.events import TRAINER
from slipstream.observe.health import HealthWarning
from slipstream.observe.progress import EngineState, PoolState
from slipstream.rollout import Batch
from slipstream.runtime.memory import unshared_bytes
from slipstream.runtime.worker_process import alive_workers
from slipstream.scoring.stage import Interval
from slipstream.step_stats import StepStats
from slipstream.sync.link import PublishStats


def record_step(run: RunContext, batch: Batch, stats: StepStats, batch_metrics: dict[str, float], wait: float) -> None:
    """Queue and show the record of the last step. The trainer waited `wait` seconds for the batch."""
    for activity in run.cluster.generator.take_activity():  # of each engine since the last step
        run.events.add("engine", **vars(activity))
    run.totals.extend_window(run.cluster.generator.totals, stats.seconds)
    record = {
        "step": run.state.step,
        "version": run.state.version,
        **run_metrics(run),
        **batch_metrics,
        **trainer_metrics(stats),
        "time/batch_wait_s": wait,
        **turn_metrics(run.cluster.turn_seconds, stats.seconds),
        **(scoring_metrics(run.scoring.take_interval()) if run.scoring else {}),
    }
    run.recorder.step(record, batch)
    run.progress.step(record)
    run.progress.rollouts(batch.groups[-1], run.chat_tokenizer.decode_prompt)
    if run.health:
        for warning in run.health.step(record, run.totals.evaluations):
            if warning.rule in ("trainer-idle", "engines-idle"):
                run.tasks.create_task(warn_with_advice(run, warning))
            else:
                run.warn(warning)


async def warn_with_advice(run: RunContext, warning: HealthWarning) -> None:
    """Show and record a warning with the change that helps most, simulated with the run's own rates."""
    advice = await advice_in_process(run.directory.path)
    remedy = f"{advice[0].upper()}{advice[1:]}. {warning.remedy}" if advice else warning.remedy
    run.warn(warning._replace(remedy=remedy))


def record_trainer_time(run: RunContext, batch: Batch, stats: StepStats, waited: float) -> None:
    """Record start and end of the step that has just ended, and the `waited` seconds before it without a batch."""
    visits, now = [group.visit_id for group in batch.groups], run.events.now()
    run.events.add(
        "step", TRAINER, now - stats.seconds, now,
        step=run.state.step + 1, version=batch.version, wait_s=waited, visit_ids=visits,
    )  # fmt: skip


def run_metrics(run: RunContext) -> dict[str, Any]:
    """Totals of the run, and the state of buffer and engines."""
    state, totals = run.state, run.totals
    return {
        "time/wall_s": round(totals.wall(), 3),
        "time/window_s": round(totals.window_seconds, 3),
        "reward/errors": dict(totals.reward_errors),
        "train/total_tokens": totals.tokens_trained,
        "train/busy_s": totals.trainer_busy,
        "train/restarts": totals.trainer_restarts,
        "train/steps_lost": totals.steps_lost,
        "gen/total_tokens": totals.tokens_generated,
        "gen/tokens_per_s": totals.generator_rate,
        "gen/busy_s": totals.generator_busy,
        **engine_metrics(run),
        **memory_metrics(),
        "disk/free_gb": run.recorder.free_gb,
        "checkpoint/size_gb": run.checkpoint_gb,
        "engines/restarts": totals.engine_restarts,
        "sync/pause_ms": 1000 * totals.pauses[-1] if totals.pauses else None,
        **publish_metrics(run.last_publish),
        "buffer/groups_ready": len(state.ready),
        "buffer/groups_in_flight": state.running,
        "buffer/capacity": state.capacity,
        **{f"rollout/{fate}": count for fate, count in dataclasses.asdict(state.ledger.counts).items()},
        "rollout/failures": dict(state.ledger.reasons),
        "rollout/reward_s": totals.take_reward_seconds(),
        **{f"policies/{name}/version": version for name, version in state.policy_versions.items()},
        **{f"environments/{stream.label}/tasks_active": stream.active for stream in state.ledger.streams},
        **{f"environments/{stream.label}/tasks_dropped": len(stream.dropped) for stream in state.ledger.streams},
    }


def publish_metrics(publish: PublishStats | None) -> dict[str, Any]:
    """The last completed publish of this process; None before it, and where a link does not count."""
    return {
        "sync/transfer_s": publish.sending if publish else None,
        "sync/ready_s": publish.ready if publish else None,
        "sync/bytes": publish.bytes if publish else None,
        "sync/changed_fraction": publish.changed if publish else None,
        "sync/engines_late": publish.late if publish else None,
    }


def turn_metrics(seconds: dict[str, float], step: float) -> dict[str, float]:
    """The durations of the last turn of a trainer that shares GPUs with the engines, in which it took a step."""
    parts = {f"sync/{part}_s": value for part, value in seconds.items() if part != "turn"}
    return {"sync/changeover_s": seconds["turn"] - step, **parts} if seconds else {}


def scoring_metrics(interval: Interval) -> dict[str, Any]:
    """The scoring since the last step."""
    return {
        "scoring/scored": interval.scored,
        "scoring/in_flight": interval.running,
        "scoring/queued": interval.queue,
        "scoring/mean_s": interval.seconds / max(1, interval.scored),
        "scoring/mean_wait_s": interval.waited / max(1, interval.scored),
        "scoring/retries": interval.retries,
    }


def pool_state(run: RunContext) -> PoolState:
    """State of trainer and engines, for the terminal, which calls it in a separate thread."""
    if run.started_cluster is None:
        return PoolState((), "starting")
    pool = run.cluster.generator
    engines = tuple(pool.generators)
    states = [EngineState(e.process.name, _state(e, pool), e.version, e.pending_requests) for e in engines]
    publishing = run.publishing is not None and not run.publishing.done()
    doing = [name for name, now in (("stepping", run.stepping), ("publishing", publishing)) if now]
    return PoolState(states, " and ".join(doing) or ("paused" if run.paused else "waiting for a batch"))


def _state(engine: EngineReplica, pool: GeneratorPool) -> str:
    if engine.process.dead:
        return "dead"
    if engine.alive:
        return "serving" if engine.version >= pool.oldest else "late"
    return "leaving" if engine.leaving else "starting"


def engine_metrics(run: RunContext) -> dict[str, float]:
    """How many engines there are, and the totals of each."""
    pool = run.cluster.generator
    wanted = [engine for engine in pool.generators if not engine.leaving]
    return {
        "engines/alive": len(pool.alive),
        "engines/total": len(wanted),
        "engines/lost": sum(engine not in run.engine_watches for engine in wanted),
        **{f"engines/tokens/{n}": engine.totals["tokens"] for n, engine in enumerate(pool.generators)},
        **{f"engines/busy_s/{n}": engine.activity.busy_s for n, engine in enumerate(pool.generators)},
    }


def memory_metrics() -> dict[str, float]:
    """GB of memory of the controller, and of the largest worker of each kind: `memory/KIND_gb`, such as "generator"."""
    found = {"memory/controller_gb": unshared_bytes() / 1e9}
    for worker in alive_workers():
        name = f"memory/{worker.name.removesuffix(' rank').rstrip(' 0123456789').replace(' ', '_')}_gb"
        found[name] = max(found.get(name, 0.0), worker.memory_bytes / 1e9)
    return found


def trainer_metrics(stats: StepStats) -> dict[str, Any]:
    """The trainer's statistics of a step, and those of each of several policies."""
    own = {f"policies/{policy}/{n}": value for policy, of in stats.policies.items() for n, value in _named(of).items()}
    passed = stats.packed_tokens and stats.seconds  # 0 tokens: no gradient was needed
    return _named(stats) | own | {"train/tokens_per_s": stats.tokens / stats.seconds if passed else None}


def _named(stats: StepStats) -> dict[str, Any]:
    """The statistics by the names of their metrics."""
    fields = [field for field in dataclasses.fields(StepStats) if field.metadata]
    return {field.metadata["metric"]: getattr(stats, field.name) for field in fields}

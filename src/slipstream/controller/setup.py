"""Start a run: validate the configuration, start the processes, restore the last checkpoint, probe the policy."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.config.schema import Config, ConfigError
from slipstream.controller.engine_supervisor import EngineEvents
from slipstream.controller.errors import RunError
from slipstream.controller.evaluation import evaluate_run
from slipstream.controller.launch import Cluster
from slipstream.controller.metrics import pool_state
from slipstream.controller.model_checks import validate_models
from slipstream.controller.node_checks import check_nodes
from slipstream.controller.publishing import publish_to_new_engines, record_publish, refresh_teacher
from slipstream.controller.rollouts import report_slow_episodes
from slipstream.controller.run_context import RunContext
from slipstream.environments.base import Policy
from slipstream.environments.episode import episode_slots
from slipstream.environments.prompts import describe, find_overlong_prompts
from slipstream.model.device import pick_device
from slipstream.model.paths import check_paths
from slipstream.observe.events import CONTROLLER
from slipstream.observe.health import Health, replay
from slipstream.observe.progress import report_startup
from slipstream.observe.run_data import Run
from slipstream.observe.trackers import check_installed
from slipstream.runtime.memory import freeze_heap
from slipstream.runtime.placement import resolve_auto
from slipstream.runtime.run_directory import read_ready
from slipstream.runtime.runtime import current_runtime
from slipstream.sync.link import find_link

PROBES = 4  # completions that engine and trainer are compared on


def resolve_config(config: Config) -> Config:
    """Return the configuration with every `auto` resolved. Raises `ConfigError` for errors visible before the start."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "torchrun started this process, and each of its processes would be a separate run; start slipstream "
            "itself, once: it starts as many ranks as trainer.ranks says"
        )
    check_paths(config)
    check_installed(config.observe.trackers)
    validate_devices(config)
    runtime = current_runtime()
    config = resolve_auto(config, runtime.gpus, runtime.hosts)
    find_link(config.sync.link)
    validate_models(config)
    return config


def validate_devices(config: Config) -> None:
    """Raise `ConfigError` for a device that this host lacks, or for a GPU by number where Ray chooses the GPUs."""
    devices = {f"{section}.device": getattr(config, section).device for section in ("generator", "trainer", "teacher")}
    if config.scoring.kind == "model":
        devices["scoring.options.device"] = str(config.scoring.options.get("device", "auto"))
    for name, device in devices.items():
        if config.runtime.kind == "local":
            pick_device(device, name)
        elif device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f'{name} = "{device}", but Ray chooses the GPUs of each worker; give "auto" or "cpu"')


async def start(run: RunContext) -> None:
    """Start the processes, restore the last checkpoint, publish version 0 and check that both sides agree."""
    await find_long_prompts(run)
    where, link = run.directory.path, run.config.sync.link
    restarts = ", sync.restart = true" if run.config.sync.restart else ""
    run.progress.note(f'run directory {where}, sync.link = "{link}"{restarts}; generators and trainer start')
    checkpoint, state, damaged = await asyncio.to_thread(run.directory.newest_whole)
    for line in damaged:
        run.progress.warn(line)
    if run.config.runtime.kind == "ray":
        await check_nodes(run.config, run.directory.path)
    await start_cluster(run)
    run.progress.watch(partial(pool_state, run))
    run.episode_slots = episode_slots(run.config, run.cluster.generator.max_num_seqs)
    run.slow_episode_report = asyncio.create_task(report_slow_episodes(run))
    if run.scoring:  # later than the engines, since it may share a GPU with them
        await run.scoring.start()
    await asyncio.to_thread(run.recorder.load_libraries)
    await continue_from(run, checkpoint, state)
    run.directory.write_config(run.config)  # the run can be resumed once this file exists
    run.trackers.start()
    run.heap_frozen = not gc.get_freeze_count()  # a heap frozen by the caller is unfrozen by the caller
    freeze_heap()


async def start_cluster(run: RunContext) -> None:
    """Start engines and trainer."""
    starting = Cluster.start(run.config, run.directory.path)
    run.started_cluster = await report_startup(starting, run.progress.note, run.directory.path / "logs")


async def continue_from(run: RunContext, checkpoint: Path | None, state: dict[str, Any]) -> None:
    """Continue a run whose trainer has just started from a checkpoint, or begin it if `checkpoint` is None.

    Removes later records, publishes the trainer's version to the engines, probes them, and evaluates once at the start.
    """
    if checkpoint:
        await restore(run, checkpoint, state)
    retire_long_prompts(run)
    await asyncio.to_thread(run.recorder.truncate, run.state.step, len(run.totals.evaluations))
    await asyncio.to_thread(watch_health, run)
    if not run.trainer_restarts:  # else time and events continue
        started_at = state["totals"]["wall_seconds"] if state else 0.0
        await asyncio.to_thread(run.events.truncate, started_at)
        run.events.set_time(run.totals.wall())
    run.cluster.generator.use_clock(run.events.now)
    record_publish(run, await run.cluster.link.connect(run.state.version))
    supervise_engines(run)
    await refresh_teacher(run)
    if run.scoring:
        run.state.ready = [await run.scoring.add_teacher(group) for group in run.state.ready]
    await probe(run)
    if not run.totals.evaluations and not run.stopped:
        await evaluate_run(run)
    run.totals.open(await run.cluster.generator.stats())
    run.cluster.generator.take_activity()  # of the start, which is not part of the window
    if not run.trainer_restarts:
        run.events.add("start", CONTROLLER, started_at, run.events.now(), step=run.state.step)


def watch_health(run: RunContext) -> None:
    """Apply the health rules from the next step on, as if this process had taken the recorded steps."""
    options = run.config.observe
    if options.health:
        run.health = Health(run.config.model_dump(), options.ignore)
        replay(Run(run.directory.path), run.health)


def supervise_engines(run: RunContext) -> None:
    """Replace engines that die from now on. Reports deaths and restarts."""

    def lost(track: str, line: str, log: str) -> None:
        run.events.add("fault", track, what=line)
        run.totals.engines_lost.append(line)
        run.progress.warn(f"{line}\n{log}".rstrip())

    def restarted(track: str, line: str, took: float) -> None:
        run.events.add("recovery", track, run.events.now() - took, run.events.now(), what=line)
        run.totals.engine_restarts += 1
        run.progress.warn(line)

    def changed() -> None:
        run.episode_slots.grow(episode_slots(run.config, run.cluster.generator.max_num_seqs).count)
        run.changed.set()

    publish = partial(publish_to_new_engines, run)
    run.cluster.supervise(EngineEvents(lost, restarted, run.progress.note, changed, publish))


async def restore(run: RunContext, path: Path, data: dict[str, Any]) -> None:
    """Restore loop state, totals and trainer from a checkpoint. Raises `ConfigError` if the data set has changed."""
    try:
        run.state.restore(data, await asyncio.to_thread(read_ready, path, data))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    run.totals.restore(data["totals"])
    await run.cluster.trainer.restore(path / "trainer")
    run.progress.note(f"resumed after step {run.state.step} with {len(run.state.ready)} groups ready")


async def find_long_prompts(run: RunContext) -> None:
    """Find the tasks whose prompts fill the context. Raises `ConfigError` if all training tasks do."""
    context = run.chat_tokenizer.limits.context
    training, held_out = run.environment.train, run.environment.test[: run.config.evaluation.tasks]
    if not context:
        return
    remedy = (
        f"no room in the context of {context} tokens; shorten them, or raise generator.max_model_len if it is lower"
    )
    run.long_prompts = await asyncio.to_thread(find_overlong_prompts, training, run.chat_tokenizer, context)
    if len(run.long_prompts) == len(training):
        raise ConfigError(f"the prompts of all training tasks leave {remedy}: {describe(run.long_prompts, training)}")
    others = await asyncio.to_thread(find_overlong_prompts, held_out, run.chat_tokenizer, context)
    for effect, tasks, found in (
        ("training tasks are left out", training, run.long_prompts),
        ("held-out tasks will fail", held_out, others),
    ):
        if found:
            named = describe(found, tasks)
            run.progress.warn(f"{len(found)} of {len(tasks)} {effect}, since their prompts leave {remedy}: {named}")


def retire_long_prompts(run: RunContext) -> None:
    """Exclude tasks with long prompts from the ledger, and list them in the summary."""
    run.state.ledger.retire(run.long_prompts)
    run.totals.tasks_retired |= {run.environment.train[i].id: f"prompt of {n}" for i, n in run.long_prompts.items()}


async def probe(run: RunContext) -> None:
    """Sample from an engine and score with the trainer. Raises `RunError` if the log-probabilities differ."""
    sampling = run.sampling
    if not sampling.record_sampling_mask:  # the trainer scores the full distribution, without top_k and top_p
        sampling = dataclasses.replace(sampling, top_k=0, top_p=1.0)
    policy = Policy(run.cluster.generator, run.chat_tokenizer, sampling, f"{run.config.loop.seed}/probe")
    playable = (task for i, task in enumerate(run.environment.train) if i not in run.long_prompts)
    tasks = itertools.islice(playable, PROBES)
    sampled = await asyncio.gather(*(policy.sample(task.prompt, seed=i) for i, task in enumerate(tasks)))
    async with run.cluster.trainer_turn(publishes=False):
        scored = await run.cluster.trainer.score(sampled)
    pairs = zip(sampled, scored, strict=True)
    worst = max(abs(a - b) for c, scores in pairs for a, b in zip(c.logprobs, scores, strict=True))
    bound = run.config.trainer.logprob_tolerance or (1e-3 if run.config.model.dtype == "float32" else 0.5)
    finding = f"log-probabilities of generator and trainer differ by at most {worst:.1e} (bound {bound:.1e})"
    if not worst <= bound:
        raise RunError(
            f"{finding}: they do not run the same policy. Check model.dtype and the model's files, or raise "
            "trainer.logprob_tolerance if you accept the difference"
        )
    run.progress.note(f"probe: {finding}")

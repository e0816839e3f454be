"""Start a run: validate the configuration, start the processes, restore the last checkpoint, compare log-probabilities.

A dead trainer is restarted from the last whole checkpoint, as by `--resume`, while engines continue to run.
ARCHITECTURE.md says why that is sound. Engines are restarted, too, if they can't connect to another trainer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.config.schema import AUTO, Config, ConfigError
from slipstream.controller.engine_calls import PublishError
from slipstream.controller.engine_supervisor import close_cluster, supervise_engines
from slipstream.controller.evaluation import evaluate_served_policy, held_out_tasks
from slipstream.controller.launch import Cluster
from slipstream.controller.metrics import pool_state
from slipstream.controller.node_checks import check_nodes, measure_network
from slipstream.controller.probe import probe
from slipstream.controller.publishing import record_publish, refresh_teacher
from slipstream.controller.rollouts import report_slow_episodes
from slipstream.controller.run_context import RunContext
from slipstream.controller.trackers import TrackerProcess
from slipstream.environments.episode import episode_slots
from slipstream.environments.prompts import describe, find_overlong_prompts
from slipstream.errors import RunError
from slipstream.model.device import pick_device
from slipstream.model.images import reads_images
from slipstream.model.inspection import attention_heads, can_share_heads, causal_lm, model_config, validate_lengths
from slipstream.model.loading import describe_targets, load_causal_lm, load_model
from slipstream.model.paths import check_paths, replaced_bases
from slipstream.model.policy import validate_context
from slipstream.model.tokenizer import validate_same_vocabulary
from slipstream.observe.events import CONTROLLER, TRAINER
from slipstream.observe.health import Health, replay
from slipstream.observe.progress import report_startup
from slipstream.observe.run_data import read_lines
from slipstream.observe.trackers import check_installed
from slipstream.plan.choice import choose_options
from slipstream.plan.hardware import GPUS, Gpu, kind_of
from slipstream.plan.memory import choose_memory
from slipstream.runtime.closing import run_bounded
from slipstream.runtime.memory import freeze_heap
from slipstream.runtime.placement import idle_options, resolve_auto
from slipstream.runtime.run_directory import read_ready
from slipstream.runtime.runtime import current_runtime
from slipstream.runtime.worker import WorkerDied, WorkerError, describe_death
from slipstream.sync.link import find_link

META = torch.device("meta")  # for models without their weights


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
    if AUTO in (config.loop.max_lag, config.generator.replicas):
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        config = choose_options(config, runtime.gpus, name)
    measured = config.sync.link == "auto" and runtime.hosts > 1
    network = run_bounded(measure_network(runtime, config)) if measured else None
    config = resolve_auto(config, runtime.gpus, runtime.hosts, network)
    find_link(config.sync.link)
    validate_models(config)
    if config.trainer.memory == "auto":
        config = choose_memory(config, runtime.gpus, this_gpu(), host_memory())
    return config


def this_gpu() -> Gpu | None:
    """The first GPU of this host, with the rates of a known kind; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return dataclasses.replace(kind_of(name) or GPUS["h100"], name=name, memory=float(memory))


def host_memory() -> int:
    """Bytes of this host's memory, or the limit of its cgroup, such as that of a container, if that is less."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max" is no number
        found = min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return found


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


def validate_models(config: Config) -> None:
    """Raise `ConfigError` for a policy, reference or teacher that can't be loaded, or that an option can't apply to."""
    validate_lengths(config)
    if config.trainer.kind == "pytorch":
        for own in config.each_model:
            model = load_model(own.model, own.lora, device=META, dtype=torch.float32, policies=own.policies)
            _validate_policy(own, causal_lm(model))
    for index, policy in enumerate(config.policies):
        if policy.model:
            validate_same_vocabulary(policy.model, f"policies.{index}.model", config.model.path)
    others = {"teacher.path": config.teacher.path} if config.teacher.path else {}
    if config.algorithm.kl_coef and config.algorithm.reference not in ("start", "average"):
        others["algorithm.reference"] = config.algorithm.reference
    for option, path in others.items():
        if option != "teacher.path" or config.teacher.engine == "torch":  # vLLM knows other models than transformers
            load_causal_lm(path, device=META, dtype=torch.float32, option=option)
        validate_same_vocabulary(path, option, config.model.path)
        if option == "algorithm.reference":
            _validate_reference(config.model.path, path)


def _validate_reference(policy: str, reference: str) -> None:
    """Raise `ConfigError` if the policy at `policy` reads images and the model at `reference` is of another type."""
    ours, theirs = (model_config(path) for path in (policy, reference))
    if reads_images(ours) and ours.model_type != (kind := getattr(theirs, "model_type", "")):
        raise ConfigError(
            f"algorithm.reference = {reference!r} is a {kind}; give a {ours.model_type}, as the policy is"
        )


def _validate_policy(config: Config, model: Any) -> None:
    """Raise `ConfigError` if `model` can't be trained, or ranks can't share its heads or experts."""
    from slipstream.trainers.experts import expert_modules
    from slipstream.trainers.tensor_parallel import plan_shards

    trainer, size = config.trainer, config.generator.tensor_parallel_size
    quantization = getattr(model.config, "quantization_config", None) or {}
    if quantization.get("quant_method") == "bitsandbytes" and not config.lora.rank:
        raise ConfigError(
            f"model.path = {config.model.path!r} has weights in the format of bitsandbytes, which can't be trained; "
            "train adapters (lora.rank = 16), or give the model with whole weights"
        )
    if config.serves_adapters and any(".lora_embedding_" in name for name, _ in model.named_parameters()):
        remedy = 'which vLLM can\'t serve; name other modules, or set generator.engine = "torch"'
        raise ConfigError(f"{describe_targets(config.lora)} adapts the embedding, {remedy}")
    if reads_images(model.config):
        _validate_image_model(config, model.config.model_type)
    if trainer.parallel == "tensor" and trainer.ranks > 1:
        plan_shards(model, trainer.ranks)
    if trainer.expert_parallel > 1:
        expert_modules(model, trainer.expert_parallel)
    if trainer.context_parallel > 1:
        validate_context(trainer.context_parallel, model)
    if not can_share_heads(model.config, size):
        heads, keys, _ = attention_heads(model.config)
        raise ConfigError(
            f"generator.tensor_parallel_size = {size} can't share {heads} attention heads and {keys} heads of keys and "
            "values; give a divisor"
        )
    layers, stages = model.config.get_text_config().num_hidden_layers, config.generator.pipeline_parallel_size
    if stages > layers:
        raise ConfigError(
            f"generator.engine_args.pipeline_parallel_size = {stages}, but the model has {layers} layers; give at most "
            "as many"
        )


def _validate_image_model(config: Config, kind: str) -> None:
    """Raise `ConfigError` for an option that does not go with a model that reads images."""
    generator, trainer = config.generator, config.trainer
    conflicts = {
        f'generator.engine = "{generator.engine}"; set it to "vllm"': generator.engine != "vllm",
        "generator.servers; leave them out": generator.servers,
        "generator.engine_args.pipeline_parallel_size; leave it out": generator.pipeline_parallel_size > 1,
        "generator.engine_args.mm_processor_kwargs, which the trainer does not apply; set the size of images in the "
        "model's preprocessor_config.json": "mm_processor_kwargs" in generator.engine_args,
        'trainer.parallel = "tensor"; set it to "fsdp"': trainer.parallel == "tensor" and trainer.ranks > 1,
        "trainer.context_parallel; leave it out": trainer.context_parallel > 1,
        "a teacher; leave teacher.path and teacher.lag out": config.teacher.path or config.teacher.lag,
    }
    for conflict, found in conflicts.items():
        if found:
            raise ConfigError(f"model.path = {config.model.path!r} is a {kind}, which does not go with {conflict}")


async def start(run: RunContext) -> None:
    """Start the processes, restore the last checkpoint, publish version 0 and check that both sides agree."""
    await find_long_prompts(run)
    where, link = run.directory.path, run.config.sync.link
    restarts = ", sync.restart = true" if run.config.sync.restart else ""
    chosen, _, reason = run.config.sync.chosen.partition(": ")
    why = f" ({reason})" if chosen == link else ""  # else the user has changed the link since
    run.progress.note(f'run directory {where}, sync.link = "{link}"{restarts}{why}; generators and trainer start')
    if changed := run.directory.changed_options(run.config):
        run.progress.note(f"changed since the last start: {', '.join(changed)}")
    for line in replaced_bases(run.config):
        run.progress.warn(line)
    if idle := idle_options(run.config, current_runtime().gpus):
        run.progress.note(f"no effect without a GPU: {', '.join(idle)}")
    if run.config.trainer.chosen:
        run.progress.note(f"trainer.memory: {run.config.trainer.chosen}")
    checkpoint, state = await find_checkpoint(run)
    if not checkpoint and (lost := sum(1 for _ in read_lines(run.directory.metrics))):
        run.progress.warn(f"there is no checkpoint yet: the run starts again, and {lost} recorded steps are replaced")
    if run.config.runtime.kind == "ray":
        await check_nodes(run.config, run.directory.path)
    await start_cluster(run)
    run.progress.watch(partial(pool_state, run))
    run.episode_slots = episode_slots(run.config, run.cluster.generator.max_num_seqs)
    run.slow_episode_report = asyncio.create_task(report_slow_episodes(run.episode_slots, run.progress.note))
    if run.scoring:  # later than the engines, since it may share a GPU with them
        await report_startup(run.scoring.start(), run.progress.note, run.directory.path / "logs")
    await asyncio.to_thread(run.recorder.load_libraries)
    await continue_from(run, checkpoint, state)
    run.directory.write_config(run.config)  # the run can be resumed once this file exists
    for name in run.config.observe.trackers:
        run.trackers.append(TrackerProcess(name, run.config.observe.project, run.directory.path, run.progress.warn))
    run.heap_frozen = not gc.get_freeze_count()  # a heap frozen by the caller is unfrozen by the caller
    freeze_heap()


async def start_cluster(run: RunContext) -> None:
    """Start engines and trainer."""
    starting = Cluster.start(run.config, run.directory.path)
    run.started_cluster = await report_startup(starting, run.progress.note, run.directory.path / "logs")


async def find_checkpoint(run: RunContext) -> tuple[Path | None, dict[str, Any]]:
    """The newest whole checkpoint and its state; None and {} without one. Warns of damaged checkpoints.

    Raises `ConfigError` if the run was given fewer steps than the checkpoint has.
    """
    checkpoint, state, damaged = await asyncio.to_thread(run.directory.newest_whole)
    for line in damaged:
        run.progress.warn(line)
    if checkpoint and (taken := state.get("step", 0)) > (steps := run.config.loop.steps):
        raise ConfigError(f"loop.steps = {steps} is below step {taken} of {checkpoint}; give {taken} or more")
    return checkpoint, state


async def continue_from(run: RunContext, checkpoint: Path | None, state: dict[str, Any]) -> None:
    """Continue a run whose trainer has just started from a checkpoint, or begin it if `checkpoint` is None.

    Removes later records, publishes the trainer's version to the engines, probes them, and evaluates once at the start.
    """
    if checkpoint:
        await restore(run, checkpoint, state)
    retire_long_prompts(run)
    lost = await asyncio.to_thread(run.recorder.truncate, run.state.step, len(run.totals.evaluations))
    await asyncio.to_thread(apply_health_rules, run)
    if not run.trainer_restarts:  # else time and events continue, and losses have been reported
        for text in lost:
            run.progress.warn(text)
        started_at = state["totals"]["wall_seconds"] if state else 0.0
        await asyncio.to_thread(run.events.truncate, started_at)
        run.events.set_time(run.totals.wall())
    run.cluster.generator.use_clock(run.events.now)
    record_publish(run, await run.cluster.link.connect(run.state.version))
    supervise_engines(run)
    async with run.cluster.trainer_turn(publishes=False) if run.config.teacher.lag else nullcontext():
        await refresh_teacher(run)
    if run.scoring:
        run.state.ready = [await run.scoring.add_teacher(group) for group in run.state.ready]
    await probe(run)
    if not run.totals.evaluations and not run.stopped:
        await evaluate_served_policy(run)
    run.totals.open(await run.cluster.generator.stats())
    if not run.trainer_restarts:
        run.events.add("start", CONTROLLER, started_at, run.events.now(), step=run.state.step)


def apply_health_rules(run: RunContext) -> None:
    """Apply the health rules from the next step on, as if this process had taken the recorded steps."""
    options = run.config.observe
    if options.health:
        run.health = Health(run.config.model_dump(), options.ignore)
        metrics, evaluations = (read_lines(run.directory.path / f"{name}.jsonl") for name in ("metrics", "evaluations"))
        replay(metrics, list(evaluations), run.health)


async def restore(run: RunContext, path: Path, data: dict[str, Any]) -> None:
    """Restore loop state, totals and trainer from a checkpoint. Raises `ConfigError` if they don't fit the run."""
    try:
        run.state.restore(data, await asyncio.to_thread(read_ready, path, data))
        run.totals.restore(data["totals"])
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    except KeyError as error:
        raise ConfigError(f"{path}: written by an older version of Slipstream (no {error}); start a new run") from None
    async with run.cluster.trainer_turn(publishes=False):
        await run.cluster.trainer.restore(path / "trainer")
    run.progress.note(f"resumed after step {run.state.step} with {len(run.state.ready)} groups ready")


async def find_long_prompts(run: RunContext) -> None:
    """Find the tasks whose prompts fill the context. Raises `ConfigError` if those of an environment all do."""
    context = run.chat_tokenizer.limits.context
    remedy = (
        f"no room in the context of {context} tokens; shorten them, or raise generator.max_model_len if it is lower"
    )
    for each in run.environments if context else ():
        training, held_out = each.environment.train, held_out_tasks(run.config, each.loaded)
        each.long_prompts = await asyncio.to_thread(find_overlong_prompts, training, run.chat_tokenizer, context)
        if len(each.long_prompts) == len(training):
            found = describe(each.long_prompts, training)
            raise ConfigError(f"the prompts of all training tasks leave {remedy}: {found}")
        others = await asyncio.to_thread(find_overlong_prompts, held_out, run.chat_tokenizer, context)
        for effect, tasks, long in (
            ("training tasks are left out", training, each.long_prompts),
            ("held-out tasks will fail", held_out, others),
        ):
            if long:
                named = describe(long, tasks)
                run.progress.warn(f"{len(long)} of {len(tasks)} {effect}, since their prompts leave {remedy}: {named}")


def retire_long_prompts(run: RunContext) -> None:
    """Exclude tasks with long prompts from the ledger, and list them in the summary."""
    for index, each in enumerate(run.environments):
        run.state.ledger.retire(index, each.long_prompts)
        ids = {each.loaded.id_of(each.environment.train[i]): f"prompt of {n}" for i, n in each.long_prompts.items()}
        run.totals.tasks_retired |= ids


async def restart_trainer(run: RunContext, error: Exception) -> None:
    """Continue from the newest whole checkpoint after the death of a trainer rank.

    Raises `error` if it has another cause. Raises `RunError` after `runtime.max_restarts` restarts.
    """
    before, steps, first, died_at = run.totals, run.state.step, run.trainer_restarts, run.events.now()
    failure: WorkerDied | WorkerError | PublishError | None = trainer_death(run, error)
    limit = run.config.runtime.max_restarts
    if failure is None or not limit:
        raise error
    dead = next(rank.name for rank in run.cluster.trainer_ranks if rank.dead)
    run.events.add("fault", dead, died_at, what=describe_death(failure))
    engines_stay = run.cluster.engines_can_stay
    while run.trainer_restarts < limit:
        run.trainer_restarts += 1
        try:
            rewound_to = await _rewind_and_restart(run, failure, steps, engines_stay)
        except ConfigError as again:
            raise RunError(f"the trainer can't be restarted: {again}") from None
        except (WorkerDied, WorkerError, PublishError) as again:
            engines_stay = run.cluster.engines_can_stay and trainer_death(run, again) is not None
            failure = again
        else:
            run.totals.carry_over(before, run.trainer_restarts - first, steps - run.state.step)
            lost, what = steps - run.state.step, f"the trainer continues from step {run.state.step}"
            keys = {"what": what, "step": run.state.step, "steps_lost": lost, "rewound_to": rewound_to}
            run.events.add("recovery", TRAINER, died_at, run.events.now(), **keys)
            return
    raise RunError(f"{failure}\nThe trainer was restarted {limit} times before (runtime.max_restarts)") from None


def trainer_death(run: RunContext, error: BaseException) -> WorkerDied | None:
    """The death of a trainer rank that caused `error`, or is in it if it is a group; None for other errors."""
    deaths = [rank.dead for rank in run.cluster.trainer_ranks if rank.dead]
    group = BaseExceptionGroup("", [error])
    return next((death for death in deaths if group.subgroup(lambda one: one is death)), None)  # noqa: B023


async def _rewind_and_restart(run: RunContext, failure: Exception, steps: int, engines_stay: bool) -> float:
    """Go back to the newest whole checkpoint, and start the trainer from it, and the engines unless they stay.

    `steps` is the number of steps taken before. Returns the time of the run at which it wrote the checkpoint.
    """
    await run.cluster.trainer_process.stop()
    await run.recorder.flush()
    await asyncio.to_thread(run.directory.remove_partial)
    checkpoint, state = await find_checkpoint(run)
    step = state.get("step", 0)
    run.progress.warn(
        f"{describe_death(failure)}; {'the trainer restarts' if engines_stay else 'trainer and engines restart'} "
        f"({run.trainer_restarts} of runtime.max_restarts = {run.config.runtime.max_restarts}) and the run continues "
        f"from step {step}: {steps - step} steps are lost"
    )
    run.rewind()
    if engines_stay:
        await run.cluster.restart_trainer()
    else:
        await close_cluster(run)
        await start_cluster(run)
    await continue_from(run, checkpoint, state)
    return float(state["totals"]["wall_seconds"]) if state else 0.0

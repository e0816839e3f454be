"""Cross-checks: combinations of options that no run can have, as one table of conditions and messages.

`faults` evaluates the table. In a message, `{loop.steps}` becomes `loop.steps = 100`, and `{=loop.steps}` `100`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from slipstream.config import engine_args
from slipstream.config.environment_checks import environment_faults, sampling_faults
from slipstream.config.policy_checks import policy_faults
from slipstream.config.schema import AUTO, DEVICE, NO_DEVICE, SECTIONS, Config, TeacherConfig
from slipstream.config.section import MAX_WORKERS, is_url
from slipstream.config.toml import is_writable, to_toml

TRACKERS = ("wandb", "trackio", "tensorboard", "mlflow")

Condition = Callable[[Config], object]
Check = tuple[Condition, str]  # what is wrong if it holds, and the message
Conflict = tuple[Condition, str, str]  # the same, then the conflicting option and the remedy


def faults(config: Config) -> Iterator[str]:
    """One line for each combination of options that can't be run; the first is the most helpful."""
    yield from environment_faults(config)
    yield from sampling_faults(config)
    yield from _unwritable_values(config)
    for wrong, message in CHECKS:
        if wrong(config):
            yield re.sub(r"\{(=?)([\w.]+)\}", lambda found: _shown(config, *found.groups()), message)
    yield from _idle_options(config)
    yield from engine_args.faults(config)
    yield from policy_faults(config)
    for index, own in enumerate(config.each_policy.values()):
        yield from (f"policies.{index}: {fault}" for fault in faults(own))
    yield from _tracker_faults(config.observe.trackers)


def spares_copy(config: Config) -> bool:
    """Whether `trainer.keep_compute_copy = false` is possible and would save the memory of one copy of the weights."""
    return config.trainer.keep_compute_copy and not any(wrong(config) for wrong, *_ in COPY_CONFLICTS)


def refers_to_base(config: Config) -> bool:
    """Whether the start policy is the KL reference, and equals the base model without the adapters that are trained."""
    lora = config.lora
    adapts_only = lora.rank > 0 and not lora.path and lora.bias == "none"
    return adapts_only and config.algorithm.reference == "start"


def _shown(config: Config, bare: str, name: str) -> str:
    value: Any = config
    for key in name.split("."):
        value = value[key] if isinstance(value, dict) else getattr(value, key)
    value = "auto" if value == AUTO else value
    if bare:
        return value if isinstance(value, str) else to_toml(value)
    return f"{name} = {to_toml(value)}"


def _unwritable_values(config: Config) -> Iterator[str]:
    """Values of free-form tables, such as dates, that the run's config.toml can't hold."""
    sections = [(name, getattr(config, name)) for name in SECTIONS]
    sections += [(f"environments.{index}", entry) for index, entry in enumerate(config.environments)]
    sections += [(f"policies.{index}.algorithm", entry.algorithm) for index, entry in enumerate(config.policies)]
    tables = {f"{s}.{n}": v for s, section in sections for n, v in section if isinstance(v, dict)}
    tables |= {f"algorithm.corrections.{i}": table for i, table in enumerate(config.algorithm.corrections)}
    for table, values in tables.items():
        for name, value in values.items():
            if not is_writable(value):
                yield (
                    f"{table}.{name} = {value!r} is no text, finite number, true, false, or list or table of these; "
                    "give it as text"
                )


def _tracker_faults(names: list[str]) -> Iterator[str]:
    """Trackers that don't exist, or whose files in the run directory would have the same name."""
    labels = [name.rpartition(":")[2] for name in names]
    for name in (name for name in names if name not in TRACKERS and ":" not in name):
        close = difflib.get_close_matches(name.lower(), TRACKERS, 1)
        hint = f" (did you mean {to_toml(close[0])}?)" if close else ""
        known = ", ".join(map(to_toml, TRACKERS))
        own = 'or your own as "module:Class" or "file.py:Class"'
        yield f"observe.trackers: {to_toml(name)} is unknown{hint}; give {known}, {own}"
    if len(set(labels)) < len(labels):
        yield f"observe.trackers = {to_toml(names)} names a tracker twice; name each once"


def _known(option: str, *names: str, own: str = '"module:Class" or "file.py:Class"') -> Check:
    """The value must be one of these names, or "module:thing"."""
    value, listed = attrgetter(option), ", ".join(to_toml(name) for name in names if name)
    return (
        lambda c: value(c) not in names and ":" not in value(c),
        f"{{{option}}} is unknown; give {listed} or your own as {own}",
    )


def _conflicts(chosen: Condition, text: str, *others: Conflict) -> list[Check]:
    """The chosen option does not go with any of the others."""

    def both(other: Condition) -> Condition:
        return lambda c: chosen(c) and other(c)

    return [(both(other), f"{text} does not go with {what}; {remedy}") for other, what, remedy in others]


def _idle_options(config: Config) -> Iterator[str]:
    """One line for all changed options that have no effect because a condition of `IDLE` does not hold."""
    for works, needed, *options in IDLE:
        changed = [] if works(config) else [option for option in options if is_changed(config, option)]
        if changed:
            listed = ", ".join(_shown(config, "", option) for option in changed)
            one = len(changed) == 1 and f"{changed[0].partition('.')[2]} at {to_toml(_default(changed[0]))}"
            does, remedy = ("does", f"leave {one}") if one else ("do", "leave them out")
            yield f"{listed} {does} nothing without {needed}; set that, or {remedy}"


def is_changed(config: Config, option: str) -> bool:
    """Whether an option, such as "loop.steps", differs from its default."""
    return bool(attrgetter(option)(config) != _default(option))


def _default(option: str) -> Any:
    section, _, name = option.partition(".")
    return SECTIONS[section].model_fields[name].default


def _rewards_steps(config: Config) -> bool:
    """Whether a scorer, or a user's environment, may reward single steps of an episode."""
    names = [environment.name.partition(":") for environment in config.each_environment]
    own = any(colon and library not in ("reasoning-gym", "verifiers") for library, colon, _ in names)
    return bool(config.scoring.kind or own)


def _has_reward_function(config: Config) -> bool:
    """Whether a reward function may raise: a user's environment may have one."""
    names = [environment.name.partition(":") for environment in config.each_environment]
    own = any(library in ("dataset", "gsm8k") or (colon and library != "verifiers") for library, colon, _ in names)
    return bool(own or ":" in config.scoring.kind)


def _in_flight_at_swap(config: Config) -> bool:
    """Whether a publish can find sequences in flight, or stops the engines."""
    return bool(config.loop.max_lag or config.sync.placement == "colocated" or config.sync.restart)


def _has_teacher(config: Config) -> bool:
    return bool(config.teacher.path or config.teacher.lag)


def _truncates(config: Config) -> bool:
    return any(sampling.top_k or sampling.top_p < 1 for sampling in config.each_sampling)


COPY_CONFLICTS: tuple[Conflict, ...] = (  # of `trainer.keep_compute_copy = false`
    (lambda c: c.trainer.parallel != "fsdp", "{trainer.parallel}", "leave one of them out"),
    (lambda c: c.trainer.ranks > 1, '{trainer.ranks}, which keep none with "fsdp"', "leave it out"),
    (lambda c: c.model.dtype == "float32", "{model.dtype}, which needs none", "leave it out"),
    (lambda c: c.lora.rank, "{lora.rank}, whose base has no other copy", "leave it out"),
    (lambda c: c.trainer.master_weights == "bfloat16", "{trainer.master_weights}, which needs none", "leave it out"),
    (lambda c: c.sync.link == "single_copy", "{sync.link}, which is that copy", "leave it out"),
)
CHECKS: tuple[Check, ...] = (
    _known("generator.engine", "torch", "vllm"),
    _known("trainer.kind", "pytorch"),
    _known("sync.link", "auto", "shared", "single_copy", "nccl", "nccl_direct", "lora", "delta", "checkpoint"),
    _known("scoring.kind", "", "http", "model", own='"module:thing"'),
    # weight links
    *_conflicts(
        lambda c: c.sync.link == "single_copy", "{sync.link}",
        (lambda c: c.generator.replicas == AUTO, "{generator.replicas}", "give a number"),
        (lambda c: c.sync.every > 1, "{sync.every}", "set it to 1"),
        (lambda c: c.lora.rank, "{lora.rank}", "set it to 0"),
        (lambda c: c.model.dtype not in ("bfloat16", "auto"), "{model.dtype}", 'set it to "bfloat16"'),
    ),
    (lambda c: MAX_WORKERS < c.generator.replicas < AUTO,
     f"{{generator.replicas}} are more engines than a run can start; give at most {MAX_WORKERS}"),
    (lambda c: c.generator.min_replicas > c.generator.replicas,
     "{generator.min_replicas} engines can't be alive of {generator.replicas}; lower the one or raise the other"),
    (lambda c: c.sync.link == "lora" and not c.serves_adapters,
     '{sync.link} is for lora.rank above 0 with generator.engine = "vllm", not for {lora.rank} with '
     '"{=generator.engine}"; use "auto"'),
    (lambda c: c.serves_adapters and c.sync.link not in ("lora", "auto"),
     "{sync.link} can't bring adapters ({lora.rank}) to vLLM; use \"auto\""),
    (lambda c: c.lora.targets and c.lora.target_pattern,
     "{lora.target_pattern} and {lora.targets} both name modules to adapt; leave one of them out"),
    (lambda c: c.lora.dropout and c.lora.experts,
     "{lora.dropout} can't be with adapters on experts; set it to 0, or lora.experts = false"),
    (lambda c: c.serves_adapters and c.lora.experts,
     '{lora.experts} can\'t be with vLLM; set it to false, or generator.engine = "torch"'),
    (lambda c: c.serves_adapters and c.sync.in_flight == "recompute",
     "{sync.in_flight} can't be with adapters in vLLM, where keys and values belong to one; use \"continue\" (finish "
     'on it), "retry" or "drain"'),
    (lambda c: c.serves_adapters and c.lora.rank > engine_args.MAX_LORA_RANK,
     f"{{lora.rank}} is more than the {engine_args.MAX_LORA_RANK} that vLLM serves; lower it"),
    (lambda c: c.sync.link == "nccl_direct" and c.generator.engine == "torch",
     '{sync.link} is vLLM\'s own; set generator.engine = "vllm", or use "nccl"'),
    # the loop
    (lambda c: 0 < c.loop.buffer_size < c.loop.groups_per_step,
     "{loop.buffer_size} can't hold the {=loop.groups_per_step} groups of one step; raise it to at least "
     "{=loop.groups_per_step}, or set it to 0"),
    (lambda c: not c.loop.epochs and c.trainer.warmup_steps >= c.loop.steps,
     "{trainer.warmup_steps} leaves nothing of {loop.steps}; lower it below {=loop.steps}"),
    (lambda c: c.checkpoint.every % c.sync.every,
     "{checkpoint.every} is no multiple of {sync.every}; make it one, so that a checkpoint holds the weights of a "
     "version"),
    # the trainer
    (lambda c: c.trainer.fsdp_shard_size == 1,
     '{trainer.fsdp_shard_size} leaves each rank all weights, which is trainer.parallel = "ddp"; set that'),
    (lambda c: c.trainer.fsdp_shard_size and c.trainer.parallel != "fsdp",
     "{trainer.fsdp_shard_size} does not go with {trainer.parallel}; set it to 0"),
    (lambda c: c.trainer.fsdp_shard_size and c.trainer.ranks % c.trainer.fsdp_shard_size,
     "{trainer.fsdp_shard_size} must divide {trainer.ranks}; change it, or set it to 0"),
    *_conflicts(lambda c: not c.trainer.keep_compute_copy, "{trainer.keep_compute_copy}", *COPY_CONFLICTS),
    *_conflicts(
        lambda c: c.trainer.master_weights == "bfloat16", "{trainer.master_weights}",
        (lambda c: c.model.dtype == "float32", "{model.dtype}", 'set that to "bfloat16"'),
        (lambda c: c.lora.rank, "{lora.rank}: adapters are small, and stay float32", "leave it out"),
        (lambda c: c.algorithm.kl_coef and c.algorithm.reference == "average",
         "{algorithm.reference}, of which bfloat16 would lose the small changes",
         'set trainer.master_weights = "float32"'),
    ),
    (lambda c: c.trainer.optimizer == "muon" and c.lora.rank,
     '{trainer.optimizer} is for whole weights, not for {lora.rank}; use "adamw", or set lora.rank = 0'),
    *_conflicts(
        lambda c: c.trainer.fp8, "{trainer.fp8}",
        (lambda c: c.trainer.parallel == "tensor" and c.trainer.ranks > 1, "{trainer.parallel}", 'use "fsdp" or "ddp"'),
        (lambda c: c.lora.quantization == "4bit", "{lora.quantization}, whose base has its own products",
         "drop one of them"),
    ),
    (lambda c: c.trainer.parallel == "tensor" and c.trainer.ranks > 1 and c.lora.rank,
     '{trainer.parallel} can\'t train adapters; use "fsdp", or set lora.rank = 0'),
    (lambda c: c.trainer.ranks % c.trainer.context_parallel,
     "{trainer.context_parallel} must divide {trainer.ranks}; change one of them"),
    (lambda c: c.trainer.ranks % c.trainer.expert_parallel,
     "{trainer.expert_parallel} must divide {trainer.ranks}; change one of them"),
    *_conflicts(lambda c: c.trainer.context_parallel > 1, "{trainer.context_parallel}",
                (lambda c: c.trainer.parallel == "tensor", "{trainer.parallel}", 'use "fsdp"')),
    *_conflicts(
        lambda c: c.trainer.expert_parallel > 1, "{trainer.expert_parallel}",
        (lambda c: c.lora.quantization == "4bit", "{lora.quantization}", "leave one of them out"),
        (lambda c: c.trainer.parallel != "fsdp", "{trainer.parallel}", 'set it to "fsdp"'),
        (lambda c: c.trainer.fsdp_shard_size, "{trainer.fsdp_shard_size}", "set it to 0"),
        (lambda c: c.lora.experts, "lora.experts", "set it to false"),
    ),
    *_conflicts(
        lambda c: c.lora.bias != "none", "{lora.bias}",
        (lambda c: c.serves_adapters, "vLLM, which serves adapters without biases", 'set it to "none", or '
         'generator.engine = "torch"'),
        (lambda c: c.policies, "[[policies]], which share the biases of their model", 'set it to "none"'),
    ),
    *_conflicts(
        lambda c: c.lora.quantization == "4bit", "{lora.quantization}",
        (lambda c: c.lora.rank == 0, "{lora.rank}, which trains every weight", "set it to 16, for example"),
        (lambda c: c.trainer.ranks > 1 and c.trainer.parallel != "ddp", "{trainer.parallel}", 'set it to "ddp"'),
        (lambda c: c.generator.engine == "vllm" and "quantization" not in c.generator.engine_args,
         "a vLLM that has the whole base", 'give generator.engine_args.quantization = "bitsandbytes"'),
        (lambda c: c.sync.placement == "colocated", "{sync.placement}", 'use "disaggregated"'),
    ),
    (lambda c: c.sync.link == "single_copy" and c.generator.tensor_parallel_size == 1
     and (c.trainer.ranks != c.generator.replicas or (c.trainer.ranks > 1 and c.trainer.parallel != "ddp")),
     "{sync.link} with {generator.replicas} needs trainer.ranks = {=generator.replicas} and, with several, "
     'trainer.parallel = "ddp": each rank computes on the weights of the engine on its GPU'),
    (lambda c: c.sync.link == "single_copy" and c.generator.tensor_parallel_size > 1
     and (c.trainer.ranks != c.generator.tensor_parallel_size or c.trainer.parallel != "tensor"),
     "{sync.link} with {generator.tensor_parallel_size} needs trainer.ranks = {=generator.tensor_parallel_size} and "
     'trainer.parallel = "tensor": a rank of the trainer computes on the weights of a rank of the engine'),
    (lambda c: c.sync.link == "single_copy" and c.generator.tensor_parallel_size > 1 < c.generator.replicas,
     "{sync.link} with {generator.replicas} needs generator.tensor_parallel_size = 1"),
    (lambda c: len(c.trainer.betas) != 2 or not all(0 <= beta < 1 for beta in c.trainer.betas),
     "{trainer.betas} must be two numbers in [0, 1); try [0.9, 0.99]"),
    # placement, restarted engines and attached servers
    *_conflicts(
        lambda c: c.sync.placement == "colocated", "{sync.placement}",
        (lambda c: c.sync.restart, "sync.restart", "leave it out"),
        (lambda c: c.sync.link in ("single_copy", "nccl", "nccl_direct", "delta"),
         "{sync.link}, whose ends run at once",
         'use "shared"'),
        (lambda c: c.generator.servers, "generator.servers, which can't be put to sleep", "leave them out"),
    ),
    *_conflicts(
        lambda c: c.sync.restart, "{sync.restart}",
        (lambda c: c.sync.link not in ("auto", "checkpoint"), "{sync.link}", 'set it to "checkpoint"'),
        (lambda c: c.sync.in_flight not in ("retry", "drain"), "{sync.in_flight}: sequences end with their engine",
         'set it to "retry" or "drain"'),
        (lambda c: c.sync.verify == "full",
         "{sync.verify}: engines serve the files that they load, and no checksums are compared", "leave it out"),
        (lambda c: c.lora.rank, "{lora.rank}, of which files are no model", "set it to 0"),
        (lambda c: c.generator.servers, "generator.servers, which are yours to start", "leave them out"),
    ),
    *_conflicts(
        lambda c: c.generator.servers, "generator.servers",
        (lambda c: c.generator.engine != "vllm", "{generator.engine}", 'set it to "vllm"'),
        (lambda c: c.generator.replicas != len(c.generator.servers), "{generator.replicas}", "leave it out"),
        (lambda c: not all(map(is_url, c.generator.servers)),
         "servers = {=generator.servers}", "each is a URL such as http://host:8000"),
        (lambda c: len({urlsplit(url).netloc for url in c.generator.servers}) < len(c.generator.servers),
         "servers = {=generator.servers}",
         "name each once"),
        *((lambda c, n=n: is_changed(c, n), n, "give it to `vllm serve` instead")
          for n in ("generator.tensor_parallel_size", "generator.gpu_memory_utilization", "generator.engine_args",
                    "generator.max_num_seqs", "generator.device", "generator.threads")),
        (lambda c: is_changed(c, "generator.max_restarts"), "generator.max_restarts: the run does not start them",
         "leave it out"),
        (lambda c: c.sync.link in ("nccl_direct", "single_copy"),
         "{sync.link}, which takes engines that the run starts",
         'set it to "delta", "nccl" or "checkpoint", or leave servers out'),
        (lambda c: c.sync.link == "shared" and c.generator.remote,
         "{sync.link}, which does not reach {=generator.remote}", 'set it to "delta"'),
    ),
    # evaluation, the objective, scorers and teachers
    (lambda c: c.evaluation.samples > 1 and not c.evaluation.temperature,
     "{evaluation.samples} would be the same completion of a task at {evaluation.temperature}, which is greedy; set "
     "evaluation.temperature = 1.0, for example, or leave evaluation.samples out"),
    (lambda c: c.algorithm.kl_coef and c.algorithm.kl_estimator == "k1" and not c.algorithm.kl_weighted,
     '{algorithm.kl_estimator} has no gradient on average; set algorithm.kl_weighted, or use "k3"'),
    (lambda c: c.algorithm.kl_coef and c.algorithm.kl_estimator == "k2" and c.algorithm.kl_weighted,
     '{algorithm.kl_weighted} does not go with {algorithm.kl_estimator}; use "k3", or set it to false'),
    *_conflicts(
        lambda c: c.algorithm.filter_zero_advantage, "{algorithm.filter_zero_advantage}",
        (lambda c: c.algorithm.kl_coef,
         "{algorithm.kl_coef}, which trains tokens without an advantage, too", "drop one of them"),
        (lambda c: c.algorithm.normalize_advantages
         and c.algorithm.advantage["name"] not in ("group_mean", "leave_one_out"),
         "{algorithm.normalize_advantages} where groups have no baseline: equal rewards have an advantage",
         'drop one of them, or set algorithm.advantage to "group_mean" or "leave_one_out"'),
    ),
    (lambda c: not c.scoring.kind
     and any(e.name == "dataset" and not e.options.get("reward") for e in c.each_environment),
     'environment.reward is not set, nor is scoring.kind: give one, such as environment.reward = "exact"'),
    (lambda c: c.scoring.kind == "model" and not DEVICE.fullmatch(str(c.scoring.options.get("device", "auto"))),
     f"{{scoring.options.device}}: {NO_DEVICE}"),
    (lambda c: c.teacher.path and c.teacher.lag,
     "{teacher.lag} makes the policy its own teacher; leave teacher.path out"),
    (lambda c: c.teacher.lag and c.teacher.engine == "vllm", 'teacher.lag needs teacher.engine = "torch"'),
)  # fmt: skip
IDLE: tuple[tuple[Any, ...], ...] = (  # a condition, its text, and options without effect if it does not hold
    (lambda c: c.lora.rank, "lora.rank", "lora.alpha", "lora.use_rslora", "lora.dropout", "lora.bias",
     "lora.targets", "lora.target_pattern", "lora.experts"),
    (lambda c: c.scoring.kind, "scoring.kind",
     "scoring.options", "scoring.weights", "scoring.concurrency", "scoring.requests_per_second", "scoring.timeout"),
    (_has_teacher, "teacher.path or teacher.lag", *(f"teacher.{name}" for name in TeacherConfig.model_fields)),
    (lambda c: c.teacher.engine == "vllm", 'teacher.engine = "vllm"',
     "teacher.gpu_memory_utilization", "teacher.engine_args"),
    (_rewards_steps, "scoring.kind, a scorer that rewards steps", "algorithm.process_reward_coef"),
    (lambda c: c.algorithm.overlong == "penalty", 'algorithm.overlong = "penalty"', "algorithm.overlong_buffer"),
    (lambda c: c.generator.engine != "torch", 'generator.engine = "vllm"', "generator.tensor_parallel_size",
     "generator.gpu_memory_utilization", "generator.engine_args"),
    (lambda c: c.sync.link in ("auto", "checkpoint"), 'sync.link = "checkpoint"', "sync.keep_versions"),
    (lambda c: c.sync.link in ("delta", "lora", "auto"), 'sync.link = "delta" or "lora"', "sync.max_mb_per_s"),
    (lambda c: c.algorithm.filter_zero_advantage, "algorithm.filter_zero_advantage = true",
     "algorithm.max_filtered_in_a_row"),
    (lambda c: c.algorithm.kl_coef, "algorithm.kl_coef", "algorithm.reference", "algorithm.reference_decay",
     "algorithm.kl_estimator", "algorithm.kl_weighted"),
    (lambda c: c.algorithm.reference == "average", 'algorithm.reference = "average"',
     "algorithm.reference_decay"),
    (_truncates, "sampling.top_k or top_p", "algorithm.replay_sampling_mask"),
    (lambda c: c.trainer.ranks > 1, "trainer.ranks above 1", "trainer.parallel"),
    (lambda c: c.evaluation.tasks, "evaluation.tasks above 0", "evaluation.every", "evaluation.every_tokens",
     "evaluation.temperature", "evaluation.samples", "evaluation.snapshot", "evaluation.against_start"),
    (lambda c: len(c.policies) > 1, "several [[policies]]", "evaluation.against_start"),
    (lambda c: c.observe.health, "observe.health = true", "observe.ignore"),
    (lambda c: c.observe.trackers, "observe.trackers", "observe.project"),
    (lambda c: c.runtime.kind == "ray", 'runtime.kind = "ray"',
     "runtime.address", "runtime.placement"),
    (lambda c: c.loop.max_lag, "loop.max_lag above 0", "loop.force_max_lag"),
    (lambda c: c.loop.max_lag or c.sync.every > 1, "loop.max_lag above 0", "loop.buffer_size"),
    (_has_reward_function, "a reward function", "environment.reward_error"),
    (_in_flight_at_swap, "loop.max_lag above 0", "sync.in_flight"),
)  # fmt: skip

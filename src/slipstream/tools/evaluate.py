"""`slipstream eval`: evaluate a policy on held-out tasks with the engine of its configuration, or compare two policies.

Starts the engines alone, without a trainer, so that they get all GPUs that the configuration gives to engines.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import lcm
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from slipstream.config.loading import with_options
from slipstream.config.plugins import Interrupts
from slipstream.config.schema import Config, ConfigError
from slipstream.controller.evaluation import evaluate, held_out_tasks
from slipstream.controller.evaluation_record import PlayedTask, all_failed, describe_failures
from slipstream.controller.launch import start_generators
from slipstream.controller.rollouts import report_slow_episodes
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.concurrency import EpisodeSlots
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.episode import EventLoopWatchdog, blocked_limit
from slipstream.environments.load import LoadedEnvironment, close_environment, load_environments
from slipstream.environments.reward_workers import cores
from slipstream.errors import RunError
from slipstream.generators.pool import GeneratorPool
from slipstream.model.device import pick_device
from slipstream.model.inspection import max_model_len
from slipstream.model.loading import load_causal_lm, load_model
from slipstream.model.paths import adapter_config, check_path, check_policy_paths
from slipstream.model.tokenizer import load_tokenizer
from slipstream.observe.estimates import Comparison, compare_paired
from slipstream.observe.formatting import by_label, counts, plural
from slipstream.observe.recorder import write_rollouts
from slipstream.rollout import Batch, Group
from slipstream.runtime.closing import closing, run_bounded
from slipstream.runtime.placement import place, resolve_auto
from slipstream.runtime.run_directory import scratch_directory
from slipstream.runtime.runtime import current_runtime, open_runtime
from slipstream.scoring.load import load_scoring
from slipstream.tools.export import merge_adapter

INTERVALS = "Brackets: 95% confidence intervals for tasks drawn like these (Wilson, clustered by task)."
META = torch.device("meta")
TEST = "95% interval: Student's, paired by task; p: paired sign-flip permutation test, two-sided."


@dataclass(frozen=True)
class Evaluation:
    """An evaluated policy: the record as in `evaluations.jsonl`, and the outcomes of the samples of each task.

    `policies` are the names of several policies that texts and comparisons are about.
    """

    config: Config
    record: dict[str, Any]
    played: Sequence[PlayedTask]
    policies: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The name of the environment, or the label of a dataset, or the labels of several."""
        if (name := self.config.environment.name) not in ("", "dataset"):
            return name
        return " and ".join(each.label for each in self.config.each_environment)

    @property
    def path(self) -> str:
        """The path of the model, or those of several policies."""
        own = [each.adapter or each.model for each in self.config.policies if each.name in self.policies]
        return ", ".join(filter(None, own)) or self.config.model.path

    def write_rollouts(self, path: Path) -> None:
        """Write the rollouts as the parquet files of a run; `advantage` is NaN, failed episodes are left out."""
        groups = tuple(
            Group(number, each.id, sum(each.episodes, ()), each.environment.options.label)
            for number, each in enumerate(self.played)
            if each.episodes
        )
        none = tuple((float("nan"),) * len(group.rollouts) for group in groups)
        tokenizer = ChatTokenizer(load_tokenizer(self.config.model.path), options=self.config.model)
        try:
            write_rollouts(path, 0, Batch(groups, none), tokenizer.decode_prompt)
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}; choose another file") from None


def validate_policy(config: Config) -> None:
    """Raise `ConfigError` for a model that can't be loaded, by its files and configuration, without its weights."""
    load_tokenizer(config.model.path)
    if config.policies:
        for own in config.each_model:
            load_model(own.model, own.lora, device=META, dtype=torch.float32, policies=own.policies)
    elif config.generator.engine == "torch":  # vLLM knows other models than transformers
        load_causal_lm(config.model.path, device=META, dtype=torch.float32)


def evaluate_policy(config: Config, policy: str = "") -> Evaluation:
    """Evaluate the model at `model.path`, or `[[policies]]`; texts are about the one named `policy`, or all of them.

    Raises `ConfigError`, and `RunError` if every episode fails.
    """
    check_path(config.model.path)
    check_policy_paths(config)
    pick_device(config.generator.device, "generator.device")
    with open_runtime(config.runtime):
        record, played = run_bounded(_evaluate_policy(for_engines_only(config)))
    return Evaluation(config, record, played, [policy] if policy else [each.name for each in config.policies])


def compare(policy: Evaluation, against: Evaluation) -> Comparison:
    """Compare the scores of `policy` with those of `against` on the same tasks."""
    before, after = ([fmean(each.scores) for each in one.played] for one in (against, policy))
    return compare_paired(before, after, _samples(policy, against))


def compare_policies(policy: Evaluation, against: Evaluation) -> dict[str, Comparison]:
    """Compare the rewards of several policies, by name, on the tasks in which each has rollouts in both evaluations."""
    found = {}
    for name in policy.policies:
        rewards = ((a.rewards_of(name), b.rewards_of(name)) for a, b in zip(against.played, policy.played, strict=True))
        if pairs := [(fmean(a), fmean(b)) for a, b in rewards if a and b]:
            before, after = zip(*pairs, strict=True)
            found[name] = compare_paired(before, after, _samples(policy, against))
    return found


def _samples(*evaluations: Evaluation) -> int:
    return lcm(*(evaluation.record["eval/samples_per_task"] for evaluation in evaluations))


def for_engines_only(config: Config) -> Config:
    """The configuration without trainer, teacher and weight link: engines get all GPUs and cores.

    Of a single policy, `model.path` becomes `lora.path` if that is set, and no new adapters are made.
    """
    generator = config.generator.model_dump(exclude_unset=True)
    if config.generator.engine == "torch" and config.runtime.kind == "local" and not config.generator.threads:
        generator["threads"] = max(1, cores() // config.generator.engines)
    rest: dict[str, dict[str, Any]] = {name: {} for name in ("sync", "teacher", "checkpoint")}
    if not config.policies:  # the engine serves the adapters of several
        rest["lora"] = {}
    rest["model"] = config.model.model_dump(exclude_unset=True) | {"path": config.lora.path or config.model.path}
    return with_options(
        config, generator=generator, trainer={"device": "cpu"}, algorithm={"replay_routing": False}, **rest
    )


async def _evaluate_policy(config: Config) -> tuple[dict[str, Any], list[PlayedTask]]:
    environments = load_environments(config)
    if not any(held_out_tasks(config, each) for each in environments):
        count = sum(len(each.environment.test) for each in environments)
        names = " and ".join(repr(each.options.name) for each in environments)
        raise ConfigError(
            f"environment.name = {names} has {count} held-out tasks, and evaluation.tasks = {config.evaluation.tasks}: "
            "there is nothing to evaluate on"
        )
    runtime = current_runtime()
    config = resolve_auto(config, runtime.gpus, runtime.hosts)
    played: list[PlayedTask] = []
    closers = [partial(close_environment, each.environment) for each in environments]
    async with closing(*closers), open_engines(config) as pool:
        record = await _play(config, environments, pool, played)
    if all_failed(record):
        raise RunError(describe_failures(record))
    return record, played


async def _play(
    config: Config, environments: Sequence[LoadedEnvironment], pool: GeneratorPool, played: list[PlayedTask]
) -> dict[str, Any]:
    """The record of the evaluation; `played` gets the outcomes. Raises the death of the last engine."""
    tokenizer = ChatTokenizer(load_tokenizer(config.model.path), max_model_len(config), config.model)
    endpoint, scoring = Endpoint(tokenizer), load_scoring(config, tokenizer)
    async with closing(*(part.close for part in (scoring, endpoint) if part)):
        if scoring:
            await scoring.start()
        slots = EpisodeSlots(config.environment.max_concurrent or 2 * pool.max_num_seqs)
        limit = blocked_limit(environment.options.timeout for environment in environments)
        note = partial(print, "slipstream:", file=sys.stderr)
        slow = asyncio.create_task(report_slow_episodes(slots, note))
        try:
            with Interrupts(), EventLoopWatchdog(limit, note):
                record = await evaluate(config, environments, pool, tokenizer, endpoint, scoring, slots, played=played)
        finally:
            slow.cancel()
    if dead := pool.dead:
        raise dead
    return record


@asynccontextmanager
async def open_engines(config: Config) -> AsyncIterator[GeneratorPool]:
    """The started engines of the configuration. Their logs are removed unless there is an error, which may name one."""
    runtime = current_runtime()
    placement = place(config, runtime.gpus)
    runtime.reserve(config, placement)
    with scratch_directory("eval") as folder:
        if config.generator.engine == "vllm" and adapter_config(config.model.path):
            merge_adapter(Path(config.model.path), folder / "model", requantize=True)
            config = with_options(config, model=config.model.model_dump() | {"path": str(folder / "model")})
        pool = await start_generators(config, folder, placement)
        async with closing(pool.close):
            yield pool


def describe(evaluation: Evaluation) -> str:
    """The scores as text: a line, and one for each pass@k and category."""
    record, name = evaluation.record, evaluation.name
    failures, errors, samples = record["eval/failures"], record["eval/reward_errors"], record["eval/samples_per_task"]
    failed = f"{record['eval/failed']} failed" + f": {counts(failures)}" * bool(failures)
    failed += f", rewards that raised: {counts(errors)}" * bool(errors)
    tasks = plural(record["eval/tasks"], "held-out task") + f", {samples} samples each" * (samples > 1)
    (_, first), *others = _rows(evaluation)
    ended = f"{record['eval/mean_length']:.0f} tokens each, {record['eval/duration_s']:.1f} s"
    lines = [f"{name}: score {first} on {tasks} ({failed}), {ended}"]
    return "\n".join([*lines, *(f"  {row} {value}" for row, value in others)])


def describe_comparison(found: Comparison) -> str:
    """The difference of two scores with its interval and p-value, in one line."""
    value, low, high = found.difference
    if not found.better and not found.worse:
        return f"no difference in {plural(found.equal, 'task')}"
    changed = f"{plural(found.better, 'task')} better, {found.worse} worse, {found.equal} equal"
    return f"{value:+.3f} [{low:+.3f}, {high:+.3f}], p = {found.p_value:.3g} ({changed})"


def to_markdown(policy: Evaluation, against: Evaluation | None = None) -> str:
    """The scores of one or two policies as Markdown: a table, and for two the test of their difference."""
    columns = [policy] if against is None else [policy, against]
    header = ["", *(f"`{one.path}`" for one in columns)]
    values = [dict(_rows(one)) for one in columns]
    rows = [[name, *(own.get(name, "–") for own in values)] for name in {k: None for own in values for k in own}]
    failed = ["failed episodes", *(str(one.record["eval/failed"]) for one in columns)]
    table = [header, ["---"] * len(header), *rows, failed]
    record, name = policy.record, policy.name
    evaluated = (
        f"{name}: {plural(record['eval/tasks'], 'held-out task')}, samples of each: {record['eval/samples_per_task']}"
    )
    lines = [f"{evaluated}, temperature {policy.config.evaluation.temperature:g}.", ""]
    lines += [f"| {' | '.join(row)} |" for row in table] + ["", INTERVALS]
    if against is not None:
        lines += ["", f"Difference of the scores: {describe_comparison(compare(policy, against))}. {TEST}"]
        for name, found in compare_policies(policy, against).items():
            lines += ["", f"Difference of the rewards of {name}: {describe_comparison(found)}."]
    return "\n".join(lines)


def _rows(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Name and value with interval of each estimate: the score, pass@k, and scores by category and environment; of
    several policies the reward and pass@k of those that the evaluation is about."""
    record, labels = evaluation.record, by_label(evaluation.record, "eval/score")
    counts_of = {f"eval/category/{name}": tasks for name, tasks in record["categories"].items()}
    counts_of |= {f"eval/environments/{name}/score": record[f"eval/environments/{name}/tasks"] for name in labels}
    rows = []
    for name, (low, high) in record["intervals"].items():
        _, kind, label = (*name.split("/"), "")[:3]
        if kind == "policies" and label not in evaluation.policies:
            continue
        if labels or kind != "environments":
            shown = re.sub(r"^eval/(category/|environments/|policies/)?", "", name).removesuffix("/score")
            shown = re.sub("/(pass|reward|against)", r" \1", shown).replace("against_start", "against the start")
            tasks = f" ({plural(counts_of[name], 'task')})" if name in counts_of else ""
            rows.append((shown, f"{record[name]:.3f} [{low:.3f}, {high:.3f}]{tasks}"))
    return rows

"""Cross-checks of environments and of the sampling in each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slipstream.config.environments import EnvironmentConfig, SamplingConfig
from slipstream.config.schema import Config
from slipstream.config.toml import to_toml
from slipstream.rollout import Sampling


def environment_faults(config: Config) -> Iterator[str]:
    """Messages for a missing name, a label that is malformed or taken, and options in the wrong table.

    With [[environments]], `weight` for example belongs to each of them, and `max_concurrent` to [environment].
    """
    entries, shared = config.environments, config.environment
    if not entries and not shared.name:
        yield 'environment.name = "": it must not be empty'
    for name in ("name", "label", "weight", "options") if entries else ():
        if (value := getattr(shared, name)) != getattr(EnvironmentConfig(name=""), name):
            yield f"environment.{name} = {to_toml(value)} does not go with [[environments]]; set {name} in each of them"
    labels: dict[str, int] = {}
    for index, (entry, complete) in enumerate(zip(entries, config.each_environment, strict=False)):
        if not entry.name:
            yield f'environments.{index}.name = "": it must not be empty'
        if "max_concurrent" in entry.model_fields_set:
            yield f"environments.{index}.max_concurrent is for all environments; set environment.max_concurrent"
        if (first := labels.setdefault(complete.label, index)) != index:
            yield (
                f'environments.{index} and environments.{first} are both "{complete.label}" in metrics and task ids; '
                f'give one another label, such as environments.{index}.label = "{complete.label}-2"'
            )
    if wrong := next((e.label for e in config.each_environment if not re.fullmatch(r"[\w.-]+", e.label)), ""):
        yield f'label = "{wrong}" of an environment: use letters, digits, "_", "-" and "." only'
    if any(e.worker_memory_gb and not e.workers for e in config.each_environment):
        yield "environment.worker_memory_gb limits environment.workers; set their number, too"


def _samplings(config: Config) -> Iterator[tuple[str, SamplingConfig]]:
    """The options of each sampling of training rollouts, with the section that gives them."""
    yield "sampling", config.sampling
    for index, entry in enumerate(config.environments or [config.environment]):
        if entry.sampling.model_fields_set:
            where = f"environments.{index}" if config.environments else "environment"
            yield f"{where}.sampling", config.sampling_of(entry)


def sampling_faults(config: Config) -> Iterator[str]:
    """Sampling parameters that no engine can sample with, or that don't go with other options."""
    samplings = [
        (section, options.model_dump(exclude={"stop"}) | {"stop_strings": tuple(options.stop)})
        for section, options in _samplings(config)
    ]
    for section, changes in (*samplings, ("evaluation", {"temperature": config.evaluation.temperature})):
        try:
            Sampling(**changes)
        except ValueError as error:
            yield f"{section}.{error}".replace("stop_strings", "stop")
    generator, longest = config.generator, config.generator.max_model_len
    for section, options in _samplings(config):
        if 0 < longest <= options.max_tokens:
            yield (
                f"generator.max_model_len = {longest} leaves no room for a prompt in addition to {section}.max_tokens "
                f"= {options.max_tokens}; raise generator.max_model_len or lower {section}.max_tokens"
            )
        replayed = config.algorithm.replay_sampling_mask and generator.engine == "vllm"
        if replayed and options.top_p < 1 and not options.top_k:
            yield (
                f"{section}.top_p = {options.top_p} alone can't be replayed with vLLM, which does not report the "
                f"tokens that it kept; set {section}.top_k too, to 64 for example, or "
                "algorithm.replay_sampling_mask = false"
            )
        changed = options.temperature != 1 or options.top_k or options.top_p < 1
        if (config.teacher.path or config.teacher.lag) and config.teacher.engine == "vllm" and changed:
            yield (
                f'teacher.engine = "vllm" scores the unmodified distribution alone, and {section}.temperature, top_k '
                'or top_p change it; leave them out, or use teacher.engine = "torch"'
            )

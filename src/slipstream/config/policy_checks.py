"""Checks of `[[policies]]`: their names, and options that do not go with them or that they need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from slipstream.config.schema import Config
from slipstream.config.toml import to_toml

FOR_ALL = ("replay_sampling_mask", "replay_routing", "filter_zero_advantage", "max_filtered_in_a_row")
CONFLICTS: tuple[tuple[Callable[[Config], Any], str], ...] = (  # what several policies can't have, and the remedy
    (
        lambda c: c.generator.engine == "vllm" and not c.lora.rank,
        'need adapters in vLLM; set lora.rank = 16, for example, or generator.engine = "torch"',
    ),
    (
        lambda c: c.generator.engine == "vllm" and any(p.model not in ("", c.model.path) for p in c.policies),
        'with a model of their own need generator.engine = "torch": vLLM serves one model; leave policies.N.model out',
    ),
    (
        lambda c: c.evaluation.against_start and len(c.each_model) > 1,
        "do not go with evaluation.against_start if they train several models, or all weights: no copy of the start is "
        "kept; leave it out",
    ),
    (
        lambda c: c.trainer.memory == "auto" and len(c.each_model) > 1,
        'of several models do not go with trainer.memory = "auto", which estimates one; set the options that you need',
    ),
    (lambda c: c.sync.restart, "do not go with sync.restart; leave it out"),
    (lambda c: c.lora.path, "do not go with lora.path; leave it out"),
    (lambda c: c.lora.experts, "do not go with lora.experts; set it to false"),
    (lambda c: c.trainer.ranks > 1, "need trainer.ranks = 1"),
    (lambda c: c.trainer.kind != "pytorch", 'need trainer.kind = "pytorch"'),
    (lambda c: c.generator.engine not in ("torch", "vllm"), 'need generator.engine = "torch" or "vllm"'),
    (lambda c: c.generator.servers, "do not go with generator.servers; leave them out"),
    (
        lambda c: c.generator.engine == "vllm" and c.runtime.kind == "ray",
        'do not go with vLLM on Ray; set runtime.kind = "local"',
    ),
    (
        lambda c: c.sync.link not in ("auto", "shared", "checkpoint", "lora"),
        'need sync.link = "shared" or "checkpoint", with vLLM "lora"',
    ),
    (lambda c: c.teacher.lag, "do not go with teacher.lag; give teacher.path"),
    (lambda c: c.loop.max_tokens, "do not go with loop.max_tokens; set loop.steps"),
)


def policy_faults(config: Config) -> Iterator[str]:
    """Messages about names that are invalid or given twice, and about options that do not go with several policies."""
    first: dict[str, int] = {}
    for index, policy in enumerate(config.policies):
        if not re.fullmatch(r"[\w-]+", policy.name):
            yield f'policies.{index}.name = {to_toml(policy.name)}: use letters, digits, "_" and "-" only'
        if (before := first.setdefault(policy.name, index)) != index:
            yield f'policies.{index} and policies.{before} are both "{policy.name}"; give one another name'
        for name in policy.algorithm.model_fields_set.intersection(FOR_ALL):
            yield f"policies.{index}.algorithm.{name} is for all policies; set algorithm.{name}"
    for wrong, problem in CONFLICTS if config.policies else ():
        if wrong(config):
            yield f"[[policies]] {problem}"

"""The probe at the start of a run: generator and trainer must give the same tokens the same probabilities."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from slipstream.config.schema import Config
from slipstream.controller.run_context import RunContext
from slipstream.environments.base import Policy
from slipstream.errors import RunError
from slipstream.generators.base import GenerationError
from slipstream.rollout import Completion, Sampling

PROBES = 4  # completions that engine and trainer are compared on
PROBE_TOKENS = 256  # at most, of each
PROBE_ROUNDS = 8  # in which other prompts are tried if none of these can be sampled from


async def sample_probes(run: RunContext, policies: Sequence[Policy]) -> list[Completion]:
    """Completions of the first prompts that can be sampled from. Raises the error of a prompt if none of them can be.

    Each of the `policies` samples. The tasks of other prompts are retired once they are visited.
    """
    playable = (
        task for each in run.environments for i, task in enumerate(each.environment.train) if i not in each.long_prompts
    )
    outcomes: list[Completion | BaseException] = []
    for _ in range(PROBE_ROUNDS):
        tasks = list(enumerate(itertools.islice(playable, PROBES)))
        sampling = [policy.sample(task.prompt, seed=i) for policy in policies for i, task in tasks]
        outcomes = await asyncio.gather(*sampling, return_exceptions=True) or outcomes
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            if not isinstance(error, GenerationError):
                raise error
        if len(errors) < len(outcomes):
            return [outcome for outcome in outcomes if isinstance(outcome, Completion)]
    raise errors[0]


def probe_sampling(sampling: Sampling) -> Sampling:
    """The run's sampling, but short: training waits for the probe."""
    sampling = dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, PROBE_TOKENS))
    if sampling.record_sampling_mask:
        return sampling
    return dataclasses.replace(sampling, top_k=0, top_p=1.0)  # the trainer scores the full distribution


async def probe(run: RunContext) -> None:
    """Sample from an engine and score with the trainer. Raises `RunError` if the log-probabilities differ."""
    seed, sampling = f"{run.config.loop.seed}/probe", probe_sampling(run.sampling)
    whole = Policy(run.cluster.generator, run.chat_tokenizer, sampling, seed, policies=run.policies)
    sampled = await sample_probes(run, [whole[name] for name in run.policies] or [whole])
    async with run.cluster.trainer_turn(publishes=False):
        scored = await run.cluster.trainer.score(sampled)
    run.progress.note(f"probe: {compare_logprobs(sampled, scored, run.config)}")


def compare_logprobs(sampled: Sequence[Completion], scored: Sequence[Sequence[float]], config: Config) -> str:
    """How far the log-probabilities of generator and trainer are apart. Raises `RunError` beyond the tolerance.

    The tolerance is that of the mean: in bfloat16, one token in a few thousand differs by more than 0.5.
    """
    pairs = zip(sampled, scored, strict=True)
    gaps = [abs(a - b) for c, scores in pairs for a, b in zip(c.logprobs, scores, strict=True)]
    mean = statistics.fmean(gaps)
    exact = config.model.dtype == "float32" and not config.trainer.fp8
    tolerance = config.trainer.logprob_tolerance or (1e-3 if exact else 0.2)
    finding = (
        f"log-probabilities of generator and trainer differ by {mean:.1e} on average (tolerance {tolerance:.1e}) "
        f"and by at most {max(gaps):.1e}"
    )
    if not mean <= tolerance:
        raise RunError(
            f"{finding}: they do not run the same policy. Check model.dtype and the model's files, or raise "
            "trainer.logprob_tolerance if you accept the difference"
        )
    return finding

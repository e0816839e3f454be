"""The probe at the start of a run, and the limit of the watch over a whole run."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError, LoopConfig
from slipstream.controller import setup, stalls
from slipstream.controller.probe import (
    PROBE_ROUNDS,
    PROBE_TOKENS,
    PROBES,
    compare_logprobs,
    probe_sampling,
    sample_probes,
)
from slipstream.controller.setup import resolve_config, restore
from slipstream.environments.base import Task
from slipstream.errors import RunError
from slipstream.generators.base import GenerationError
from slipstream.plan.hardware import GIB, GPUS
from slipstream.rollout import Completion, Sampling, VersionSpan
from slipstream.runtime.worker import WorkerDied
from slipstream.runtime.worker_process import HEARTBEAT_S
from slipstream.scheduling.loop_state import LoopState

COMPLETION = Completion((3, 4), (5,), (-1.0,), (VersionSpan(0, 0, 1),), "stop")


class Prompts:
    """A policy that can't encode prompts marked "bad", and whose engine is dead for those marked "dead"."""

    def __init__(self) -> None:
        self.asked = 0

    async def sample(self, prompt: str, seed: int) -> Completion:
        self.asked += 1
        if prompt == "bad":
            raise GenerationError("the prompt is empty")
        if prompt == "dead":
            raise WorkerDied("generator 0 died")
        return COMPLETION


def probed(prompts: list[str]) -> tuple[list[Completion], Prompts]:
    train = [Task(str(number), prompt) for number, prompt in enumerate(prompts)]
    environment = SimpleNamespace(environment=SimpleNamespace(train=train), long_prompts={})
    run: Any = SimpleNamespace(environments=[environment])
    policy: Any = Prompts()
    return asyncio.run(sample_probes(run, [policy])), policy


def test_the_probe_leaves_out_prompts_that_fail() -> None:
    assert probed(["bad", "good", "bad", "good", "good"])[0] == [COMPLETION, COMPLETION]
    assert probed(["bad"] * PROBES + ["good"])[0] == [COMPLETION]


def test_the_probe_raises_what_all_prompts_fail_by_after_a_few_rounds() -> None:
    policies: list[Prompts] = []
    for prompts in (["bad"], ["bad"] * PROBES, ["bad"] * 1000):
        with pytest.raises(GenerationError, match="the prompt is empty"):
            policies.append(probed(prompts)[1])
    with pytest.raises(WorkerDied):
        probed(["good", "dead"])
    assert not policies and PROBE_ROUNDS * PROBES < 1000


def test_the_probe_is_short_and_its_distribution_whole_unless_masks_are_recorded() -> None:
    run = Sampling(max_tokens=32000, top_k=20, top_p=0.9)
    assert probe_sampling(run) == Sampling(max_tokens=PROBE_TOKENS)
    masked = replace(run, max_tokens=8, record_sampling_mask=True)
    assert probe_sampling(masked) == masked


@pytest.mark.parametrize(
    ("dtype", "gaps", "accepted"),
    [
        ("bfloat16", [0.04] * 99 + [0.9], True),  # one token of a tail that every bfloat16 model has
        ("bfloat16", [0.3] * 10, False),
        ("bfloat16", [0.04, float("nan")], False),
        ("float32", [1e-5] * 10, True),
        ("float32", [2e-3] * 10, False),
    ],
)
def test_the_tolerance_of_the_probe_is_that_of_the_mean(dtype: str, gaps: list[float], accepted: bool) -> None:
    config = load_config(None, ["--model.path=m", "--environment.name=addition", f"--model.dtype={dtype}"])
    sampled = [replace(COMPLETION, logprobs=array("f", [-1.0] * len(gaps)))]
    scored = [[-1.0 - gap for gap in gaps]]
    if accepted:
        assert "on average" in compare_logprobs(sampled, scored, config)
    else:
        with pytest.raises(RunError, match=r"do not run the same policy.*trainer.logprob_tolerance"):
            compare_logprobs(sampled, scored, config)


def test_a_worker_that_hangs_is_replaced_before_the_run_ends() -> None:
    """Both watches have `runtime.progress_timeout`. A worker's acts within two intervals of `HEARTBEAT_S`."""
    config = load_config(None, ["--model.path=m", "--environment.name=addition", "--runtime.progress_timeout=20"])
    run: Any = SimpleNamespace(config=config, episode_slots=SimpleNamespace(longest=None), scoring=None)
    assert stalls._limit(run) > config.runtime.progress_timeout + 2 * HEARTBEAT_S


def test_a_checkpoint_of_an_older_version_is_refused_in_one_line(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(state=LoopState(LoopConfig(), 1, []))
    (tmp_path / "ready").touch()
    with pytest.raises(ConfigError, match=r": written by an older version of Slipstream \(no 'streams'\); start"):
        asyncio.run(restore(run, tmp_path, {"ready": "ready", "ledger": {"position": 3}}))


def test_a_run_chooses_its_memory_options_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [f"--model.path={tiny}", "--model.dtype=bfloat16", "--environment.name=addition", "--trainer.memory=auto"]
    without = resolve_config(load_config(None, flags)).trainer
    assert (without.memory, without.chosen) == ("manual", "the options as they are: no GPU on this host")
    small = replace(GPUS["l4"], memory=7.92 * GIB)
    monkeypatch.setattr(setup, "this_gpu", lambda: small)
    chosen = resolve_config(load_config(None, flags))
    assert chosen.trainer.tokens_per_microbatch < 16384 and "tokens_per_microbatch = " in chosen.trainer.chosen
    monkeypatch.setattr(setup, "this_gpu", lambda: GPUS["h200"])
    assert resolve_config(chosen).trainer == chosen.trainer  # as a resumed run does

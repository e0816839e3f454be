"""The trainer: one optimizer step on one batch, and the state that has to outlive it.

Consumes batches, produces updated parameters and a `StepStats` for each. Waits for nothing but the weight link's word
that no generator reads the memory it is about to write.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.losses import grpo, kl_to_reference, off_policy_statistics
from slipstream.config import AlgorithmConfig, Config, TrainerConfig
from slipstream.models import device_here, load_model, trained_parameters
from slipstream.rollout import Batch, Completion
from slipstream.trainers import checkpoint
from slipstream.trainers.logprobs import per_completion, refuse_untrainable, token_logprobs
from slipstream.trainers.packing import MicroBatch, length, pack, plan


@dataclass(frozen=True)
class StepStats:
    """What one step did. Token means are over the completion tokens that had a gradient; `seconds` is all of it."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    entropy: float
    kl: float
    mismatch_kl: float
    ratio: float
    effective_sample_size: float
    clipped: float
    tokens: int
    skipped: bool
    seconds: float


class Trainer:
    """A policy, its optimizer and the learning rule."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.loop.seed)
        self.device = device_here()
        # Master weights are float32 whatever the compute format is.
        self.model = load_model(config.model, config.lora, device=self.device, dtype=torch.float32)
        refuse_untrainable(self.model.config)
        self.model.train()
        self.parameters = trained_parameters(self.model)
        self.step_count = self.token_count = 0
        self.before_update: Callable[[], None] = lambda: None
        self._algorithm: AlgorithmConfig = config.algorithm
        self._options: TrainerConfig = config.trainer
        self._steps, self._tokens = config.loop.steps, config.loop.tokens
        self._compute = torch.bfloat16 if config.model.dtype == "bfloat16" else None
        self._reference = self._start_policy()
        self._optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.trainer.learning_rate,
            betas=config.trainer.betas,
            weight_decay=config.trainer.weight_decay,
        )

    def step(self, batch: Batch) -> StepStats:
        """One optimizer step. The loss is divided once, by all tokens of the batch, signal or not."""
        began = time.perf_counter()
        sequences = [(c, a) for c, a in batch.sequences() if a != 0 or self._algorithm.kl]
        sums: dict[str, Tensor] = {}
        for indices in plan([length(c) for c, _ in sequences], self._options.tokens_per_microbatch):
            micro = pack([sequences[i] for i in indices], self.device)
            loss, statistics = self._loss(micro)
            torch.autograd.backward(loss / batch.tokens)
            for name, value in statistics.items():
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value
        grad_norm = self._update()
        self.token_count += batch.tokens
        count = sum(len(c.token_ids) for c, _ in sequences)
        means = {name: value.item() / max(count, 1) for name, value in sums.items()}
        ratio, squared = means.get("ratio", 1.0), means.get("ratio_squared", 1.0)
        return StepStats(
            step=self.step_count,
            loss=means.get("loss", 0.0) * count / max(batch.tokens, 1),
            grad_norm=grad_norm,
            learning_rate=self._optimizer.param_groups[0]["lr"],
            entropy=means.get("entropy", 0.0),
            kl=means.get("kl", 0.0),
            mismatch_kl=means.get("mismatch_kl", 0.0),
            ratio=ratio,
            effective_sample_size=ratio**2 / squared,
            clipped=means.get("clipped", 0.0),
            tokens=batch.tokens,
            skipped=not math.isfinite(grad_norm),
            seconds=time.perf_counter() - began,
        )

    @torch.no_grad()
    def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        """Log-probabilities of these completions' tokens under the policy as it is now."""
        scored: dict[int, list[float]] = {}
        for indices in plan([length(c) for c in completions], self._options.tokens_per_microbatch):
            chosen = [completions[i] for i in indices]
            with self._precision():
                logprobs, _ = token_logprobs(self.model, pack([(c, 0.0) for c in chosen], self.device))
            scored |= dict(zip(indices, per_completion(logprobs, chosen), strict=True))
        return [scored[i] for i in range(len(completions))]

    def save(self, path: Path) -> None:
        """Everything that the next step depends on, into the directory `path`."""
        checkpoint.save(path, self.parameters, self._optimizer, self.step_count, self.token_count)

    def restore(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        self.step_count, self.token_count = checkpoint.restore(path, self.parameters, self._optimizer)

    def export(self, path: Path) -> None:
        """The policy as a Hugging Face directory, or its adapters as a PEFT directory."""
        checkpoint.export(path, self.model, self.parameters)

    def _loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Summed loss of a micro-batch, and sums that describe it."""
        rule = self._algorithm
        with self._precision():
            logprobs, entropy = token_logprobs(self.model, micro)
        clip = {"clip_low": rule.clip_low, "clip_high": rule.clip_high}
        loss = grpo(logprobs, micro.behaviour, micro.advantages, **clip, truncate=rule.truncate).sum()
        statistics = off_policy_statistics(logprobs, micro.behaviour, micro.advantages, **clip)
        if rule.kl:
            with torch.no_grad(), self._precision(), self._reference() as reference:
                reference_logprobs, _ = token_logprobs(reference, micro)
            kl = kl_to_reference(logprobs, reference_logprobs).sum()
            loss = loss + rule.kl * kl
            statistics["kl"] = kl.detach()
        return loss, statistics | {"loss": loss.detach(), "entropy": entropy.sum()}

    def _update(self) -> float:
        """Clip, move the parameters and return the gradient's norm; a gradient that isn't finite moves nothing."""
        clip = self._options.gradient_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), clip).item()
        spent = self.token_count / self._tokens if self._tokens else 0.0
        self._optimizer.param_groups[0]["lr"] = learning_rate(self._options, self.step_count, self._steps, spent)
        if math.isfinite(norm):
            self.before_update()
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.step_count += 1
        return norm

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self._compute) if self._compute else contextlib.nullcontext()

    def _start_policy(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """A context in which the start policy can be run, for the KL term."""
        model: Any = self.model
        if not self._algorithm.kl:
            return contextlib.nullcontext
        if hasattr(model, "disable_adapter"):

            @contextlib.contextmanager
            def without_adapter() -> Any:
                with model.disable_adapter():
                    yield model

            return without_adapter
        frozen = copy.deepcopy(model).requires_grad_(False)
        return lambda: contextlib.nullcontext(frozen)


def learning_rate(options: TrainerConfig, step: int, steps: int, spent: float = 0.0) -> float:
    """Rate of the step after `step` finished ones: linear warm-up, then decay to 0 at the end of the run.

    That is after `steps`, or when `spent`, the share of its tokens that the run has trained on, is 1.
    """
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    progress = min(1.0, max(spent, (step - options.warmup_steps) / max(1, steps - options.warmup_steps)))
    if options.schedule == "linear":
        return options.learning_rate * (1 - progress)
    if options.schedule == "cosine":
        return options.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    return options.learning_rate

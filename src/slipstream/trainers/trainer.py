"""The trainer: one optimizer step on one batch, and the state that has to outlive it.

Consumes batches, produces updated parameters and a `StepStats` for each. Waits for nothing but the weight link's word
that no generator reads the memory it is about to write.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.losses import grpo, kl_to_reference, off_policy_statistics
from slipstream.config import AlgorithmConfig, Config, TrainerConfig
from slipstream.models import device_here, load_model, trained_parameters
from slipstream.rollout import Batch, Completion, Sample, samples_of
from slipstream.trainers import checkpoint
from slipstream.trainers.memory import checkpoint_activations, compile_layers
from slipstream.trainers.offload import move
from slipstream.trainers.packing import MicroBatch, bundle, bundle_length, pack, plan
from slipstream.trainers.policy import Policy
from slipstream.trainers.precision import compute_on, lowered
from slipstream.trainers.speed import Meter


@dataclass(frozen=True)
class StepStats:
    """What one step did. Token means are over the completion tokens that had a gradient; `seconds` is all of it.

    `tokens_packed` went through the model, `tflops` is the rate of its own arithmetic in 10^12 operations a second,
    `utilisation` that as a share of what the device does in a matrix product, `memory_gb` the most that was in use.
    """

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
    tokens_packed: int
    tflops: float
    utilisation: float | None
    memory_gb: float


class Trainer:
    """A policy, its optimizer and the learning rule. `parameters` are the float32 masters of what is trained."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.loop.seed)
        self.device = device_here()
        options, compute = config.trainer, getattr(torch, config.model.dtype)
        frozen = compute if config.lora.rank else torch.float32  # adapters are float32 over any base
        self.model = load_model(config.model, config.lora, device=self.device, dtype=frozen)
        self.model.train()
        self.parameters = trained_parameters(self.model)
        self.step_count = self.token_count = 0
        self.before_update: Callable[[], None] = lambda: None
        self._offloaded = False
        self._frozen: Any = None
        self._algorithm: AlgorithmConfig = config.algorithm
        self._options: TrainerConfig = options
        self._steps, self._tokens = config.loop.steps, config.loop.tokens
        fuse = options.compile and self.device.type == "cuda"
        self._policy = Policy(self.model, fuse)
        self._reference = self._start_policy(compute)
        self._lowered = None if compute == torch.float32 else lowered(self.parameters, compute)
        if self._lowered:
            compute_on(self.model, self.parameters, self._lowered)
        checkpoint_activations(self.model, options.activation_checkpointing)
        if fuse:
            compile_layers(self.model)
        self._meter = Meter(self.model, self.device)
        self._optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
            fused=self.device.type == "cuda",
        )

    def compute_on(self, tensors: Mapping[str, Tensor]) -> None:
        """Run forward and backward passes on these tensors from now on, whoever keeps them up to date."""
        compute_on(self.model, self.parameters, tensors)
        self._lowered = None

    def offload(self) -> None:
        """Free the device: all state goes to the host's memory, where it can be saved and published."""
        move(self._state(), torch.device("cpu"))
        self._offloaded = True

    def load(self) -> None:
        """Take the state back."""
        move(self._state(), self.device)
        self._offloaded = False

    def step(self, batch: Batch) -> StepStats:
        """One optimizer step. The loss is divided once, by all tokens of the batch, signal or not."""
        self._refuse_offloaded()
        began = time.perf_counter()
        samples = [s for s in batch.samples() if any(s.advantages) or self._algorithm.kl]
        sums: dict[str, Tensor] = {}
        for micro in self._micro_batches(samples, batch.version):
            loss, statistics = self._loss(micro)
            torch.autograd.backward(loss / batch.tokens)
            for name, value in statistics.items():
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value
        grad_norm = self._update()
        self.token_count += batch.tokens
        count = sum(len(s.drawn) for s in samples)
        means = {name: value.item() / max(count, 1) for name, value in sums.items()}
        ratio, squared = means.get("ratio", 1.0), means.get("ratio_squared", 1.0)
        seconds = time.perf_counter() - began
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
            seconds=seconds,
            **self._meter.read(seconds),
        )

    def _micro_batches(self, samples: Sequence[Sample], version: int = 0) -> Iterator[MicroBatch]:
        """All samples, packed; each is made while the device is at the one before."""
        budget = self._options.tokens_per_microbatch
        bundles = bundle(samples, budget, share=self._policy.packs)
        [mine] = plan([bundle_length(samples, members) for members in bundles], budget)
        for items in mine:
            if items:
                micro = pack(samples, [bundles[i] for i in items], self.device, version)
                self._meter.count(micro)
                yield micro

    @torch.no_grad()
    def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        """Log-probabilities of these completions' tokens under the policy as it is now."""
        self._refuse_offloaded()
        samples = [samples_of([completion])[0] for completion in completions]
        scored: dict[int, list[float]] = {}
        for micro in self._micro_batches(samples):
            logprobs, _ = self._policy(micro)
            lengths = [len(samples[i].drawn) for i in micro.order]
            scored |= dict(zip(micro.order, map(Tensor.tolist, logprobs.split(lengths)), strict=True))
        return [scored[i] for i in range(len(completions))]

    def save(self, path: Path) -> None:
        """Everything that the next step depends on, into the directory `path`."""
        checkpoint.save(path, self.parameters, self._optimizer, self.step_count, self.token_count)

    def restore(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        self.step_count, self.token_count = checkpoint.restore(path, self.parameters, self._optimizer)
        self._lower()

    def export(self, path: Path) -> None:
        """The policy as a Hugging Face directory, or its adapters as a PEFT directory."""
        checkpoint.export(path, self.model, self.parameters)

    def _state(self) -> Iterator[Tensor]:
        """All that a step needs on the device: masters, what is computed on, gradients, and the optimizer's."""
        models = (self.model, *filter(None, [self._frozen]))
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        tensors += [*self.parameters.values(), *(self._lowered or {}).values()]
        yield from tensors
        yield from (tensor.grad for tensor in tensors if tensor.grad is not None)
        counted_here = self._optimizer.defaults["fused"]  # else AdamW counts its steps on the host
        for moments in self._optimizer.state.values():
            yield from (tensor for name, tensor in moments.items() if name != "step" or counted_here)

    def _refuse_offloaded(self) -> None:
        if self._offloaded:
            raise RuntimeError("this trainer is offloaded: nothing may be asked of it before it is loaded")

    def _loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Summed loss of a micro-batch, and sums that describe it."""
        rule = self._algorithm
        logprobs, entropy = self._policy(micro)
        clip = {"clip_low": rule.clip_low, "clip_high": rule.clip_high}
        loss = grpo(logprobs, micro.behaviour, micro.advantages, **clip, truncate=rule.truncate).sum()
        statistics = off_policy_statistics(logprobs, micro.behaviour, micro.advantages, **clip)
        if rule.kl:
            with torch.no_grad(), self._reference() as reference:
                reference_logprobs, _ = reference(micro)
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
            self._lower()
        self._optimizer.zero_grad()
        self.step_count += 1
        return norm

    def _lower(self) -> None:
        """Bring the weights that are computed on to what their masters say."""
        if self._lowered:
            torch._foreach_copy_(list(self._lowered.values()), [p.detach() for p in self.parameters.values()])

    def _start_policy(self, compute: torch.dtype) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """A context in which the start policy can be run, for the KL term."""
        model: Any = self.model
        if not self._algorithm.kl:
            return contextlib.nullcontext
        if hasattr(model, "disable_adapter"):

            @contextlib.contextmanager
            def without_adapter() -> Any:
                with model.disable_adapter():
                    yield self._policy

            return without_adapter
        self._frozen = copy.deepcopy(self._policy).requires_grad_(False)
        for parameter in self._frozen.parameters():
            parameter.data = parameter.data.to(compute)
        return lambda: contextlib.nullcontext(self._frozen)


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

"""The trainer: one optimizer step on one batch, and the state that has to outlive it.

Consumes batches, produces updated parameters and a `StepStats` for each. Waits for nothing but the weight link's word
that no generator reads the memory it is about to write.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.kl import kl_to_reference
from slipstream.algorithms.learning import learn
from slipstream.algorithms.schedule import learning_rate
from slipstream.algorithms.statistics import SUMS, means, sums
from slipstream.algorithms.tokens import Tokens
from slipstream.config import AlgorithmConfig, Config, ConfigError, TrainerConfig
from slipstream.models import device_here, dtype_of, load_model, refuse_adapter, stored_dtype, trained_parameters
from slipstream.packed.flash import use_installed
from slipstream.packed.packing import MicroBatch, bundle, bundle_length, length, pack, plan
from slipstream.packed.policy import Policy
from slipstream.rollout import Batch, Completion, Sample, StepStats, samples_of
from slipstream.rule import Rule, load_rule
from slipstream.sync.gathered import part_here
from slipstream.trainers import checkpoint
from slipstream.trainers.guards import refuse_to_go_on
from slipstream.trainers.memory import prepare_layers
from slipstream.trainers.offload import move
from slipstream.trainers.parallel import Ranks, by_mesh, clip_gradients
from slipstream.trainers.precision import compute_on, lowered, take_in
from slipstream.trainers.reference import Reference
from slipstream.trainers.speed import Meter
from slipstream.trainers.tensor import cut

COUNTS = ("step_count", "token_count", "skipped_count", "skipped_in_a_row")  # what a checkpoint knows of the past


class Trainer:
    """A policy, its optimizer and the learning rule. `parameters` are the float32 masters of what is trained,
    `attention` is whose kernel attends."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.loop.seed)
        refuse_adapter(config.model.path)
        self.device = device_here()
        options, compute = config.trainer, dtype_of(config)
        self.ranks = Ranks(options, self.device)
        stored = compute if config.lora.rank else stored_dtype(config.model.path)  # adapters are float32 over any base
        home = torch.device("cpu") if self.ranks.gathers else self.device  # until it is cut up
        self.model = load_model(config.model, config.lora, device=home, dtype=stored)
        if not self.ranks.gathers:
            take_in(self.model, self.device, compute)
        self.model.eval()  # without dropout: tokens keep the probabilities that they were drawn with
        self.step_count = self.token_count = self.skipped_count = self.skipped_in_a_row = 0
        self.micro_batches = 0  # that this rank is done with
        self.before_update: Callable[[], None] = lambda: None
        self._offloaded = False
        self._algorithm: AlgorithmConfig = config.algorithm
        self._rule: Rule = load_rule(config)
        kind, weighted = config.algorithm.kl_estimator, config.algorithm.kl_weighted
        self._penalty = partial(kl_to_reference, estimator=kind, weighted=weighted)
        self._options: TrainerConfig = options
        self._steps, self._tokens = config.loop.steps, config.loop.tokens
        fuse = options.compile and self.device.type == "cuda" and compute != torch.float32
        self._policy = Policy(self.model, fuse, self.ranks.context)
        wanted = options.attention if self._policy.packs else "torch"  # others attend by code of their own
        self.attention = use_installed(wanted, self.device, compute, self.model)
        if options.expert_parallel > 1 and not self._policy.routing.experts:
            raise ConfigError(f"trainer.expert_parallel = {options.expert_parallel}, but the model has no experts")
        self._reference = Reference(self._policy, config, self.ranks) if config.algorithm.kl else None
        self._meter = Meter(self._policy, self.device)
        if self.ranks.gathers:
            self.ranks.shard(self._policy, compute)
        prepare_layers(self.model, options.activation_checkpointing, fuse and not self.ranks.tensor)
        self.parameters = trained_parameters(self.model)
        if self.ranks.tensor and self.ranks.mesh:
            self.parameters, self.ranks.alike = cut(self._policy, self.ranks.mesh)
        if self._reference:
            self._reference.follow(self.parameters)
        lower = compute != torch.float32 and not self.ranks.gathers  # parts are cast as they are gathered
        self._lowered = lowered(self.parameters, compute) if lower else None
        if self._lowered:
            compute_on(self.model, self.parameters, self._lowered)
        elif self.ranks.tensor:
            parts = {name: part_here(p.detach()) for name, p in self.parameters.items()}
            compute_on(self.model, self.parameters, parts)
        self._optimizer = torch.optim.AdamW(
            [{"params": group} for group in by_mesh(self.parameters.values())],
            lr=options.learning_rate,
            betas=(options.betas[0], options.betas[1]),
            weight_decay=options.weight_decay,
            fused=True,  # else a CPU holds several copies of the largest parameter
        )

    def compute_on(self, tensors: Mapping[str, Tensor]) -> None:
        """Run forward and backward passes on these tensors from now on, whoever keeps them up to date.

        Raises `ConfigError` unless they are the parts of the weights that this rank has.
        """
        for name, parameter in self.parameters.items():
            ours, theirs = part_here(parameter.detach()).shape, tensors[name].shape
            if ours != theirs:
                raise ConfigError(
                    f"{name} is {list(theirs)} in the engine and {list(ours)} in the trainer: other parts"
                )
        compute_on(self.model, self.parameters, tensors)
        self._lowered = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # an engine on the same GPU may have what the copy took

    def offload(self) -> None:
        """Free the device: all state goes to the host's memory, where it can be saved and published."""
        move(self._state(), torch.device("cpu"))
        self._offloaded = True

    def load(self) -> None:
        """Take the state back."""
        move(self._state(), self.device)
        self._offloaded = False

    def step(self, batch: Batch) -> StepStats:
        """One optimizer step. What a token counts is settled once for all tokens of the batch, signal or not."""
        self._refuse_offloaded()
        began = time.perf_counter()
        every = [s for s in batch.samples() if not any(map(math.isnan, s.advantages))]
        weights = self._rule.aggregation(torch.tensor([len(s.drawn) for s in every], dtype=torch.float64))
        passes = self._rule.linear and not self._algorithm.kl  # over what has no advantage
        chosen = [i for i, s in enumerate(every) if any(s.advantages) or not passes]
        summed = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        highest = torch.full((), -math.inf, device=self.device)
        for micro in self._micro_batches([every[i] for i in chosen], batch.version):
            found = self._learn(micro, weights[[chosen[i] for i in micro.order]])
            if self.ranks.counts and not micro.filler:
                summed, highest = summed + found[0], torch.maximum(highest, found[1].max())
        if chosen:
            self.ranks.sum_gradients(self.parameters)
        totals = dict(zip(SUMS, self.ranks.add(summed).tolist(), strict=True))
        described = means(totals, self.ranks.most(highest.item()))
        grad_norm = self._update(described["loss"])
        self.token_count += batch.tokens
        seconds = time.perf_counter() - began
        return StepStats(
            step=self.step_count,
            grad_norm=grad_norm,
            learning_rate=self._optimizer.param_groups[0]["lr"],
            **described,
            tokens=batch.tokens,
            skipped=self.skipped_count,
            seconds=seconds,
            **self._meter.read(seconds, self.ranks),
        )

    def _micro_batches(self, samples: Sequence[Sample], version: int = 0) -> Iterator[MicroBatch]:
        """This rank's samples, packed; each micro-batch is made while the device is at the one before.

        A rank that has fewer than others works on the shortest sample meanwhile, to take part in what they do together.
        """
        budget = self._options.tokens_per_microbatch
        bundles = bundle(samples, budget, self._policy.packs, self.ranks.shares)
        sizes = [bundle_length(samples, members) for members in bundles]
        costs = [self._meter.cost(samples, members) for members in bundles]
        context = self.ranks.context
        packed = partial(pack, samples, device=self.device, version=version, multiple=context.size if context else 1)
        for items in plan(sizes, budget, self.ranks.shares, costs)[self.ranks.share]:
            if items:
                yield packed([bundles[i] for i in items])
            elif samples and self.ranks.gathers:
                shortest = min(range(len(samples)), key=lambda i: length(samples[i]))
                yield replace(packed([[shortest]]), filler=True)
            self.micro_batches += 1

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
        self.ranks.forget_gathered(self._policy)
        scored = self.ranks.union(scored)
        return [scored[i] for i in range(len(completions))]

    def save(self, path: Path, last: bool = False) -> Future[Any]:
        """Copy everything that the next step depends on; it is in the directory `path` once the result is there.

        With `last` nothing is copied: no step may follow.
        """
        return checkpoint.save(path, self._all(), self.ranks, last)

    def restore(self, path: Path) -> None:
        """Go on from what `save` wrote, by however many ranks."""
        counts = checkpoint.restore(path, self._all(), self.ranks)
        for name in COUNTS:
            setattr(self, name, counts.get(name, 0))
        self._lower()
        if self._reference:
            self._reference.serve()

    def export(self, path: Path) -> None:
        """The policy as a Hugging Face directory, or its adapters as a PEFT directory."""
        checkpoint.export(path, self.model, self.parameters, self.ranks)

    def _all(self) -> checkpoint.State:
        """All that the next step depends on."""
        average = self._reference.average if self._reference else {}
        counts = {name: getattr(self, name) for name in COUNTS}
        return checkpoint.state_of(self.parameters, self._optimizer, average, counts)

    def _state(self) -> Iterator[Tensor]:
        """All that a step needs on the device: masters, what is computed on, gradients, and the optimizer's."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += self._reference.state() if self._reference else []
        tensors += [*self.parameters.values(), *(self._lowered or {}).values()]
        yield from tensors
        yield from (tensor.grad for tensor in tensors if tensor.grad is not None)
        for moments in self._optimizer.state.values():
            yield from moments.values()

    def _refuse_offloaded(self) -> None:
        if self._offloaded:
            raise RuntimeError("this trainer is offloaded: nothing may be asked of it before it is loaded")

    def _learn(self, micro: MicroBatch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient of a micro-batch, whose samples have these weights a token. Returns its sums and ratios."""
        logprobs, entropy = self._policy(micro)
        if not micro.filler:
            self._meter.count(micro, self.ranks.counts)
        tokens = Tokens(
            logprobs=logprobs.detach().requires_grad_(),
            behaviour=micro.behaviour,
            advantages=micro.advantages,
            sequence=micro.sequences,
            lag=micro.lags,
            proximal=logprobs.detach(),
            # After the policy: FSDP settles what is trained in its first pass, and adapters are not in the reference's.
            reference=self._reference.logprobs(micro) if self._reference else None,
            teacher=micro.teacher,
        )
        lesson = learn(tokens, self._rule.loss, self._rule.corrections, self._penalty, self._algorithm.kl)
        counts = (0.0 if micro.filler else 1.0) * weights.to(entropy)[micro.sequences]
        torch.autograd.backward(logprobs, counts * lesson.gradient)
        return sums(tokens, lesson, entropy, counts), tokens.ratio.detach()

    def _update(self, loss: float) -> float:
        """Clip, move the parameters and return the gradient's norm; what isn't finite moves nothing, on any rank."""
        norm = clip_gradients(self.parameters.values(), self._options.gradient_clip or math.inf)
        spent = self.token_count / self._tokens if self._tokens else 0.0
        warmup, schedule = self._options.warmup_steps, self._options.schedule
        share = learning_rate(schedule, self.step_count, steps=self._steps, warmup=warmup, spent=spent)
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * share
        finite = math.isfinite(norm) and math.isfinite(loss)
        self.skipped_count += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if finite:
            self.before_update()
            self._optimizer.step()
            self._lower()
            if self._reference:
                self._reference.update()
        self._optimizer.zero_grad()
        self.step_count += 1
        refuse_to_go_on(self.skipped_in_a_row, self._options)
        return norm

    def _lower(self) -> None:
        """Bring the weights that are computed on to what their masters say."""
        if self._lowered:
            masters = [part_here(parameter.detach()) for parameter in self.parameters.values()]
            torch._foreach_copy_(list(self._lowered.values()), masters)

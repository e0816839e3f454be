"""The trainer: one optimizer step on one batch, and the state that a checkpoint holds.

Consumes batches; produces updated parameters and a `StepStats` for each. `before_update` of the weight link makes sure
that no engine reads the memory that the optimizer writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.kl import kl_to_reference
from slipstream.algorithms.schedule import learning_rate
from slipstream.algorithms.statistics import SUMS, means, sums
from slipstream.algorithms.token_gradients import token_gradients
from slipstream.algorithms.tokens import Tokens
from slipstream.config.schema import Config, ConfigError
from slipstream.model.device import current_device, dtype_of
from slipstream.model.images import image_processor
from slipstream.model.inspection import adapter_dropouts, trained_parameters
from slipstream.model.loading import load_model, stored_dtype
from slipstream.model.packing import MicroBatch, forward_length, group_by_prefix, pack, plan, prefix_group_length
from slipstream.model.paths import validate_adapter
from slipstream.model.policy import PackedPolicy
from slipstream.objective import load_objective
from slipstream.rollout import Batch, Completion, Sample, build_samples
from slipstream.step_stats import StepStats
from slipstream.sync.sharded_weights import local_part
from slipstream.trainers import checkpoint
from slipstream.trainers.activation_checkpointing import prepare_layers
from slipstream.trainers.failures import validate_skipped_steps
from slipstream.trainers.flops import FlopsMeter
from slipstream.trainers.fp8 import MULTIPLE, use_fp8_products
from slipstream.trainers.master_weights import cast_parameters, compute_on, keep_float32_gradients, trained_dtype
from slipstream.trainers.offload import new_offloader
from slipstream.trainers.optimizer import new_optimizer
from slipstream.trainers.parallel import TrainerRanks, clip_gradients
from slipstream.trainers.reference import Reference
from slipstream.trainers.tensor_parallel import shard_model
from slipstream.trainers.warm_up import warm_up

ENGINE_WEIGHT_BYTES = 2  # of an engine's parameter
PUBLISH_BYTES = 3 * 2**30  # of the buckets of a publish, unless a parameter is larger than a bucket
BUCKET_COPIES = 4  # of a parameter larger than a bucket: two buckets, the shards that are gathered, and a rank's own
COUNTS = ("step_count", "token_count", "skipped_count", "skipped_in_a_row")  # counters that a checkpoint holds


class Trainer:
    """A policy, its optimizer and the objective.

    `parameters` are what the optimizer updates: masters of the trained weights, in the format `trainer.master_weights`.
    """

    def __init__(self, config: Config, model: Any = None) -> None:
        """`model` is that of `load_trained_model`, by default a new one."""
        torch.manual_seed(config.loop.seed)
        validate_adapter(config.model.path)
        self.device = current_device()
        self._options, self._algorithm, self._seed = config.trainer, config.algorithm, config.loop.seed
        self._steps, self._tokens = config.loop.steps, config.loop.max_tokens
        self.step_count = self.token_count = self.skipped_count = self.skipped_in_a_row = 0
        self.micro_batches = 0  # done by this rank; progress for the supervisor
        self.before_update: Callable[[], None] = lambda: None
        self._offloaded = False

        compute = dtype_of(config)
        master = trained_dtype(self._options, compute)
        compiled = self._options.compile and self.device.type == "cuda" and compute != torch.float32
        self.ranks = TrainerRanks(self._options, self.device)
        self._multiple = self._options.context_parallel * (MULTIPLE if self._options.fp8 else 1)
        self.model = self._prepare_model(config, model, compute, master)
        self._frozen_elements = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        self._dropouts = adapter_dropouts(self.model)
        self._images = image_processor(config.model.path)
        self._objective = load_objective(config)
        algorithm = self._algorithm
        self._penalty = partial(kl_to_reference, estimator=algorithm.kl_estimator, weighted=algorithm.kl_weighted)
        keep_logits = self._options.activation_checkpointing == "none"
        self._policy = PackedPolicy(self.model, compiled, self.ranks.context, keep_logits)
        if self._options.fp8 and not self._policy.packs:
            raise ConfigError("trainer.fp8: this model reads sequences one by one, in lengths that FP8 does not take")
        self._reference = Reference(self._policy, config, self.ranks) if algorithm.kl_coef else None
        self._meter = FlopsMeter(self._policy, self.device)
        self.parameters = self._shard_parameters(compute, master, compiled)
        if self._reference:
            self._reference.track(self.parameters)
        self._compute_copies = self._new_compute_copies(compute, master)
        keep_float32_gradients(self.parameters.values())
        self._optimizer = new_optimizer(self.model, self.parameters, self._options, compiled, self._seed)
        self._offloader = new_offloader(config, self.device)
        if compiled:
            self.warm_up()

    def warm_up(self) -> None:
        """Compile the passes of the first step. Parameters and optimizer stay as they are."""
        with self._adapter_dropout():
            tokens = self._options.tokens_per_microbatch
            warm_up(self._policy, self.ranks, self.device, tokens, self._multiple, self._images)
        self._optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare_model(self, config: Config, model: Any, compute: torch.dtype, master: torch.dtype) -> Any:
        """`model`, by default a new one, in evaluation mode. Without FSDP it is on the device, in its final dtypes."""
        # FSDP moves it to the GPU layer by layer.
        model = model or load_trained_model(config, torch.device("cpu") if self.ranks.is_fsdp else self.device)
        if not self.ranks.is_fsdp:
            cast_parameters(model, self.device, compute, master)
        if self._options.fp8:
            use_fp8_products(model, self.device, compute)
        return model.eval()  # without dropout, as engines sample

    def _shard_parameters(
        self, compute: torch.dtype, master: torch.dtype, compiled: bool
    ) -> dict[str, torch.nn.Parameter]:
        """Shard the model over the ranks, checkpoint its activations and compile its layers, as configured.

        Returns the parameters that the optimizer updates.
        """
        if self.ranks.is_fsdp:
            self.ranks.shard(self._policy, compute, master)
        tensor_parallel = self.ranks.is_tensor_parallel
        prepare_layers(self.model, self._options.activation_checkpointing, compiled and not tensor_parallel)
        parameters = trained_parameters(self.model)
        if tensor_parallel and self.ranks.mesh:
            parameters, self.ranks.partial_gradients = shard_model(self._policy, self.ranks.mesh)
        return parameters

    def _new_compute_copies(self, compute: torch.dtype, master: torch.dtype) -> dict[str, Tensor] | None:
        """Copies of the parameters in the dtype `compute`, if masters have another: passes then use the copies.

        Passes of tensor-parallel ranks and of experts use this rank's shards. FSDP casts the shards of other parameters
        as it gathers them, without copies.
        """
        masters = {name: p for name, p in self.parameters.items() if not self.ranks.is_gathered(p)}
        parts = {name: local_part(p.detach()) for name, p in masters.items()}
        copies = {name: part.to(compute) for name, part in parts.items()} if compute != master else {}
        if copies or self.ranks.is_sharded:
            compute_on(self.model, masters, copies or parts)
        return copies or None

    def compute_on(self, tensors: Mapping[str, Tensor]) -> None:
        """Run forward and backward passes on `tensors`, which an engine serves and updates (`single_copy`).

        Raises `ConfigError` unless their shapes are those of this rank's shards.
        """
        for name, parameter in self.parameters.items():
            ours, theirs = local_part(parameter.detach()).shape, tensors[name].shape
            if ours != theirs:
                shapes = f"{list(theirs)} in the engine and {list(ours)} in the trainer"
                raise ConfigError(f"{name} is {shapes}: other parts")
        compute_on(self.model, self.parameters, tensors)
        self._compute_copies = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # free the copy for the engine on this GPU

    def offload(self) -> bool:
        """Free GPU memory for engines, unless the GPU holds a step and the engines together. Returns whether it does.

        An offloaded state can be saved, but not published or exported.
        """
        if self._offloader and not self.ranks.all_reduce_max(not self._offloader.has_room):
            return True
        if self._offloader and not self._offloaded:
            checkpoint.create_moments(self.parameters.values(), self._optimizer)
            reference = self._reference.state() if self._reference else []
            weights = [*self.model.parameters(), *self.model.buffers()]
            frozen = [tensor for tensor in weights if not tensor.requires_grad]
            constant = frozen if self._reference and self._reference.average else [*frozen, *reference]
            saved = [*self._moments(), *reference, *self.parameters.values(), *frozen]
            self._offloader.offload(saved, (self._compute_copies or {}).values(), constant)
        self._offloaded = True
        return False

    def make_room(self) -> None:
        """Free GPU memory for the weights of engines that wake while this trainer publishes to them."""
        if self._offloader:
            trained = [p.numel() for p in self.parameters.values()]  # of full tensors
            weights = ENGINE_WEIGHT_BYTES * (sum(trained) + self._frozen_elements)
            buckets = max(PUBLISH_BYTES, BUCKET_COPIES * ENGINE_WEIGHT_BYTES * max(trained))
            self._offloader.make_room(weights + buckets, self._moments())

    def onload(self) -> None:
        """Move all state back to the device."""
        if self._offloader and self._offloaded:
            self._offloader.onload(late=self._moments())  # they arrive during the passes of the step
            self._update_compute_copies()
        self._offloaded = False

    def step(self, batch: Batch) -> StepStats:
        """One optimizer step. Loss weights of tokens are normalised once, over all tokens of the batch.

        Raises `NotFinite` after too many steps in a row whose update was skipped.
        """
        self._validate_on_device()
        began = time.perf_counter()
        samples = [s for s in batch.samples() if not any(map(math.isnan, s.advantages))]
        lengths = torch.tensor([len(s.sampled_positions) for s in samples], dtype=torch.float64)
        weights = self._objective.aggregation(lengths)
        skips_zero = self._objective.linear and not self._algorithm.kl_coef  # samples without an advantage
        trained = [i for i, s in enumerate(samples) if any(s.advantages) or not skips_zero]
        summed = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        highest = torch.full((), -math.inf, device=self.device)
        with self._adapter_dropout():
            for micro in self._micro_batches([samples[i] for i in trained], batch.version):
                sums_of_micro, ratios = self._backward(micro, weights[[trained[i] for i in micro.order]])
                if self.ranks.is_leader and not micro.filler:
                    summed, highest = summed + sums_of_micro, torch.maximum(highest, ratios.max())
        if trained:
            self.ranks.sum_gradients(self.parameters)
        totals = dict(zip(SUMS, self.ranks.all_reduce_sum(summed).tolist(), strict=True))
        metrics = means(totals, self.ranks.all_reduce_max(highest.item()))
        grad_norm = self._update(metrics["loss"])
        self.token_count += batch.tokens
        seconds = time.perf_counter() - began
        stats = StepStats(
            step=self.step_count,
            grad_norm=grad_norm,
            learning_rate=self._optimizer.param_groups[0]["lr"],
            **metrics,
            tokens=batch.tokens,
            skipped_steps=self.skipped_count,
            seconds=seconds,
            **self._meter.take_statistics(seconds, self.ranks),
        )
        if self._offloader:
            self._offloader.record_step(stats.max_memory_gb * 1e9)
        return stats

    @contextmanager
    def _adapter_dropout(self) -> Iterator[None]:
        """Drop inputs of adapters during a block, by masks that depend on the seed, the step and the rank alone.

        The backward pass is part of the block: it may compute layers again.
        """
        if self._dropouts:
            torch.manual_seed(hash((self._seed, self.step_count, self.ranks.rank)) % 2**63)
        for dropout in self._dropouts:
            dropout.train()
        try:
            yield
        finally:
            for dropout in self._dropouts:
                dropout.eval()

    def _micro_batches(self, samples: Sequence[Sample], version: int = 0) -> Iterator[MicroBatch]:
        """This rank's packed micro-batches, each packed when the caller asks for it.

        A GPU then still computes the previous one. `version` is the trainer's, from which lags are counted. With FSDP a
        rank with fewer micro-batches repeats the shortest sample as filler, to join the collectives.
        """
        budget = self._options.tokens_per_microbatch
        prefix_groups = group_by_prefix(samples, budget, self._policy.packs, self.ranks.data_parallel_size)
        sizes = [prefix_group_length(samples, members) for members in prefix_groups]
        costs = [self._meter.cost(samples, members) for members in prefix_groups]
        packed = partial(
            pack, samples, device=self.device, version=version, multiple=self._multiple, processor=self._images
        )
        parts = plan(sizes, budget, self.ranks.data_parallel_size, costs)
        for number, items in enumerate(parts[self.ranks.data_parallel_rank]):
            least = max(sum(sizes[i] for i in parts[part][number]) for part in self.ranks.parts_of_equal_length)
            if items:
                yield packed([prefix_groups[i] for i in items], least=least)
            elif samples and self.ranks.is_fsdp:
                shortest = min(range(len(samples)), key=lambda i: forward_length(samples[i]))
                yield replace(packed([[shortest]], least=least), filler=True)
            self.micro_batches += 1

    @torch.no_grad()
    def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        """Log-probabilities of the sampled tokens of `completions` under the current policy.

        The probe compares them with those of the engine.
        """
        self._validate_on_device()
        samples = [build_samples([completion])[0] for completion in completions]
        scored: dict[int, list[float]] = {}
        for micro in self._micro_batches(samples):
            logprobs, _ = self._policy(micro)
            lengths = [len(samples[i].sampled_positions) for i in micro.order]
            scored |= dict(zip(micro.order, map(Tensor.tolist, logprobs.split(lengths)), strict=True))
        self.ranks.reshard(self._policy)
        scored = self.ranks.merge(scored)
        return [scored[i] for i in range(len(completions))]

    def save(self, path: Path, last: bool = False) -> Future[Any]:
        """Write a checkpoint into the directory `path`; the result is set when it is complete.

        The state is copied first, except for the `last` checkpoint, after which no step may follow. Raises
        `CheckpointFailed`, also by the result.
        """
        return checkpoint.save(path, self._checkpoint_state(), self.ranks, last)

    def restore(self, path: Path) -> None:
        """Restore what `save` wrote, with any number of ranks. Raises as `checkpoint.restore`."""
        counts = checkpoint.restore(path, self._checkpoint_state(), self.ranks)
        for name in COUNTS:
            setattr(self, name, counts.get(name, 0))
        self._update_compute_copies()
        if self._reference:
            self._reference.load_average()

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face directory, or its adapters as a PEFT directory."""
        checkpoint.export(path, self.model, self.parameters, self.ranks)

    def _checkpoint_state(self) -> checkpoint.State:
        """What `save` writes and `restore` overwrites in place, with the copies on the host of offloaded tensors."""
        if self._offloader:
            self._offloader.wait()
        average = self._reference.average if self._reference else {}
        counts = {name: getattr(self, name) for name in COUNTS}
        state = checkpoint.state_of(self.parameters, self._optimizer, average, counts)
        return checkpoint.map_tensors(state, self._offloader.on_host) if self._offloader else state

    def _moments(self) -> list[Tensor]:
        """The optimizer's moments on the device."""
        if self._options.offload_optimizer:
            return []
        return [moment for state in self._optimizer.state.values() for moment in state.values()]

    def _validate_on_device(self) -> None:
        if self._offloaded:
            raise RuntimeError("this trainer is offloaded: call onload before the next step or score")

    def _backward(self, micro: MicroBatch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Accumulate the gradient of a micro-batch; `weights` are the loss weights of its samples' tokens.

        Returns the sums of its statistics, and the importance ratios.
        """
        logprobs, entropy = self._policy(micro)
        if not micro.filler:
            self._meter.add_pass(micro, self.ranks.is_leader)
        tokens = Tokens(
            logprobs=logprobs.detach().requires_grad_(),
            behaviour=micro.behaviour,
            advantages=micro.advantages,
            sequence=micro.sequences,
            lag=micro.lags,
            proximal=logprobs.detach(),
            # After the policy: FSDP initialises at its first pass, which must include the adapters.
            reference=self._reference.logprobs(micro) if self._reference else None,
            teacher=micro.teacher,
        )
        objective, kl_coef = self._objective, self._algorithm.kl_coef
        gradients = token_gradients(tokens, objective.loss, objective.corrections, self._penalty, kl_coef)
        token_weights = (0.0 if micro.filler else 1.0) * weights.to(entropy)[micro.sequences]
        torch.autograd.backward(logprobs, token_weights * gradients.gradient)
        return sums(tokens, gradients, entropy, token_weights), tokens.ratio.detach()

    def _update(self, loss: float) -> float:
        """Clip gradients and update parameters. Returns the gradient norm.

        If the norm or the loss is not finite, all ranks skip the update, which still counts as a step. Raises
        `NotFinite` after `trainer.max_consecutive_nonfinite` skipped steps in a row.
        """
        norm = clip_gradients(self.parameters.values(), self._options.gradient_clip or math.inf)
        spent = self.token_count / self._tokens if self._tokens else 0.0
        warmup, schedule = self._options.warmup_steps, self._options.schedule
        share = learning_rate(schedule, self.step_count, steps=self._steps, warmup=warmup, spent=spent)
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * share
        finite = math.isfinite(norm) and math.isfinite(loss)
        self.skipped_count += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self._offloader:
            self._offloader.wait()
        if finite:
            self.before_update()
            self._optimizer.step()
            self._update_compute_copies()
            if self._reference:
                self._reference.update()
        self._optimizer.zero_grad()
        self.step_count += 1
        validate_skipped_steps(self.skipped_in_a_row, self._options)
        return norm

    def _update_compute_copies(self) -> None:
        if self._compute_copies:
            masters = [local_part(self.parameters[name].detach()) for name in self._compute_copies]
            torch._foreach_copy_(list(self._compute_copies.values()), masters)


def load_trained_model(config: Config, device: torch.device) -> Any:
    """The model to train, with adapters if the run trains those, in the dtype in which it is loaded."""
    stored = dtype_of(config) if config.lora.rank else stored_dtype(config.model.path)  # adapters are float32
    return load_model(config.model, config.lora, device=device, dtype=stored)

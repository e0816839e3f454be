"""What a split's parts cost by rooflines: a decode step, a prefill, an optimizer step, a publish, and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache

from slipstream.plan.hardware import GIB, Cluster, Rates
from slipstream.plan.shapes import BF16, Shape
from slipstream.plan.workload import Workload

FP32 = 4
ENGINE_OVERHEAD = 2.5 * GIB  # context, CUDA graphs and activations of an engine
TRAINER_OVERHEAD = 3.5 * GIB  # context, chunks of logits, allocator
PCIE = 25e9  # bytes/s between a GPU and pageable host memory
PINNED = 45e9  # bytes/s to or from pinned host memory by PCIe 5, in both directions at once
QUANTIZED = 1 + FP32 / 64  # bytes of a moment of 8 bits, with its share of a block's scale
SHARED_SLOWDOWN = 1.9  # of each side on shared GPUs, fitted to five runs: one reads memory while the other multiplies
TURN_S = 0.3  # of a turn of colocated engines and trainer, without copies: sleep, wake-up (colocated_turns_h200x1.json)
TURN_RESERVE = 5 * GIB  # of the GPU that colocated engines and the trainer's kept state leave
EXCHANGES = 4  # of all tokens in a layer, in both passes (expert parallelism)
# Kept activations, relative to the outputs of matrix products; trainer_h200.json
KEPT = {"none": 1.71, "selective": 1.0, "full": 0.27}
# Seconds of forward passes and recomputation, relative to the products of one forward pass; trainer_h200.json
RECOMPUTED = {"none": 0.88, "selective": 1.03, "full": 4 / 3}
ADAPTER_ACTIVATIONS = 1.1  # of a layer with adapters; memory_h200x1.json
# Of vLLM's kernels for adapters, fitted to rank 32 and 256 sequences; adapter_kernels_h200.json
ADAPTER_LAUNCHES_S = 27e-6  # a layer
ADAPTER_BYTES = 19  # which take the rest of the time: for each token, and each input and output of a linear layer
EAGER_ACTIVATIONS, EAGER_SECONDS = 1.3, 2.2  # without compiled layers, relative to them; memory_eager_h200x1.json
FP8_SECONDS = 0.82  # of a dense model's step on all weights, relative to one without FP8 products; trainer_h200.json
EXPOSED = 0.5  # share of the traffic of weights and gradients that computation does not hide
DEFAULT_MICROBATCH = 16384
CHANGED_BYTES = 3.0  # of a changed element in a delta: its position and its value, coded
SLOW_NETWORK = 1.25e9  # bytes/s; below, `sync.link = "auto"` means delta


@dataclass(frozen=True)
class EngineCost:
    """Times of an engine of `tp` GPUs. A decode step of `n` sequences with `k` tokens takes fixed(n) + k * each.

    `adapters`: whether it serves adapters instead of trained weights.
    """

    shape: Shape
    cluster: Cluster
    rates: Rates
    tp: int
    adapters: bool = False
    _fixed: dict[int, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def each(self) -> float:
        """Seconds to read keys and values of one token of context."""
        if self.rates.engine_tokens_per_s or self.rates.measured_decode:
            return 0.0
        return self._key_seconds

    @property
    def _key_seconds(self) -> float:
        split = min(self.tp, self.shape.kv_heads)
        return self.shape.kv_bytes / split / (self.cluster.gpu.bandwidth * self.rates.bandwidth)

    def fixed(self, sequences: int) -> float:
        """Seconds of a decode step without its context."""
        if sequences not in self._fixed:
            self._fixed[sequences] = self._compute_fixed(sequences)
        return self._fixed[sequences]

    def _compute_fixed(self, sequences: int) -> float:
        rates = self.rates
        if rates.engine_tokens_per_s:
            return sequences / rates.engine_tokens_per_s
        if rates.measured_decode:
            measured = rates.decode_fixed_s + rates.decode_sequence_s * sequences
            tp, context = rates.decode_reference
            if tp == self.tp:
                return measured
            same, here = (replace(self, rates=Rates(), tp=size) for size in (tp, self.tp))
            ratio = here.step(sequences, sequences * context) / same.step(sequences, sequences * context)
            return measured * ratio
        host = rates.host_step_s + rates.host_pair_s * sequences**2
        adapters = self.adapters * self.shape.layers * ADAPTER_LAUNCHES_S + self._adapter_seconds(sequences)
        return self._matmul_seconds(sequences) + self._all_reduces(sequences) + adapters + host

    def _matmul_seconds(self, sequences: int) -> float:
        """Seconds of a decode step's matrix products on a GPU: the longer of reading the weights and multiplying."""
        gpu, rates, shape = self.cluster.gpu, self.rates, self.shape
        reading = shape.decode_weight_bytes(sequences) / self.tp / (gpu.bandwidth * rates.bandwidth)
        operations = shape.forward_operations(sequences, 0)
        return max(reading, operations / self.tp / (gpu.operations * rates.prefill))

    def _adapter_seconds(self, tokens: float) -> float:
        """Seconds of the adapters' matrix products in a forward pass, without launches of their kernels."""
        width = self.shape.adapter_width(self.tp) if self.adapters else 0
        return tokens * width * ADAPTER_BYTES / self.cluster.gpu.bandwidth

    def _all_reduces(self, tokens: float) -> float:
        """Seconds of the all-reduces of a forward pass: two in each layer, none on one GPU."""
        if self.tp == 1:
            return 0.0
        size = tokens * self.shape.hidden * BF16 * 2 * (self.tp - 1) / self.tp
        return 2 * self.shape.layers * (self.rates.all_reduce_s + size / (self.cluster.gpu.link * self.rates.link))

    def step(self, sequences: float, tokens: float) -> float:
        """Seconds of a decode step."""
        return self.fixed(max(1, round(sequences))) + self.each * tokens

    def prefill(self, tokens: float, context: float = 0.0) -> float:
        """Seconds to compute the keys and values of `tokens` tokens after `context` others, with the all-reduces.

        Returns 0.0 with measured decode rates, which include prefills.
        """
        if not tokens or self.rates.engine_tokens_per_s or self.rates.measured_decode:
            return 0.0
        gpu = self.cluster.gpu
        operations = self.shape.forward_operations(tokens, context + tokens / 2, predicted=1)
        compute = operations / self.tp / (gpu.operations * self.rates.prefill)
        return compute + self._all_reduces(tokens) + self._adapter_seconds(tokens)


@dataclass(frozen=True)
class TrainerCost:
    """Times and memory of a trainer with `ranks` ranks."""

    shape: Shape
    cluster: Cluster
    rates: Rates
    work: Workload
    ranks: int = 1
    parallel: str = "fsdp"
    context_parallel: int = 1
    checkpointing: str = "selective"
    microbatch: int = DEFAULT_MICROBATCH
    own_copy: bool = True  # of the weights in bfloat16; false where it computes on the engine's
    optimizer: str = "adamw"
    master_weights: str = "float32"
    offload_optimizer: bool = False
    keep_compute_copy: bool = True
    compiled: bool = True
    fp8: bool = False
    shard_size: int = 0  # ranks that share one copy of the weights (fsdp); 0 is all of them
    expert_parallel: int = 1
    reference: str = ""  # of a KL term: "start", "average" or "model" (another one)

    @property
    def runs_compiled(self) -> bool:
        """Whether layers run compiled: those of tensor parallelism never do."""
        return self.compiled and self.parallel != "tensor"

    @property
    def trained(self) -> int:
        rank = self.work.lora_rank
        return self.shape.lora_parameters(rank) if rank else self.shape.parameters

    @property
    def link(self) -> float:
        """Bytes/s between ranks, those of the slowest pair."""
        spans = self.ranks > self.cluster.per_node
        return (self.cluster.network if spans else self.cluster.gpu.link) * self.rates.link

    def step(self, sampled: float, packed: float) -> float:
        """Seconds of an optimizer step on `sampled` tokens to train on, `packed` tokens in all."""
        rates = self.rates
        if rates.train_token_s or rates.train_fixed_s:
            return rates.train_fixed_s + rates.train_token_s * packed / self.ranks
        operations = self.shape.forward_operations(packed, self.work.context, sampled)
        backward = 1 if self.work.lora_rank else 2  # no gradients of frozen weights
        operations *= RECOMPUTED[self.checkpointing] + backward + bool(self.reference)
        reached = rates.train * (1 - math.exp(-self.shape.hidden / rates.narrow))
        reached *= rates.experts if self.shape.experts > 1 else 1.0
        compute = operations / (self.ranks * self.cluster.gpu.operations * reached)
        compute *= 1 if self.runs_compiled else EAGER_SECONDS
        compute *= FP8_SECONDS if self.fp8 and self.shape.experts <= 1 and not self.work.lora_rank else 1
        state = sum(self._state().values())
        update = 2 * state / (self.cluster.gpu.bandwidth * rates.bandwidth)
        pinned = min(PINNED, self.cluster.gpu.link * rates.link)  # slower cards have PCIe 4 as their link
        moved = self.moments / pinned if self.offload_optimizer else 0.0
        return compute + self._traffic(packed) + max(update, moved)

    @property
    def shards(self) -> int:
        """Parts into which masters and moments are split."""
        return 1 if self.parallel == "ddp" else self.shard_size or self.ranks

    @property
    def split_experts(self) -> int:
        """Parameters of experts that `expert_parallel` splits, instead of FSDP."""
        if self.expert_parallel == 1:
            return 0
        return self.shape.layers * self.shape.experts * self.shape.expert_parameters

    @property
    def trained_experts(self) -> int:
        """Those of `split_experts` that are trained."""
        return 0 if self.work.lora_rank else self.split_experts

    @property
    def own_trained(self) -> float:
        """Trained parameters that one rank holds."""
        return (self.trained - self.trained_experts) / self.shards + self.trained_experts / self.expert_parallel

    @property
    def own_parameters(self) -> float:
        """Parameters that one rank holds."""
        rest = self.shape.parameters - self.split_experts
        return rest / self.shards + self.split_experts / self.expert_parallel

    def _traffic(self, packed: float) -> float:
        """Seconds in which ranks wait for each other's weights, gradients or activations."""
        if self.ranks == 1:
            return 0.0
        part = (self.ranks - 1) / self.ranks
        share = self.ranks // self.context_parallel
        passes = math.ceil(packed / share / (self.microbatch * self.context_parallel))
        if self.parallel == "ddp":
            size = 2 * FP32 * self.trained * part
        elif self.parallel == "tensor":
            size = 8 * self.shape.layers * self.shape.hidden * BF16 * packed * part
        else:  # weights for both passes, and gradients in float32
            gathered = 2 * BF16 * (self.shape.parameters - self.split_experts)
            gathered += FP32 * (self.trained - self.trained_experts)
            tokens = EXCHANGES * self.shape.layers * self.shape.hidden * BF16 * packed / self.ranks
            copies = self.ranks / self.expert_parallel
            summed = 2 * FP32 * self.trained_experts / self.expert_parallel * (1 - 1 / copies)
            size = passes * gathered * part + tokens * (self.expert_parallel - 1) + summed
        keys = packed / share * self.shape.kv_bytes * 3 if self.context_parallel > 1 else 0.0
        return (size * EXPOSED + keys) / self.link

    def memory(self) -> dict[str, float]:
        """Bytes of one GPU by part."""
        shape, frozen = self.shape, bool(self.work.lora_rank)
        whole = self.ranks == 1 or self.parallel == "ddp"
        gathers = self.parallel == "fsdp" and (self.ranks > 1 or not self.keep_compute_copy)
        copies = self.keep_compute_copy and self.master_weights == "float32"
        weights = 0.0
        if frozen or (copies and not gathers and (whole or self.parallel == "tensor")):
            weights = shape.weight_bytes / self.shards
        if gathers:  # two layers, and the embeddings
            weights += 2 * (shape.weight_bytes - BF16 * self.split_experts) / shape.layers + 2 * BF16 * shape.embedding
        if frozen:  # experts that are counted above as shards of FSDP
            weights += BF16 * self.split_experts * (1 / self.expert_parallel - 1 / self.shards)
        elif copies:  # passes of experts use a copy in the compute dtype
            weights += BF16 * self.split_experts / self.expert_parallel
        return {
            "weights": weights if self.own_copy else 0.0,
            **self._state(),
            "activations": self._activations(),
            **({"reference": self.reference_bytes} if self.reference_bytes else {}),
            "overhead": TRAINER_OVERHEAD,
        }

    @property
    def reference_bytes(self) -> float:
        """Bytes of the KL reference on each GPU.

        These are its weights, which only `fsdp` shards, and for "average" also the average in float32. With adapters
        only a reference of another model takes memory. It is estimated at the policy's size.
        """
        if not self.reference or (self.work.lora_rank and self.reference != "model"):  # adapters share their base
            return 0.0
        share = self.own_parameters / self.shape.parameters if self.parallel == "fsdp" else 1.0
        average = FP32 * self.own_parameters if self.reference == "average" else 0.0
        return self.shape.weight_bytes * share + average

    def _state(self) -> dict[str, float]:
        """Bytes of what the optimizer reads and writes on the GPU."""
        each = self.own_trained
        masters = each * (FP32 if self.master_weights == "float32" else BF16)
        moments = 0.0 if self.offload_optimizer else self.moments
        return {"masters": masters, "gradients": FP32 * each, "moments": moments}

    @property
    def lasting_state(self) -> float:
        """Bytes on one GPU of masters and moments, which last between steps."""
        state = self._state()
        return state["masters"] + state["moments"]

    @property
    def moments(self) -> float:
        """Bytes of the moments of one rank, on its GPU or in host memory."""
        each = self.own_trained
        if self.optimizer == "adamw_8bit":
            return 2 * QUANTIZED * each
        if self.optimizer == "muon":  # one moment of each matrix
            outside = self.shape.embedding * (1 if self.shape.tied else 2) / self.shards
            return FP32 * (each + outside)
        return 2 * FP32 * each

    def _activations(self) -> float:
        """Outputs of the matrix products of each layer, of one micro-batch, and its logits if they are kept."""
        shape = self.shape
        everything, mixture = self.checkpointing == "none", shape.experts > 1
        attention = shape.head_dim * (shape.heads + 2 * shape.kv_heads) + 2 * shape.hidden
        # With expert parallelism a rank has rows for the tokens of all ranks of its group.
        active = shape.active * self.expert_parallel
        mlp = 2 * active * shape.expert_intermediate if mixture else 2 * shape.intermediate
        kept = KEPT[self.checkpointing] * (attention + mlp)
        if everything and mixture:  # also a token's rows for its experts
            experts = active * (shape.hidden + 3 * shape.expert_intermediate)
            kept = KEPT[self.checkpointing] * attention + experts
        if everything:  # keys and values, repeated for the heads that share them
            kept += 2 * shape.head_dim * (shape.heads - shape.kv_heads)
        if self.checkpointing == "selective" and self.expert_parallel > 1:  # tokens that the rank gathers
            kept += shape.hidden * self.expert_parallel
        if self.checkpointing == "selective" and self.context_parallel > 1:  # exchanged queries, keys, values, outputs
            kept += 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        kept *= ADAPTER_ACTIVATIONS if self.work.lora_rank else 1
        kept *= 1 if self.runs_compiled else EAGER_ACTIVATIONS
        split = self.ranks if self.parallel == "tensor" else 1
        logits = shape.vocabulary if everything and not self.work.lora_rank else 0
        quantized = shape.parameters if everything and self.fp8 else 0  # FP8 weights of all layers, on each rank
        return self.microbatch * BF16 * (shape.layers * kept + logits) / split + quantized


@dataclass(frozen=True)
class PublishCost:
    """The cost of a publish: seconds until engines have the weights, of the trainer's hold and of an engine's pause."""

    link: str
    transfer: float
    hold: float
    pause: float
    staging: float  # bytes on each GPU of an engine


def publish_cost(
    shape: Shape, cluster: Cluster, rates: Rates, work: Workload, placement: str, tp: int, gpus: int
) -> PublishCost:
    """The cost of a publish in a run of `gpus` GPUs, the trainer's included; zeros if colocated."""
    size = BF16 * (shape.lora_parameters(work.lora_rank) if work.lora_rank else shape.parameters)
    swap = 1e-3 + 2 * size / tp / (cluster.gpu.bandwidth * rates.bandwidth)
    if placement == "colocated":
        return PublishCost("shared", 0.0, 0.0, 0.0, 0.0)
    if placement == "single_copy":
        return PublishCost("single_copy", swap, swap, swap, 0.0)
    spans = gpus > cluster.per_node
    speed = cluster.network if spans else cluster.gpu.link
    if work.lora_rank:
        return PublishCost("lora", size / PCIE + 0.05, size / PCIE, 0.0, size / tp)
    if spans and cluster.network < SLOW_NETWORK:
        changed = CHANGED_BYTES * changed_fraction(work.learning_rate, work.every) * shape.parameters
        return PublishCost("delta", min(size, changed) / speed, 2 * size / cluster.gpu.bandwidth, swap, 0.0)
    sent = size / (speed * rates.link)
    return PublishCost("nccl", sent, sent, swap, size / tp)


def colocated_turn_cost(trainer: TrainerCost, free: float, overlaps: bool) -> PublishCost:
    """The cost of a turn of a colocated trainer apart from its step: sleep and wake-up of engines, and copies.

    Engines leave `free` bytes of each GPU. State that does not fit there goes to the host and back. Each rank gathers
    the weights, and engines copy them. A turn that `overlaps` with generation consists of that alone.
    """
    shape, cluster, rank = trainer.shape, trainer.cluster, trainer.work.lora_rank
    size, state = BF16 * trainer.trained, trainer.lasting_state
    if rank:
        state += shape.weight_bytes * trainer.own_parameters / shape.parameters
    gathered = BF16 * (trainer.trained - trainer.own_trained) / trainer.link
    given = gathered + 4 * size / (cluster.gpu.bandwidth * trainer.rates.bandwidth)
    moved = 2 * max(0.0, state + TURN_RESERVE - free) / PINNED
    return turn_cost("lora" if rank else "shared", given, given if overlaps else TURN_S + moved + given, overlaps)


def turn_cost(link: str, transfer: float, seconds: float, overlaps: bool) -> PublishCost:
    """The cost of a turn that takes `seconds` apart from its step.

    A turn that `overlaps` with generation pauses engines for that time. In another one they sleep in any case, and only
    the trainer is held.
    """
    hold, pause = (0.0, seconds) if overlaps else (seconds, 0.0)
    return PublishCost(link, transfer, hold, pause, 0.0)


@cache
def changed_fraction(learning_rate: float, steps: int) -> float:
    """Share of elements that `steps` change, by `sync.prediction`, for normal weights of standard deviation 0.02."""
    import torch

    from slipstream.sync.prediction import count_exponents, expected_changed_fraction

    weights = torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02
    return expected_changed_fraction(count_exponents([weights]), learning_rate, steps)

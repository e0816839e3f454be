"""Mapping of parameters to a tensor-parallel vLLM model: for any sharding each value is served exactly once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from slipstream.errors import InvalidInput, UserError
from slipstream.generators.vllm.requests import sum_checksums
from slipstream.generators.vllm.weight_mapping import expert_shard, map_parameters
from slipstream.generators.vllm.weights import VllmWeights
from slipstream.generators.vllm.worker_methods import BlockingWeights
from slipstream.sync.checksum import checksum
from slipstream.sync.link import ParameterShard

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEAD = 4


class Rank(nn.Module):
    """A layer as vLLM holds it on one rank: fused, sharded, the vocabulary padded."""

    packed_modules_mapping = PACKED

    def __init__(self, shapes: dict[str, list[int]], size: int, kv_heads: int, padded: int) -> None:
        super().__init__()
        kv_here = max(1, kv_heads // size) * HEAD
        hidden = shapes["norm.weight"][0]
        rows = {
            "attn.qkv_proj.weight": [shapes["attn.q_proj.weight"][0] // size + 2 * kv_here, hidden],
            "attn.o_proj.weight": [hidden, shapes["attn.o_proj.weight"][1] // size],
            "mlp.gate_up_proj.weight": [2 * shapes["mlp.up_proj.weight"][0] // size, hidden],
            "mlp.down_proj.weight": [hidden, shapes["mlp.down_proj.weight"][1] // size],
            "embed.weight": [padded // size, hidden],
            "norm.weight": [hidden],
        }
        self.held = {name: nn.Parameter(torch.full(shape, torch.nan)) for name, shape in rows.items()}

    def named_parameters(self, *_: object, **__: object):  # type: ignore[no-untyped-def,override]
        yield from self.held.items()


def shapes_of(heads: int, kv_heads: int, hidden: int, inner: int, vocabulary: int) -> dict[str, list[int]]:
    return {
        "embed.weight": [vocabulary, hidden],
        "attn.q_proj.weight": [heads * HEAD, hidden],
        "attn.k_proj.weight": [kv_heads * HEAD, hidden],
        "attn.v_proj.weight": [kv_heads * HEAD, hidden],
        "attn.o_proj.weight": [hidden, heads * HEAD],
        "mlp.gate_proj.weight": [inner, hidden],
        "mlp.up_proj.weight": [inner, hidden],
        "mlp.down_proj.weight": [hidden, inner],
        "norm.weight": [hidden],
    }


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.integers(3, 6), st.integers(5, 40))
def test_shards_hold_every_parameter_once(size: int, kv_heads: int, hidden: int, vocabulary: int) -> None:
    shapes = shapes_of(8, kv_heads, hidden, 8, vocabulary)
    padded = -(-vocabulary // 8) * 8
    ranks = [Rank(shapes, size, kv_heads, padded) for _ in range(size)]
    weights: dict[str, Tensor] = {name: torch.randn(shape) for name, shape in shapes.items()}
    places = [map_parameters(model, shapes, rank, size) for rank, model in enumerate(ranks)]
    for per_rank in places:
        for name, place in per_rank.items():
            place.tensor.copy_(weights[name][place.index])
    for name, whole in weights.items():
        found = torch.full_like(whole, torch.nan)
        for per_rank in places:
            found[per_rank[name].index] = per_rank[name].tensor
        assert torch.equal(found, whole), name
        sums = [checksum(p[name].tensor, p[name].index) for p in places if p[name].counted]
        assert sum(sums) % 2**64 == checksum(whole), name
    for model in ranks:  # nothing of a fused tensor is left unwritten, but for the padding of the vocabulary
        for name, held in model.held.items():
            assert name == "embed.weight" or not held.isnan().any()


class Served:
    """A model of vLLM's with these tensors."""

    def __init__(self, **held: Tensor) -> None:
        self.held = {name.replace("__", "."): tensor for name, tensor in held.items()}

    def named_parameters(self):  # type: ignore[no-untyped-def]
        return ((name, nn.Parameter(tensor)) for name, tensor in self.held.items())


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.sampled_from(["", "routed_experts__"]))
def test_stacked_experts_match_the_layout_of_vllm(experts: int, hidden: int, inner: int, module: str) -> None:
    """Written as a stack, each expert's gate, up and down projections lie where vLLM puts those of a model's files."""
    shapes = {
        "mlp.experts.gate_up_proj": [experts, 2 * inner, hidden],
        "mlp.experts.down_proj": [experts, hidden, inner],
    }
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    names = {"w13_weight": "mlp.experts.gate_up_proj", "w2_weight": "mlp.experts.down_proj"}
    held = {f"mlp__experts__{module}{n}": torch.full(shapes[o], torch.nan) for n, o in names.items()}
    places = map_parameters(Served(**held), shapes, 0, 1)
    for name, place in places.items():
        place.tensor.copy_(weights[name][place.index])
    for number in range(experts):
        gate, up = weights["mlp.experts.gate_up_proj"][number].chunk(2)  # as transformers computes on it
        for kind, wanted in (("gate", gate), ("up", up), ("down", weights["mlp.experts.down_proj"][number])):
            part = expert_shard(f"mlp.experts.{number}.{kind}_proj.weight", places)
            assert part and torch.equal(part.tensor, wanted)
    w13, w2 = held.values()
    assert torch.equal(w13, weights["mlp.experts.gate_up_proj"]) and torch.equal(w2, weights["mlp.experts.down_proj"])
    assert expert_shard("mlp.gate.weight", places) is None
    padded = Served(**{name: torch.zeros(experts, *(n + 1 for n in t.shape[1:])) for name, t in held.items()})
    for model, size, remedy in (
        (Served(**held), 2, "tensor_parallel_size = 1"),
        (padded, 1, 'link = "checkpoint" and sync'),
    ):
        with pytest.raises(ValueError, match=rf"mlp.experts.gate_up_proj is .*{remedy}"):
            map_parameters(model, shapes, 0, size)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mlp.experts.w13": [4, 8, 4]}, "no tensor for mlp.experts.w13"),
        ({"attn.o_proj.weight": [4, 33]}, "attn.o_proj.weight is .4, 33. in the trainer and .4, 32. in vLLM"),
        ({"attn.k_proj.weight": [12, 4]}, "attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight are"),
    ],
)
def test_an_unknown_layout_is_refused_by_name(change: dict[str, list[int]], said: str) -> None:
    shapes = shapes_of(8, 2, 4, 8, 16)
    with pytest.raises(ValueError, match=rf'{said}.*; set sync.link = "checkpoint", sync.restart = true'):
        map_parameters(Rank(shapes, 1, 2, 16), shapes | change, 0, 1)


def test_a_pipeline_stage_maps_what_it_holds() -> None:
    """Tied embeddings are in both stages."""
    shapes = {"embed.weight": [6, 4], "layers.0.norm.weight": [4], "layers.1.norm.weight": [4]}
    first = Served(embed__weight=torch.zeros(6, 4), layers__0__norm__weight=torch.zeros(4))
    last = Served(layers__1__norm__weight=torch.zeros(4), embed__weight=torch.zeros(6, 4))
    assert [[*map_parameters(stage, shapes, 0, 1, 2)] for stage in (first, last)] == [
        ["embed.weight", "layers.0.norm.weight"],
        ["embed.weight", "layers.1.norm.weight"],
    ]
    with pytest.raises(ValueError, match=r"no tensor for layers.1.norm.weight: this model can't be updated in place"):
        map_parameters(first, shapes, 0, 1)
    copied = Served(layers__1__norm__weight=torch.zeros(4), lm_head__weight=torch.zeros(6, 4))
    with pytest.raises(ValueError, match=r"serves lm_head.weight in a pipeline stage without .* leave out generator.e"):
        map_parameters(copied, shapes, 0, 1, 2)


def test_checksums_of_stages_cover_every_parameter() -> None:
    """Two stages of two tensor-parallel workers each; both stages hold `tied`."""
    workers = [{"a": "1", "tied": "5"}, {"a": "2", "tied": "6"}, {"b": "7", "tied": "4"}, {"b": "0", "tied": "7"}]
    assert sum_checksums(workers, ["a", "b", "tied"], 2) == {"a": 3, "b": 7, "tied": 11}
    with pytest.raises(UserError, match="hold 0 values of c instead of one"):
        sum_checksums(workers, ["a", "c"], 2)
    workers[3]["tied"] = "8"
    with pytest.raises(UserError, match="hold 2 values of tied instead of one"):
        sum_checksums(workers, ["tied"], 2)


def test_a_parameter_that_no_pipeline_stage_holds_is_refused() -> None:
    class Stages:
        def __init__(self, *missing: list[str]) -> None:
            self.collective_rpc = lambda *arguments, **named: missing

    VllmWeights(Stages(["b"], ["a"]), "nccl", {}, 1)
    with pytest.raises(InvalidInput, match="serves no tensor for b: "):
        VllmWeights(Stages(["c", "b"], ["a", "b"]), "nccl", {}, 1)


def test_a_worker_reports_what_vllms_own_transfer_wrote() -> None:
    """vLLM's transfer needs GPUs; what a worker does around it does not."""
    torch.manual_seed(0)
    sent = {"norm.weight": torch.randn(8), "mlp.weight": torch.randn(8, 6)}
    served = torch.zeros(5, 6)  # the rows 3 to 8 of `mlp.weight`
    rows = (slice(3, 8),)
    shards = {
        "norm.weight": ParameterShard(torch.zeros(8), (8,), counted=False),
        "mlp.weight": ParameterShard(served, (8, 6), rows),
    }

    class Transfer:
        closed = False

        def receive(self) -> None:
            served.copy_(sent["mlp.weight"][rows])

        def close(self) -> None:
            self.closed = True

    transfer: Any = Transfer()
    weights = BlockingWeights(transfer, shards)
    weights.prepare({})
    assert weights.prepared()
    weights.apply()
    assert weights.applied() and weights.pause_s() >= 0
    weights.start_checksums([*sent, "of another stage"])
    expected = checksum(sent["mlp.weight"][rows], rows)
    assert weights.checksums() == {"norm.weight": 0, "mlp.weight": expected}
    weights.close()
    assert transfer.closed

"""FP8 weights of vLLM after a publish: equal to those that vLLM itself makes of the same values, in the same memory."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.config.loading import load_config
from slipstream.errors import InvalidInput
from slipstream.generators.served_weights import ServedWeights
from slipstream.generators.vllm import quantized_weights
from slipstream.generators.vllm.quantized_weights import validate_link
from slipstream.generators.vllm.weight_mapping import expert_shard, map_parameters
from slipstream.sync.checksum import checksum
from slipstream.sync.link import find_link

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = {
    "attn.q_proj.weight": (64, 32), "attn.k_proj.weight": (32, 32), "attn.v_proj.weight": (32, 32),
    "attn.o_proj.weight": (32, 64), "mlp.experts.gate_up_proj": (2, 32, 48), "norm.weight": (32,),
}  # fmt: skip
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
QUANTIZED = ("attn.qkv_proj.weight", "attn.o_proj.weight", "mlp.experts.w13_weight")


def values(seed: int) -> dict[str, Tensor]:
    """Weights whose rows have scales of their own."""
    draw = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(shape, generator=draw) * torch.rand(shape, generator=draw)).to(DEVICE, torch.bfloat16)
            for name, shape in SHAPES.items()}  # fmt: skip


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's weight, transposed, and scales, as vLLM makes them when it has loaded the weight from a file."""
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod

    layer: Any = nn.Module()
    layer.weight, layer.tp_size = nn.Parameter(weight.clone(), requires_grad=False), 1
    kernel = SimpleNamespace(process_weights_after_loading=lambda _: None, input_quant_key=lambda: None)
    method: Any = SimpleNamespace(
        fp8_linear=kernel,
        get_weight_for_quantization=lambda of: of.weight,
        release_requantization_source_weights=lambda _: None,
    )
    Fp8PtpcOnlineLinearMethod.process_weights_after_loading(method, layer)
    return layer.weight.data, layer.weight_scale.data


def loaded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What vLLM serves after it has loaded these weights from files."""
    fused = torch.cat([weights[f"attn.{part}_proj.weight"] for part in "qkv"])
    served = {"norm.weight": weights["norm.weight"].clone()}
    for name, weight in zip(QUANTIZED[:2], (fused, weights["attn.o_proj.weight"]), strict=True):
        served[name], served[f"{name}_scale"] = quantize(weight)
    experts = [quantize(expert) for expert in weights["mlp.experts.gate_up_proj"]]
    served[QUANTIZED[2]] = torch.stack([weight.view(torch.int8).t() for weight, _ in experts]).view(experts[0][0].dtype)
    served[f"{QUANTIZED[2]}_scale"] = torch.stack([scale for _, scale in experts])
    return served


class Served(nn.Module):
    """A vLLM model with these parameters."""

    packed_modules_mapping = PACKED

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.held = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in parameters.items()}

    def named_parameters(self, *_: object, **__: object):  # type: ignore[no-untyped-def,override]
        yield from self.held.items()


def same(served: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return served.keys() == wanted.keys() and all(torch.equal(*map(bits, (served[n], wanted[n]))) for n in wanted)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class Published:
    """Engine's weights after the publish of `values(1)` in place of `values(0)`."""

    def __init__(self, link: str, folder: Path) -> None:
        self.tensors = loaded(values(0))
        self.memory = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}
        config = load_config(None, ["--model.path=m", "--environment.name=e", "--model.dtype=bfloat16"])
        trained = {name: nn.Parameter(value.cpu()) for name, value in values(1).items()}
        self.sender = find_link(link)[0](trained, config, folder, 1)
        info = self.sender.connection_info()
        info |= {"parts": [info]} if link == "handover" else {}
        self.shards = map_parameters(Served(self.tensors), info["shapes"], 0, 1)
        self.weights = ServedWeights(link, info, self.shards, 1, rebind=False)
        self.trained, self.version = trained, 0
        self.publish()

    def publish(self, applied: bool = True) -> dict[str, Any]:
        """Publish what is trained; without `applied` the engine does not swap. Returns what the sender adds."""
        handle = self.sender.stage(self.version)
        self.version += 1
        self.weights.prepare(handle)
        more = self.sender.send(handle) or {}
        while not self.weights.prepared():
            time.sleep(0.001)
        if applied:
            self.weights.apply()
        self.sender.release(handle)
        return more

    def checksums(self) -> dict[str, int]:
        self.weights.start_checksums([*SHAPES])
        while (sums := self.weights.checksums()) is None:
            time.sleep(0.001)
        return sums

    def close(self) -> None:
        self.weights.close()
        self.sender.close()


@pytest.mark.parametrize("link", ["shared", "checkpoint", "nccl", "handover", "delta"])
def test_a_publish_makes_the_tensors_that_vllm_makes_of_files(link: str, tmp_path: Path) -> None:
    published = Published(link, tmp_path)
    assert same(published.tensors, loaded(values(1))) and not same(published.tensors, loaded(values(0)))
    assert {name: tensor.data_ptr() for name, tensor in published.tensors.items()} == published.memory
    assert published.checksums() == {name: checksum(value) for name, value in values(1).items()}
    published.close()


def test_changes_are_applied_to_a_copy_of_the_trainers_values(tmp_path: Path) -> None:
    """Also after a version that the engine received and did not serve."""
    published = Published("delta", tmp_path)
    for step, applied in enumerate((True, False, True, True)):
        for value in published.trained.values():
            value.data.flatten()[step::97] += 0.25
        before = {name: tensor.clone() for name, tensor in published.tensors.items()}
        sent = published.publish(applied)
        assert 0 < sent["changed"] < 0.05
        wanted = loaded({n: value.detach().to(DEVICE) for n, value in published.trained.items()}) if applied else before
        assert (
            same(published.tensors, wanted)
            and {n: t.data_ptr() for n, t in published.tensors.items()} == published.memory
        )
    assert published.checksums() == {name: checksum(value.detach()) for name, value in published.trained.items()}
    published.close()


@pytest.mark.parametrize(
    ("tensor", "parameter"),
    [
        ("attn.qkv_proj.weight", "attn.q_proj.weight"),
        ("attn.qkv_proj.weight_scale", "attn.q_proj.weight"),
        ("mlp.experts.w13_weight_scale", "mlp.experts.gate_up_proj"),
        ("norm.weight", "norm.weight"),
    ],
)
@pytest.mark.parametrize("link", ["nccl", "handover", "delta"])
def test_checksums_show_which_parameter_is_served_with_a_flipped_bit(
    tensor: str, parameter: str, link: str, tmp_path: Path
) -> None:
    published = Published(link, tmp_path)
    served = published.tensors[tensor]
    memory = torch.as_strided(served.view(torch.uint8), (1,), (1,))
    memory ^= 1
    differs = {name for name, found in published.checksums().items() if found != checksum(values(1)[name])}
    assert differs == {parameter}
    published.close()


def test_checksums_show_values_that_changed_on_their_way(tmp_path: Path) -> None:
    """Rows that are quantized alike still have the checksum of the received values."""
    published = Published("shared", tmp_path)
    received = published.weights._received["attn.o_proj.weight"]
    received.view(torch.int16)[3, 5] ^= 1
    quantized = [bits(t) for t in quantize(received.to(DEVICE))]
    for name, new in zip(("attn.o_proj.weight", "attn.o_proj.weight_scale"), quantized, strict=True):
        published.tensors[name].copy_(new.view(published.tensors[name].dtype).view(published.tensors[name].shape))
    assert published.checksums()["attn.o_proj.weight"] != checksum(values(1)["attn.o_proj.weight"])
    published.close()


def test_each_expert_of_a_file_has_its_rows_and_scales() -> None:
    held = loaded(values(0))
    shards = map_parameters(Served(held), SHAPES, 0, 1)
    for number, expert in enumerate(values(0)["mlp.experts.gate_up_proj"]):
        for kind, part in zip(("gate", "up"), expert.chunk(2), strict=True):
            shard = expert_shard(f"mlp.experts.{number}.{kind}_proj.weight", shards)
            assert shard and shard.holds(part) and not shard.holds(part.flip(0))


def test_ranks_hold_rows_and_columns_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a vLLM whose ranks compute scales alone; another one is refused."""
    whole, size = values(0), 2
    shapes = {name: shape for name, shape in SHAPES.items() if "experts" not in name}
    sums = dict.fromkeys(shapes, 0)
    for rank in range(size):
        parts = {name: value.chunk(size)[rank] for name, value in whole.items() if name[5:6] in "qkv"}
        parts["attn.o_proj.weight"] = whole["attn.o_proj.weight"].chunk(size, dim=1)[rank]
        held = loaded({**whole, **parts})
        monkeypatch.setattr(quantized_weights, "scales_span_ranks", lambda: False)
        shards = map_parameters(Served(held), shapes, rank, size)
        assert all(shard.holds(whole[name][shard.index]) for name, shard in shards.items())
        for name, shard in shards.items():
            part = whole[name][shard.index]
            sums[name] += shard.checksum(lambda part=part: part) if shard.counted else 0
        monkeypatch.setattr(quantized_weights, "scales_span_ranks", lambda: True)
        with pytest.raises(
            InvalidInput, match=r"attn.o_proj.weight is split by columns .* generator.tensor_parallel_size = 1$"
        ):
            map_parameters(Served(held), shapes, rank, size)
    assert {n: s % 2**64 for n, s in sums.items()} == {n: checksum(whole[n]) for n in shapes}


@pytest.mark.parametrize(("scale", "said"), [(None, "no scale"), (torch.ones(1), r"a scale of shape \[1\]")])
def test_other_quantizations_are_refused_by_name(scale: Tensor | None, said: str) -> None:
    held = loaded(values(0))
    del held["attn.o_proj.weight_scale"]
    held |= {"attn.o_proj.weight_scale": scale} if scale is not None else {}
    wanted = rf'^vLLM has {said} for the FP8 values .* of attn.o_proj.weight, .* quantization = "fp8_per_channel"'
    with pytest.raises(InvalidInput, match=wanted):
        map_parameters(Served(held), SHAPES, 0, 1)


@pytest.mark.parametrize("link", ["single_copy", "nccl_direct"])
def test_links_that_write_the_trainers_values_are_refused(link: str) -> None:
    weights = values(0)
    shards = map_parameters(Served(loaded(weights)), SHAPES, 0, 1)
    with pytest.raises(
        InvalidInput, match=rf'^sync.link = "{link}" writes .* use "nccl", "shared", "delta" or "checkpoint"$'
    ):
        validate_link(link, shards)
    validate_link(link, {"norm.weight": shards["norm.weight"]})

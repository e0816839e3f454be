"""The table of families in docs/models.md: each row is trained, packed, served and published to from a tiny model."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.config.schema import LoraConfig
from slipstream.controller.launch import Cluster
from slipstream.errors import InvalidInput
from slipstream.generators.base import GenerationError
from slipstream.generators.torch.engine import MODEL_TYPES, Engine, validate_supported
from slipstream.generators.vllm.weight_mapping import map_parameters
from slipstream.model.loading import add_adapters
from slipstream.model.packing import group_by_prefix, pack
from slipstream.model.policy import PackedPolicy
from slipstream.rollout import Sampling
from slipstream.runtime.worker import WorkerError
from tests.conftest import build_tokenizer
from tests.families import FAMILIES, Family, table
from tests.generators.test_engine import assert_true, drain, requests
from tests.generators.vllm.test_engine import assert_drawn_by, config_of
from tests.model.test_policy import samples
from tests.processes import published_versions

CPU = torch.device("cpu")
FOR_VLLM = {"head_dim": 32, "hidden_size": 128, "eos_token_id": 1, "pad_token_id": 0}  # head sizes of vLLM on a CPU
families = pytest.mark.parametrize("name", FAMILIES)


def plain_logprobs(model: Any, every: list[Any], order: Any) -> torch.Tensor:
    """Log-probabilities of the sampled tokens by the model's own forward pass, one sequence at a time."""
    found = []
    for sample in (every[i] for i in order):
        logits = model(torch.tensor([sample.token_ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
        own = logits.gather(-1, torch.tensor(sample.token_ids[1:])[:, None])[:, 0]
        found.append(own[len(sample.prompt_ids) - 1 :])
    return torch.cat(found)


@families
@pytest.mark.parametrize("adapters", [False, True])
def test_packed_log_probabilities_and_gradients_are_those_of_a_plain_forward_pass(name: str, adapters: bool) -> None:
    """With adapters the head is frozen, and its gradient is computed in the forward pass."""
    model = FAMILIES[name].build()
    if adapters:
        model = add_adapters(model, LoraConfig(rank=2))
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.05)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    policy, every = PackedPolicy(model), samples()
    assert policy.packs is FAMILIES[name].packs
    micro = pack(every, group_by_prefix(every, 10_000, policy.packs), CPU)
    results = (policy(micro)[0], plain_logprobs(plain, every, micro.order))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    for logprobs in results:
        logprobs.square().sum().backward()
    named = [(n, p, q) for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True)]
    assert all((p.grad is None) == (q.grad is None) for _, p, q in named) and any(q.grad is not None for *_, q in named)
    for _, p, q in named:
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, atol=1e-5 * q.grad.abs().max().item() + 1e-6, rtol=1e-4)


@families
def test_the_embedded_engine_is_exact_or_refuses_the_family(name: str) -> None:
    model = FAMILIES[name].build()
    if not FAMILIES[name].embedded:
        with pytest.raises(GenerationError, match=rf"model type '{model.config.model_type}'; set generator.engine"):
            validate_supported(model.config)
        return
    engine, asked = Engine(copy.deepcopy(model), slots=5), requests(12)
    for key, (prompt, sampling) in enumerate(asked):
        engine.submit(key, prompt, sampling)
    for key, completion in drain(engine).items():
        assert_true(completion, asked[key][1], {0: model})


def save(family: Family, path: Path) -> None:
    family.build(**FOR_VLLM).save_pretrained(path)
    build_tokenizer().save_pretrained(path)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Qwen3"])  # of tests/generators/vllm
def test_vllm_serves_each_version_exactly(name: str, tmp_path: Path) -> None:
    family, path = FAMILIES[name], tmp_path / "model"
    save(family, path)
    restart = ["--sync.link=checkpoint", "--sync.restart=true", "--sync.in_flight=retry"]
    flags = restart if family.vllm == "restart" else ["--sync.verify=full"]

    async def main() -> None:
        pools = await Cluster.start(config_of(path, "--algorithm.replay_routing=false", *flags), tmp_path)
        draw = pools.generator.generate
        try:
            if family.vllm in ("GPU", "renamed"):
                with pytest.raises(WorkerError, match=r"can't be updated in place; set sync\.link"):
                    await pools.link.connect(0)
                return
            async for version, stored in published_versions(pools, tmp_path):
                for c in await asyncio.gather(*(draw([5, 6, 7 + i], Sampling(max_tokens=24)) for i in range(6))):
                    assert c.versions == (version, version)
                    assert_drawn_by(stored, c)
        finally:
            await pools.close()

    asyncio.run(main())


def test_the_documented_table_is_that_of_the_tests() -> None:
    assert table() in Path("docs/models.md").read_text()
    assert {family.build().config.model_type for family in FAMILIES.values() if family.embedded} == {*MODEL_TYPES}


def test_a_fused_projection_is_not_cut_by_rows_for_several_gpus() -> None:
    """Rank 1's rows of query, key and value are no consecutive rows of Phi-3's parameter."""
    name, served = "model.layers.0.self_attn.qkv_proj.weight", torch.zeros(32, 32)
    model = SimpleNamespace(
        named_parameters=lambda: [(name, torch.nn.Parameter(served))], packed_modules_mapping={"qkv_proj": ["qkv_proj"]}
    )
    assert map_parameters(model, {name: [32, 32]}, 0, 1)[name].tensor.shape == (32, 32)
    with pytest.raises(InvalidInput, match=rf"{name} is fused .* generator.tensor_parallel_size = 1"):
        map_parameters(model, {name: [64, 32]}, 0, 2)

"""vLLM on prompts with images: log-probabilities are the trainer's, before and after a publish."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.config.schema import LoraConfig, ModelConfig
from slipstream.controller.launch import Cluster
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.model.images import image_processor
from slipstream.model.loading import load_model
from slipstream.model.packing import pack
from slipstream.model.policy import PackedPolicy
from slipstream.model.tokenizer import load_tokenizer
from slipstream.rollout import Completion, Sampling, build_samples
from tests.generators.vllm.test_engine import BOUND, config_of
from tests.processes import changing, published_versions
from tests.vision import KINDS, png, question, save_vision_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(240),
]
SIZES = ((20, 24), (40, 16), (16, 64))


def differences(path: Path, completions: list[Completion]) -> list[torch.Tensor]:
    """How far recorded log-probabilities are from those of a packed forward pass of the model at `path`."""
    model = load_model(ModelConfig(path=str(path)), LoraConfig(), device=torch.device("cpu"), dtype=torch.float32)
    samples = [sample for c in completions for sample in build_samples([c])]
    processor = image_processor(str(path))
    micro = pack(samples, [[i] for i in range(len(samples))], torch.device("cpu"), processor=processor)
    with torch.no_grad():
        logprobs, _ = PackedPolicy(model.eval())(micro)
    found = (logprobs - micro.behaviour).abs()
    return list(found.split([len(c.token_ids) for c in completions]))


@pytest.mark.parametrize("kind", KINDS)
def test_each_version_is_served_exactly(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_vision_model(path, kind)
    chat = ChatTokenizer(load_tokenizer(str(path)), 256, ModelConfig(path=str(path)))
    prompts = [question(*(png(*size, i, orientation=1 + i) for size in SIZES[: i % 3])) for i in range(6)]

    async def main() -> None:
        pools = await Cluster.start(config_of(path, "--sync.verify=full"), tmp_path)

        async def drawn() -> list[Completion]:
            asked = [(chat.encode(p), Sampling(max_tokens=24, images=chat.images(p))) for p in prompts]
            found = await asyncio.gather(*(pools.generator.generate(*each) for each in asked))
            return [replace(c, images=sampling.images) for c, (_, sampling) in zip(found, asked, strict=True)]

        try:
            async for version, stored in published_versions(pools, tmp_path):
                completions = await drawn()
                assert {c.versions for c in completions} == {(version, version)}
                assert max(map(torch.max, differences(stored, completions))) < BOUND
        finally:
            await pools.close()

    asyncio.run(main())


@pytest.mark.parametrize("rank", [0, 4])
def test_sequences_with_images_are_exact_across_a_swap(rank: int, tmp_path: Path) -> None:
    """With adapters a sequence keeps the version that it started with."""
    path = tmp_path / "model"
    save_vision_model(path, "Qwen2_5_VL")
    chat = ChatTokenizer(load_tokenizer(str(path)), 256, ModelConfig(path=str(path)))
    prompts = [question(*(png(*size, seed=i) for size in SIZES[: i % 3])) for i in range(6)]
    asked = [(chat.encode(p), Sampling(max_tokens=150, ignore_eos=True, images=chat.images(p))) for p in prompts]

    async def main() -> None:
        flags = [f"--lora.rank={rank}", f"--sync.in_flight={'continue' if rank else 'recompute'}"]
        pools = await Cluster.start(config_of(path, *flags), tmp_path)
        trainer, pool = changing(pools), pools.generator
        try:
            await pools.link.connect(0)
            await trainer.store(tmp_path / "0")
            await trainer.precompute_change(1)
            running = [asyncio.create_task(pool.generate(*each)) for each in asked]
            while await pool.longest_in_flight() < 10:
                await asyncio.sleep(0.001)
            await trainer.change(1)
            await pools.link.publish(1)
            await trainer.store(tmp_path / "1")
            later = await asyncio.gather(*(pool.generate(*each) for each in asked))
            completions = [*await asyncio.gather(*running), *later]
        finally:
            await pools.close()
        completions = [replace(c, images=s.images) for c, (_, s) in zip(completions, asked * 2, strict=True)]
        assert {c.versions for c in completions[6:]} == {(1, 1)}
        assert {c.versions for c in completions[:6]} == {(0, 0) if rank else (0, 1)}
        by_version = [differences(tmp_path / str(version), completions) for version in (0, 1)]
        for index, completion in enumerate(completions):
            for span in completion.spans:
                assert by_version[span.version][index][span.start : span.end].max() < BOUND

    asyncio.run(main())

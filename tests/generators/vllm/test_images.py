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
from slipstream.model.packing import group_by_prefix, pack
from slipstream.model.policy import PackedPolicy
from slipstream.model.tokenizer import load_tokenizer
from slipstream.rollout import Completion, Sampling, build_samples
from tests.generators.vllm.test_engine import BOUND, config_of
from tests.processes import changing
from tests.vision import KINDS, png, question, save_vision_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(240),
]
SIZES = ((20, 24), (40, 16), (16, 64))


def assert_drawn_by(path: Path, completions: list[Completion]) -> None:
    """All log-probabilities are those of a packed forward pass of the model at `path`."""
    model = load_model(ModelConfig(path=str(path)), LoraConfig(), device=torch.device("cpu"), dtype=torch.float32)
    samples = [sample for c in completions for sample in build_samples([c])]
    processor = image_processor(str(path))
    groups = group_by_prefix(samples, 10_000)
    micro = pack(samples, groups, torch.device("cpu"), processor=processor)
    with torch.no_grad():
        logprobs, _ = PackedPolicy(model.eval())(micro)
    assert (logprobs - micro.behaviour).abs().max() < BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_each_version_is_served_exactly(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_vision_model(path, kind)
    chat = ChatTokenizer(load_tokenizer(str(path)), 256, ModelConfig(path=str(path)))
    prompts = [question(*(png(*size, seed=i) for size in SIZES[: i % 3])) for i in range(6)]

    async def main() -> None:
        pools = await Cluster.start(config_of(path, "--sync.verify=full"), tmp_path)
        trainer = changing(pools)

        async def drawn() -> list[Completion]:
            asked = [(chat.encode(p), Sampling(max_tokens=24, images=chat.images(p))) for p in prompts]
            found = await asyncio.gather(*(pools.generator.generate(*each) for each in asked))
            return [replace(c, images=sampling.images) for c, (_, sampling) in zip(found, asked, strict=True)]

        try:
            await pools.link.connect(0)
            for version in (0, 1):
                if version:
                    await trainer.change(1)
                    await pools.link.publish(1)
                await trainer.store(tmp_path / str(version))
                completions = await drawn()
                assert {c.versions for c in completions} == {(version, version)}
                assert_drawn_by(tmp_path / str(version), completions)
        finally:
            await pools.close()

    asyncio.run(main())

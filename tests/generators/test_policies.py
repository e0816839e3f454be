"""Several adapters in the embedded engine: each request samples from its own policy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.config.algorithm import PolicyConfig
from slipstream.config.schema import LoraConfig, ModelConfig
from slipstream.generators.base import GenerationError
from slipstream.generators.torch.engine import Engine
from slipstream.generators.torch.policy_engines import PolicyEngines
from slipstream.model.loading import load_model
from slipstream.rollout import Sampling
from tests.conftest import build_model, random_prompts
from tests.generators.test_engine import BOUND, drain

POLICIES = ("left", "right")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_requests_of_several_policies_sample_as_in_engines_of_their_own(tmp_path: Path, family: str) -> None:
    build_model(family, eos_token_id=1, pad_token_id=0).save_pretrained(tmp_path)
    model = load_model(
        ModelConfig(path=str(tmp_path)), LoraConfig(rank=4), device=torch.device("cpu"), dtype=torch.float32,
        policies=[PolicyConfig(name=name) for name in POLICIES],
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    own = {}
    for policy in POLICIES:  # PEFT merges the adapter of one policy into weights
        merged = copy.deepcopy(model)
        merged.set_adapter(f"policy-{policy}")
        own[policy] = Engine(merged.merge_and_unload(), slots=4)
    own[""] = Engine(AutoModelForCausalLM.from_pretrained(tmp_path), slots=4)

    engine, expected, same = Engine(model.get_base_model(), slots=4, policies=POLICIES), {}, 0
    for number, prompt in enumerate(random_prompts(4, longest=9)):
        for policy, alone in own.items():  # of one prompt by all, which share no keys and values
            for target, name in ((engine, policy), (alone, "")):
                target.submit((number, policy), prompt, Sampling(max_tokens=8, seed=number, policy=name))
    for alone in own.values():
        expected |= drain(alone)
    for key, completion in drain(engine).items():
        assert completion.token_ids == expected[key].token_ids and completion.policy == key[1]
        assert completion.logprobs == pytest.approx(expected[key].logprobs, abs=BOUND)
        same += completion.token_ids == expected[key[0], ""].token_ids
    assert same < 8, "the adapters have no effect"


def test_engines_of_several_models_sample_swap_and_count_as_each_alone() -> None:
    def engines() -> list[Engine]:
        models = build_model(seed=1), build_model(seed=2, num_hidden_layers=2)
        return [Engine(model, slots=2, policies=[name]) for model, name in zip(models, POLICIES, strict=True)]

    def play(*served: Any) -> dict[Any, Any]:
        for number, prompt in enumerate(random_prompts(3, longest=9)):
            for i, policy in enumerate(POLICIES):
                served[i % len(served)].submit(
                    (number, policy), prompt, Sampling(max_tokens=9, seed=number, policy=policy)
                )
        results = {}
        for one in served:
            for _ in range(4):
                results |= dict(one.step())
            one.swap(7, lambda: None, "recompute")
            results |= drain(one)
        return results

    together, alone = PolicyEngines(engines()), engines()
    found, expected = play(together), play(*alone)
    assert len(found) == 6 and {key: c.token_ids for key, c in found.items()} == {
        key: c.token_ids for key, c in expected.items()
    }
    assert all(c.policy == key[1] and c.versions == expected[key].versions for key, c in found.items())
    assert {v for c in found.values() for v in c.versions} == {0, 7} and together.version == 7
    assert together.tokens_generated == sum(one.tokens_generated for one in alone) == 6 * 9
    with pytest.raises(GenerationError, match="serves no policy ''"):
        together.submit(0, (3, 4), Sampling())
    together.submit(0, (3, 4), Sampling(policy="right"))
    together.abort(0)
    assert not together.busy


def test_an_engine_refuses_a_policy_that_it_does_not_serve() -> None:
    with pytest.raises(GenerationError, match="serves no policy 'other'"):
        Engine(build_model()).submit(0, (3, 4), Sampling(policy="other"))

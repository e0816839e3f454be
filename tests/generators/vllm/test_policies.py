"""Real vLLM on a CPU serves the adapters of several policies at once, and each version of all of them."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config.loading import validate
from slipstream.generators.base import GenerationError
from slipstream.model.inspection import policy_parameters, trained_parameters
from slipstream.model.loading import load_model
from slipstream.rollout import Completion, Sampling
from slipstream.sync.checksum import checksum

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(240),
]
POLICIES = ("left", "right")
BOUND = 1e-4


def drew(policy: Any, completion: Completion) -> bool:
    """Whether the model sampled this completion."""
    ids = torch.tensor([completion.prompt_ids + completion.token_ids[:-1]])
    with torch.no_grad():
        logits = policy(ids).logits[0, len(completion.prompt_ids) - 1 :]
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return bool((wanted - torch.tensor(completion.logprobs)).abs().max() < BOUND)


def test_each_request_samples_from_its_policy_at_every_version(patient: Path, tmp_path: Path) -> None:
    from slipstream.generators.vllm.engine import VllmEngine
    from slipstream.sync.adapters import AdapterSender

    config = validate({
        "model": {"path": str(patient)}, "environment": {"name": "addition"}, "lora": {"rank": 4},
        "policies": [{"name": name} for name in POLICIES], "sync": {"link": "lora"},
        "generator": {"engine": "vllm", "max_num_seqs": 8},
    })  # fmt: skip
    load = lambda lora: load_model(config.model, lora, device=torch.device("cpu"), dtype=torch.float32)  # noqa: E731
    models = {name: load(config.lora) for name in POLICIES}
    base = load(config.lora.model_copy(update={"rank": 0}))
    each = {policy: policy_parameters(trained_parameters(model), policy) for policy, model in models.items()}
    parameters = each["left"] | each["right"]
    engine, sender = VllmEngine(config), AdapterSender(parameters, config, tmp_path, 1)
    weights: Any = engine.open_weights("lora", sender.connection_info(), 1)
    slots = engine._llm.vllm_config.lora_config.max_loras - 1  # the last one stays empty

    def publish(version: int) -> None:
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.copy_(0.3 * torch.randn_like(parameter))
        handle = sender.stage(version)
        weights.prepare(handle)
        while not weights.prepared():
            time.sleep(0.001)
        engine.swap(version, weights.apply)
        sender.release(handle)

    for version in range(slots + 1):  # each slot gets adapters of both
        publish(version)
        weights.start_checksums(list(parameters))
        while (found := weights.checksums()) is None:
            time.sleep(0.001)
        assert found == {name: checksum(parameter.detach()) for name, parameter in parameters.items()}
        for policy in (*POLICIES, ""):  # of one prompt, whose keys and values they don't share
            engine.submit(policy, [5, 6, 7, 8] * 5, Sampling(max_tokens=12, policy=policy))
        completions: dict[Any, Completion] = {}
        while engine.busy:
            completions.update(engine.step())
        for policy, model in (*models.items(), ("", base)):
            completion = completions[policy]
            assert (completion.policy, completion.versions) == (policy, (version, version))
            assert [drew(other, completion) for other in (model, *models.values(), base)].count(True) == 2, policy
            assert drew(model, completion)
    with pytest.raises(GenerationError, match="serves no policy 'other'"):
        engine.submit("other", [5, 6], Sampling(policy="other"))

    most = slots - len(POLICIES)  # adapters in use while a version loads
    for version in range(slots + 1, 2 * slots):  # a sequence of each policy stays on each version
        for policy in POLICIES:
            engine.submit((policy, version), [5, 6, 7], Sampling(max_tokens=100, policy=policy))
        for _ in range(2):
            assert not engine.step()
        publish(version)
        assert len({r.adapter for r in engine._requests.values()} | weights._current_ids) <= most
    assert engine.tokens_discarded, "the oldest sequences have restarted"
    sender.close()

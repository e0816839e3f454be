"""The policy's log-probabilities equal those of the model's own forward pass, for each model family."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import transformers

from slipstream.model.device import current_device
from slipstream.model.packing import group_by_prefix, pack
from slipstream.model.policy import PackedPolicy
from slipstream.rollout import Completion, Sample, build_samples
from tests.conftest import COMMON, VOCABULARY

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {  # attention whose values are smaller than its keys
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 8, "kv_lora_rank": 8,
    "num_key_value_heads": 4, "head_dim": None,
}  # fmt: skip
GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MIXED = {
    "Lfm2": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 64},
    "MiniMax": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "block_size": 16,
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "Llama4": {
        "attention_chunk_size": 8, "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        "no_rope_layers": [1, 1, 0], "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64,
        "moe_layers": [1],
    },
}  # fmt: skip
ATTENTIVE = {
    "DeepseekV3": LATENT | EXPERTS | GROUPED,
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # whose routers answer in another order
    "Mistral": {"sliding_window": 5},
}


def samples(count: int = 5) -> list[Sample]:
    """Samples of which some share a prompt."""
    draw = random.Random(0)
    shared = tuple(draw.randrange(VOCABULARY) for _ in range(7))
    made: list[Sample] = []
    for number in range(count):
        own = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(4, 12)))
        drawn = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(9, 20)))
        completion = Completion(shared if number % 2 else own, drawn, (0.0,) * len(drawn), (), "stop")
        made += build_samples([completion])
    return made


@pytest.mark.parametrize(("kind", "packs"), [*((kind, False) for kind in MIXED), *((kind, True) for kind in ATTENTIVE)])
def test_packed_sequences_of_any_model_family_are_independent(kind: str, packs: bool) -> None:
    text = "Text" if kind == "Llama4" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**(COMMON | (MIXED | ATTENTIVE)[kind]))
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # some are left as the memory was
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("eager")
    device = current_device()
    policy, every = PackedPolicy(model.to(device)), samples()
    assert policy.packs is packs
    micro = pack(every, group_by_prefix(every, 10_000, policy.packs), device)
    with torch.no_grad():
        found = policy(micro)[0].cpu().split([len(every[i].sampled_positions) for i in micro.order])
        for got, sample in zip(found, (every[i] for i in micro.order), strict=True):
            logits = alone(torch.tensor([sample.token_ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
            wanted = logits.gather(-1, torch.tensor(sample.token_ids[1:])[:, None])[:, 0]
            torch.testing.assert_close(got, wanted[len(sample.prompt_ids) - 1 :], atol=1e-4, rtol=1e-4)


def test_a_model_whose_head_is_zero_has_equal_log_probabilities() -> None:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    PackedPolicy(model)  # tests whether the logits are the head's outputs

"""ExpertRouting replay: each token uses the experts recorded for it, and the gradient flows through them."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from slipstream.algorithms.advantages import make_batch
from slipstream.config.schema import ConfigError
from slipstream.generators.torch.engine import Engine
from slipstream.model.inspection import find_routers, has_experts
from slipstream.model.moe_routing import ExpertRouting
from slipstream.model.packing import group_by_prefix, pack, plan, prefix_group_length
from slipstream.rollout import Batch, Completion, Group, Rollout, Sampling, VersionSpan, build_samples
from tests.conftest import COMMON, random_prompts, save_model
from tests.generators.test_engine import drain
from tests.trainers.test_trainer import gradient, make_trainer, reference_gradient

LAYERS, EXPERTS, CHOSEN, VOCABULARY = 3, 4, 2, 38
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    save_model(path, family="qwen3_moe", vocab_size=VOCABULARY, norm_topk_prob=True)
    return path


def completion_of(prompt: Any, tokens: Any, experts: Any) -> Completion:
    prompt, tokens = tuple(prompt), tuple(tokens)
    rng = random.Random(str((prompt, tokens)))
    behaviour = tuple(-rng.uniform(1.0, 6.0) for _ in tokens)
    spans = (VersionSpan(0, 0, len(tokens)),)
    return Completion(prompt, tokens, behaviour, spans, "stop", experts=experts(prompt + tokens))


def chosen_for(ids: tuple[int, ...]) -> Any:
    """Random experts for each token, equal for equal prefixes."""
    rngs = [random.Random(str(ids[: at + 1])) for at in range(len(ids) - 1)]
    return np.array([[rng.sample(range(EXPERTS), CHOSEN) for _ in range(LAYERS)] for rng in rngs], dtype=np.uint8)


def batch_of(experts: Any, groups: int = 4, seed: int = 0) -> Batch:
    """Groups whose rollouts share a prompt; some have a second turn that continues the first."""
    rng = random.Random(seed)

    def some(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, most)))

    made = []
    for entry in range(groups):
        prompt, rollouts = some(9), []
        for _ in range(rng.randint(2, 4)):
            first = completion_of(prompt, some(12), experts)
            turns = [first]
            if rng.random() < 0.4:
                turns.append(completion_of((*first.prompt_ids, *first.token_ids, *some(4)), some(5), experts))
            rollouts.append(Rollout(tuple(turns), rng.random()))
        made.append(Group(entry, str(entry), tuple(rollouts)))
    return make_batch(made)


def routed_by_hand(model: Any) -> Any:
    """The model with routers that choose `chosen_for`, with softmax weights over the chosen experts."""
    sequence: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _m, args, options: sequence.__setitem__(slice(None), [tuple(args[0][0].tolist())]), with_kwargs=True
    )
    for layer, router in enumerate(m for m in model.modules() if type(m).__name__.endswith("TopKRouter")):
        router.number = layer

        def choose(router: Any, inputs: Any, _: Any) -> Any:
            logits = inputs[0] @ router.weight.T
            experts = torch.from_numpy(chosen_for((*sequence[0], 0))[:, router.number].astype(np.int64))
            return logits, logits.gather(-1, experts).softmax(-1), experts

        router.register_forward_hook(choose)
    return model


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("budget", [8, 64, 8192])
def test_replay_gradient_equals_that_of_forced_experts(mixture: Path, budget: int, checkpointing: str) -> None:
    """Gradients, also of routers, equal those of a float64 model with the same experts, for any packing."""
    trainer = make_trainer(
        mixture, f"--trainer.tokens_per_microbatch={budget}", "--trainer.gradient_clip=0",
        f"--trainer.activation_checkpointing={checkpointing}", "--algorithm.kl_coef=0.3",
    )  # fmt: skip
    batch = batch_of(chosen_for)
    plain = AutoModelForCausalLM.from_pretrained(mixture, experts_implementation="eager", dtype=torch.float32)
    by_hand = routed_by_hand(plain)
    wanted = reference_gradient(by_hand, batch, low=0.2, high=0.2, truncate=3.0, kl=0.3)
    got = gradient(trainer, batch)
    assert got.keys() == wanted.keys()
    for name, reference in wanted.items():
        assert (got[name] - reference).abs().max() <= 1e-5 * reference.abs().max(), name
    largest = max(g.abs().max() for g in wanted.values())
    assert max(got[n].abs().max() for n in got if n.endswith("gate.weight")) > 1e-3 * largest


def test_replay_changes_log_probabilities(mixture: Path) -> None:
    batch = batch_of(chosen_for)
    bare = dataclasses.replace(batch, groups=tuple(
        dataclasses.replace(g, rollouts=tuple(
            dataclasses.replace(r, completions=tuple(dataclasses.replace(c, experts=None) for c in r.completions))
            for r in g.rollouts)) for g in batch.groups))  # fmt: skip
    with_replay, without = (make_trainer(mixture).step(b) for b in (batch, bare))
    assert abs(with_replay.mismatch_kl - without.mismatch_kl) > 1e-3
    assert with_replay.expert_changed_fraction is not None and 0.2 < with_replay.expert_changed_fraction < 0.8
    assert without.expert_changed_fraction == 0


@given(st.integers(0, 10**6), st.integers(1, 60), st.booleans())
def test_every_packed_token_has_the_experts_recorded_for_it(seed: int, budget: int, share: bool) -> None:
    """Experts encode their token and position, so that a mismatch is visible; the first turn of a
    token records them.
    """

    def tell(ids: tuple[int, ...]) -> Any:
        rows = [(token, at) for at, token in enumerate(ids[:-1])]
        return np.array([[row] * LAYERS for row in rows], dtype=np.int16).reshape(-1, LAYERS, 2)

    samples = batch_of(tell, groups=3, seed=seed).samples()
    samples = [s if i % 5 else dataclasses.replace(s, experts=None) for i, s in enumerate(samples)]
    prefix_groups = group_by_prefix(samples, budget, share=share)
    assert not share or budget < 30 or any(len(b) > 1 for b in prefix_groups)
    for items in plan([prefix_group_length(samples, b) for b in prefix_groups], budget)[0]:
        if not items or not any(samples[i].experts for b in items for i in prefix_groups[b]):
            continue
        micro = pack(samples, [prefix_groups[i] for i in items], CPU)
        assert micro.experts is not None and micro.experts.shape[1:] == (LAYERS, 2)
        known = micro.experts[:, 0, 0] >= 0
        for layer in range(LAYERS):
            assert torch.equal(micro.experts[known, layer, 0].long(), micro.input_ids[known])
            assert torch.equal(micro.experts[known, layer, 1].long(), micro.positions[known])
        bare = sum(
            prefix_group_length(samples, prefix_groups[b]) for b in items if not samples[prefix_groups[b][0]].experts
        )
        assert (~known).sum() == bare


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=5))
def test_a_continued_turn_keeps_the_experts_of_earlier_turns(turns: list[tuple[int, int]]) -> None:
    ids, completions, wanted = (7,), [], []
    for turn, (between, drawn) in enumerate(turns):
        prompt = ids + (5,) * between
        ids = prompt + (9,) * drawn
        wanted += [turn] * (len(ids) - 1 - len(wanted))
        completions.append(completion_of(prompt, ids[len(prompt) :], lambda i, t=turn: np.full((len(i) - 1, 1, 1), t)))
    (sample,) = build_samples(completions)
    assert sample.experts is not None and np.concatenate(sample.experts).ravel().tolist() == wanted


def test_trainer_and_engine_agree_with_replayed_experts(mixture: Path) -> None:
    """From engine to trainer, with shared prompts, late sequences and moved cache slots."""
    trainer = make_trainer(mixture, "--trainer.tokens_per_microbatch=64")
    engine = Engine(make_trainer(mixture).model, slots=3)
    prompts = [[t % VOCABULARY for t in p] for p in random_prompts(4, longest=9)]
    for key in range(12):
        engine.submit(key, prompts[key % 4], Sampling(max_tokens=3 + key, seed=key, record_routing=True))
    completions = list(drain(engine).values())
    assert {c.experts.dtype for c in completions} == {np.dtype(np.uint8)}
    for completion, scored in zip(completions, trainer.score(completions), strict=True):
        assert scored == pytest.approx(completion.logprobs, abs=1e-5)
    group = Group(0, "0", tuple(Rollout((c,), float(i % 3)) for i, c in enumerate(completions)))
    stats = trainer.step(make_batch([group]))
    assert stats.mismatch_kl < 1e-8 and stats.expert_changed_fraction == 0


MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
                    "first_k_dense_replace": 1, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
                    "q_lora_rank": 8, "kv_lora_rank": 8, "num_key_value_heads": 4, "head_dim": None},
    "phimoe": {"num_local_experts": 8},
}  # fmt: skip


def build(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | {"num_experts_per_tok": 2} | MORE[kind]))
    model = AutoModelForCausalLM.from_config(config).eval()
    for router in find_routers(model).values():
        torch.nn.init.normal_(router.weight)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [k for k in MORE if k != "phimoe"])
def test_replaying_a_routers_own_choice_changes_nothing(kind: str) -> None:
    """For each router weighting, with experts for the layers with a router or for all layers."""
    model, ids = build(kind), torch.tensor([[5, 6, 7, 8, 9]])
    routing, routers = ExpertRouting(model), list(find_routers(model).values())
    with torch.no_grad():
        wanted = model(ids).logits
        routing.count_choices(5)
        chosen = torch.stack([r.chosen for r in routers], 1)  # type: ignore[arg-type]
        everywhere = torch.zeros(5, LAYERS, 2, dtype=torch.int16)
        everywhere[:, LAYERS - len(routers) :] = chosen.to(torch.int16)
        for recorded in (chosen.to(torch.int16), everywhere):
            routing.replay(recorded)
            torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-5, atol=1e-6)
        routing.replay(7 - everywhere)
        assert (model(ids).logits - wanted).abs().max() > 1e-4


@pytest.mark.filterwarnings("ignore")
def test_an_unknown_router_is_refused_by_name() -> None:
    routing = ExpertRouting(build("phimoe"))
    with pytest.raises(ConfigError, match=r"PhimoeTopKRouter.*algorithm.replay_routing = false"):
        routing.replay(torch.zeros(5, LAYERS, 2, dtype=torch.int16))
    routing.replay(None)


def test_expert_load_counts_the_replayed_experts() -> None:
    model = build("qwen3_moe")
    routing = ExpertRouting(model)
    assert set(routing.take_load().values()) == {None}
    experts = torch.tensor([[[0, 1]] * 2] * 3 + [[[0, 2]] * 2], dtype=torch.int16)  # four tokens, two layers
    routing.replay(experts)
    model(torch.tensor([[5, 6, 7, 8]]))
    routing.count_choices(4)
    routing.count_choices(4)
    routing.count_choices(0)
    own = torch.stack([r.chosen for r in find_routers(model).values()], 1)  # type: ignore[arg-type]
    changed = sum(e not in o for es, os in zip(experts.tolist(), own.tolist(), strict=True)
                  for e2, o in zip(es, os, strict=True) for e in e2)  # fmt: skip
    share = np.array([4, 3, 1]) / 8
    read = routing.take_load()
    assert read["expert_max_load"] == pytest.approx(0.5) and read["expert_idle_fraction"] == pytest.approx(5 / 8)
    assert read["expert_load_entropy"] == pytest.approx(-(share * np.log(share)).sum() / np.log(8))
    assert read["expert_changed_fraction"] == pytest.approx(changed / 16)
    assert set(routing.take_load().values()) == {None}


def test_has_experts_distinguishes_dense_models_and_mixtures(tiny: Path, mixture: Path) -> None:
    assert has_experts(str(mixture)) and not has_experts(str(tiny))
    assert not find_routers(make_trainer(tiny).model)
    assert all(a != b for a, b in pairwise(find_routers(make_trainer(mixture).model)))


@pytest.mark.filterwarnings("ignore")
def test_adapters_on_experts_train_and_serve_and_load(mixture: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    flags = ("--lora.rank=2", "--lora.experts=true", "--trainer.learning_rate=1e-2")
    trainer, fresh = make_trainer(mixture, *flags), make_trainer(mixture, *flags)
    adapters = [name for name in trainer.parameters if ".experts." in name]
    assert len(adapters) == 2 * 2 * LAYERS  # A and B of both weights of each layer's experts
    for seed in range(2):
        trainer.step(batch_of(chosen_for, seed=seed))
    assert all(not torch.equal(trainer.parameters[name], fresh.parameters[name]) for name in adapters)
    engine = Engine(fresh.model.get_base_model(), slots=4)
    with torch.no_grad():
        for name, parameter in fresh.parameters.items():
            parameter.copy_(trainer.parameters[name])
    for key in range(4):
        engine.submit(key, [3, 4, 5], Sampling(max_tokens=8, seed=key, record_routing=True))
    completions = list(drain(engine).values())
    for completion, scored in zip(completions, trainer.score(completions), strict=True):
        assert scored == pytest.approx(completion.logprobs, abs=1e-5)
    trainer.export(tmp_path / "policy")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(mixture), tmp_path / "policy").eval()
    ids = torch.tensor([completions[0].prompt_ids + completions[0].token_ids])
    with torch.no_grad():
        logprobs = loaded(ids).logits[0, 2:-1].log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(completions[0].logprobs, abs=1e-5)


def test_experts_and_routers_have_no_adapters_unless_asked_for(mixture: Path) -> None:
    names = make_trainer(mixture, "--lora.rank=2").parameters
    assert len(names) == 4 * 2 * LAYERS and all(".self_attn." in name for name in names)


def test_expert_adapters_of_a_dense_model_are_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora.experts = true, but the model has no experts"):
        make_trainer(tiny, "--lora.rank=2", "--lora.experts=true")

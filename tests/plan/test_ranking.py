"""Ranked splits: what fits, which is first, and that formula and simulation agree."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.config.schema import ConfigError
from slipstream.plan.hardware import GIB, Cluster, Rates, find_gpu
from slipstream.plan.ranking import plan, rank, simulate, simulate_slots, simulated_figures
from slipstream.plan.shapes import from_config
from slipstream.plan.splits import Problem, Split, can_shard_trainer, evaluate, splits
from slipstream.plan.workload import Delay, Lengths
from slipstream.trainers.tensor_parallel import plan_shards
from tests.plan.cases import problem, scenario, work


def test_the_first_split_is_the_fastest_and_fits() -> None:
    plans = plan(problem(), (0, 1), simulated=3)
    fitting = [found for found in plans if not found.missing]
    assert plans[0].source == "simulation" and plans[0].split.max_lag == 1
    assert plans[0].tokens_per_s == max(found.tokens_per_s for found in plans if found.source == "simulation")
    for found in fitting:
        assert found.split.gpus <= 8
        assert all(sum(parts.values()) <= 79.2 * GIB for parts in found.memory.values())
    synchronous = [found for found in fitting if found.split.max_lag == 0 and found.source == "simulation"]
    assert synchronous and synchronous[0].tokens_per_s < plans[0].tokens_per_s


def test_what_does_not_fit_says_by_how_much() -> None:
    whole = evaluate(problem(), Split("disaggregated", 1, "fsdp", 1, 7, 1, 1))
    needed = sum(whole.memory["trainer"].values())
    assert needed > 16 * 7.6e9
    assert whole.missing == f"the trainer lacks {needed / GIB - 79.2 + 1:.1f} GiB on each GPU"


@pytest.mark.parametrize("placement", [("disaggregated", 4, "fsdp", 1, 4, 1), ("colocated", 8, "fsdp", 1, 8, 1)])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("spread", [0.0, 0.6])
def test_the_formula_agrees_with_the_simulation(lag: int, spread: float, placement: Any) -> None:
    lengths = Lengths(2048, spread, 8192)
    found = evaluate(problem(work=work(lengths, groups=64, group_size=8)), Split(*placement, lag))
    formula = found.tokens_per_s
    simulate(found)
    assert found.tokens_per_s == pytest.approx(formula, rel=0.25)
    assert found.lag_mean <= lag


def test_the_formula_knows_that_a_group_waits_for_its_slowest_tools() -> None:
    waits = {"turns": 4, "tool": Delay(20.0, 1.0), "scoring": Delay(10.0, 1.0)}
    found = evaluate(
        problem(work=work(Lengths(2048), groups=64, group_size=8, **waits)),
        Split("disaggregated", 4, "fsdp", 1, 4, 1, 1),
    )
    formula = found.tokens_per_s
    simulate(found)
    assert formula / 2 < found.tokens_per_s < 1.3 * formula


def test_rates_by_formula_do_not_outrank_simulated_ones() -> None:
    """At lag 8 there are too many tokens to simulate, and the rate by formula is the highest."""
    given = problem(work=work(Lengths(8192, 0.8, 32000), groups=64, group_size=8, steps=100))
    plans = [found for found in plan(given, (1, 8), simulated=2) if not found.missing]
    sources = [found.source for found in plans]
    assert max(plans, key=lambda found: found.tokens_per_s).source == "formula"
    assert sources.index("formula") == sources.count("simulation") > 0


def test_a_shared_gpu_holds_the_sleeping_engine() -> None:
    split, given = Split("colocated", 4, "fsdp", 1, 4, 1, 1), problem(gpus=4, model="1.7B")
    fitting = 0
    for memory in range(12, 60):
        gpu = replace(given.cluster.gpu, memory=memory * GIB)
        found = evaluate(replace(given, cluster=replace(given.cluster, gpu=gpu)), split)
        used = sum(found.memory["trainer"].values()) + found.memory["engine"]["overhead"]
        assert found.missing or used <= (memory - 1) * GIB
        fitting += not found.missing
    assert 0 < fitting < 48


def test_more_engines_help_where_generation_is_slower() -> None:
    few, more = (evaluate(problem(gpus=4 + n), Split("disaggregated", 4, "fsdp", 1, n, 1, 1)) for n in (1, 2))
    assert few.trainer_busy < 0.5
    assert more.tokens_per_s > 1.5 * few.tokens_per_s


LONG_TAILS = work(Lengths(595, 0.6, 2048), groups=32, group_size=8)
COLOCATED = Split("colocated", 2, "fsdp", 1, 2, 1, 4)


def test_half_the_slots_are_chosen_where_rollouts_become_stale() -> None:
    tails = problem("1.7B", "h200", 2, work=LONG_TAILS)
    chosen, given = (simulate_slots(evaluate(replace(tails, slots=n), COLOCATED)) for n in (0, 256))
    assert (chosen.slots, given.slots) == (128, 256)
    assert chosen.stale < 0.02 < 0.1 < given.stale
    assert chosen.lag_mean < given.lag_mean and chosen.tokens_per_s > given.tokens_per_s
    # Memory, and what follows from it, is that of as many slots.
    assert chosen.memory == evaluate(replace(tails, slots=128), COLOCATED).memory


@pytest.mark.parametrize(
    "rates", [Rates(host_step_s=0.05), Rates(engine_tokens_per_s=15e3), Rates(decode_sequence_s=6e-5)]
)
def test_slots_are_not_halved_for_a_lower_rate_nor_by_measured_rates(rates: Rates) -> None:
    """Of the first, steps with half as many sequences take as long. The others hold for a run's number of sequences."""
    found = simulate_slots(evaluate(replace(problem("1.7B", "h200", 2, work=LONG_TAILS), rates=rates), COLOCATED))
    assert found.slots == 256 and found.stale > 0.02


def test_slots_are_not_halved_where_as_many_rollouts_stay_stale() -> None:
    tails = problem("1.7B", "h200", 4, work=replace(LONG_TAILS, groups=16))
    found = simulate_slots(evaluate(tails, Split("disaggregated", 2, "fsdp", 1, 2, 1, 4)))
    fewer = evaluate(replace(tails, slots=found.slots // 2), found.split)
    simulate(fewer)
    assert fewer.stale > found.stale / 2 > 0.01


def test_the_end_of_a_run_is_not_taken_for_its_speed() -> None:
    """At the end nothing is started: the last steps train on what is left, and wait for the longest completions."""
    lengths = Lengths(256, 0.6, 2048)
    short, long = (scenario(work(lengths, steps=steps), max_lag=4, slots=64) for steps in (14, 200))
    wanted = simulated_figures(long, 4).tokens_per_s
    assert simulated_figures(replace(short, continues=True), 4).tokens_per_s == pytest.approx(wanted, rel=0.05)
    assert simulated_figures(short, 4).tokens_per_s < 0.9 * wanted


def test_measured_lengths_are_cut_at_the_limit() -> None:
    lengths = Lengths(100.0, samples=(5000, 10), most=200)
    assert lengths.values == (10, 200) and lengths.longest == 200


def test_a_model_that_fits_nowhere_and_lengths_over_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"405B fits on no split of 8 x h100: .* lacks [\d,.]+ GiB"):
        rank(problem("405B"), (1,))
    with pytest.raises(ConfigError, match="context of 131,072"):
        rank(problem(work=work(Lengths(131072))), (1,))


def test_the_first_split_has_the_smallest_lag_that_is_as_fast() -> None:
    plans = plan(problem("0.6B", gpus=2, work=work(Lengths(256), groups=64)), (8, 2), simulated=3)
    assert plans[0].split.max_lag == 2
    assert plans[0].tokens_per_s >= 0.97 * max(found.tokens_per_s for found in plans[1:] if found.source != "formula")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("kv_heads", "vocabulary"), [(2, 96), (4, 96), (12, 96), (12, 94)])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_tensor_parallel_trainers_are_those_that_runs_accept(
    ranks: int, kv_heads: int, vocabulary: int, kind: str
) -> None:
    config = AutoConfig.for_model(
        kind, hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=12, head_dim=4,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=24,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        plan_shards(model, ranks)
        accepted = True
    except ConfigError:
        accepted = False
    values = config.to_dict() | ({"num_experts": 1} if kind == "qwen3" else {})
    shape = from_config(values, "tiny")
    assert can_shard_trainer(shape, ranks) == accepted
    found = splits(Problem(shape, Cluster(find_gpu("h100"), 2 * ranks), work(), Rates()), (1,))
    assert any(split.parallel == "tensor" and split.ranks == ranks for split in found) == accepted


def test_single_copy_has_an_engine_and_a_rank_on_each_gpu() -> None:
    found = [split for split in splits(problem("8B", gpus=4), (1,)) if split.placement == "single_copy"]
    assert {(split.ranks, split.parallel, split.engines, split.tp) for split in found} == {
        (4, "ddp", 4, 1),
        (4, "tensor", 1, 4),
    }


def test_single_copy_of_a_mixture_is_on_one_gpu() -> None:
    found = list(splits(problem("30B-A3B", "h200", 2), (1,)))
    assert not [split for split in found if split.placement == "single_copy"]


def test_trainers_of_a_mixture_may_split_experts_that_their_ranks_divide() -> None:
    found = {
        (split.ranks, split.expert_parallel)
        for split in splits(problem("30B-A3B"), (1,))
        if split.placement == "disaggregated" and split.parallel == "fsdp" and split.expert_parallel > 1
    }
    assert found == {(2, 2), (4, 4)}  # of 128 experts; an engine takes at least one of the 8 GPUs
    assert not any(split.expert_parallel > 1 for split in splits(problem("8B"), (1,)))


def test_colocated_trainers_have_a_rank_on_each_gpu() -> None:
    found = [split for split in splits(problem("8B", gpus=4), (1,)) if split.placement == "colocated"]
    assert {split.ranks for split in found} == {4} and {split.parallel for split in found} == {"fsdp", "ddp", "tensor"}
    assert {(split.engines, split.tp) for split in found} == {(4, 1), (2, 2), (1, 4)}


def test_engines_with_fp8_weights_hold_and_read_half_of_the_layers() -> None:
    plain = problem("8B", gpus=2)
    split = Split("disaggregated", 1, "fsdp", 1, 1, 1, 1)
    whole, fp8 = (evaluate(replace(plain, fp8_engines=on), split) for on in (False, True))
    layers = plain.shape.parameters - 2 * plain.shape.embedding
    saved = whole.memory["engine"]["weights"] - fp8.memory["engine"]["weights"]
    assert saved == pytest.approx(layers, rel=0.01)
    served = replace(plain, fp8_engines=True).served
    assert plain.shape.decode_weight_bytes(9) - served.decode_weight_bytes(9) == pytest.approx(saved)
    assert fp8.engine.fixed(8) < whole.engine.fixed(8) and fp8.trainer.memory() == whole.trainer.memory()


def test_a_kl_reference_takes_memory_and_a_forward_pass() -> None:
    split = Split("disaggregated", 4, "fsdp", 1, 4, 1, 1)
    plain, kl = (evaluate(problem(reference=reference), split) for reference in ("", "start"))
    assert kl.memory["trainer"]["reference"] == plain.problem.shape.weight_bytes / 4
    assert kl.trainer.step(1e5, 1e5) > 1.2 * plain.trainer.step(1e5, 1e5)
    adapters = problem(reference="start", work=work(Lengths(2048), groups=64, group_size=8, lora_rank=32))
    assert "reference" not in evaluate(adapters, split).memory["trainer"]


def test_a_turn_is_shorter_where_the_trainers_state_stays() -> None:
    split = Split("colocated", 2, "fsdp", 1, 2, 1, 1)
    kept, moved = (evaluate(problem("8B", gpu, 2), split).publish for gpu in ("h200", "h100"))
    assert kept.link == moved.link == "shared" and kept.hold < 1
    assert moved.hold - kept.hold == pytest.approx(2 * 8.19e9 * 12 / 2 / 45e9, rel=0.5)


def test_engines_sample_during_a_turn_where_both_fit() -> None:
    split = Split("colocated", 1, "fsdp", 1, 1, 1, 4)
    beside, turns = (evaluate(problem("1.7B", gpu, 1), split) for gpu in ("h200", "l40s"))
    assert beside.overlaps and not turns.overlaps and not turns.missing
    assert beside.scenario(2).overlaps and beside.publish.hold < 0.1 < turns.publish.hold


def test_only_engines_that_slept_recompute_keys_and_values() -> None:
    """A run without an option keeps them while the engines stay awake."""
    seconds = {
        (overlaps, how): simulated_figures(
            scenario(work(Lengths(256)), max_lag=2, placement="colocated", overlaps=overlaps, in_flight=how), 2
        ).step_s
        for overlaps in (False, True)
        for how in ("continue", "recompute")
    }
    assert seconds[False, "continue"] == seconds[False, "recompute"]
    assert seconds[True, "continue"] < seconds[True, "recompute"]


def test_a_thousand_splits_are_ranked_in_seconds() -> None:
    began = time.process_time()
    plans = rank(problem("8B", gpus=64), (0, 1, 2, 4, 8))
    assert len(plans) > 1000
    assert time.process_time() - began < 5

"""The planner's figures against measured and published ones.

    python benchmarks/plan.py [seed] [runs] [public] [speed] [--json FILE]

`seed`: a published table of the time in which one H100 samples 512 rollouts of 2K, 8K and 32K tokens, with a 7 B and a
32 B model. Its rates (6,300 and 1,200 tokens/s) do not depend on the length. `shapes` is this planner's time from the
shapes and the GPU table alone, `rate` with those rates as calibration, and `bound` the least time in which the keys and
values of the sampled tokens can be read at the full bandwidth of the data sheet.

`runs`: whole runs of this folder. `shapes` predicts from shape and GPU, `fitted` from the run's time of an optimizer
step, of a gap between two steps, and of a generated token: what is predicted is how the sides wait for each other.

`public`: series of runs that others published, calibrated on the first of each series.

`speed`: seconds on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from work import SHAPES as WORK_SHAPES
from work import conditions

from slipstream.plan.costs import EngineCost, PublishCost, TrainerCost
from slipstream.plan.engine import Request, SimulatedEngine
from slipstream.plan.hardware import Cluster, Rates, find_gpu
from slipstream.plan.ranking import rank, simulated_figures
from slipstream.plan.scenario import Figures, Scenario
from slipstream.plan.shapes import Shape, find_shape, from_config
from slipstream.plan.simulator import Simulation
from slipstream.plan.splits import Problem, Split, evaluate
from slipstream.plan.workload import Lengths, Workload

RESULTS = Path(__file__).parent / "results"
SEED_MINUTES = {"7B": (3, 11, 45), "32B": (14, 56, 222)}  # 2K, 8K, 32K tokens; "3.7 hours"
SEED_RATES = {"7B": 6300, "32B": 1200}
SEED_LENGTHS, SEED_ROLLOUTS, SEED_SLOTS = (2000, 8000, 32000), 512, 64  # slots: the default of generator.max_num_seqs
MEMORY = 0.9  # share of the GPU for the engine


def seed_table() -> list[dict[str, Any]]:
    """One entry for each cell of the table."""
    cells = []
    for model, published in SEED_MINUTES.items():
        for length, minutes in zip(SEED_LENGTHS, published, strict=True):
            shape, cluster = find_shape(model), Cluster(find_gpu("h100"), 1)
            least = SEED_ROLLOUTS * length * length / 2 * shape.kv_bytes / cluster.gpu.bandwidth
            predicted = {
                "shapes": sampling_seconds(shape, cluster, Rates(), length) / 60,
                "rate": sampling_seconds(shape, cluster, Rates(engine_tokens_per_s=SEED_RATES[model]), length) / 60,
            }
            errors = {f"{name}_error": value / minutes - 1 for name, value in predicted.items()}
            cell = {"model": model, "tokens": length, "published_min": minutes, "bound_min": least / 60}
            cells.append(cell | {f"{name}_min": value for name, value in predicted.items()} | errors)
    return cells


def sampling_seconds(shape: Shape, cluster: Cluster, rates: Rates, length: int) -> float:
    """Seconds in which one engine samples the table's rollouts after short prompts."""
    kv = (MEMORY * cluster.gpu.memory - shape.weight_bytes - 2**31) / shape.kv_bytes
    slots = SEED_ROLLOUTS if rates.engine_tokens_per_s else SEED_SLOTS
    engine = SimulatedEngine(EngineCost(shape, cluster, rates, 1), slots, kv if slots == SEED_SLOTS else 1e12)
    for _ in range(SEED_ROLLOUTS):
        engine.add(Request(None, 32, length, None, 32))
    engine.advance(0.0)
    while (at := engine.next_event()) is not None:
        engine.advance(at)
    return engine.at


# File, shape, groups, slots, split; all with prompts of 128 tokens and completions of 512, see end_to_end.py.
RUNS: tuple[tuple[str, str, int, int, Split], ...] = (
    *((f"end_to_end_{name}", "1.7B", 16, slots, Split("disaggregated", 1, "fsdp", 1, 1, 1, 4)) for name, slots in (
        ("h200x2", 256), ("h200x2_64_cores", 256), ("32_cores_h200x2", 256), ("beside_trl_h200x2", 256),
        ("slow_host_h200x2", 256), ("512_slots_h200x2", 512))),
    ("end_to_end_mixture_h200x2", "1B-mixture", 8, 256, Split("disaggregated", 1, "fsdp", 1, 1, 1, 4)),
    ("end_to_end_single_copy_tp2_h200x2", "0.6B", 8, 256, Split("single_copy", 2, "tensor", 1, 1, 2, 4)),
)  # fmt: skip


def work_shape(name: str) -> Shape:
    """The shape of a model of work.py."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    return from_config(heads | WORK_SHAPES[name], name)


def whole_runs() -> list[dict[str, Any]]:
    """Predicted and measured figures of each run."""
    found = []
    for name, shape, groups, slots, split in RUNS:
        record = json.loads((RESULTS / f"{name}.json").read_text())
        work = Workload(Lengths(128), Lengths(512), groups, 8, len(record["each"]))
        problem = Problem(work_shape(shape), Cluster(find_gpu("h200"), 2), work, Rates(), slots=slots)
        measured = {
            "step_s": record["seconds"] / record["steps"], "tokens_per_s": record["trained_tokens_per_s"],
            "lag": record["lag_mean"], "trainer": record["busy"]["trainer"], "engines": record["busy"]["generator"],
        }  # fmt: skip
        predicted = {how: predict(replace(problem, rates=rates), split, record) for how, rates in (
            ("shapes", Rates()), ("fitted", fitted(record, problem)))}  # fmt: skip
        found.append({"run": name, "measured": measured} | {
            how: compare(figures, measured) for how, figures in predicted.items()})  # fmt: skip
    return found


def predict(problem: Problem, split: Split, record: dict[str, Any]) -> Figures:
    """The measured steps of a run, after the same warm-up, whose first step compiles."""
    scenario = replace(
        evaluate(problem, split).scenario(len(record["each"])), slots=problem.slots, kv_tokens=1e9,
        first_step_s=record["each"][0]["step_seconds"],
    )  # fmt: skip
    if problem.rates.measured_decode:  # beside the trainer, which includes its slowdown
        scenario = replace(scenario, shared_slowdown=1.0)
    return simulated_figures(scenario, len(record["each"]) - record["steps"])


def fitted(record: dict[str, Any], problem: Problem) -> Rates:
    """Decoding by the tokens that were generated while the engine was busy, training and gaps by their medians."""
    decode = min(1.0, record["busy"]["generator"]) / record["generated_tokens_per_s"]
    return replace(
        problem.rates, train_fixed_s=record["step_s"], decode_fixed_s=problem.slots * decode,
        step_overhead_s=max(0.0, record["publish_and_rest_s"]),
    )  # fmt: skip


def compare(figures: Figures, measured: dict[str, float]) -> dict[str, Any]:
    """Predicted figures, their errors, and whether the busier side is the same."""
    return {
        "step_s": figures.step_s, "tokens_per_s": figures.tokens_per_s, "lag": figures.lag_mean,
        "trainer": figures.trainer_busy, "engines": figures.engines_busy,
        "rate_error": figures.tokens_per_s / measured["tokens_per_s"] - 1,
        "lag_error": figures.lag_mean - measured["lag"],
        "same_side": (figures.trainer_busy > figures.engines_busy) == (measured["trainer"] > measured["engines"]),
    }  # fmt: skip


def public_runs() -> list[dict[str, Any]]:
    """Seconds of the runs of marin#8936 and marin#8955, with the sides' times calibrated on the first of each series.

    A synchronous step is generation plus training plus the copy of weights. Which share each has was published only for
    the copies of #8955; trainer and engines are assumed to take the rest in equal parts, since nothing else is known.
    """
    series = (
        ("marin#8936, sync and async", 25, 0.0, ((0, 1653.0), (1, 1182.0))),
        ("marin#8955, max_lag 0 to 4", 100, 2100.0, ((0, 8524.0), (1, 5583.0), (2, 5093.0), (3, 4913.0), (4, 4301.0))),
    )
    found = []
    for name, updates, copies, runs in series:
        side = (runs[0][1] - copies) / updates / 2
        rows = []
        for lag, seconds in runs:
            predicted = updates * overlapped(side, copies / updates, lag)
            rows.append({"max_lag": lag, "published_s": seconds, "predicted_s": predicted})
        for row in rows:
            row["ratio_error"] = (row["predicted_s"] / rows[0]["predicted_s"]) / (row["published_s"] / runs[0][1]) - 1
        found.append({"series": name, "runs": rows})
    return found


def overlapped(side: float, copy: float, lag: int) -> float:
    """Seconds of a step whose engines and trainer take `side` seconds each, with log-normal lengths."""
    work = Workload(Lengths(100), Lengths(500, 0.5, 4000), 32, 8, 60)
    shape, cluster = find_shape("8B"), Cluster(find_gpu("h100"), 8)

    def scenario(decode: float, lag: int) -> Scenario:
        rates = Rates(decode_fixed_s=decode, train_fixed_s=side)
        parts = EngineCost(shape, cluster, rates, 1), TrainerCost(shape, cluster, rates, work)
        return Scenario(work, *parts, PublishCost("nccl", copy, copy, 0.0, 0.0), 4, 64, 1e9, lag)

    synchronous = simulated_figures(scenario(0.01, 0)).step_s - side - copy
    return simulated_figures(scenario(0.01 * side / synchronous, lag)).step_s


def speed() -> dict[str, Any]:
    """Processor seconds of a ranking by formula and of two simulations."""
    work = Workload(Lengths(512), Lengths(2048, 0.6, 8192), 64, 8, 100)
    problem = Problem(find_shape("8B"), Cluster(find_gpu("h100"), 64), work, Rates())
    began = time.process_time()
    splits = len(rank(problem, (0, 1, 2, 4, 8)))
    ranked = time.process_time() - began
    found: dict[str, Any] = {"splits": splits, "ranking_s": ranked}
    for engines, groups, steps in ((64, 64, 100), (1024, 2500, 5)):
        plan = evaluate(replace(problem, work=replace(work, groups=groups, steps=steps)),
                        Split("disaggregated", 8, "fsdp", 1, engines, 1, 2))  # fmt: skip
        simulation = Simulation(replace(plan.scenario(steps), slots=16))
        began = time.process_time()
        simulation.run()
        seconds = time.process_time() - began
        found[f"simulation_{engines}_engines"] = {
            "rollouts": groups * 8, "steps": steps, "events": simulation.processed, "seconds": seconds
        }  # fmt: skip
    return found


PARTS = {"seed": seed_table, "runs": whole_runs, "public": public_runs, "speed": speed}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="default: all")
    found.add_argument("--json", type=Path)
    return found


if __name__ == "__main__":
    options = parser().parse_args()
    record = conditions() | {name: PARTS[name]() for name in options.parts or PARTS}
    print(json.dumps(record, indent=1))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")

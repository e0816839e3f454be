"""The planner's figures against measured and published ones.

    python benchmarks/plan.py [seed] [runs] [public] [speed] [--json FILE]

`seed`: a published table of the time in which one H100 samples 512 rollouts of 2K, 8K and 32K tokens, with a 7 B and a
32 B model. Its rates (6,300 and 1,200 tokens/s) do not depend on the length. `shapes` is this planner's time from the
shapes and the GPU table alone, `rate` with those rates as calibration, and `bound` the least time in which the keys and
values of the sampled tokens can be read at the full bandwidth of the data sheet.

`runs`: whole runs of this folder. `shapes` predicts from shape and GPU, `fitted` from the run's time of an optimizer
step, of a gap between two steps, and of a token that an engine samples while it is busy: what is predicted is how the
sides wait for each other.

`public`: series of runs that others published, calibrated on the first of each series.

`speed`: seconds on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from work import SHAPES as WORK_SHAPES
from work import conditions

from slipstream.plan.costs import SHARED_SLOWDOWN, EngineCost, PublishCost, TrainerCost, turn_cost
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


ROUNDS = 3  # of a fit
BISECTIONS = 16
WHOLE_RUNS = ("end_to_end_*.json", "colocated_*.json")


def work_shape(name: str) -> Shape:
    """The shape of a model of work.py."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    return from_config(heads | WORK_SHAPES[name], name)


def whole_runs() -> list[dict[str, Any]]:
    """Predicted and measured figures of each run whose record is in this folder."""
    found = []
    for path in sorted(path for pattern in WHOLE_RUNS for path in RESULTS.glob(pattern)):
        record = json.loads(path.read_text())
        problem, split = setting(record)
        measured = {
            "step_s": record["seconds"] / record["steps"], "tokens_per_s": record["trained_tokens_per_s"],
            "lag": record["lag_mean"], "trainer": record["busy"]["trainer"], "engines": record["busy"]["generator"],
        }  # fmt: skip
        predicted = {how: predict(replace(problem, rates=rates), split, record) for how, rates in (
            ("shapes", Rates()), ("fitted", fitted(record, problem, split)))}  # fmt: skip
        found.append({"run": path.stem, "split": str(split), "measured": measured} | {
            how: compare(figures, measured) for how, figures in predicted.items()})  # fmt: skip
    return found


def setting(record: dict[str, Any]) -> tuple[Problem, Split]:
    """What a record's flags say: the work, as benchmarks/work.py draws it, and the placement."""
    given = dict(flag.removeprefix("--").split("=", 1) for flag in record["flags"])
    number = lambda name, default=1: int(given.get(name, default))  # noqa: E731
    most, spread = number("sampling.max_tokens"), float(given["environment.options"].split("spread=")[1].rstrip("}"))
    # With a spread the median is a quarter of the limit.
    mean = most / 4 * math.exp(spread**2 / 2) if spread else most
    work = Workload(
        Lengths(128), Lengths(mean, spread, most), number("loop.groups_per_step"), 8, len(record["each"]),
        lora_rank=number("lora.rank", 0),
    )  # fmt: skip
    gpu = find_gpu("h100" if "H100" in record["device"] else "h200")
    single, apart = given["sync.link"] == "single_copy", given.get("sync.placement", "disaggregated")
    split = Split(
        "single_copy" if single else apart, number("trainer.ranks"), given.get("trainer.parallel", "fsdp"), 1,
        number("generator.replicas"), number("generator.tensor_parallel_size"), number("loop.max_lag"),
    )  # fmt: skip
    slots = number("generator.max_num_seqs")
    fp8 = "fp8" in given.get("generator.engine_args.quantization", "")
    shape = work_shape(record["shape"])
    return Problem(shape, Cluster(gpu, split.gpus), work, Rates(), slots=slots, fp8_engines=fp8), split


def predict(problem: Problem, split: Split, record: dict[str, Any]) -> Figures:
    """The measured steps of a run, after the same warm-up, whose first step compiles.

    Colocated engines sleep during the first two steps. Later they sample in steps if no state has to come back then.
    """
    first = record["each"][0]  # older records have another name
    recomputes = "--sync.in_flight=recompute" in record["flags"]
    scenario = replace(
        evaluate(problem, split).scenario(len(record["each"])), slots=problem.slots, kv_tokens=1e9,
        in_flight="recompute" if recomputes else "continue",
        first_step_s=first.get("time/step_s") or first["step_seconds"], continues=True,
    )  # fmt: skip
    if split.placement == "colocated":
        scenario = replace(scenario, first_step_s=0.0, overlaps=not record["onload_s"])
    if problem.rates.measured_decode and split.placement == "colocated":
        link, overlaps = scenario.publish.link, scenario.overlaps
        publish = turn_cost(link, record["ready_s"], record["publish_and_rest_s"], overlaps)
        scenario = replace(scenario, publish=publish)
    return simulated_figures(scenario, len(record["each"]) - record["steps"])


def fitted(record: dict[str, Any], problem: Problem, split: Split) -> Rates:
    """Training and gaps by their medians; decode steps are those of the shape, times a factor by which engines sample
    as many tokens in a busy second as in the run. Colocated engines and trainer take turns in the gap."""
    engine, slots = evaluate(problem, split).engine, problem.slots
    few, many = (engine.step(count, count * problem.work.context) for count in (slots / 4, slots))
    each = (many - few) / (slots - slots / 4)
    measured = record["generated_tokens_per_s"] / (min(1.0, record["busy"]["generator"]) * split.engines)
    rest = 0.0 if split.placement == "colocated" else max(0.0, record["publish_and_rest_s"])
    slowdown = SHARED_SLOWDOWN if shares_gpus(record, split) else 1.0
    own = replace(
        problem.rates, train_fixed_s=record["step_s"] / slowdown, step_overhead_s=rest,
        decode_fixed_s=many - slots * each, decode_sequence_s=each, decode_reference=(split.tp, 0.0),
    )  # fmt: skip
    for _ in range(ROUNDS):
        steps = predict(replace(problem, rates=own), split, record).records
        first, last = steps[len(steps) - record["steps"] - 1], steps[-1]
        factor = (last.sampled - first.sampled) / (last.engine_busy - first.engine_busy) / measured
        own = replace(own, decode_fixed_s=factor * own.decode_fixed_s, decode_sequence_s=factor * own.decode_sequence_s)
    return own


def shares_gpus(record: dict[str, Any], split: Split) -> bool:
    """Whether the engines of a run sampled on the trainer's GPUs during its steps."""
    colocated = split.placement == "colocated" and not record["onload_s"]
    return bool(split.max_lag) and (colocated or split.placement == "single_copy")


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
    """Seconds of the runs of marin#8936 and marin#8955, and of a version in verl's ablation of staleness (7 B, 128 H20,
    four batches a version). The decode rate is calibrated on the first of each series.

    Of marin's runs only the copies of #8955 were published: trainer and engines are assumed to take the rest in equal
    parts. verl published the seconds of training, 4 s for the rest, and fractions of a version as bounds: 0.5 is taken
    as a lag of 1 here.
    """
    series = (
        ("marin#8936, sync and async", 25, 1, None, 0.0, ((0, 1653.0), (1, 1182.0))),
        ("marin#8955, max_lag 0 to 4", 100, 1, None, 2100.0,
         ((0, 8524.0), (1, 5583.0), (2, 5093.0), (3, 4913.0), (4, 4301.0))),
        ("verl, staleness 0 and 0.5", 1, 4, 98.77, 4.1, ((0, 231.34), (1, 150.63))),
    )  # fmt: skip
    found = []
    for name, versions, batches, trained, copies, runs in series:
        seconds, copy = runs[0][1] / versions, copies / versions
        train = (trained or (runs[0][1] - copies) / 2) / versions
        decode = decode_of(seconds, train, copy, batches)
        rows = []
        for lag, published in runs:
            predicted = versions * version_seconds(decode, train, copy, batches, lag)
            rows.append({"max_lag": lag, "published_s": published, "predicted_s": predicted})
        for row in rows:
            row["ratio_error"] = (row["predicted_s"] / rows[0]["predicted_s"]) / (row["published_s"] / runs[0][1]) - 1
        found.append({"series": name, "runs": rows})
    return found


def decode_of(seconds: float, train: float, copy: float, batches: int) -> float:
    """Seconds of a decode step with which a synchronous version takes `seconds`, by bisection."""
    low, high = 1e-4, 10.0
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        too_long = version_seconds(middle, train, copy, batches, 0) > seconds
        low, high = (low, middle) if too_long else (middle, high)
    return low


def version_seconds(decode: float, train: float, copy: float, batches: int, lag: int) -> float:
    """Seconds of a version of `batches` steps that train for `train` seconds in all, with log-normal lengths."""
    work = Workload(Lengths(100), Lengths(500, 0.5, 4000), 32, 8, 60, batches)
    shape, cluster = find_shape("8B"), Cluster(find_gpu("h100"), 8)
    rates = Rates(decode_fixed_s=decode, train_fixed_s=train / batches)
    parts = EngineCost(shape, cluster, rates, 1), TrainerCost(shape, cluster, rates, work)
    scenario = Scenario(work, *parts, PublishCost("nccl", copy, copy, 0.0, 0.0), 4, 64, 1e9, lag)
    return batches * simulated_figures(scenario).step_s


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

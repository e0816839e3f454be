"""`slipstream plan`: rank the splits of a cluster's GPUs for a run."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

from rich.console import Console

from slipstream.config.engine_args import serves_fp8
from slipstream.config.loading import load_config
from slipstream.config.lora import MAX_RANK
from slipstream.config.schema import AUTO, Config, ConfigError, TrainerConfig
from slipstream.observe.advice import SHAPE, advise, describe_figures, fit_run, on_cpu, run_config
from slipstream.observe.run_data import Run, load_run
from slipstream.plan.calibration import Fit, scenario_of_run
from slipstream.plan.choice import LAGS
from slipstream.plan.hardware import Cluster, Gpu, Rates, find_gpu
from slipstream.plan.memory import kl_reference
from slipstream.plan.ranking import plan as rank_plans
from slipstream.plan.ranking import simulated_figures
from slipstream.plan.shapes import find_shape
from slipstream.plan.splits import Plan, Problem
from slipstream.plan.workload import Delay, Lengths, Workload, read_lengths
from slipstream.tools.plan_report import as_json, print_plan, print_sweep

COPIED_BYTES, COPIES = 2**30, 20
FIT_ERROR = 0.2  # of trained tokens/s in the simulation of a run by its own rates; more is warned of
MAX_GPUS, MAX_LAG = 1024, 1000
INTEGERS = {  # bounds
    "rollouts": (1, 10**9), "group_size": (2, 10**9), "prompt": (1, 10**9), "completion": (1, 10**9),
    "max_tokens": (1, 10**9), "steps": (1, 10**9), "per_node": (1, 10**9), "turns": (1, 10**9), "seed": (0, 2**63 - 1),
    "tool_tokens": (0, 10**9), "lora_rank": (0, MAX_RANK),
}  # fmt: skip
NUMBERS = {
    "spread": (0, 3), "prompt_spread": (0, 3), "tool_seconds": (0, 86_400), "scoring_seconds": (0, 86_400),
    "link": (1e-3, 1e6), "network": (1e-3, 1e9), "engine_rate": (1e-3, 1e9), "price": (0, 1e9),
}  # fmt: skip
# Of the data sheet's rates: 808 of 989 TFLOP/s on an H200 (tflops / utilisation in trainer_h200.json); a usual copy.
MATMUL_SHARE, COPY_SHARE = 0.82, 0.9
DEFAULT_PROMPT, DEFAULT_ROLLOUTS, DEFAULT_STEPS = 512, 512, 100


def plan(options: argparse.Namespace, flags: list[str]) -> None:
    """Rank the splits, print them, and write them to the files that `options` name. Raises `ConfigError`."""
    for option, path in (("--html", options.html), ("--json", options.json)):
        if path and not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no directory {path.parent}; make it or choose another file")
        if path and path.is_dir():
            raise ConfigError(f"{option} {path} is a directory; give a file")
    run = load_run(options.run) if options.run else None
    file = options.config or (run and run.path / "config.toml")
    config = load_config(file, flags) if file else None
    if config is None and not options.model:
        raise ConfigError("plan needs a CONFIG.toml, --model, or --from RUN")
    if config is None and flags:
        raise ConfigError(f"{flags[0]} is an option of a configuration; give a CONFIG.toml, too")
    counts = parse_counts("--gpus", options.gpus, 1, MAX_GPUS)
    lags = parse_counts("--max-lag", options.max_lag, 0, MAX_LAG) if options.max_lag else default_lags(config)
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    if run and _is_another(options.model or (config.model.path if config else ""), run_config(run).model.path):
        raise ConfigError(f"--from {run.path}: its rates are those of another model; plan its own, or leave --from out")
    found = show_fit(run, console) if run else None
    ranked, faults = dict[int, list[Plan]](), list[ConfigError]()
    for count in counts:
        try:
            ranked[count] = rank_plans(problem(options, config, count, found), lags)
        except ConfigError as fault:
            faults.append(fault)
    if not ranked:
        raise faults[0]
    if len(counts) > 1 or (options.max_lag and len(lags) > 1):
        print_sweep(ranked, [count for count in counts if count not in ranked], options.price, console)
    best = min(ranked.values(), key=lambda plans: plans[0].order)
    print_plan(best, options.price, console)
    if options.html:
        from slipstream.tools.plan_page import page

        write(options.html, "--html", page(best))
    if options.json:
        write(options.json, "--json", json.dumps(_json(ranked, options.price), indent=1))


def _json(ranked: dict[int, list[Plan]], price: float) -> dict[str, object]:
    """The run and its splits, for a JSON file: as ranked for one number of GPUs, by trained tokens/s for several."""
    plans = sorted((plan for found in ranked.values() for plan in found), key=lambda plan: plan.order)
    if len(ranked) == 1:
        (plans,) = ranked.values()
    shape, work = plans[0].problem.shape, plans[0].problem.work
    run = {
        "model": shape.name, "parameters": shape.parameters, "gpu": plans[0].problem.cluster.gpu.name,
        "rollouts": work.rollouts, "prompt": work.prompt.typical, "completion": work.completion.typical,
        "steps": work.steps,
    }  # fmt: skip
    return {"run": run, "splits": [as_json(plan, price) for plan in plans]}


def write(path: Path, option: str, text: str) -> None:
    """Write a file that an option names, and say so on standard error. Raises `ConfigError`."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}; choose another file") from None
    print(f"{option.removeprefix('--')} written to {path}", file=sys.stderr)


def parse_counts(option: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """Whole numbers separated by commas. Raises `ConfigError`."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < least or max(found) > most:
        example = f"such as {least},{2 * least + 1}"
        raise ConfigError(f"{option} {text} must be whole numbers from {least} to {most}, {example}")
    return found


def default_lags(config: Config | None) -> tuple[int, ...]:
    """The run's lag, by default 1, and a synchronous run to compare with; several lags if it is "auto"."""
    if config and config.loop.max_lag == AUTO:
        return 0, *LAGS
    return tuple(dict.fromkeys((0, config.loop.max_lag if config else 1)))


def show_fit(run: Run, console: Console) -> Fit:
    """Fit the rates to a run, and print the fit, its error, and the advice for that run. Raises `ConfigError`."""
    try:
        found, config = fit_run(run), run_config(run)
        simulated = simulated_figures(scenario_of_run(found, config, SHAPE))
        console.print(f"{run.name}: {found.describe()}\n{describe_figures(found, simulated)}")
        for read_error in run.read_errors:
            console.print(f"Warning: {read_error}.")
        if (error := abs(simulated.tokens_per_s / found.tokens_per_s - 1)) > FIT_ERROR:
            console.print(
                f"Warning: these rates do not explain the run ({error:.0%} off), so the figures below may err as much. "
                "Give a longer run, alone on its machine."
            )
        if on_cpu(run, config):
            console.print("Warning: the run's trainer had no GPU; the figures below are for GPUs as slow as its CPU.")
        if advice := advise(run):
            console.print(f"{advice}.")
    except ConfigError as error:
        raise ConfigError(f"--from {run.path}: {error}") from None
    except (LookupError, TypeError, ValueError) as error:
        found_error = f"its records lack what a fit needs ({error})"
        raise ConfigError(f"--from {run.path}: {found_error}; give a run of this release") from None
    return found


def problem(options: argparse.Namespace, config: Config | None, gpus: int, found: Fit | None = None) -> Problem:
    """What to plan, from the command's options over those of the configuration. Raises `ConfigError`."""
    for name, (least, most) in (INTEGERS | NUMBERS).items():
        if (value := getattr(options, name)) is not None and not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be a number from {least} to {most:,}")
    path = config.model.path if config else ""
    shape = find_shape(options.model) if options.model else find_shape(path, "model.path")
    gpu = measure_gpu(find_gpu(options.gpu)) if options.measure else find_gpu(options.gpu)
    gpu = replace(gpu, link=options.link * 1e9) if options.link else gpu
    cluster = Cluster(gpu, gpus, options.per_node, options.network * 1e9 / 8)
    rates, work = found.rates if found else Rates(), workload(options, config, shape.context)
    if options.engine_rate:
        rates = replace(rates, engine_tokens_per_s=options.engine_rate)
    if found and not (options.completion or options.lengths):
        work = replace(work, completion=replace(found.completion, most=work.completion.most))
    if found and not (options.prompt or options.prompt_lengths):
        work = replace(work, prompt=found.prompt)
    if found and options.turns is None:
        work = replace(work, turns=found.turns, tool_tokens=options.tool_tokens or found.tool_tokens)
    if found and not options.tool_seconds:
        work = replace(work, tool=found.tool)
    if work.turns == 1 and (options.tool_seconds or options.tool_tokens):
        raise ConfigError("--tool-seconds and --tool-tokens are those between turns; give --turns 2 or more")
    if work.turns > work.completion.mean:
        raise ConfigError(f"--turns {work.turns} exceeds the {work.completion.mean:,.0f} tokens that the turns share")
    trainer = config.trainer if config else TrainerConfig()
    fp8 = config is not None and serves_fp8(config)
    reference = kl_reference(config) if config else ""
    return Problem(
        shape, cluster, work, rates, seed=options.seed, trainer=trainer, fp8_engines=fp8, reference=reference
    )


def _is_another(model: str, other: str) -> bool:
    """Whether two models that can be found have different sizes."""
    try:
        return not 0.9 < find_shape(model).parameters / find_shape(other).parameters < 1.1
    except ConfigError:
        return False


@cache
def measure_gpu(like: Gpu) -> Gpu:
    """The measured GPU of this machine, with the link rate of `like`. Raises `ConfigError` without a GPU.

    `Rates` are shares of the rates in a data sheet. So the measured rates of a matrix product and a copy are divided by
    the shares that they usually reach.
    """
    import torch

    from slipstream.trainers.flops import peak_matmul_flops

    if not torch.cuda.is_available():
        raise ConfigError("--measure: this machine has no GPU; run it where the run will be, or give --gpu alone")
    device = torch.device("cuda")
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for rounds in (3, COPIES):  # warm up, then measure
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(rounds):
            target.copy_(source)
        torch.cuda.synchronize()
    bandwidth = 2 * COPIED_BYTES * COPIES / (time.perf_counter() - began)
    operations, memory = peak_matmul_flops(device), torch.cuda.mem_get_info()[1]
    return Gpu(torch.cuda.get_device_name(), memory, bandwidth / COPY_SHARE, operations / MATMUL_SHARE, like.link)


def workload(options: argparse.Namespace, config: Config | None, context: int) -> Workload:
    """The work of a run. Completions reach `sampling.max_tokens` unless `--completion` or `--lengths` is given.

    Prompts without a given length leave room for completions in the model's `context`.
    """
    if options.lengths and (options.completion or options.spread):
        raise ConfigError("--lengths has all lengths; leave --completion and --spread out")
    if options.prompt_lengths and (options.prompt or options.prompt_spread):
        raise ConfigError("--prompt-lengths has all lengths; leave --prompt and --prompt-spread out")
    loop, most = config.loop if config else None, options.max_tokens or (config.longest_completion if config else 0)
    completion = Lengths(options.completion or most or 2048, options.spread, most)
    if options.lengths:
        completion = replace(read_lengths("--lengths", options.lengths), most=most)
    elif most and completion.mean > most:
        raise ConfigError(f"--completion {options.completion} exceeds the limit of {most} tokens; raise --max-tokens")
    if loop and loop.epochs and not options.steps:
        raise ConfigError(f"loop.epochs = {loop.epochs:g} needs the tasks; give --steps, from `slipstream data`")
    size = options.group_size or (loop.group_size if loop else 8)
    rollouts = options.rollouts or (loop.groups_per_step * size if loop else DEFAULT_ROLLOUTS)
    if rollouts % size:
        raise ConfigError(f"--rollouts {rollouts} is no multiple of the group size {size}; change one, or --group-size")
    assumed = max(1, min(DEFAULT_PROMPT, context - (most or round(completion.mean))))
    prompt = Lengths(options.prompt or assumed, options.prompt_spread)
    if options.prompt_lengths:
        prompt = read_lengths("--prompt-lengths", options.prompt_lengths)
    return Workload(
        prompt, completion, rollouts // size, size,
        options.steps or (loop.steps if loop else DEFAULT_STEPS), config.sync.every if config else 1,
        options.turns or 1, Delay(options.tool_seconds, 1.0 if options.tool_seconds else 0.0), options.tool_tokens,
        Delay(options.scoring_seconds, 1.0 if options.scoring_seconds else 0.0),
        config.scoring.concurrency if config else 64,
        config.environment.max_concurrent if config else 0,
        options.lora_rank if options.lora_rank is not None else (config.lora.rank if config else 0),
        config.trainer.learning_rate if config else 1e-5,
    )  # fmt: skip

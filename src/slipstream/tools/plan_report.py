"""Shows a ranked plan as text or JSON, and as a configuration to start with.

A split divides the GPUs between trainer ranks and engines. `price` is the price of one GPU-hour; 0 leaves out costs.
"""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.config.loading import validate
from slipstream.config.schema import TrainerConfig
from slipstream.config.toml import to_toml
from slipstream.observe.formatting import duration, number, short
from slipstream.plan.hardware import GIB
from slipstream.plan.memory import HEADROOM, OPTIONS
from slipstream.plan.ranking import distinct
from slipstream.plan.splits import CHOSEN_ALWAYS, Plan

SHOWN, UNFIT = 10, 3  # rows of the table


def as_json(plan: Plan, price: float) -> dict[str, Any]:
    """A split with its placement and figures. Memory is in GiB of one GPU of each role."""
    split, work = plan.split, plan.problem.work
    placement = {
        "placement": split.placement, "trainer_ranks": split.ranks, "parallel": split.parallel,
        "context_parallel": split.context_parallel, "expert_parallel": split.expert_parallel,
        "engines": split.engines, "tensor_parallel": split.tp,
        "max_lag": split.max_lag, "link": plan.publish.link, "gpus": plan.problem.cluster.gpus,
    }  # fmt: skip
    memory = {role: {part: b / GIB for part, b in parts.items()} for role, parts in plan.memory.items()}
    if plan.missing:
        return placement | {"fits": False, "missing": plan.missing, "memory_gib": memory}
    return placement | {
        "fits": True, "source": plan.source, "trained_tokens_per_s": plan.tokens_per_s, "step_s": plan.step_s,
        "run_s": plan.run_s, "trainer_busy": plan.trainer_busy, "engines_busy": plan.engines_busy,
        "lag_mean": plan.lag_mean, "lag_p99": plan.lag_p99, "stale": plan.stale, "preemptions": plan.preemptions,
        "pause_s": plan.publish.pause, "transfer_s": plan.publish.transfer, "trainer_held_s": plan.publish.hold,
        "memory_gib": memory, "slots": plan.slots, "kv_tokens": round(plan.kv_tokens),
        "buffer_groups": (split.max_lag + 1) * work.groups * work.every,
        **{option: getattr(plan.trainer, field) for option, field in OPTIONS.items()},
        "gpu_hours": plan.gpu_hours, "cost": plan.gpu_hours * price if price else None,
    }  # fmt: skip


def print_plan(plans: list[Plan], price: float, console: Console) -> None:
    """Print the workload, the best splits, GPU memory, splits that do not fit, why the first is best, and its options.

    `plans` are ranked, the best first.
    """
    best = plans[0]
    work, cluster = best.problem.work, best.problem.cluster
    shape, lengths = best.problem.shape, f"{work.prompt.typical:,.0f} + {work.completion.typical:,.0f} tokens"
    console.print(
        f"{shape.name} ({shape.parameters / 1e9:.3g} B) on {cluster.gpus} x {cluster.gpu.name}: {work.steps} steps of "
        f"{work.rollouts} rollouts of {lengths}"
    )
    fitting = distinct([plan for plan in plans if not plan.missing])
    console.print(_table(fitting[:SHOWN], price))
    by_formula = any(not plan.is_simulated for plan in fitting[:SHOWN])
    if by_formula and any(plan.is_simulated for plan in fitting):
        console.print("~ by formula; the first rows by a simulation of the run's own scheduling.")
    elif by_formula:
        console.print("~ by formula: a simulation of so many turns would take too long.")
    console.print(_memory_table(best))
    unfit = dict.fromkeys(f"{plan.split}: {plan.missing}" for plan in plans if plan.missing)  # each for several lags
    for line in [*unfit][:UNFIT]:
        console.print(f"Does not fit: {line}.")
    console.print(f"\n{explain(fitting)}\n")
    console.print(to_config(best), markup=False, highlight=False)


def _table(plans: list[Plan], price: float) -> Table:
    rows = [{"": f"{place}"} | _row(plan, price) for place, plan in enumerate(plans, 1)]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    return table


def _row(plan: Plan, price: float) -> dict[str, str]:
    mark, most = ("", "") if plan.is_simulated else ("~", "<= ")
    return {
        "GPUs": f"{plan.problem.cluster.gpus}", "max_lag": f"{plan.split.max_lag}", "split": f"{plan.split}",
        "tokens/s": f"{mark}{number(plan.tokens_per_s)}", "step": f"{plan.step_s:,.1f} s", "run": duration(plan.run_s),
        "trainer": f"{plan.trainer_busy:.0%}", "engines": f"{plan.engines_busy:.0%}",
        "lag": f"{most}{plan.lag_mean:.1f}", "p99": f"{most}{plan.lag_p99:.0f}",
        "stale": f"{plan.stale:.1%}" if plan.is_simulated else "–",
        "pause": f"{1000 * plan.publish.pause:,.0f} ms",
        "slots": f"{plan.slots}", "GPU-hours": short(plan.gpu_hours),
    } | ({"cost": number(plan.gpu_hours * price)} if price else {})  # fmt: skip


def print_sweep(ranked: dict[int, list[Plan]], unfit: list[int], price: float, console: Console) -> None:
    """Print the best split of each number of GPUs and each lag. No split fits on `unfit` numbers of GPUs."""
    best: dict[tuple[int, int], Plan] = {}
    for gpus, plans in ranked.items():
        fitting = [plan for plan in plans if not plan.missing]
        for plan in sorted(fitting, key=lambda plan: plan.order):
            best.setdefault((gpus, plan.split.max_lag), plan)
    table = _table([plan for _, plan in sorted(best.items(), key=lambda item: item[0])], price)
    for count in unfit:
        table.add_row("", f"{count}", "", "does not fit")
    console.print(table)


def _memory_table(plan: Plan) -> Table:
    parts = list(dict.fromkeys(part for role in plan.memory.values() for part in role))
    table = Table("GiB of each GPU", *parts, "free")
    total = plan.problem.cluster.gpu.memory
    for role, sizes in plan.memory.items():
        free = total - sum(sizes.values())
        shown = [f"{sizes[part] / GIB:,.1f}" if part in sizes else "" for part in parts]
        table.add_row(role, *shown, f"{free / GIB:,.1f}")
    return table


def explain(plans: list[Plan]) -> str:
    """Why the first split is the first, in two sentences."""
    best = plans[0]
    slower = "engines are" if best.engines_busy >= best.trainer_busy else "trainer is"
    first = (
        f"{best.split} with max_lag = {best.split.max_lag} trains {number(best.tokens_per_s)} tokens/s: its {slower} "
        f"the slower side, with the trainer busy {best.trainer_busy:.0%} of the time and the engines "
        f"{best.engines_busy:.0%}."
    )
    other = next((plan for plan in plans[1:] if _differs(plan, best)), None)
    if other is None:
        return f"{first} No other division of the GPUs fits."
    gain = best.tokens_per_s / other.tokens_per_s
    side = "engines are" if other.engines_busy >= other.trainer_busy else "trainer is"
    ratio = f"{abs(gain - 1):.0%} {'more' if gain > 1 else 'fewer'} than" if abs(gain - 1) >= 0.005 else "as many as"
    if gain < 1 and best.split.max_lag < other.split.max_lag:
        ratio = f"at a smaller lag, {ratio}"
    second = (
        f"That is {ratio} the next, {other.split} with max_lag = {other.split.max_lag}, whose {side} the slower "
        f"side (trainer busy {other.trainer_busy:.0%}, engines {other.engines_busy:.0%})."
    )
    return f"{first} {second}"


def _differs(one: Plan, other: Plan) -> bool:
    a, b = one.split, other.split
    return (a.placement, a.ranks, a.engines, a.tp) != (b.placement, b.ranks, b.engines, b.tp)


def options(plan: Plan) -> dict[str, dict[str, Any]]:
    """The options of the configuration that this plan sets, by section."""
    split, work, total = plan.split, plan.problem.work, plan.problem.cluster.gpu.memory
    engine = sum(plan.memory.get("engine", {}).get(part, 0.0) for part in ("weights", "keys and values", "overhead"))
    if split.placement == "single_copy":
        parts = plan.memory["trainer and engine"]
        engine = parts["weights"] + parts["keys and values"] + parts["overhead"] / 2
    share = math.floor(100 * engine / (total - HEADROOM / 4)) / 100
    generator = {
        "engine": "vllm", "replicas": split.engines, "tensor_parallel_size": split.tp, "max_num_seqs": plan.slots,
        "gpu_memory_utilization": share,
    }  # fmt: skip
    trainer: dict[str, Any] = {"ranks": split.ranks}
    if split.ranks > 1:
        trainer |= {name: getattr(split, name) for name in ("parallel", "context_parallel", "expert_parallel")}
    values = {option: getattr(plan.trainer, field) for option, field in OPTIONS.items()}
    values |= {name: getattr(plan.problem.trainer, name) for name in ("compile", "fp8")}
    trainer |= {name: v for name, v in values.items() if name in CHOSEN_ALWAYS or v != getattr(TrainerConfig(), name)}
    sync: dict[str, Any] = {
        "link": "auto" if split.placement == "colocated" else plan.publish.link,
        "every": work.every,
    }
    if split.placement == "colocated":
        sync["placement"] = "colocated"
    loop = {
        "steps": work.steps,
        "groups_per_step": work.groups,
        "group_size": work.group_size,
        "max_lag": split.max_lag,
    }
    sections: dict[str, dict[str, Any]] = {"loop": loop}
    if work.completion.most:
        sections["sampling"] = {"max_tokens": work.completion.most}
    sections["generator"] = generator
    if work.lora_rank:
        sections["lora"] = {"rank": work.lora_rank}
    return sections | {"trainer": trainer, "sync": sync}


def to_config(plan: Plan) -> str:
    """The options as TOML. Raises `ConfigError` if no run can have them."""
    sections = options(plan)
    validate({"model": {"path": "model"}, "environment": {"name": "addition"}} | sections)
    lines = [
        f'[model]\npath = "{plan.problem.shape.name}"  # a directory or a Hub name\n',
        '# [environment]\n# name = "..."  # an environment, or dataset = "..."\n',
    ]
    for name, values in sections.items():
        lines.append(f"[{name}]\n" + "".join(f"{key} = {to_toml(value)}\n" for key, value in values.items()))
    return "\n".join(lines)

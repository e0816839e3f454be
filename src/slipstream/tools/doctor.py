"""`slipstream doctor`: check the nodes that a run would use, and name each fault with its remedy."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.config.loading import load_config
from slipstream.config.schema import Config
from slipstream.controller.node_checks import Examination, examine
from slipstream.controller.node_worker import NodeReport
from slipstream.environments.load import close_environment, load_environment
from slipstream.errors import UserError
from slipstream.observe.formatting import plural
from slipstream.runtime.closing import run_bounded
from slipstream.runtime.runtime import current_runtime, open_runtime

PLACEHOLDERS = ("--model.path=MODEL", "--environment.name=addition")  # for options without a default
CHECKS = ("nodes", "versions", "model files", "options", "imports", "environment", "GPUs", "memory", "limits",
          "run directory", "host names", "connections", "bandwidth", "all-reduce", "servers")  # fmt: skip
OF_CONFIG = "model files", "options", "imports", "environment"  # checks that need a configuration


def doctor(path: str | None, flags: Sequence[str] = (), as_json: bool = False) -> int:
    """Check this machine or a Ray cluster, for the run of a configuration if there is one. Prints what it finds.

    Returns the exit status: 1 if there are faults. Raises `ConfigError` for a wrong option.
    """
    config = load_config(path, [*(() if path else PLACEHOLDERS), *flags])
    directory = Path(config.run.dir or "runs").absolute()
    directory = next(folder for folder in (directory, *directory.parents) if folder.is_dir())
    with open_runtime(config.runtime):
        found = run_bounded(examine(current_runtime(), config if path else None, directory))
        if path:
            _check_options(found, config)
            _check_environment(found, config)
    results = _results(found, bool(path))
    if not config.generator.servers:
        del results["servers"]
    if as_json:
        rates = [{"from": one, "to": other, "bytes_per_s": rate} for (one, other), rate in found.bandwidth.items()]
        faults, nodes = [fault._asdict() for fault in found.faults], [asdict(report) for report in found.reports]
        shown = {"nodes": nodes, "bandwidth": rates, "servers": found.servers, "checks": results, "link": found.link}
        shown["faults"] = faults
        print(json.dumps(shown, indent=1))
    else:
        _print(found, results)
    return 1 if found.faults else 0


def _check_options(found: Examination, config: Config) -> None:
    """Add a fault for an option that does not go with the model, unless the model's files are at fault."""
    from slipstream.controller.setup import validate_models  # imports transformers

    if any(fault.check == "model files" for fault in found.faults):
        found.skipped["options"] = "no model"
        return
    try:
        validate_models(config)
    except UserError as error:
        found.add("options", str(error))


def _check_environment(found: Examination, config: Config) -> None:
    """Add a fault for an environment that can't be loaded here, where the controller of a run loads it."""
    if any(fault.check == "imports" and "environment.name" in fault.text for fault in found.faults):
        found.skipped["environment"] = "its import fails"
        return
    try:
        with redirect_stdout(sys.stderr):  # keeps the output of `--json` valid
            for options in config.each_environment:
                asyncio.run(close_environment(load_environment(options)))
    except UserError as error:
        found.add("environment", str(error))


def _results(found: Examination, with_config: bool) -> dict[str, str]:
    """The result of each check: "ok", "skipped: reason", or the number of its faults."""
    skipped = found.skipped | ({} if with_config else dict.fromkeys(OF_CONFIG, "no CONFIG"))
    skipped |= {"bandwidth": "one node"} if len(found.reports) == 1 else {}
    results = dict.fromkeys(CHECKS, "ok") | {check: f"skipped: {why}" for check, why in skipped.items()}
    counts = Counter(fault.check for fault in found.faults)
    return results | {check: f"{count} fault{'s' * (count > 1)}" for check, count in counts.items()}


def _print(found: Examination, results: dict[str, str]) -> None:
    console = Console(highlight=False)
    packages = Table("node", *(found.reports[0].versions if found.reports else ()))
    resources = Table("node", "GPUs", "memory", "/dev/shm", "open files", "disk", "bandwidth")
    for report in found.reports:
        rates = [rate for pair, rate in found.bandwidth.items() if report.node in pair]
        packages.add_row(report.node, *(version or "none" for version in report.versions.values()))
        resources.add_row(*_cells(report), f"{8 * min(rates) / 1e9:.1f} Gbit/s" if rates else "-")
    checks = Table("check", "result")
    for check, result in results.items():
        checks.add_row(check, result, style="red" if "fault" in result else "dim" if "skipped" in result else "")
    console.print(packages, resources, checks)
    for url, rate in found.servers.items():
        console.print(f"{url} receives {8e-9 * rate:.1f} Gbit/s from the trainer's node", markup=False, soft_wrap=True)
    if found.link:
        console.print(f'sync.link = "auto" is {found.link}', markup=False, soft_wrap=True)
    for fault in found.faults:
        console.print(f"{fault.check}: {fault.text}", style="red", markup=False, soft_wrap=True)
    console.print("no faults" if not found.faults else plural(len(found.faults), "fault"), soft_wrap=True)


def _cells(report: NodeReport) -> list[str]:
    gpus = [f"{gpu.index} {gpu.name} {gpu.free / 1024:.0f}/{gpu.total / 1024:.0f} GiB" for gpu in report.gpus]
    gpus += [f"driver {report.gpus[0].driver}"] if report.gpus else []
    memory, shm, disk = (
        f"{size / 1e9:.1f} GB" if size >= 0 else "-" for size in (report.memory, report.shm, report.disk)
    )
    files = str(report.open_files) if report.open_files >= 0 else "unlimited"
    return [report.node, "\n".join(gpus) or "none", memory, shm, files, disk]

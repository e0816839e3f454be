"""Records of measurements: their commands run today, they tell their conditions, and pages name those that exist."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import cli
from slipstream.config.loading import join_flags, load_config, option_names

ROOT = Path(__file__).parents[1]
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def entries(record: Any) -> Iterator[dict[str, Any]]:
    yield from record if isinstance(record, list) else [record]


def commands(record: Any) -> Iterator[str]:
    """Of the record's entries, and of the runs in each that have commands of their own."""
    for entry in entries(record):
        lists = [part for part in (entry.get("runs"), entry.get("results")) if isinstance(part, list)]
        for part in [entry, *itertools.chain(*lists)]:
            yield from [part["command"]] if "command" in part else part.get("commands", [])


def check(command: str) -> None:
    """Raise whatever the command would say before it starts to measure."""
    program, *arguments = shlex.split(command)
    if program == "make":
        goal, *_ = arguments
        assert re.search(rf"^[\w ]*\b{goal}\b[\w ]*:", (ROOT / "Makefile").read_text(), re.M), f"no make {goal}"
    elif program == "slipstream":
        options, flags = cli.parser().parse_known_args(join_flags(arguments))
        load_config(ROOT / options.config, flags)
    else:
        at = next(i for i, argument in enumerate(arguments) if argument.endswith(".py"))
        script(ROOT / arguments[at], join_flags(arguments[at + 1 :]))


def script(path: Path, arguments: list[str]) -> None:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"record_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # in which dataclasses look for their annotations
    spec.loader.exec_module(module)
    options, flags = module.parser().parse_known_args(arguments)
    if path.stem == "end_to_end":
        load_config(None, [*module.configuration(options, Path("m"), Path("run")), *flags])
    elif path.stem == "trainer":
        module.configure(Path("m"), flags)
    elif path.stem == "example_memory":
        load_config(module.EXAMPLE, flags)
    elif path.stem == "vllm_core":
        module.configure(options, flags)
    elif path.stem in ("vllm_scheduler", "vllm_step"):
        module.configure(options, "m", flags)
    elif path.stem == "publish_gpu":
        for link in options.links:
            module.configure(Path("m"), link, options, flags)
    elif path.stem == "learning":
        fixed = {"model.path": "m", "environment.dataset": "tasks.jsonl", "environment.reward": "math"} | module.FLAGS
        load_config(None, [*(f"--{name}={value}" for name, value in fixed.items()), *flags])
    elif path.stem == "runtimes":
        load_config(None, ["--model.path=m", "--environment.name=addition", *flags])
    elif path.stem == "demo":
        module.configuration(module.parser(), "addition", options.dir, options.seed, flags)
    else:
        assert not flags, f"{path.name} does not know {flags}"
    if path.stem == "verify":
        for case in options.cases:
            module.configure("m", options.dtype, case)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_command_of_a_record_runs_today(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(argparse.ArgumentParser, "exit", refuse)
    record = json.loads(path.read_text())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "H200" in next(entries(record))["device"])
    found = list(commands(record))
    assert found, "a record says its command"
    for command in found:
        check(command)


def refuse(parser: argparse.ArgumentParser, status: int = 0, message: str | None = None) -> None:
    raise AssertionError(message)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_tells_its_conditions(path: Path) -> None:
    for entry in entries(json.loads(path.read_text())):
        assert {"device", "date", "commit", "versions"} <= set(entry)
        assert "torch" in entry["versions"]


def test_benchmarks_name_options_that_exist() -> None:
    known = set(option_names())
    for path in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*.sh")]:
        named = set(re.findall(r"--([a-z]+\.[a-z_]+)[= ]", path.read_text()))
        assert named <= known, f"{path.name}: {named - known}"


def test_pages_and_records_know_each_other() -> None:
    there = {path.name for path in RECORDS}
    text = "\n".join(page.read_text() for page in PAGES)
    assert there <= set(re.findall(r"\b\w+\.json\b", text)), "records that no page names"
    page = (ROOT / "docs" / "measurements.md").read_text()
    named = re.findall(r"\b\w+\.json\b", page) + re.findall(r"benchmarks/results/(\w+\.json)", text)
    assert set(named) <= there, "pages name records that are not there"

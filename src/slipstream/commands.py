"""The commands of the command line: each gets its parsed arguments, and the flags that override the configuration.

Libraries are imported by the command that needs them, so that the others start at once.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config.loading import (
    as_flags,
    dump,
    load_config,
    load_policy_config,
    load_run_config,
    load_verify_config,
    parse_flags,
    with_policy,
)
from slipstream.config.schema import Config, ConfigError
from slipstream.config.suggestions import suggest
from slipstream.errors import UserError

if TYPE_CHECKING:
    from slipstream.tools.evaluate import Evaluation


def train(options: argparse.Namespace, flags: list[str]) -> None:
    if bool(options.config) == bool(options.resume):
        raise ConfigError("train needs a CONFIG.toml, or --resume RUN_DIR, and not both")
    config = load_config(options.config, flags) if options.config else None
    if config:  # before slow imports
        from slipstream.model.paths import check_paths

        check_paths(config)
    if options.auto_resume:
        if not (config and config.run.dir):
            raise ConfigError("--auto-resume needs a CONFIG.toml, and in run.dir the directory of the run")
        if (Path(config.run.dir) / "config.toml").exists():
            options.resume, flags = Path(config.run.dir), as_flags(config)
    from slipstream.controller.prestart import prestarted

    known = config or _saved_config(options.resume, flags)
    with prestarted(known) if known else nullcontext():
        summary = _train(options, flags, config)
    from slipstream.observe.report import report
    from slipstream.observe.run_data import load_run

    report(load_run(summary["directory"]))


def _saved_config(run: Path, flags: list[str]) -> Config | None:
    """The configuration of the run to resume, or None if it can't be read: `resume` reports the reason."""
    try:
        return load_run_config(run / "config.toml", flags)
    except (ConfigError, OSError):
        return None


def _train(options: argparse.Namespace, flags: list[str], config: Config | None) -> dict[str, Any]:
    """Start a run, or resume one. Returns its summary."""
    from slipstream.run import resume, train

    if options.resume:
        moved = None if config else dict(parse_flags(flags)).get("run.dir")
        if moved and Path(str(moved)).absolute() != options.resume.absolute():
            raise ConfigError(f"run.dir = {str(moved)!r} does nothing with --resume: the run stays in {options.resume}")
        return resume(options.resume, flags, quiet=options.quiet)
    assert config
    return train(config, quiet=options.quiet)


def evaluate(options: argparse.Namespace, flags: list[str]) -> None:
    if vars(options)["evaluation.tasks"] == "0":
        raise ConfigError("--tasks 0: there is nothing to evaluate on; give 1 or more")
    config = load_policy_config(options.target, options.environment, flags)
    if options.rollouts and not options.rollouts.absolute().parent.is_dir():
        raise ConfigError(
            f"--rollouts {options.rollouts}: there is no directory {options.rollouts.parent}; make it first"
        )
    name = options.policy
    if name and name not in (names := [policy.name for policy in config.policies]):
        known = f"which has {', '.join(names)}{suggest(name, names)}" if names else "which has one; leave --policy out"
        raise ConfigError(f"--policy {name} is no policy of {options.target}, {known}")
    from slipstream.tools.evaluate import evaluate_policy, validate_policy

    if options.against:
        with _prefix_errors("--against"):
            against = with_policy(config, options.against, name)
            validate_policy(against)
    found = [evaluate_policy(config, name)]
    try:
        if options.rollouts:
            found[0].write_rollouts(options.rollouts)
        if options.against:
            with _prefix_errors("--against"):
                found.append(evaluate_policy(against, name))
    finally:  # the first result is kept if the second evaluation fails
        _print_evaluations(options, found)


@contextmanager
def _prefix_errors(option: str) -> Iterator[None]:
    """Begin the message of user errors with the name of an option."""
    try:
        yield
    except UserError as error:
        error.args = (f"{option}: {error}",)
        raise


def _print_evaluations(options: argparse.Namespace, found: Sequence[Evaluation]) -> None:
    """Print one or two evaluations in the format that `options` name, and failed episodes to stderr."""
    from slipstream.controller.evaluation_record import describe_failures
    from slipstream.observe.events import strict_json
    from slipstream.tools.evaluate import compare, compare_policies, describe, describe_comparison, to_markdown

    for one in found:
        if one.record["eval/failed"]:
            print(f"slipstream: {describe_failures(one.record)}", file=sys.stderr)
    compared = compare(*found) if len(found) > 1 else None
    by_policy = compare_policies(*found) if len(found) > 1 else {}
    if options.markdown:
        print(to_markdown(*found))
    elif options.json and compared:
        records = [one.record for one in found]
        shown = {"policy": records[0], "against": records[1], "comparison": compared.as_dict()}
        each = {"policies": {name: own.as_dict() for name, own in by_policy.items()}} if by_policy else {}
        print(strict_json(shown | each, indent=1))
    elif options.json:
        print(strict_json(found[0].record, indent=1))
    else:
        other = f"{options.policy} of {options.against}" if options.policy else options.against
        names = [f"{name}, " if options.against else "" for name in (options.target, other)]
        print("\n".join(name + describe(one) for name, one in zip(names, found, strict=False)))
        if compared:
            print(f"{options.target} minus {other}: {describe_comparison(compared)}")
        for policy, own in by_policy.items():
            print(f"  reward of {policy}: {describe_comparison(own)}")


def generate(options: argparse.Namespace, flags: list[str]) -> None:
    config = load_policy_config(options.target, None, ["--evaluation.samples=1", *flags], default="addition")
    _check_model(config)
    from slipstream.tools.generate import generate

    if config.policies:
        found = f"--prompt reaches one policy, and {options.target} has {len(config.policies)}"
        raise ConfigError(f"{found}; give the directory of one, such as RUN/policy/{config.policies[0].name}")
    print("\n\n".join(generate(config, options.prompt)))


def _check_model(config: Config) -> None:
    """Raise `ConfigError` for a misspelt path of the model, before slow imports."""
    from slipstream.model.paths import check_path

    check_path(config.model.path)


def export(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.tools.export import export

    print(export(options.run, options.to, options.merge, options.policy))


def push(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.tools.push import push

    print(push(options.run, options.name, options.merge, options.public, options.policy))


def verify(options: argparse.Namespace, flags: list[str]) -> int:
    config = load_verify_config(options.target, flags)
    _check_model(config)
    from slipstream.tools.verify import verify

    found = asyncio.run(verify(config, prompts=options.prompts, tokens=options.tokens, after=options.after))
    print(found.describe(config))
    return 0 if found.exact else 1


def plan(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.tools.plan import plan

    plan(options, flags)


def study_lag(options: argparse.Namespace, flags: list[str]) -> int:
    if bool(options.config) == options.draw:
        raise ConfigError("study lag needs a CONFIG.toml, or --draw, and not both")
    from slipstream.tools.lag_study.command import present, study_lag
    from slipstream.tools.lag_study.plan import Plan, parse_corrections, parse_lags

    if options.draw:
        present(options.dir, options.target)
        return 0
    lags, corrections = parse_lags(options.lags), parse_corrections(options.corrections)
    plan = Plan(Path(options.config), options.dir, lags, corrections, options.seeds, tuple(flags))
    choices = ("--lags", options.lags, "--corrections", options.corrections, "--seeds", str(options.seeds))
    command = ["slipstream", "study", "lag", options.config, *choices, "--jobs", str(options.jobs), *flags]
    failed = study_lag(plan, jobs=options.jobs, target=options.target, command=command)
    for line in failed:
        print(f"slipstream: {line}", file=sys.stderr)
    return 1 if failed else 0


def report(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.observe.page import write_report
    from slipstream.observe.run_data import load_run

    runs = [load_run(path) for path in options.runs]
    output = options.output or runs[0].path / ("report.html" if len(runs) == 1 else "comparison.html")
    try:
        write_report(runs, output)
    except OSError as error:
        raise ConfigError(f"{output} can't be written: {error.strerror}; choose another file with --output") from None
    for problem in (f"{run.name}: {problem}" for run in runs for problem in run.problems):
        print(f"slipstream: {problem}", file=sys.stderr)
    print(output)


def watch(options: argparse.Namespace, flags: list[str]) -> None:
    """Serve the page of runs over HTTP until Ctrl-C."""
    if find_spec("aiohttp") is None:
        raise ConfigError("slipstream watch needs aiohttp: pip install 'slipstream-rl[watch]'")
    from slipstream.observe.watch import watch

    watch(options.runs, options.host, options.port)


def control(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.tools.control import command

    command(options.name, options.run, options.address, options.json, options.engines)


def runs(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.tools.control import list_runs

    list_runs(options.dir, options.address, options.json)


def trace(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.observe.run_data import load_run
    from slipstream.observe.trace import write_trace

    path = options.output or options.run / "trace.json"
    print(write_trace(load_run(options.run), path, options.steps))
    print(f"trace    {path} ({path.stat().st_size / 1e6:.1f} MB), open it in ui.perfetto.dev")


def track(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.observe.trackers import track

    step = track(options.run, options.to, options.project)
    print(f"{options.run} is in {options.to} up to step {step}")


def doctor(options: argparse.Namespace, flags: list[str]) -> int:
    from slipstream.tools.doctor import doctor

    return doctor(options.config, flags, as_json=options.json)


def data(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.tools.data import data

    data(options.config, flags, options.tasks)


def rollouts(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.observe.report import print_rollouts
    from slipstream.observe.run_data import load_run

    print_rollouts(load_run(options.run), options.step, options.group, options.json)


def compare(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.observe.report import print_comparison
    from slipstream.observe.run_data import load_run

    print_comparison([load_run(run) for run in options.runs], options.json)


def config(options: argparse.Namespace, flags: list[str]) -> None:
    if options.config is None:  # placeholders for options without a default
        named = any(flag.startswith("--environment.dataset=") for flag in flags)
        flags = ["--model.path=MODEL", *([] if named else ["--environment.name=ENVIRONMENT"]), *flags]
    print(dump(load_config(options.config, flags)))

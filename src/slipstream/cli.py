"""The command line: parses arguments, calls the library, prints results."""

from __future__ import annotations

if __name__ == "__main__":
    import slipstream.__main__  # noqa: F401  # answers Ctrl-C during the other imports

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TypeAlias

from slipstream import __version__
from slipstream.config.loading import (
    as_flags,
    dump,
    join_flags,
    load_config,
    load_policy_config,
    load_verify_config,
    parse_flags,
    with_policy,
)
from slipstream.config.schema import ConfigError
from slipstream.errors import NO_SYSTEM, UserError

DESCRIPTION = "Fine-tune a language model with reinforcement learning, generating and training at the same time."
EXAMPLES = """
examples:
  slipstream train examples/gsm8k.toml --loop.max_lag 2 --trainer.learning_rate 2e-6
  slipstream train --resume runs/gsm8k-20260101-120000
  slipstream eval runs/gsm8k-20260101-120000 --tasks 200
  slipstream eval models/gemma-3-270m --environment gsm8k --environment.options.data examples/data/gsm8k
  slipstream generate models/gemma-3-270m --prompt "The capital of France is"
  slipstream status runs/gsm8k-20260101-120000
  slipstream study lag examples/addition.toml --loop.max_tokens 350000 --lags 0,1,4,16 --seeds 3
  slipstream doctor examples/gsm8k.toml --runtime.kind ray --runtime.address auto
  slipstream config examples/gsm8k.toml

Every option of a run is --section.option VALUE; `slipstream config` lists them all with their meaning.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 success, 1 the run failed, 2 an argument or option is wrong."""
    joined = join_flags(sys.argv[1:] if arguments is None else arguments)
    given = [word for word in joined if word.startswith("--") and "." in word.partition("=")[0]]
    options, unknown = parser().parse_known_args([word for word in joined if word not in given])
    flags = given + unknown
    # A command's option for an option of the configuration, such as --tasks, comes before flags, which override it.
    flags = [f"--{name}={value}" for name, value in vars(options).items() if "." in name and value is not None] + flags
    try:
        if sys.platform == "win32":
            raise ConfigError(NO_SYSTEM)
        list(parse_flags(flags))  # report malformed flags before anything else
        if options.command is not _train:  # `train` sets a handler that ends the run after its step
            with contextlib.suppress(ValueError):  # not the main thread: no signals here
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if flags and options.command in WITHOUT_OPTIONS:
            raise ConfigError(f"{flags[0]} is no option of this command; see --help")
        status: int | None = options.command(options, flags)
        return status or 0
    except ConfigError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("slipstream: stopped at once", file=sys.stderr)
        return 130
    except UserError as error:
        message = " ".join(map(str, getattr(error, "__notes__", [error])))
        if "--resume" not in message and (directory := getattr(error, "resumable", None)):
            message = f"{message.rstrip()}\nResume from the last checkpoint: slipstream train --resume {directory}"
        print(f"slipstream: {message}", file=sys.stderr)
        return 1


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"slipstream: {message}; see `{self.prog} --help`\n")


Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"
Command = Callable[[argparse.Namespace, list[str]], int | None]


def parser() -> argparse.ArgumentParser:
    root = Parser(
        "slipstream", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = root.add_subparsers(metavar="COMMAND", required=True)

    options = "Also: --section.option VALUE, see `config`."
    train = _add(commands, "train", _train, "fine-tune a policy", epilog=options)
    train.add_argument("config", nargs="?", metavar="CONFIG.toml", help="configuration of the run")
    train.add_argument("--resume", metavar="RUN_DIR", type=Path, help="resume an interrupted run")
    again = "resume the run in run.dir, if there is one, with CONFIG.toml and flags over its own options"
    train.add_argument("--auto-resume", action="store_true", help=again)
    train.add_argument("--quiet", action="store_true", help="print warnings and the final report only")

    _add_policy_commands(commands)
    _add_lag_study(commands)
    _add_views(commands)
    _add_controls(commands)

    doctor = _add(commands, "doctor", _doctor, "check this machine or a Ray cluster, for a run or in general")
    doctor.add_argument("config", nargs="?", metavar="CONFIG.toml", help="check for this run (default: for any run)")
    doctor.add_argument("--json", action="store_true", help="print reports, results and faults as JSON")

    data = _add(commands, "data", _data, "show tasks as the model reads them, and the lengths of prompts")
    data.add_argument("config", nargs="?", metavar="CONFIG.toml", help="configuration of the run")
    data.add_argument("--tasks", type=int, default=3, metavar="N", help="number of tasks to show (default: 3)")

    config = _add(commands, "config", _config, "print a configuration with all defaults, as TOML")
    config.add_argument("config", nargs="?", metavar="CONFIG.toml")
    return root


def _add(commands: Subparsers, name: str, command: Command, meaning: str, epilog: str | None = None) -> Parser:
    """Add a command. Returns its parser. `command` gets the parsed arguments, and the flags of the configuration."""
    added = commands.add_parser(name, help=meaning, epilog=epilog)
    added.set_defaults(command=command)
    return added


def _add_policy_commands(commands: Subparsers) -> None:
    """Commands on a model or the policy of a run."""
    embedded = "The embedded engine samples, for any generator.engine."
    options = "The engine of the configuration samples. Also: --section.option VALUE, see `config`."
    evaluate = _add(commands, "eval", _evaluate, "evaluate a policy on held-out tasks", epilog=options)
    target = "configuration, run directory, model directory, or Hub name"
    evaluate.add_argument("target", metavar="CONFIG|RUN_DIR|MODEL", help=target)
    against = "run directory or model to compare with on the same tasks, by a paired test"
    evaluate.add_argument("--against", metavar="RUN_DIR|MODEL", help=against)
    evaluate.add_argument(
        "--environment",
        metavar="NAME",
        help="gsm8k, addition, your own, or a label of the run's (default: all of the run)",
    )
    tasks = "held-out tasks to evaluate on (default: 100, or the run's)"
    evaluate.add_argument("--tasks", dest="evaluation.tasks", metavar="N", help=tasks)
    samples, temperature = "samples of each task, for pass@k (default: 1, or the run's)", "0 (the default) is greedy"
    evaluate.add_argument("--samples", dest="evaluation.samples", metavar="K", help=samples)
    evaluate.add_argument("--temperature", dest="evaluation.temperature", metavar="T", help=temperature)
    evaluate.add_argument("--rollouts", type=Path, metavar="FILE", help="write the rollouts as parquet")
    printed = evaluate.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print the whole result as JSON")
    printed.add_argument("--markdown", action="store_true", help="print the scores as a Markdown table")

    generate = _add(commands, "generate", _generate, "complete a prompt", epilog=embedded)
    generate.add_argument("target", metavar="MODEL|RUN_DIR", help="model directory, run directory, or Hub name")
    generate.add_argument("--prompt", action="append", required=True, help="text to complete; may be given repeatedly")
    for flag, name, default, meaning in (
        ("--max-tokens", "sampling.max_tokens", None, "longest completion (default: 128, or the run's)"),
        ("--temperature", "evaluation.temperature", "0", "0 (the default) is greedy"),
        ("--seed", "loop.seed", "0", "same seed, same completions"),
    ):
        generate.add_argument(flag, dest=name, default=default, metavar=flag[2].upper(), help=meaning)

    exported = _add(commands, "export", _export, "write a run's policy for other programs")
    exported.add_argument("run", metavar="RUN", type=Path, help="run directory")
    where = "new directory (default: RUN/export, or RUN/merged)"
    exported.add_argument("--to", metavar="DIR", type=Path, help=where)

    push = _add(commands, "push", _push, "upload a run's policy to the Hub, with a model card from its records")
    push.add_argument("run", metavar="RUN", type=Path, help="run directory")
    push.add_argument("name", metavar="NAME", help="repository, such as owner/name")
    push.add_argument("--public", action="store_true", help="create a public repository (default: private)")
    for command in (exported, push):
        command.add_argument("--merge", action="store_true", help="merge the trained adapters into their base")

    verify = _add(commands, "verify", _verify, "check that engine and weight link switch policies exactly")
    verify.add_argument("target", metavar="MODEL|RUN_DIR", help="model directory, run directory, or Hub name")
    verify.add_argument("--prompts", type=int, default=16, metavar="N", help="number of prompts (default: 16)")
    verify.add_argument("--tokens", type=int, metavar="N", help="tokens per completion (default: as many as needed)")
    verify.add_argument("--after", type=int, default=16, metavar="N", help="tokens before the switch (default: 16)")


def _add_lag_study(commands: Subparsers) -> None:
    study = commands.add_parser("study", help="compare runs of one task")
    studies = study.add_subparsers(metavar="STUDY", required=True)
    lag = _add(studies, "lag", _study_lag, "cost of stale data in accuracy, and its gain in time")
    sets = "none, default, importance, or your own as NAME:option=value,option=value (default: none,default)"
    length = "the task; loop.max_tokens is the length of each run"
    lag.add_argument("config", nargs="?", metavar="CONFIG.toml", help=length)
    lag.add_argument("--lags", default="0,1,4,16", metavar="N,N", help="values of loop.max_lag (default: 0,1,4,16)")
    lag.add_argument("--corrections", default="none,default", metavar="NAME,NAME", help=sets)
    lag.add_argument("--seeds", type=int, default=3, metavar="N", help="runs per lag and correction (default: 3)")
    lag.add_argument("--dir", type=Path, default=Path("studies/lag"), help="output; runs found there are reused")
    lag.add_argument("--jobs", type=int, default=1, metavar="N", help="concurrent runs (1, the default, for timings)")
    lag.add_argument("--target", type=float, metavar="X", help="accuracy to reach (default: 0.9 of the gain at lag 0)")
    lag.add_argument("--draw", action="store_true", help="draw table and plots again from the data in --dir")


def _add_views(commands: Subparsers) -> None:
    """Commands that show the records of runs."""
    several = "run directory; of several, the page compares the runs"
    page = _add(commands, "report", _report, "write one HTML page of runs: curves, timeline, rollouts, health")
    page.add_argument("runs", nargs="+", metavar="RUN", help=several)
    page.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first run directory")

    live = _add(commands, "watch", _watch, "serve the page of the report while the runs go on, until Ctrl-C")
    live.add_argument("runs", nargs="+", metavar="RUN", help=several)
    live.add_argument("--port", type=int, default=0, metavar="N", help="default: any free port")
    host = "address to listen on; on other than loopback addresses the URL has a token (default: 127.0.0.1)"
    live.add_argument("--host", default="127.0.0.1", help=host)

    rollouts = _add(commands, "rollouts", _rollouts, "print rollouts of a step: the best and the worst, or a group")
    rollouts.add_argument("run", metavar="RUN", help="run directory")
    rollouts.add_argument("--step", type=int, metavar="N", help="step that trained on them (default: the last)")
    rollouts.add_argument("--group", type=int, metavar="G", help="all rollouts of this group, by its visit_id")

    compare = _add(commands, "compare", _compare, "print what runs reached side by side, and how their options differ")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run directory")

    trace = _add(commands, "trace", _trace, "write when engines and trainer worked, as a trace for ui.perfetto.dev")
    trace.add_argument("run", metavar="RUN", type=Path, help="run directory")
    trace.add_argument("--output", metavar="FILE", type=Path, help="file to write (default: RUN/trace.json)")
    trace.add_argument("--steps", metavar="FIRST-LAST", help="steps to draw (default: all)")

    runs = _add(commands, "runs", _runs, "list runs: name, state, step, reward, age")
    runs.add_argument("--dir", type=Path, default=Path("runs"), help="folder of run directories (default: runs)")
    runs.add_argument("--address", default="", help="list the runs on this Ray cluster instead")

    track = _add(commands, "track", _track, "upload a run to an experiment tracker")
    track.add_argument("run", metavar="RUN", type=Path, help="run directory; of a running one, until its end")
    track.add_argument("--to", required=True, metavar="TRACKER", help="as in observe.trackers, such as wandb")
    track.add_argument("--project", default="", help="project or experiment (default: see observe.project)")
    for command in (rollouts, compare, runs):
        command.add_argument("--json", action="store_true", help="print all of it as JSON")


def _add_controls(commands: Subparsers) -> None:
    """Commands to running runs."""
    controls = {
        "status": "what a run does at present", "scale": "change the number of engines of a run",
        "pause": "start no group and take no step, until resume", "resume": "continue a paused run",
        "checkpoint": "write a checkpoint after the current step", "stop": "end a run after the current step",
    }  # fmt: skip
    where = "address of a Ray cluster, such as auto; RUN is then the run's name there"
    for name, meaning in controls.items():
        control = _add(commands, name, _control, meaning)
        if name == "scale":
            control.add_argument("engines", metavar="N", help="number of engines, 1 or more")
        control.add_argument("run", metavar="RUN", help="run directory")
        control.add_argument("--address", default="", help=where)
        control.add_argument("--json", action="store_true", help="print the answer as JSON")
        control.set_defaults(name=name, engines=None)


def _train(options: argparse.Namespace, flags: list[str]) -> None:
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
    from slipstream.observe.report import report
    from slipstream.observe.run_data import load_run
    from slipstream.run import resume, train

    if options.resume:
        summary = resume(options.resume, flags, quiet=options.quiet)
    else:
        assert config
        summary = train(config, quiet=options.quiet)
    report(load_run(summary["directory"]))


def _evaluate(options: argparse.Namespace, flags: list[str]) -> None:
    config = load_policy_config(options.target, options.environment, flags)
    if options.rollouts and not options.rollouts.absolute().parent.is_dir():
        raise ConfigError(
            f"--rollouts {options.rollouts}: there is no directory {options.rollouts.parent}; make it first"
        )
    configs = [config, *([with_policy(config, options.against)] if options.against else [])]
    from slipstream.controller.evaluation_record import describe_failures
    from slipstream.observe.events import strict_json
    from slipstream.tools.evaluate import compare, describe, describe_comparison, evaluate_policy, to_markdown

    found = [evaluate_policy(each) for each in configs]
    for one in found:
        if one.record["eval/failed"]:
            print(f"slipstream: {describe_failures(one.record)}", file=sys.stderr)
    if options.rollouts:
        found[0].write_rollouts(options.rollouts)
    compared = compare(*found) if options.against else None
    if options.markdown:
        print(to_markdown(*found))
    elif options.json and compared:
        records = [one.record for one in found]
        print(strict_json({"policy": records[0], "against": records[1], "comparison": compared.as_dict()}, indent=1))
    elif options.json:
        print(strict_json(found[0].record, indent=1))
    else:
        names = [f"{name}, " if compared else "" for name in (options.target, options.against)]
        print("\n".join(name + describe(one) for name, one in zip(names, found, strict=False)))
        if compared:
            print(f"{options.target} minus {options.against}: {describe_comparison(compared)}")


def _generate(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.controller.evaluation import generate_texts

    config = load_policy_config(options.target, None, ["--evaluation.samples=1", *flags], default="addition")
    completions = asyncio.run(generate_texts(config, options.prompt))
    for prompt, completion in zip(options.prompt, completions, strict=True):
        print(f"{prompt}{completion.text}" if len(options.prompt) == 1 else f"{prompt}{completion.text}\n")


def _export(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.tools.export import export

    print(export(options.run, options.to, options.merge))


def _push(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.tools.push import push

    print(push(options.run, options.name, options.merge, options.public))


def _verify(options: argparse.Namespace, flags: list[str]) -> int:
    from slipstream.tools.verify import verify

    config = load_verify_config(options.target, flags)
    found = asyncio.run(verify(config, prompts=options.prompts, tokens=options.tokens, after=options.after))
    print(found.describe(config))
    return 0 if found.exact else 1


def _study_lag(options: argparse.Namespace, flags: list[str]) -> int:
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


def _report(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.observe.page import write_report
    from slipstream.observe.run_data import load_run

    runs = [load_run(path) for path in options.runs]
    output = options.output or runs[0].path / "report.html"
    try:
        write_report(runs, output)
    except OSError as error:
        raise ConfigError(f"{output} can't be written: {error.strerror}; choose another file with --output") from None
    for problem in (f"{run.name}: {problem}" for run in runs for problem in run.problems):
        print(f"slipstream: {problem}", file=sys.stderr)
    print(output)


def _watch(options: argparse.Namespace, flags: list[str]) -> None:
    if find_spec("aiohttp") is None:
        raise ConfigError("slipstream watch needs aiohttp: pip install 'slipstream-rl[watch]'")
    from slipstream.observe.watch import watch

    watch(options.runs, options.host, options.port)


def _control(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.tools.control import command

    command(options.name, options.run, options.address, options.json, options.engines)


def _runs(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.tools.control import list_runs

    list_runs(options.dir, options.address, options.json)


def _trace(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.observe.run_data import load_run
    from slipstream.observe.trace import write_trace

    path = options.output or options.run / "trace.json"
    print(write_trace(load_run(options.run), path, options.steps))
    print(f"trace    {path} ({path.stat().st_size / 1e6:.1f} MB), open it in ui.perfetto.dev")


def _track(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.observe.trackers import track

    step = track(options.run, options.to, options.project)
    print(f"{options.run} is in {options.to} up to step {step}")


def _doctor(options: argparse.Namespace, flags: list[str]) -> int:
    from slipstream.tools.doctor import doctor

    return doctor(options.config, flags, as_json=options.json)


def _data(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.tools.data import data

    data(options.config, flags, options.tasks)


def _rollouts(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.observe.report import print_rollouts
    from slipstream.observe.run_data import load_run

    print_rollouts(load_run(options.run), options.step, options.group, options.json)


def _compare(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.observe.report import print_comparison
    from slipstream.observe.run_data import load_run

    print_comparison([load_run(run) for run in options.runs], options.json)


def _config(options: argparse.Namespace, flags: list[str]) -> None:
    if options.config is None:  # placeholders for options without a default
        flags = ["--model.path=MODEL", "--environment.name=ENVIRONMENT", *flags]
    print(dump(load_config(options.config, flags)))


WITHOUT_OPTIONS = (_report, _watch, _rollouts, _compare, _control, _trace, _runs, _track, _export, _push)

if __name__ == "__main__":
    sys.exit(main())

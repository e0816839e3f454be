"""The command line: parses arguments, runs a command of `commands`, prints errors, returns the exit status."""

from __future__ import annotations

if __name__ == "__main__":
    import slipstream.__main__  # noqa: F401  # answers Ctrl-C during the other imports

import argparse
import contextlib
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from slipstream import __version__, commands
from slipstream.config.loading import join_flags, parse_flags
from slipstream.config.schema import ConfigError
from slipstream.config.suggestions import suggest
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
    """Run one command.

    Returns the exit status: 0 success, 1 the run failed or a check found faults, 2 an option is wrong, 130 Ctrl-C (in
    `train` the second one; the first ends the run after its step). Raises `SystemExit` for --help and wrong arguments.
    """
    options, flags = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(options, flags)
    except BrokenPipeError:  # may be of a worker
        if options.command is commands.train or not _reader_ended():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
        return 128 + signal.SIGPIPE
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


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """A command with its own options, and the flags that set options of the configuration."""
    joined = join_flags(arguments)
    given = [word for word in joined if word.startswith("--") and "." in word.partition("=")[0]]
    options, unknown = parser().parse_known_args([word for word in joined if word not in given])
    # A command's option for an option of the configuration, such as --tasks, comes before flags, which override it.
    own = [f"--{name}={value}" for name, value in vars(options).items() if "." in name and value is not None]
    return options, own + given + unknown


def _run(options: argparse.Namespace, flags: list[str]) -> int:
    """Run a command. Returns its exit status; its errors are raised."""
    if sys.platform == "win32":
        raise ConfigError(NO_SYSTEM)
    list(parse_flags(flags))  # report malformed flags before anything else
    if options.command is not commands.train:  # `train` sets a handler that ends the run after its step
        with contextlib.suppress(ValueError):  # not the main thread: no signals here
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if flags and options.command in WITHOUT_OPTIONS:
        raise ConfigError(f"{flags[0]} is no option of this command; see --help")
    status: int | None = options.command(options, flags)
    if sys.stdout:  # None if it was closed before the start
        sys.stdout.flush()
    return status or 0


def _reader_ended() -> bool:
    """Whether nothing reads the standard output any more, as after `| head`."""
    try:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)  # reports errors only
        return bool(output.poll(0))
    except (AttributeError, OSError):  # standard output is no file
        return False


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        if found := re.fullmatch(r"(.*invalid choice: '(.*)') \(choose from (.*)\)", message):
            close = suggest(found[2], re.findall(r"[\w-]+", found[3]))
            message = found[1] + (close or f"; choose from {found[3]}")
        self.exit(2, f"slipstream: {message}; see `{self.prog} --help`\n")


Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"
Command = Callable[[argparse.Namespace, list[str]], int | None]


def parser() -> argparse.ArgumentParser:
    root = Parser(
        "slipstream", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root.add_argument("--version", action="version", version=f"slipstream {__version__}")
    into = root.add_subparsers(metavar="COMMAND", required=True)

    options = "Also: --section.option VALUE, see `config`."
    train = _add(into, "train", commands.train, "fine-tune a policy", epilog=options)
    train.add_argument("config", nargs="?", metavar="CONFIG.toml", help="configuration of the run")
    train.add_argument("--resume", metavar="RUN_DIR", type=Path, help="resume an interrupted run")
    again = "resume the run in run.dir, if there is one, with CONFIG.toml and flags over its own options"
    train.add_argument("--auto-resume", action="store_true", help=again)
    train.add_argument("--quiet", action="store_true", help="print warnings and the final report only")

    _add_evaluation(into)
    _add_policy_commands(into)
    _add_plan(into)
    _add_lag_study(into)
    _add_views(into)
    _add_controls(into)

    doctor = _add(into, "doctor", commands.doctor, "check this machine or a Ray cluster, for a run or in general")
    doctor.add_argument("config", nargs="?", metavar="CONFIG.toml", help="check for this run (default: for any run)")
    doctor.add_argument("--json", action="store_true", help="print reports, results and faults as JSON")

    data = _add(into, "data", commands.data, "show tasks as the model reads them, and the lengths of prompts")
    data.add_argument("config", nargs="?", metavar="CONFIG.toml", help="configuration of the run")
    data.add_argument("--tasks", type=int, default=3, metavar="N", help="number of tasks to show (default: 3)")

    config = _add(into, "config", commands.config, "print a configuration with all defaults, as TOML")
    config.add_argument("config", nargs="?", metavar="CONFIG.toml")
    return root


def _add(into: Subparsers, name: str, command: Command, meaning: str, epilog: str | None = None) -> Parser:
    """Add a command. Returns its parser. `command` gets the parsed arguments, and the flags of the configuration."""
    added = into.add_parser(name, help=meaning, epilog=epilog)
    added.set_defaults(command=command)
    return added


def _add_evaluation(into: Subparsers) -> None:
    options = "The engine of the configuration samples. Also: --section.option VALUE, see `config`."
    evaluate = _add(into, "eval", commands.evaluate, "evaluate a policy on held-out tasks", epilog=options)
    target = "configuration, run directory, model directory, or Hub name"
    evaluate.add_argument("target", metavar="CONFIG|RUN_DIR|MODEL", help=target)
    against = "run directory or model to compare with on the same tasks, by a paired test"
    evaluate.add_argument("--against", metavar="RUN_DIR|MODEL", help=against)
    which = "show and compare one of several policies; --against then replaces it alone"
    evaluate.add_argument("--policy", metavar="NAME", default="", help=which)
    evaluate.add_argument(
        "--environment",
        metavar="NAME",
        help="label of one of several environments, or another environment (default: all of CONFIG or RUN_DIR)",
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


def _add_policy_commands(into: Subparsers) -> None:
    """Other commands on a model or the policy of a run."""
    embedded = "The embedded engine samples, for any generator.engine."
    generate = _add(into, "generate", commands.generate, "complete a prompt", epilog=embedded)
    generate.add_argument("target", metavar="MODEL|RUN_DIR", help="model directory, run directory, or Hub name")
    text = "text to complete, or a user's message if the model has a chat template; may be given repeatedly"
    generate.add_argument("--prompt", action="append", required=True, help=text)
    for flag, name, default, meaning in (
        ("--max-tokens", "sampling.max_tokens", None, "longest completion (default: 128, or the run's)"),
        ("--temperature", "evaluation.temperature", "0", "0 (the default) is greedy"),
        ("--seed", "loop.seed", "0", "same seed, same completions"),
    ):
        generate.add_argument(flag, dest=name, default=default, metavar=flag[2].upper(), help=meaning)

    exported = _add(into, "export", commands.export, "write a run's policy for other programs")
    exported.add_argument("run", metavar="RUN", type=Path, help="run directory")
    where = "new directory (default: RUN/export, or RUN/merged)"
    exported.add_argument("--to", metavar="DIR", type=Path, help=where)

    push = _add(into, "push", commands.push, "upload a run's policy to the Hub, with a model card from its records")
    push.add_argument("run", metavar="RUN", type=Path, help="run directory")
    push.add_argument("name", metavar="NAME", help="repository, such as owner/name")
    push.add_argument("--public", action="store_true", help="create a public repository (default: private)")
    for command in (exported, push):
        command.add_argument("--merge", action="store_true", help="merge the trained adapters into their base")
        command.add_argument("--policy", metavar="NAME", default="", help="which of several policies")

    verify = _add(into, "verify", commands.verify, "check that engine and weight link switch policies exactly")
    verify.add_argument("target", metavar="MODEL|RUN_DIR", help="model directory, run directory, or Hub name")
    verify.add_argument("--prompts", type=int, default=16, metavar="N", help="number of prompts (default: 16)")
    verify.add_argument("--tokens", type=int, metavar="N", help="tokens per completion (default: as many as needed)")
    verify.add_argument("--after", type=int, default=16, metavar="N", help="tokens before the switch (default: 16)")


def _add_plan(into: Subparsers) -> None:
    options = "With CONFIG.toml also: --section.option VALUE, see `config`."
    plan = _add(into, "plan", commands.plan, "rank the splits of GPUs between trainer and engines", epilog=options)
    plan.add_argument("config", nargs="?", metavar="CONFIG.toml", help="configuration of the run")
    fitted = "use rates and lengths that a run recorded, and advise on it"
    plan.add_argument("--from", dest="run", type=Path, metavar="RUN", help=fitted)
    plan.add_argument("--model", metavar="MODEL", help="size such as 7B, model directory, or Hub name")
    plan.add_argument("--gpu", default="h100", metavar="KIND", help="kind of GPU (default: h100)")
    plan.add_argument("--measure", action="store_true", help="measure the GPU of this machine instead of --gpu's rates")
    plan.add_argument("--gpus", default="8", metavar="N,N", help="numbers of GPUs (default: 8)")
    plan.add_argument("--max-lag", metavar="N,N", help="values of loop.max_lag (default: 0 and the run's, or 1)")
    for flag, whose in (("--lengths", "completions"), ("--prompt-lengths", "prompts")):
        plan.add_argument(flag, type=Path, metavar="FILE", help=f"lengths of {whose}: a number a line, or a JSON list")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write all splits with their figures, best first")
    drawn = "draw throughput against lag, a step's timeline, and memory by GPU"
    plan.add_argument("--html", type=Path, metavar="FILE", help=drawn)
    numbers: tuple[tuple[str, type, float | None, str], ...] = (
        ("--per-node", int, 8, "GPUs of one host (default: 8)"),
        ("--link", float, None, "GB/s in one direction between GPUs of a host (default: that of --gpu)"),
        ("--network", float, 400.0, "Gbit/s between hosts (default: 400)"),
        ("--rollouts", int, None, "rollouts of a step (default: the run's, or 512)"),
        ("--group-size", int, None, "rollouts per task (default: the run's, or 8)"),
        ("--steps", int, None, "optimizer steps (default: the run's, or 100)"),
        ("--prompt", int, None, "mean tokens of a prompt (default: 512)"),
        ("--prompt-spread", float, 0.0, "deviation of the logarithm of prompt lengths (default: 0, equal lengths)"),
        ("--completion", int, None, "mean tokens of a completion (default: its limit)"),
        ("--spread", float, 0.0, "deviation of the logarithm of completion lengths (default: 0, equal lengths)"),
        ("--max-tokens", int, None, "longest completion (default: sampling.max_tokens, or four times the mean)"),
        ("--turns", int, None, "turns of an episode, which share its tokens (default: the run's, or 1)"),
        ("--tool-seconds", float, 0.0, "mean time of a tool after each turn but the last (default: 0)"),
        ("--tool-tokens", int, 0, "tokens that a tool adds (default: 0)"),
        ("--scoring-seconds", float, 0.0, "mean time to score a rollout (default: 0)"),
        ("--lora-rank", int, None, "rank of adapters (default: the run's, or 0: full fine-tuning)"),
        ("--engine-rate", float, None, "measured tokens/s of one engine, instead of the roofline"),
        ("--price", float, 0.0, "price of a GPU hour"),
        ("--seed", int, 0, "seed of the simulation (default: 0)"),
    )
    for flag, kind, default, meaning in numbers:
        plan.add_argument(flag, type=kind, default=default, metavar="N", help=meaning)


def _add_lag_study(into: Subparsers) -> None:
    study = into.add_parser("study", help="compare runs of one task")
    studies = study.add_subparsers(metavar="STUDY", required=True)
    lag = _add(studies, "lag", commands.study_lag, "cost of stale data in accuracy, and its gain in time")
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


def _add_views(into: Subparsers) -> None:
    """Commands that show the records of runs."""
    several = "run directory; of several, the page compares the runs"
    page = _add(into, "report", commands.report, "write one HTML page of runs: curves, timeline, rollouts, health")
    page.add_argument("runs", nargs="+", metavar="RUN", help=several)
    page.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first run directory")

    live = _add(into, "watch", commands.watch, "serve the page of the report while the runs go on, until Ctrl-C")
    live.add_argument("runs", nargs="+", metavar="RUN", help=several)
    live.add_argument("--port", type=int, default=0, metavar="N", help="default: any free port")
    host = "address to listen on; on other than loopback addresses the URL has a token (default: 127.0.0.1)"
    live.add_argument("--host", default="127.0.0.1", help=host)

    rollouts = _add(into, "rollouts", commands.rollouts, "print rollouts of a step: the best and the worst, or a group")
    rollouts.add_argument("run", metavar="RUN", help="run directory")
    rollouts.add_argument("--step", type=int, metavar="N", help="step that trained on them (default: the last)")
    rollouts.add_argument("--group", type=int, metavar="G", help="all rollouts of this group, by its visit_id")

    compare = _add(
        into, "compare", commands.compare, "print what runs reached side by side, and how their options differ"
    )
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run directory")

    trace = _add(into, "trace", commands.trace, "write when engines and trainer worked, as a trace for ui.perfetto.dev")
    trace.add_argument("run", metavar="RUN", type=Path, help="run directory")
    trace.add_argument("--output", metavar="FILE", type=Path, help="file to write (default: RUN/trace.json)")
    trace.add_argument("--steps", metavar="FIRST-LAST", help="steps to draw (default: all)")

    runs = _add(into, "runs", commands.runs, "list runs: name, state, step, reward, age")
    runs.add_argument("--dir", type=Path, default=Path("runs"), help="folder of run directories (default: runs)")
    runs.add_argument("--address", default="", help="list the runs on this Ray cluster instead")

    track = _add(into, "track", commands.track, "upload a run to an experiment tracker")
    track.add_argument("run", metavar="RUN", type=Path, help="run directory; of a running one, until its end")
    track.add_argument("--to", required=True, metavar="TRACKER", help="as in observe.trackers, such as wandb")
    track.add_argument("--project", default="", help="project or experiment (default: see observe.project)")
    for command in (rollouts, compare, runs):
        command.add_argument("--json", action="store_true", help="print all of it as JSON")


def _add_controls(into: Subparsers) -> None:
    """Add the commands that control a run while it runs."""
    controls = {
        "status": "what a run does at present", "scale": "change the number of engines of a run",
        "pause": "start no group and take no step, until resume", "resume": "continue a paused run",
        "checkpoint": "write a checkpoint after the current step", "stop": "end a run after the current step",
    }  # fmt: skip
    where = "address of a Ray cluster, such as auto; RUN is then the run's name there"
    for name, meaning in controls.items():
        control = _add(into, name, commands.control, meaning)
        control.add_argument("run", metavar="RUN", help="run directory")
        if name == "scale":
            control.add_argument("engines", metavar="N", help="number of engines, 1 or more")
        control.add_argument("--address", default="", help=where)
        control.add_argument("--json", action="store_true", help="print the answer as JSON")
        control.set_defaults(name=name, engines=None)


WITHOUT_OPTIONS = (
    commands.report, commands.watch, commands.rollouts, commands.compare, commands.control, commands.trace,
    commands.runs, commands.track, commands.export, commands.push,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())

"""The command line: it reads arguments, calls the library, and prints. No logic lives here."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from slipstream import __version__
from slipstream.config import (
    NO_SYSTEM,
    Config,
    ConfigError,
    LoraConfig,
    absolute_path,
    dump,
    join_flags,
    load_config,
    parse_flags,
)

# Failures whose message is all that a user needs; their classes live in modules that are slow to import.
FAILURES = (
    "RunError",
    "RecordError",
    "ActorDied",
    "ActorError",
    "GenerationError",
    "EngineFailed",
    "PublishError",
    "EvaluationError",
    "CloseError",
)
DESCRIPTION = "Fine-tune a language model with reinforcement learning, generating and training at the same time."
EXAMPLES = """
examples:
  slipstream train examples/gsm8k.toml --loop.max_lag 2 --trainer.learning_rate 2e-6
  slipstream train --resume runs/gsm8k-20260101-120000
  slipstream eval runs/gsm8k-20260101-120000 --tasks 200
  slipstream eval models/gemma-3-270m --environment gsm8k --environment.options.data examples/data/gsm8k
  slipstream generate models/gemma-3-270m --prompt "The capital of France is"
  slipstream study lag examples/addition.toml --loop.tokens 350000 --lags 0,1,4,16 --seeds 3
  slipstream config examples/gsm8k.toml

Every option of a run is --section.option VALUE; `slipstream config` lists them all with their meaning.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 the run failed, 2 something asked for is wrong."""
    joined = join_flags(sys.argv[1:] if arguments is None else arguments)
    given = [word for word in joined if word.startswith("--") and "." in word.partition("=")[0]]
    options, unknown = parser().parse_known_args([word for word in joined if word not in given])
    flags = given + unknown
    # A command's own options that stand for one of the configuration have its name, and lie under what is given so.
    flags = [f"--{name}={value}" for name, value in vars(options).items() if "." in name and value is not None] + flags
    try:
        if sys.platform == "win32":
            raise ConfigError(NO_SYSTEM)
        list(parse_flags(flags))  # a flag that is none is the first thing to say
        status: int | None = options.command(options, flags)
        return status or 0
    except ConfigError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("slipstream: stopped at once", file=sys.stderr)
        return 130
    except Exception as error:
        if not any(kind.__name__ in FAILURES for kind in type(error).__mro__):
            raise
        said = " ".join(map(str, getattr(error, "__notes__", [error])))
        if "--resume" not in said and (directory := getattr(error, "resumable", None)):
            said = f"{said.rstrip()}\nGo on from the last checkpoint: slipstream train --resume {directory}"
        print(f"slipstream: {said}", file=sys.stderr)
        return 1


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"slipstream: {message}; see `{self.prog} --help`\n")


def parser() -> argparse.ArgumentParser:
    root = Parser(
        "slipstream", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = root.add_subparsers(metavar="COMMAND", required=True)

    train = commands.add_parser(
        "train", help="fine-tune a policy", epilog="Also: --section.option VALUE, see `config`."
    )
    train.add_argument("config", nargs="?", metavar="CONFIG.toml", help="what to run")
    train.add_argument("--resume", metavar="RUN_DIR", type=Path, help="go on with an interrupted run")
    train.add_argument("--quiet", action="store_true", help="print warnings and the final report only")
    train.set_defaults(command=_train)

    embedded = "Tokens are drawn by the embedded engine, whatever generator.kind says."
    evaluate = commands.add_parser("eval", help="measure a policy on held-out tasks", epilog=embedded)
    evaluate.add_argument("target", metavar="RUN_DIR|MODEL", help="a run's directory, a model's, or a Hub name")
    evaluate.add_argument("--environment", metavar="NAME", help="gsm8k, addition, or your own (default: the run's)")
    tasks = "held-out tasks to play (default: 100, or the run's)"
    evaluate.add_argument("--tasks", dest="evaluation.tasks", metavar="N", help=tasks)
    evaluate.add_argument("--json", action="store_true", help="print the whole result as JSON")
    evaluate.set_defaults(command=_evaluate)

    generate = commands.add_parser("generate", help="complete a prompt", epilog=embedded)
    generate.add_argument("target", metavar="MODEL|RUN_DIR", help="a model's directory, a run's, or a Hub name")
    generate.add_argument("--prompt", action="append", required=True, help="text to complete; may be given repeatedly")
    for flag, name, default, meaning in (
        ("--max-tokens", "sampling.max_tokens", None, "longest completion (default: 128, or the run's)"),
        ("--temperature", "evaluation.temperature", "0", "0 (the default) is greedy"),
        ("--seed", "loop.seed", "0", "same seed, same completions"),
    ):
        generate.add_argument(flag, dest=name, default=default, metavar=flag[2].upper(), help=meaning)
    generate.set_defaults(command=_generate)

    verify = commands.add_parser("verify", help="see that engine and weight link change policies exactly")
    verify.add_argument("target", metavar="MODEL|RUN_DIR", help="a model's directory, a run's, or a Hub name")
    verify.add_argument("--prompts", type=int, default=16, metavar="N")
    verify.add_argument("--tokens", type=int, metavar="N", help="length of each completion; by default what it takes")
    verify.add_argument("--after", type=int, default=16, metavar="N", help="tokens before the change")
    verify.set_defaults(command=_verify)

    studies = commands.add_parser("study", help="compare runs of one task").add_subparsers(
        metavar="STUDY", required=True
    )
    lag = studies.add_parser("lag", help="what stale data costs in learning, and gains in time")
    lag.add_argument("config", nargs="?", metavar="CONFIG.toml", help="the task; loop.tokens says for how long")
    lag.add_argument("--lags", default="0,1,4,16", metavar="N,N", help="values of loop.max_lag (default: 0,1,4,16)")
    sets = "none, default, or your own as NAME:option=value,option=value (default: none,default)"
    lag.add_argument("--corrections", default="none,default", metavar="NAME,NAME", help=sets)
    lag.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each (default: 3)")
    lag.add_argument("--dir", type=Path, default=Path("studies/lag"), help="what is there already is not run again")
    lag.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once; times want 1 (the default)")
    lag.add_argument("--target", type=float, metavar="X", help="accuracy to reach (default: 0.9 of the gain at lag 0)")
    lag.add_argument("--draw", action="store_true", help="table and pictures once more from the data in --dir")
    lag.set_defaults(command=_study_lag)

    config = commands.add_parser("config", help="print a configuration with all defaults, as TOML")
    config.add_argument("config", nargs="?", metavar="CONFIG.toml")
    config.set_defaults(command=_config)
    return root


def _train(options: argparse.Namespace, flags: list[str]) -> None:
    if bool(options.config) == bool(options.resume):
        raise ConfigError("train needs a CONFIG.toml, or --resume RUN_DIR, and not both")
    config = load_config(options.config, flags) if options.config else None
    from slipstream.observe.report import report
    from slipstream.run import resume, train
    from slipstream.runtime.ranks import join

    if join():
        return
    report(train(config, quiet=options.quiet) if config else resume(options.resume, flags, quiet=options.quiet))


def _evaluate(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.evaluation import evaluate_model
    from slipstream.observe.figures import counts

    _unwind_on_interrupt()
    config = _config_to_draw(options.target, options.environment, flags)
    result = asyncio.run(evaluate_model(config))
    if result["failed"]:
        told = f"{result['failed']} of {result['tasks']} held-out tasks failed, the last with: {result['last_failure']}"
        print(f"slipstream: {told}", file=sys.stderr)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"{config.environment.name}: score {result['score']:.3f} on {result['tasks']} held-out tasks", end="")
        failed = f"{result['failed']} failed" + f": {counts(result['failures'])}" * bool(result["failures"])
        failed += f", rewards that raised: {counts(result['reward_errors'])}" * bool(result["reward_errors"])
        print(f" ({failed}), {result['completion_length']:.0f} tokens each, {result['seconds']:.1f} s")


def _generate(options: argparse.Namespace, flags: list[str]) -> None:
    from slipstream.evaluation import generate_texts

    _unwind_on_interrupt()
    config = _config_to_draw(options.target, None, flags, default="addition")
    completions = asyncio.run(generate_texts(config, options.prompt))
    for prompt, completion in zip(options.prompt, completions, strict=True):
        print(f"{prompt}{completion.text}" if len(options.prompt) == 1 else f"{prompt}{completion.text}\n")


def _verify(options: argparse.Namespace, flags: list[str]) -> int:
    from slipstream.verification import verify

    _unwind_on_interrupt()
    config = _config_to_verify(options.target, flags)
    found = asyncio.run(verify(config, prompts=options.prompts, tokens=options.tokens, after=options.after))
    print(found.describe(config))
    return 0 if found.exact else 1


def _study_lag(options: argparse.Namespace, flags: list[str]) -> int:
    if bool(options.config) == options.draw:
        raise ConfigError("study lag needs a CONFIG.toml, or --draw, and not both")
    from slipstream.study.lag import present, study_lag
    from slipstream.study.plan import Plan, parse_corrections, parse_lags

    _unwind_on_interrupt()
    if options.draw:
        present(options.dir, options.target)
        return 0
    lags, corrections = parse_lags(options.lags), parse_corrections(options.corrections)
    plan = Plan(Path(options.config), options.dir, lags, corrections, options.seeds, tuple(flags))
    said = ("--lags", options.lags, "--corrections", options.corrections, "--seeds", str(options.seeds))
    command = ["slipstream", "study", "lag", options.config, *said, "--jobs", str(options.jobs), *flags]
    failed = study_lag(plan, jobs=options.jobs, target=options.target, command=command)
    for line in failed:
        print(f"slipstream: {line}", file=sys.stderr)
    return 1 if failed else 0


def _unwind_on_interrupt() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt`, for commands that have processes or files to remove."""
    with contextlib.suppress(ValueError):  # not the main thread: no signals here
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _config(options: argparse.Namespace, flags: list[str]) -> None:
    if options.config is None:  # the defaults, for reading: what has none is shown as a placeholder
        flags = ["--model.path=MODEL", "--environment.name=ENVIRONMENT", *flags]
    print(dump(load_config(options.config, flags)))


def _config_to_draw(target: str, environment: str | None, flags: list[str], default: str | None = None) -> Config:
    """The configuration of a run whose policy is asked for, or the defaults around a model, which has no environment of
    its own: `default` is in its place."""
    run = Path(target) / "config.toml"
    if not run.exists():
        if not (environment := environment or default):
            raise ConfigError(f"{target} is no run's directory; name an environment: --environment NAME")
        return load_config(None, [f"--model.path={target}", f"--environment.name={environment}", *flags])
    trained = load_config(run)
    changes = [f"--model.path={_policy_of(target)}", "--generator.servers=[]"]
    if trained.lora.rank:  # the adapters are the policy's own, and no others are added to them
        changes += [f"--lora.{name}={json.dumps(option.default)}" for name, option in LoraConfig.model_fields.items()]
        changes += ["--sync.link=auto"]
    other = environment and absolute_path(environment) != absolute_path(trained.environment.name)
    if other:  # options and rewards of steps are those of the run's own environment
        changes += [f"--environment.name={environment}", "--environment.options={}", "--algorithm.process=0"]
    return load_config(run, [*changes, *flags])


def _config_to_verify(target: str, flags: list[str]) -> Config:
    """The engine and the link of a run, or the defaults, around its policy; around the model below if that is adapters,
    since those are what the link brings."""
    run, asked = Path(target) / "config.toml", dict(parse_flags(flags))
    trained = load_config(run) if run.exists() else None
    restarts = asked.get("sync.restart", trained and trained.sync.restart)
    adapts = asked.get("lora.rank", trained and trained.lora.rank)
    vllm = asked.get("generator.kind", trained and trained.generator.kind) == "vllm"
    # Where something can be computed again, it is.
    changes = [] if restarts or (adapts and vllm) else ["--sync.interruption=recompute"]
    if not trained:
        return _config_to_draw(target, None, [*changes, *flags], default="addition")
    if not trained.lora.rank:
        changes += [f"--model.path={_policy_of(target)}"]
    return load_config(run, [*changes, *flags])


def _policy_of(target: str) -> Path:
    """Where the policy of a run is. Raises `ConfigError` if there is none yet."""
    if not (policy := Path(target) / "policy").is_dir():
        raise ConfigError(f"{target} has no policy/ yet; `slipstream train --resume {target}` finishes the run")
    return policy


if __name__ == "__main__":
    sys.exit(main())

"""The command line: it reads arguments, calls the library, and prints. No logic lives here."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.config import Config, ConfigError, dump, load

DESCRIPTION = "Fine-tune a language model with reinforcement learning, generating and training at the same time."
EXAMPLES = """
examples:
  slipstream train examples/gsm8k.toml --loop.max_lag 2 --trainer.learning_rate 2e-6
  slipstream train --resume runs/gsm8k-20260101-120000
  slipstream eval runs/gsm8k-20260101-120000 --tasks 200
  slipstream eval models/gemma-3-270m --environment gsm8k --environment.options.data examples/data/gsm8k
  slipstream generate models/gemma-3-270m --prompt "The capital of France is"
  slipstream config examples/gsm8k.toml

Every option of a run is --section.option VALUE; `slipstream config` lists them all with their meaning.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 the run failed, 2 something asked for is wrong."""
    options, flags = parser().parse_known_args(arguments)
    try:
        status: int = options.command(options, flags)
        return status
    except ConfigError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("slipstream: stopped at once", file=sys.stderr)
        return 130
    except Exception as error:
        if type(error).__name__ not in ("RunError", "RecordError", "ActorDied", "ActorError", "GenerationError"):
            raise
        print(f"slipstream: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="slipstream",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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

    evaluate = commands.add_parser("eval", help="measure a policy on held-out tasks")
    evaluate.add_argument("target", metavar="RUN_DIR|MODEL", help="a run's directory, a model's, or a Hub name")
    evaluate.add_argument("--environment", metavar="NAME", help="gsm8k, addition, or your own (default: the run's)")
    evaluate.add_argument("--tasks", type=int, metavar="N", help="held-out tasks to play (default: 100, or the run's)")
    evaluate.add_argument("--json", action="store_true", help="print the whole result as JSON")
    evaluate.set_defaults(command=_evaluate)

    generate = commands.add_parser("generate", help="complete a prompt")
    generate.add_argument("target", metavar="MODEL|RUN_DIR", help="a model's directory, a run's, or a Hub name")
    generate.add_argument("--prompt", action="append", required=True, help="text to complete; may be given repeatedly")
    generate.add_argument("--max-tokens", type=int, default=128, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
    generate.add_argument("--seed", type=int, default=0, metavar="N")
    generate.set_defaults(command=_generate)

    verify = commands.add_parser("verify", help="see that engine and weight link change policies exactly")
    verify.add_argument("target", metavar="MODEL|RUN_DIR", help="a model's directory, a run's, or a Hub name")
    verify.add_argument("--prompts", type=int, default=16, metavar="N")
    verify.add_argument("--tokens", type=int, default=64, metavar="N", help="length of each completion")
    verify.add_argument("--after", type=int, default=16, metavar="N", help="tokens before the change")
    verify.set_defaults(command=_verify)

    config = commands.add_parser("config", help="print a configuration with all defaults, as TOML")
    config.add_argument("config", nargs="?", metavar="CONFIG.toml")
    config.set_defaults(command=_config)
    return root


def _train(options: argparse.Namespace, flags: list[str]) -> int:
    if bool(options.config) == bool(options.resume):
        raise ConfigError("train needs a CONFIG.toml, or --resume RUN_DIR, and not both")
    if options.resume:
        from slipstream.run import resume

        summary = resume(options.resume, flags, quiet=options.quiet)
    else:
        config = load(options.config, flags)
        from slipstream.run import train

        summary = train(config, quiet=options.quiet)
    show_report(summary)
    return 0


def _evaluate(options: argparse.Namespace, flags: list[str]) -> int:
    from slipstream.evaluation import evaluate_model

    config = _config_of(options.target, options.environment, flags)
    result = asyncio.run(evaluate_model(config, config.evaluation.tasks if options.tasks is None else options.tasks))
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"{config.environment.name}: score {result['score']:.3f} on {result['tasks']} held-out tasks", end="")
        print(f" ({result['failed']} failed), {result['completion_length']:.0f} tokens each, {result['seconds']:.1f} s")
    return 0


def _generate(options: argparse.Namespace, flags: list[str]) -> int:
    from slipstream.evaluation import generate_texts

    config = _config_of(options.target, "addition", flags)
    for prompt, completion in zip(
        options.prompt,
        asyncio.run(generate_texts(config, options.prompt, options.max_tokens, options.temperature, options.seed)),
        strict=True,
    ):
        print(f"{prompt}{completion.text}" if len(options.prompt) == 1 else f"{prompt}{completion.text}\n")
    return 0


def _verify(options: argparse.Namespace, flags: list[str]) -> int:
    from slipstream.verification import verify

    config = _config_of(options.target, "addition", ["--sync.interruption=recompute", *flags])
    found = asyncio.run(verify(config, prompts=options.prompts, tokens=options.tokens, after=options.after))
    show_verdict(found, config)
    return 0 if found.exact else 1


def show_verdict(found: Any, config: Config) -> None:
    """What `verify` found, as a table."""
    sync = config.sync
    how = f"{config.generator.kind}, tensor parallel {config.generator.tensor_parallel}, {config.model.dtype}"
    print(f"engine       {how}\nlink         {sync.link}, in flight: {sync.interruption}")
    print(f"completions  {found.completions}, of which {found.changed} changed policy in the middle")
    for name, index, (exact, total) in (("before A->B", 0, found.before), ("after  A->B", 1, found.after)):
        print(f"{name}  {exact} of {total} exact ({found.tokens[index]} tokens)")
    print(f"held         {1000 * found.hold:.2f} ms\n{'EXACT' if found.exact else 'NOT EXACT'}")


def _config(options: argparse.Namespace, flags: list[str]) -> int:
    if options.config is None:  # the defaults, for reading: what has none is shown as a placeholder
        flags = ["--model.path=MODEL", "--environment.name=ENVIRONMENT", *flags]
    print(dump(load(options.config, flags)))
    return 0


def _config_of(target: str, environment: str | None, flags: list[str]) -> Config:
    """The configuration of a run whose policy is asked for, or the defaults around a model."""
    run = Path(target) / "config.toml"
    if not run.exists():
        if environment is None:
            raise ConfigError(f"{target} is no run's directory; name an environment: --environment NAME")
        return load(None, [f"--model.path={target}", f"--environment.name={environment}", *flags])
    policy = Path(target) / "policy"
    if not policy.is_dir():
        raise ConfigError(f"{target} has no policy/ yet; `slipstream train --resume {target}` finishes the run")
    named = [f"--environment.name={environment}"] if environment else []
    return load(run, [f"--model.path={policy}", "--lora.rank=0", *named, *flags])


def show_report(summary: dict[str, Any]) -> None:
    """The table that closes a run."""
    from rich.console import Console

    from slipstream.observe.report import report

    report(summary, summary["samples"]["before"], summary["samples"]["after"], Console())


if __name__ == "__main__":
    sys.exit(main())

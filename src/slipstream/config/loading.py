"""From a TOML file and dotted flags (`--trainer.learning_rate 1e-5`) to a validated `Config`, and back to TOML.

Errors raise `ConfigError`; its lines name the option and the remedy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slipstream.config import checks
from slipstream.config.adapter import ADAPTER, with_adapter_options
from slipstream.config.algorithm import AlgorithmConfig, PolicyConfig
from slipstream.config.environments import BUILT_IN, DATASET_OPTIONS, CurriculumConfig, SamplingConfig, reads_dataset
from slipstream.config.schema import NO_DEVICE, SECTIONS, Config, ConfigError, LoraConfig
from slipstream.config.section import Section
from slipstream.config.suggestions import suggest
from slipstream.config.toml import is_writable, to_toml

PATHS = ("model.path", "lora.path", "teacher.path", "policies.adapter", "policies.model")
NESTED: dict[str, type[Section]] = {  # entries of lists, and tables in them
    "environment.sampling": SamplingConfig,
    "environment.curriculum": CurriculumConfig,
    "policy": PolicyConfig,
    "policy.algorithm": AlgorithmConfig,
}
LISTS = {"environments": "environment", "policies": "policy"}  # and what their entries are
ENTRY = re.compile(rf"({'|'.join(LISTS)})\.(\d{{1,9}})\.")  # before the name of an option of one of [[environments]]


def load_config(path: str | Path | None = None, flags: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file, with dotted flags over it. Raises `ConfigError`."""
    return _with_flags({} if path is None else _read(path), flags)


def load_run_config(file: Path, flags: Sequence[str] = ()) -> Config:
    """The configuration in a run's `config.toml`, which has all sections. Raises `ConfigError`, also if cut off."""
    values = _read(file)
    if missing := [name for name in SECTIONS if name not in values]:
        raise ConfigError(
            f"{file} is incomplete: it has no [{missing[0]}], and a run writes all sections; restore the file, since "
            "options that are missing would get their defaults"
        )
    return _with_flags(values, flags)


def _with_flags(values: dict[str, Any], flags: Sequence[str]) -> Config:
    for name, value in parse_flags(flags):
        _set_option(values, name, value)
    return validate(values)


def _read(path: str | Path) -> dict[str, Any]:
    """The values in a TOML file. Raises `ConfigError`."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def load_policy_config(target: str, environment: str | None, flags: list[str], default: str | None = None) -> Config:
    """The configuration with which to sample from a policy: `target` is a TOML file, a run's directory, or a model.

    `environment` is a label of the file or the run, or another environment, which a model needs, or has `default`.
    Raises `ConfigError`.
    """
    run, given = Path(target) / "config.toml", dict(parse_flags(flags))
    file = Path(target) if target.endswith(".toml") else run
    # Where the environment reads a dataset, another one replaces it, and the environment stays.
    other = "environment.dataset" in given and not (file.exists() and reads_dataset(_read(file).get("environment")))
    environment = str(given.get("environment.name") or environment or ("dataset" if other else ""))
    if target.endswith(".toml") and environment and _read(target).get("environments"):
        config = load_config(target, [flag for flag in flags if not flag.startswith("--environment.")])
        rest = [flag for flag in flags if not flag.startswith("--environments.")]  # of which `config` has the values
        return load_config(target, [*_select_environment(target, config, environment), *rest])
    if target.endswith(".toml"):
        return load_config(target, [*([f"--environment.name={environment}"] if environment else []), *flags])
    if not run.exists():
        if not (environment := environment or default):
            found = "is no run's directory" if Path(target).exists() else "does not exist here"
            raise ConfigError(f"{target} {found}; of a model, name an environment, too: --environment NAME")
        return load_config(None, [f"--model.path={target}", f"--environment.name={environment}", *flags])
    trained = load_run_config(run)
    changes = ["--generator.servers=[]", *["--sync.link=auto"] * bool(trained.lora.rank)]
    if trained.policies:
        saved = [policy_of(target, policy.name) for policy in trained.policies]
        kind = "adapter" if trained.lora.rank else "model"
        changes += [f"--policies.{i}.{kind}={to_toml(str(path))}" for i, path in enumerate(saved)]
    else:
        changes += [f"--model.path={policy_of(target)}"]
    if trained.lora.rank and not trained.policies:  # the saved policy holds the run's adapters
        defaults = {name: option.default for name, option in LoraConfig.model_fields.items()}
        changes += [f"--lora.{name}={v if isinstance(v, str) else to_toml(v)}" for name, v in defaults.items()]
    changes += _select_environment(target, trained, environment) if environment else []
    return load_run_config(run, [*changes, *flags])


def _select_environment(target: str, config: Config, environment: str) -> list[str]:
    """Flags for one label of the configuration, or another environment. Raises `ConfigError` with the labels."""
    each = config.each_environment
    chosen = [i for i, e in enumerate(each) if environment in (e.label, e.name)]
    if chosen and config.environments:
        return [f"--environments={to_toml([config.environments[i] for i in chosen])}"]
    if chosen or absolute_path(environment) == absolute_path(config.environment.name):
        return []
    if environment not in BUILT_IN and ":" not in environment:
        labels = ", ".join(e.label for e in each)
        raise ConfigError(
            f"--environment {environment} is no label of {target}, which has {labels}, and no environment"
            f"{suggest(environment, [*(e.label for e in each), *BUILT_IN])}"
        )
    changes = [f"--environment.name={environment}", "--environment.options={}", "--environments=[]"]
    return [*changes, "--algorithm.process_reward_coef=0"]


def with_policy(config: Config, target: str, name: str = "") -> Config:
    """The configuration with the policy of another run, or another model; of several policies with all of the other
    run, or with the one of this `name`. Raises `ConfigError`."""
    if config.policies:
        return _with_policies(config, target, [name] if name else [policy.name for policy in config.policies])
    path = str(policy_of(target)) if (Path(target) / "config.toml").exists() else target
    return with_options(config, model=config.model.model_dump() | {"path": path}, lora={}, sync={})


def _with_policies(config: Config, target: str, names: Sequence[str]) -> Config:
    """The configuration with these policies of the run in directory `target`."""
    run = Path(target) / "config.toml"
    if not run.exists():
        raise ConfigError(
            f"{target} is no run; give the directory of a run of these policies (before training they are those of a "
            "CONFIG.toml)"
        )
    other = load_run_config(run)
    if not other.policies:
        raise ConfigError(f"{target} has trained one policy without a name; give a run of policies {', '.join(names)}")
    policies = [policy.model_dump(exclude_unset=True) for policy in config.policies]
    for policy in (each for each in policies if each["name"] in names):
        path = str(policy_of(target, policy["name"]))
        adapts = other.each_policy[policy["name"]] if other.lora.rank else None
        policy.update({"adapter": path, "model": adapts.model.path} if adapts else {"adapter": "", "model": path})
    every = len(names) == len(policies)  # then the other run's base and adapters replace this one's
    base = {"path": other.model.path} if every else {}
    lora = (other if every else config).lora.model_dump(exclude_unset=True)
    return with_options(config, model=config.model.model_dump() | base, lora=lora, policies=policies)


def load_verify_config(target: str, flags: list[str]) -> Config:
    """The configuration with which to verify engine and weight link: those of a run, or the defaults around a model.

    A run that trains adapters is verified on its base model, since its link publishes adapters. Sequences in flight are
    recomputed at the swap, unless engines restart or vLLM serves adapters. Raises `ConfigError`.
    """
    run, given = Path(target) / "config.toml", dict(parse_flags(flags))
    trained = load_run_config(run) if run.exists() else None
    restarts = given.get("sync.restart", trained and trained.sync.restart)
    adapts = given.get("lora.rank", trained and trained.lora.rank)
    vllm = given.get("generator.engine", trained and trained.generator.engine) == "vllm"
    changes = [] if restarts or (adapts and vllm) else ["--sync.in_flight=recompute"]
    if not trained:
        return load_policy_config(target, None, [*changes, *flags], default="addition")
    if trained.policies or not trained.lora.rank:
        changes += [f"--model.path={policy_of(target)}"]
    return load_run_config(run, [*changes, *flags])


def policy_of(target: str, name: str = "") -> Path:
    """The policy that the run in directory `target` has written; of several the one with this name.

    Raises `ConfigError` before the end of the run, for a run of several policies without a name, and for unknown names.
    """
    if not (policy := Path(target) / "policy").is_dir():
        path = shlex.quote(target)
        again = f"`slipstream train --resume {path}`"
        if (Path(target) / "summary.json").exists():
            more = "(with a higher --loop.steps if the run is complete)"
            raise ConfigError(f"{target} has no policy/ any more; {again} writes it again {more}")
        more = f"`slipstream status {path}` shows it while it runs, else {again} continues it"
        raise ConfigError(f"{target} has no policy/ yet, since the run has not ended; {more}")
    several = sorted({each.parent for kind in (ADAPTER, "config.json") for each in policy.glob(f"*/{kind}")})
    if several and not name:
        found = ", ".join(each.as_posix() for each in several)
        how = "`export` and `push` take one of them with --policy NAME, `generate` its directory"
        raise ConfigError(f"{target} has several policies; {how}: {found}")
    if name and policy / name not in several:
        names = [each.name for each in several]
        known = (
            f"which has {', '.join(names)}{suggest(name, names)}" if several else "which has one; leave --policy out"
        )
        raise ConfigError(f"--policy {name} is no policy of {target}, {known}")
    return policy / name


def validate(values: Mapping[str, Any]) -> Config:
    """Nested values as a `Config`. Raises `ConfigError` with all invalid options, or the first of `checks.faults`."""
    shared = values.get("environment", {})
    if values.get("environments") == [] and isinstance(shared, dict) and not {"name", "dataset"} & {*shared}:
        raise ConfigError("environments is an empty list, and environment.name is not set; give one of them")
    try:
        config = Config.model_validate(with_adapter_options(values))
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_explain(e) for e in error.errors()))) from None
    for fault in checks.faults(config):
        raise ConfigError(fault)
    return config


def with_options(config: Config, **sections: Any) -> Config:
    """The configuration with these sections replaced. Raises `ConfigError`."""
    return validate(config.model_dump(exclude_unset=True) | sections)


def with_absolute_paths(config: Config) -> Config:
    """The configuration with absolute paths, for processes with another working directory.

    Three kinds of text are made absolute if they name an existing file or directory: "path/to/file.py:thing" of any
    option, paths of models, and text with a "/" or a suffix in a table of options.
    """
    given = config.model_dump(exclude_unset=True)
    return validate({name: _with_absolute_paths(name, values) for name, values in given.items()})


def absolute_path(text: str) -> str:
    """The absolute form of "path/to/file.py:thing" or of an existing path; other text is returned unchanged."""
    module, colon, name = text.rpartition(":")
    file, rest = (module, colon + name) if module.endswith(".py") else (text, "")
    exists = os.path.exists(file)  # noqa: PTH110, since Path.exists raises for a text that is too long for a path
    return f"{Path(file).absolute()}{rest}" if exists else text


def _with_absolute_paths(name: str, value: Any) -> Any:
    """The value of this option, or of an entry of its table or list, with absolute paths."""
    if isinstance(value, dict):
        return {key: _with_absolute_paths(f"{name}.{key}", inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_with_absolute_paths(name, inside) for inside in value]
    if not isinstance(value, str):
        return value
    like_path = (".options." in name or name == "algorithm.reference") and ("/" in value or Path(value).suffix)
    return absolute_path(value) if like_path or name in PATHS or value.rpartition(":")[0].endswith(".py") else value


def join_flags(arguments: Sequence[str]) -> list[str]:
    """The arguments with every `--a.b v` written as `--a.b=v`, so that argparse does not read `v` as a positional."""
    joined: list[str] = []
    for argument in arguments:
        needs_value = joined and re.fullmatch(rf"--([^=]*\.[^=]*|{'|'.join(LISTS)})", joined[-1])
        if needs_value and not argument.startswith("--"):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def parse_flags(flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """`--a.b v` and `--a.b=v` as ("a.b", value).

    The value of a text option is taken literally; any other value is parsed as TOML or as a table in JSON, or taken as
    text if both fail.
    Raises `ConfigError` for anything else than an option with a value.
    """
    for flag in join_flags(flags):
        if not flag.startswith("--"):
            remedy = "give one file" if flag.endswith(".toml") else "options look like --section.option value"
            raise ConfigError(f"{flag!r} is not an option; {remedy}")
        name, equals, text = flag[2:].partition("=")
        if ("." not in name and name not in LISTS) or not all(name.split(".")):
            raise ConfigError(f"unknown option --{name}{suggest(name, option_names())}; see `slipstream config --help`")
        if not equals:
            raise ConfigError(f"--{name} has no value; give one: --{name} VALUE")
        yield name, _flag_value(name, text)


def as_flags(config: Config) -> list[str]:
    """Flags that set what was given to this configuration; options at their defaults are left out."""
    given = flat_options(config, exclude_unset=True)
    return [f"--{name}={value if isinstance(value, str) else to_toml(value)}" for name, value in given.items()]


def flat_options(config: Config, *, exclude_unset: bool = False) -> dict[str, Any]:
    """The values of options by dotted name, and the lists of `LISTS` that are given."""
    sections = config.model_dump(exclude_unset=exclude_unset)
    lists = {name: entries for name in LISTS if (entries := sections.pop(name, []))}
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()} | lists


def option_names() -> list[str]:
    """Every dotted option name."""
    return [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]


def dump(config: Config) -> str:
    """The configuration as TOML with every default, each option under its description."""
    lines = []
    for name, section in SECTIONS.items():
        lines.append(f"[{name}]  # {section.__doc__}")
        for key, info in section.model_fields.items():
            lines += [f"# {info.description}", f"{key} = {to_toml(getattr(getattr(config, name), key))}"]
        lines.append("")
    for name in LISTS:
        for entry in getattr(config, name):  # only the options given: [environment] or [algorithm] has the others
            given = entry.model_dump(exclude_unset=True).items()
            lines += [f"[[{name}]]", *(f"{key} = {to_toml(value)}" for key, value in given), ""]
    return "\n".join(lines)


def _set_option(values: dict[str, Any], name: str, value: Any) -> None:
    if entry := ENTRY.match(name):
        entries, number = values.get(entry[1]), int(entry[2])
        if not isinstance(entries, list) or len(entries) <= number or not isinstance(entries[number], dict):
            known = "are counted from 0" if entries else "a flag can't add; write them into the configuration file"
            raise ConfigError(f"--{name}: there is no entry {number} of [[{entry[1]}]], which {known}")
        values, name = entries[number], name[entry.end() :]
    *parents, last = name.split(".")
    for parent in parents:
        if isinstance(function := values.get(parent), str) and name.startswith(f"algorithm.{parent}."):
            values[parent] = {"name": function}  # loss = "ppo" in the file, and a flag for one option of that loss
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--{name}: {parent} is a value, not a section")
    values[last] = value


def _flag_value(name: str, text: str) -> Any:
    section, _, key = _without_number(name).partition(".")
    option = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
    if option and option.annotation is str:
        return text
    with contextlib.suppress(ValueError):
        return tomllib.loads(f"value = {text}")["value"]
    with contextlib.suppress(ValueError, RecursionError):
        if text.startswith("{"):
            return json.loads(text)
    return text


def _without_number(name: str) -> str:
    """The name of an option of an entry of a list, such as "environment.timeout" of "environments.0.timeout"."""
    return ENTRY.sub(lambda entry: f"{LISTS[entry[1]]}.", name)


EXPECTED = {  # by pydantic's name of an error
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_type": "it must be true or false",
    "string_type": "it must be text",
    "string_too_short": "it must not be empty",
    "string_pattern_mismatch": NO_DEVICE,  # the only options with a pattern
    "list_type": 'it must be a list, such as ["a", "b"]',
    "tuple_type": "it must be a list, such as [0.9, 0.99]",
    "dict_type": "it must be a table, such as { name = 1 }",
    "model_type": "it must be a section of options: a line [{name}], then a line for each option",
    "model_attributes_type": "it must be a section of options: a line [{name}], then a line for each option",
}


def _explain(error: Any) -> str:
    """One line for a pydantic error: an unknown option, a missing option, or a value and its type or range."""
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        nested = [f"environment.{option}" for option in DATASET_OPTIONS]
        nested += [f"{key}.{n}" for key, section in NESTED.items() for n in section.model_fields]
        sections = () if "." in name else (*SECTIONS, *LISTS)
        hint = suggest(_without_number(name), [*sections, *option_names(), *nested])
        if entry := ENTRY.match(name):
            hint = hint.replace(f"{LISTS[entry[1]]}.", entry[0])
        return f"unknown option {name}{hint}; `slipstream config` lists all"
    if error["type"] == "missing":
        if name in SECTIONS:
            name += "." + next(key for key, info in SECTIONS[name].model_fields.items() if info.is_required())
        return f"{name} is not set; add it to the file or give --{name} VALUE"
    expected = EXPECTED.get(error["type"], error["msg"]).replace("{name}", name)
    expected = expected[0].lower() + expected[1:]
    shown = to_toml(error["input"]) if is_writable(error["input"]) else repr(error["input"])
    return f"{name} = {shown}: {expected.replace('input should', 'it must')}"

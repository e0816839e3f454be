"""Upload the policy of a run to the Hub, with a model card made from the run's records."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from slipstream.config.loading import policy_of
from slipstream.config.schema import ConfigError
from slipstream.config.toml import to_toml
from slipstream.errors import UserError
from slipstream.model.paths import adapter_config, hub_answers
from slipstream.observe.figures import figures
from slipstream.observe.formatting import number
from slipstream.observe.page.data import describe_options
from slipstream.observe.run_data import Run, load_run
from slipstream.observe.score import compare_scores
from slipstream.tools.export import export

PROJECT = "https://pypi.org/project/slipstream-rl/"
SECRET = re.compile(r'(?i)("?[\w-]*(?:key|token|secret|password|authorization|cookie)[\w-]*"?\s*=\s*)"(?:[^"\\]|\\.)*"')
SECTIONS = ("algorithm", "loop", "trainer", "lora", "sampling")  # whose given options the card lists
ALWAYS = ("algorithm.advantage", "algorithm.loss", "algorithm.corrections", "loop.steps", "loop.max_lag", "loop.seed",
          "loop.groups_per_step", "loop.group_size", "trainer.learning_rate", "lora.rank")  # fmt: skip


def push(path: Path, name: str, merge: bool = False, public: bool = False, policy: str = "") -> str:
    """Upload the policy of the run in directory `path` to the repository `name`, which is created if needed, private
    unless `public`; of several policies the one named `policy`.

    Returns the URL. Raises `ConfigError` before any work, and `UserError` if the Hub refuses.
    """
    run, source = load_run(path), policy_of(str(path), policy)
    _validate_access(name)
    with tempfile.TemporaryDirectory(dir=path, prefix="push-") as folder:
        model = export(path, Path(folder) / "merged", merge=True, name=policy) if merge else source
        files = [CommitOperationAdd(file, data) for file, data in contents(run, model, name, policy).items()]
        try:
            url = HfApi().create_repo(name, private=not public, exist_ok=True)
            HfApi().create_commit(name, files, commit_message=f"Upload {run.name} by Slipstream")
        except Exception as error:  # the class depends on the huggingface_hub release
            raise UserError(f"{name} was not uploaded to {constants.ENDPOINT}: {_line(error)}") from error
    return str(url)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _validate_access(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"{name!r} is no name of a repository: {_line(error)}") from None
    if not get_token():
        raise ConfigError("push needs a token of the Hub that may write: run `hf auth login`, or set HF_TOKEN")
    if constants.HF_HUB_OFFLINE or not hub_answers():
        raise ConfigError(f"{constants.ENDPOINT} can't be reached; connect this host, and unset HF_HUB_OFFLINE if set")


def contents(run: Run, model: Path, name: str, policy: str = "") -> dict[str, Path | bytes]:
    """All files of the repository by name: those of the model, the model card, and the configuration of the run."""
    files: dict[str, Path | bytes] = {file.name: file for file in sorted(model.iterdir()) if file.is_file()}
    card = str(model_card(run, name, bool(adapter_config(str(model))), policy))
    return files | {"README.md": card.encode(), "slipstream.toml": _configuration(run).encode()}


def model_card(run: Run, name: str, is_adapter: bool, policy: str = "") -> ModelCard:
    """The card: base, environments, results with 95% intervals, options, versions, and the whole configuration."""
    base, on_hub = _base(run, policy)
    data = ModelCardData(
        base_model=base if on_hub else None, library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation", tags=["slipstream", "reinforcement-learning", *["lora"] * is_adapter],
    )  # fmt: skip
    kind = "A LoRA adapter of" if is_adapter else "A fine-tuned version of"
    what = f"{kind} `{base}`, trained by reinforcement learning with [Slipstream]({PROJECT})."
    what += f" It is the policy `{policy}` of a run that trained several." if policy else ""
    versions = dict(run.summary.get("packages") or {})
    sections = {
        "Results": _table({"Environment": _environments(run), **_score_rows(run), **figures(run)}),
        "Training": _table(_options(run, policy)),
        "Versions": _table(versions) if versions else "The run recorded none.",
        "Configuration": f"`slipstream train slipstream.toml` repeats the run.\n\n```toml\n{_configuration(run)}```",
    }
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items())
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {name.rpartition('/')[2]}\n\n{what}\n\n{text}\n")


def _base(run: Run, policy: str = "") -> tuple[str, bool]:
    """The name of the base, or of that of one of several policies, and whether it is on a Hub; of a directory only its
    own name."""
    own = [each.get("model") for each in run.config.get("policies", ()) if each["name"] == policy]
    path = str((own and own[0]) or run.options.get("model.path", "–"))
    on_hub = path.count("/") == 1 and not path.startswith(("/", ".", "~")) and not Path(path).exists()
    return (path if on_hub else Path(path).name), on_hub


def _environments(run: Run) -> str:
    parts = run.config.get("environments") or [run.config.get("environment", {})]
    data = [part.get("options", {}).get("dataset") for part in parts]
    names = [str(part.get("label") or file or part.get("name") or "–") for part, file in zip(parts, data, strict=True)]
    return ", ".join(Path(name).name if Path(name).is_absolute() else name for name in names)


def _score_rows(run: Run) -> dict[str, str]:
    """Rows of the model card as texts by label: scores before and after training, their difference, number of tasks.

    Empty if no evaluation has a score.
    """
    if not (score := compare_scores(run.evaluations)):
        return {}
    rows = {f"Score {when}": score[when] for when in ("before", "after", "difference") if score.get(when)}
    shown = {
        label: (f"{value:+.3f}" if "difference" in label else number(value, 3))
        + (f" [{low:.3f}, {high:.3f}]" if low is not None else "")
        for label, (value, low, high) in rows.items()
    }
    return {**shown, "Evaluated on": f"{number(score['tasks'])} held-out tasks; intervals of 95%: {score['method']}"}


def _options(run: Run, policy: str) -> dict[str, str]:
    """The main options, and all others of their sections that differ from the default; those of one of several policies
    where it has its own."""
    defaults = {option["name"]: option.get("default") for option in describe_options()}
    own: dict[str, Any] = {}
    for each in run.config.get("policies", ()):
        if each["name"] == policy:
            own |= {f"algorithm.{name}": value for name, value in each.get("algorithm", {}).items()}
            own |= {"trainer.learning_rate": each["learning_rate"]} if each.get("learning_rate") else {}
    chosen = {
        name: value
        for name, value in (run.options | own).items()
        if name in ALWAYS or (name.partition(".")[0] in SECTIONS and value != defaults.get(name))
    }
    return {f"`{name}`": f"`{SECRET.sub(_hide, to_toml(value))}`" for name, value in chosen.items()}


def _configuration(run: Run) -> str:
    """`config.toml` of the run, without the values of options that are named like secrets."""
    return SECRET.sub(_hide, (run.path / "config.toml").read_text(encoding="utf-8"))


def _hide(found: re.Match[str]) -> str:
    return f'{found[1]}"(removed)"'


def _table(rows: Mapping[str, Any]) -> str:
    def cells(values: Iterable[Any]) -> str:
        return "| " + " | ".join(str(value).replace("|", "\\|").replace("\n", " ") for value in values) + " |"

    return "\n".join([cells(("", "")), "| --- | --- |", *(cells(row) for row in rows.items())])

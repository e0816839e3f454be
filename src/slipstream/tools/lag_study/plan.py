"""The runs of a lag study: one per lag, correction and seed, each with its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

from slipstream.config.loading import flat_options, load_config, parse_flags
from slipstream.config.schema import Config, ConfigError
from slipstream.runtime.placement import resolve_auto

# Options that each named correction sets; the command line can define others.
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "default": (),
    "none": ("algorithm.loss=reinforce", "algorithm.corrections=[]"),  # stale tokens are treated as on-policy
    # The widest clip range leaves the unbounded importance weight.
    "importance": ("algorithm.loss=ppo", "algorithm.loss.clip_low=1.0", "algorithm.loss.clip_high=1e9"),
}
SET_BY_STUDY = {
    "loop.max_lag": "give --lags",
    "loop.seed": "give --seeds N",
    "loop.steps": "its runs end by tokens: give --loop.max_tokens",
    "run.dir": "give --dir",
}
EVALUATIONS = 20  # per run, at equal numbers of trained tokens


@dataclass(frozen=True)
class Run:
    """One run of a study; `flags` are laid over the configuration file."""

    lag: int
    correction: str
    seed: int
    path: Path
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"lag {self.lag}, {self.correction}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """A study: runs of the configuration in `file` with `flags` over it, in directories below `directory`."""

    file: Path
    directory: Path
    lags: tuple[int, ...]
    corrections: dict[str, tuple[str, ...]]
    seeds: int
    flags: tuple[str, ...]

    def runs(self) -> list[Run]:
        """All runs, seed by seed, so that an interrupted study has complete seeds."""
        return [self._new_run(*cell) for cell in product(range(self.seeds), self.corrections, self.lags)]

    def configuration(self, run: Run) -> Config:
        """The run's configuration. Raises `ConfigError`."""
        return load_config(self.file, run.flags)

    def check(self) -> None:
        """Raise `ConfigError` for an invalid run, or if its directory holds a run of another configuration."""
        for name, _ in parse_flags(self.flags):
            if name in SET_BY_STUDY:
                raise ConfigError(f"--{name} is set by the study; {SET_BY_STUDY[name]}")
        for run in self.runs():
            config, earlier = resolve_auto(self.configuration(run)), run.path / "config.toml"
            if earlier.exists() and (changed := _differences(resolve_auto(load_config(earlier)), config)):
                raise ConfigError(
                    f"{run.path} holds a run of another configuration ({', '.join(changed)}); "
                    "name another --dir, or remove it"
                )

    def log(self, run: Run) -> Path:
        """Where the output of a run is written."""
        return self.directory / "logs" / f"{run.path.name}.log"

    @property
    def tokens(self) -> int:
        """Trained tokens of each run. Raises `ConfigError` if `loop.max_tokens` is not set."""
        if not (tokens := self._base.loop.max_tokens):
            raise ConfigError(
                "runs are compared at equal numbers of trained tokens, and loop.max_tokens is not set; "
                "add --loop.max_tokens N, for example tokens_trained in the summary.json of a run that learned"
            )
        return tokens

    @cached_property
    def _base(self) -> Config:
        return load_config(self.file, self.flags)

    def _new_run(self, seed: int, correction: str, lag: int) -> Run:
        """The run of a lag, a correction and a seed: its directory and its flags."""
        path, loop = self.directory / f"lag{lag}-{correction}-seed{seed}", self._base.loop
        # A completion has at least one token, so the limit on tokens ends the run before this limit on steps.
        steps = self.tokens // (loop.groups_per_step * loop.group_size) + 1
        synchronous = ["loop.force_max_lag=false"]  # options without effect at lag 0 are refused
        if self._base.sync.every == 1:
            synchronous.append("loop.buffer_size=0")
        flags = (
            "loop.force_max_lag=true", f"evaluation.every_tokens={max(1, self.tokens // EVALUATIONS)}",
            "evaluation.every=0", *self.flags, *self.corrections[correction],
            *([] if lag else synchronous),
            f"loop.max_lag={lag}", f"loop.seed={seed}", f"loop.steps={steps}", f"run.dir={path}",
        )  # fmt: skip
        return Run(lag, correction, seed, path, tuple(f"--{flag.removeprefix('--')}" for flag in flags))


def parse_lags(text: str) -> tuple[int, ...]:
    """The numbers in "0,1,4", in ascending order. Raises `ConfigError`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise ConfigError(f"--lags {text} is no list of different whole numbers; give for example --lags 0,1,4,16")
    return tuple(sorted(map(int, parts)))


def parse_corrections(text: str) -> dict[str, tuple[str, ...]]:
    """Option presets by name in "none,tight:algorithm.loss.clip_high=0.1,algorithm.loss.clip_low=0.1".

    A name is one of `CORRECTIONS`, or is followed by a colon. Further options belong to the name before them. Raises
    `ConfigError`.
    """
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        name, colon, flag = part.strip().partition(":")
        if "=" in name and found:
            found[list(found)[-1]] += (part.strip(),)
            continue
        if name in found or not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"--corrections: {name!r} is no name, or is there twice; give NAME or NAME:option=value")
        if not colon and name not in CORRECTIONS:
            known = ", ".join(CORRECTIONS)
            raise ConfigError(f"--corrections: {name} is unknown; give {known}, or your own as {name}:option=value")
        found[name] = (flag,) if colon else CORRECTIONS[name]
    return found


def _differences(earlier: Config, wanted: Config) -> list[str]:
    """Options in which two configurations differ, with both values."""
    before, now = flat_options(earlier), flat_options(wanted)
    return [
        f"{name} = {before.get(name)!r}, now {now.get(name)!r}"
        for name in before | now
        if before.get(name) != now.get(name)
    ]

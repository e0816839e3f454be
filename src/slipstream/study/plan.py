"""What a study of lag consists of: a run for every lag, correction and seed, each with its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import Config, ConfigError, load_config, parse_flags
from slipstream.runtime.placement import settled

# What each correction changes in the configuration; a user's own come from the command line.
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "default": (),
    # Old tokens are taken for new ones.
    "none": ("algorithm.loss=reinforce", "algorithm.corrections=[]"),
    # The widest clip there is: what is left is the plain importance weight, without a bound.
    "importance": ("algorithm.loss=ppo", "algorithm.loss.clip_low=1.0", "algorithm.loss.clip_high=1e9"),
}
SET_BY_STUDY = {
    "loop.max_lag": "give --lags",
    "loop.seed": "give --seeds N",
    "loop.steps": "its runs end by tokens: give --loop.tokens",
    "run.dir": "give --dir",
}
POINTS = 20  # evaluations of a run, at equal numbers of trained tokens


@dataclass(frozen=True)
class Cell:
    """What all seeds of one lag and one correction share."""

    lag: int
    correction: str


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    cell: Cell
    seed: int
    path: Path
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"lag {self.cell.lag}, {self.cell.correction}, seed {self.seed}"


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
        """All runs, one seed after the other, so that a study that is cut short has whole seeds."""
        return [
            self._run(Cell(lag, correction), seed)
            for seed in range(self.seeds)
            for correction in self.corrections
            for lag in self.lags
        ]

    def configuration(self, run: Run) -> Config:
        """The run's configuration. Raises `ConfigError`."""
        return load_config(self.file, run.flags)

    def check(self) -> None:
        """Raise `ConfigError` for a run that can't be, or whose directory holds one of another configuration."""
        for name, _ in parse_flags(self.flags):
            if name in SET_BY_STUDY:
                raise ConfigError(f"--{name} is set by the study; {SET_BY_STUDY[name]}")
        for run in self.runs():
            config, held = settled(self.configuration(run)), run.path / "config.toml"
            if held.exists() and (changed := _differences(settled(load_config(held)), config)):
                raise ConfigError(
                    f"{run.path} holds a run of another configuration ({', '.join(changed)}); "
                    "name another --dir, or remove it"
                )

    def _run(self, cell: Cell, seed: int) -> Run:
        path = self.directory / f"lag{cell.lag}-{cell.correction}-seed{seed}"
        own = {
            "loop.max_lag": cell.lag, "loop.seed": seed, "loop.steps": self._steps, "run.dir": path,
        }  # fmt: skip
        points = [f"evaluation.every_tokens={max(1, self.tokens // POINTS)}", "evaluation.every=0"]
        flags = ["loop.hold_lag=true", *points, *self.flags, *self.corrections[cell.correction]]
        return Run(cell, seed, path, tuple(f"--{flag.removeprefix('--')}" for flag in [*flags, *_flags(own)]))

    @property
    def tokens(self) -> int:
        """Tokens that each run trains on. Raises `ConfigError` if they are not said."""
        if not (tokens := self._base.loop.tokens):
            raise ConfigError(
                "runs are compared at equal numbers of trained tokens, and loop.tokens is not set; "
                "add --loop.tokens N, for example tokens_trained in the summary.json of a run that learned"
            )
        return tokens

    @property
    def _steps(self) -> int:
        """More steps than the tokens last for, since a completion has at least one: only the tokens end a run."""
        return self.tokens // (self._base.loop.groups_per_step * self._base.loop.group_size) + 1

    @property
    def _base(self) -> Config:
        return load_config(self.file, self.flags)


def parse_lags(text: str) -> tuple[int, ...]:
    """ "0,1,4" as numbers, in ascending order. Raises `ConfigError`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(f"--lags {text} is no list of different whole numbers; give for example --lags 0,1,4,16")
    return tuple(sorted(map(int, parts)))


def parse_corrections(text: str) -> dict[str, tuple[str, ...]]:
    """ "none,tight:algorithm.loss.clip_high=0.1,algorithm.loss.clip_low=0.1" as flags by name. Raises `ConfigError`.

    A part with "=" and no name before it belongs to the correction before.
    """
    found: dict[str, list[str]] = {}
    for part in text.split(","):
        name, colon, flag = part.strip().partition(":")
        if "=" in name and found:
            found[list(found)[-1]].append(part.strip())
            continue
        if name in found or not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"--corrections: {name!r} is no name, or is there twice; give NAME or NAME:option=value")
        if not colon and name not in CORRECTIONS:
            known = ", ".join(CORRECTIONS)
            raise ConfigError(f"--corrections: {name} is unknown; give {known}, or your own as {name}:option=value")
        found[name] = [flag] if colon else list(CORRECTIONS[name])
    return {name: tuple(flags) for name, flags in found.items()}


def _flags(values: dict[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]


def _differences(held: Config, wanted: Config) -> Sequence[str]:
    """Options in which two configurations differ."""
    now = wanted.model_dump()
    return [
        f"{section}.{name} = {value!r}, now {now[section][name]!r}"
        for section, values in held.model_dump().items()
        for name, value in values.items()
        if value != now[section][name]
    ]

"""What a run asks of its engines and its trainer: groups, lengths, turns, and the times of environments and scorers."""

from __future__ import annotations

import contextlib
import json
import math
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from slipstream.config.schema import ConfigError

QUANTILES = 512  # that stand for a distribution
MAX_LENGTH = 10**9  # tokens


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: log-normal with this mean and `spread`, the deviation of the logarithm, cut at `most`.

    Without a spread all are equal to the mean. `samples` are drawn from instead, if there are any.
    """

    mean: float
    spread: float = 0.0
    most: int = 0  # 0: the mean, or four times the mean with a spread
    samples: tuple[int, ...] = ()

    @cached_property
    def values(self) -> tuple[int, ...]:
        """The samples, or the quantiles of the distribution, in ascending order."""
        if self.samples:
            return tuple(min(sample, self.most or sample) for sample in sorted(self.samples))
        most = self.most or round(self.mean * 4)
        if not self.spread:
            return (min(round(self.mean), most),)
        normal = NormalDist(math.log(self.mean) - self.spread**2 / 2, self.spread)
        lengths = (math.exp(normal.inv_cdf((i + 0.5) / QUANTILES)) for i in range(QUANTILES))
        return tuple(max(1, min(round(length), most)) for length in lengths)

    @property
    def longest(self) -> int:
        return self.most if self.most and self.spread else self.values[-1]

    @cached_property
    def typical(self) -> float:
        """Mean length, after the cut."""
        return fmean(self.values)

    @cached_property
    def square(self) -> float:
        """Mean of the squared length, after the cut."""
        return fmean(value**2 for value in self.values)

    def draw(self, rng: random.Random) -> int:
        return self.values[int(rng.random() * len(self.values))]

    def largest_of(self, count: int) -> float:
        """Expected largest of `count` lengths (Blom 1958: the quantile of a normal's largest order statistic)."""
        index = int(len(self.values) * (count - 0.375) / (count + 0.25))
        return float(self.values[min(index, len(self.values) - 1)])


@dataclass(frozen=True)
class Delay:
    """Seconds: log-normal with this mean and `spread`, the deviation of the logarithm; 0: none."""

    mean: float = 0.0
    spread: float = 0.0

    def draw(self, rng: random.Random) -> float:
        if not self.mean or not self.spread:
            return self.mean
        return rng.lognormvariate(math.log(self.mean) - self.spread**2 / 2, self.spread)

    def largest_of(self, count: int, times: int = 1) -> float:
        """About the largest of `count` sums of `times` delays each, as of a log-normal with a sum's mean and variance.

        The quantile is that of Blom (1958), see `Lengths.largest_of`.
        """
        if not self.mean or not times:
            return 0.0
        spread = math.sqrt(math.log1p(math.expm1(self.spread**2) / times))
        quantile = NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
        return times * self.mean * math.exp(spread * quantile - spread**2 / 2)


@dataclass(frozen=True)
class Workload:
    """A run: `steps` of `groups` groups of `group_size` rollouts, published after every `every` steps.

    A rollout samples `completion` tokens in `turns` turns. After each turn but the last a tool works for `tool` and
    adds `tool_tokens`. Then scorers work for `scoring`, `scorers` at once. At most `max_concurrent` rollouts are in
    flight; 0: the default of runs.
    """

    prompt: Lengths
    completion: Lengths
    groups: int = 64
    group_size: int = 8
    steps: int = 100
    every: int = 1
    turns: int = 1
    tool: Delay = Delay()
    tool_tokens: int = 0
    scoring: Delay = Delay()
    scorers: int = 64
    max_concurrent: int = 0
    lora_rank: int = 0
    learning_rate: float = 1e-5

    @property
    def rollouts(self) -> int:
        """Rollouts of a step."""
        return self.groups * self.group_size

    def in_flight(self, versions: float) -> float:
        """Rollouts in flight where the gate admits those of so many versions."""
        return min(versions * self.rollouts, self.max_concurrent or math.inf)

    @property
    def scoring_s(self) -> float:
        """Least seconds to score the rollouts of a step: all scorers are always busy."""
        return self.rollouts * self.scoring.mean / self.scorers

    @property
    def sampled(self) -> float:
        """Mean number of tokens that a step trains on."""
        return self.rollouts * self.completion.typical

    @property
    def read(self) -> float:
        """Tokens of one rollout that the engine did not sample."""
        return self.prompt.typical + (self.turns - 1) * self.tool_tokens

    @property
    def unsampled(self) -> float:
        """Mean number of other tokens in the trainer's passes of a step: rollouts of a group share their prompt."""
        return self.groups * self.prompt.typical + self.rollouts * (self.turns - 1) * self.tool_tokens

    @property
    def packed(self) -> float:
        """Mean number of tokens in the trainer's passes of a step."""
        return self.sampled + self.unsampled

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self.prompt.longest + self.completion.longest + (self.turns - 1) * self.tool_tokens

    @property
    def context(self) -> float:
        """Mean number of keys that a sampled token attends to."""
        return self.read + self.completion.square / (2 * self.completion.typical)


def read_lengths(option: str, path: Path) -> Lengths:
    """Lengths in tokens, from the file of an option, with a JSON list or numbers separated by white space.

    Raises `ConfigError` for an unreadable file, fewer than two numbers, or a number outside 1 to `MAX_LENGTH`.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if text.lstrip().startswith(("[", "{")) else text.split()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or ("no text" if isinstance(error, UnicodeError) else error)
        raise ConfigError(f"{option} {path}: {reason}; give a file with one number of tokens a line") from None
    if isinstance(found, dict):
        raise ConfigError(f"{option} {path}: it has a JSON object; give a list, or one number of tokens a line")
    samples = tuple(_length(f"{option} {path}", place, entry) for place, entry in enumerate(found, 1))
    if len(samples) < 2:
        raise ConfigError(f"{option} {path}: it needs two numbers or more")
    return Lengths(fmean(samples), samples=samples)


def _length(source: str, place: int, entry: Any) -> int:
    with contextlib.suppress(ValueError):
        is_number = isinstance(entry, int | str) or (isinstance(entry, float) and entry.is_integer())
        if is_number and not isinstance(entry, bool) and 1 <= int(entry) <= MAX_LENGTH:
            return int(entry)
    raise ConfigError(f"{source}, entry {place}: {entry!r:.40} is no whole number from 1 to {MAX_LENGTH:,}")

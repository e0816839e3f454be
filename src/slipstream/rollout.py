"""The data that flows through Slipstream, from a prompt to a batch.

Each noun is the previous one, ripened: a `Completion` is what a generator returns, a `Rollout` is an episode with its
reward, a `Group` is the rollouts of one task, a `Batch` is what one optimizer step consumes, as `Sample`s, and
`StepStats` are what it answers. Nothing here is filled in later and nothing here imports the rest of the package.

Token ids and log-probabilities are arrays of 4-byte numbers: a batch of 4 million tokens is 32 MB, is pickled as bytes,
and is no object of the garbage collector's. Any sequence of numbers can be given in their place.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0  # vLLM raises lower ones to this minimum
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 1000
UNPACKED = (TypeError, ValueError, OverflowError)  # for what is no sequence of such numbers
MAX_INT = 2**31 - 1  # of a count or a token id


def ids(values: Iterable[int]) -> array[int]:
    """Whole numbers, such as token ids, as 32-bit integers."""
    return _packed("i", values)


def numbers(values: Iterable[float]) -> array[float]:
    """Numbers, such as log-probabilities, as 32-bit floats."""
    return _packed("f", values)


def _packed(kind: str, values: Iterable[Any]) -> array[Any]:
    return values if isinstance(values, array) and values.typecode == kind else array(kind, values)


class VersionSpan(NamedTuple):
    """Tokens `start:end` of a completion were drawn by version `version` of the policy."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one completion is drawn. The defaults sample the policy itself, unmodified.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token. `seed` makes the completion a function of the
    weights and the prompt alone. `record_kept` and `record_experts` ask the generator for what training needs to
    replay: the tokens that top-k/top-p kept, and the experts that a mixture of experts chose. With `ignore_eos` only
    `stop_tokens` and `stop_strings` end a completion early, not the model's end-of-sequence tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    record_kept: bool = False
    record_experts: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, sound, wanted in (
            (
                "temperature",
                _number(self.temperature)
                and (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE),
                f"0 (greedy), or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
            ),
            ("top_k", _whole(self.top_k, 0), f"a whole number up to {MAX_INT}, 0 for all"),
            ("top_p", _number(self.top_p) and 0 < self.top_p <= 1, "a number above 0, 1 at most"),
            ("max_tokens", isinstance(self.max_tokens, int) and self.max_tokens >= 1, "a whole number, 1 or more"),
            ("stop_tokens", _list(self.stop_tokens) and all(_whole(t, 0) for t in self.stop_tokens), "token ids"),
            (
                "stop_strings",
                _list(self.stop_strings)
                and len(self.stop_strings) <= MAX_STOP_STRINGS
                and all(isinstance(t, str) and 0 < len(t) <= MAX_STOP_CHARACTERS for t in self.stop_strings),
                f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
            ),
            ("seed", isinstance(self.seed, int), "a whole number"),
        ):
            if not sound:
                raise ValueError(f"{name} = {_shown(getattr(self, name))} must be {wanted}")

    @property
    def truncates(self) -> bool:
        """Whether it leaves tokens out."""
        return bool(self.top_k) or self.top_p < 1


def _number(value: object) -> bool:
    return isinstance(value, int | float)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and least <= value <= MAX_INT


def _list(value: object) -> bool:
    return isinstance(value, tuple | list)


def _shown(value: object) -> str:
    """A value as an error message shows it: one line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens that a policy drew after a prompt, and what is needed to train on them.

    `logprobs[i]` is the natural-log probability of `token_ids[i]` under the distribution it was really drawn from
    (temperature, top-k and top-p applied, so 0.0 for a greedy token). `spans` cover all tokens in order.
    `finish_reason` is "stop" (a stop token, kept as the last token, or a stop string) or "length".
    `kept[i]` holds the ids that top-k/top-p left at position i; `experts` is an integer array
    [prompt + completion - 1, layers, experts per token]. Both are None unless asked for.
    """

    prompt_ids: array[int]
    token_ids: array[int]
    logprobs: array[float]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    temperature: float = 1.0
    text: str = ""
    kept: tuple[Any, ...] | None = None
    experts: Any = None

    def __post_init__(self) -> None:
        for name, pack in (("prompt_ids", ids), ("token_ids", ids), ("logprobs", numbers)):
            with suppress(*UNPACKED):  # a rollout of such a completion is refused
                object.__setattr__(self, name, pack(getattr(self, name)))

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest version that drew a token."""
        return min(s.version for s in self.spans), max(s.version for s in self.spans)


def spans_of(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Run-length encode one version per token into spans."""
    spans: list[VersionSpan] = []
    for position, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, position + 1)
        else:
            spans.append(VersionSpan(version, position, position + 1))
    return tuple(spans)


class StepReward(NamedTuple):
    """The step of a completion whose last token is `end` earned `reward`: a turn, a line of thought or one token."""

    end: int
    reward: float


def rewards_of_turns(completions: Sequence[Completion], rewards: Sequence[float]) -> tuple[tuple[StepReward, ...], ...]:
    """Steps that are whole turns, from a reward for each completion, or from none at all. Raises `ValueError`."""
    if rewards and len(rewards) != len(completions):
        raise ValueError(f"{len(rewards)} rewards were given for {len(completions)} turns; give one for each")
    pairs = zip(completions, rewards, strict=False)
    return tuple((StepReward(len(c.token_ids) - 1, float(r)),) if c.token_ids else () for c, r in pairs)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished episode: every completion drawn in it, in order, and the reward for all of it.

    `metrics` are named numbers beside the reward, such as the parts that it was added up from. `steps` are process
    rewards, and `teacher` the log-probabilities of the drawn tokens under a teacher: one entry a completion, or nothing
    at all.

    An episode of several roles, such as proposer and solver, is a rollout of each, with its own reward. A rollout is
    compared with those of its group that have the same `role`.
    """

    completions: tuple[Completion, ...]
    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    steps: tuple[tuple[StepReward, ...], ...] = ()
    teacher: tuple[array[float], ...] = ()
    role: str = ""

    def __post_init__(self) -> None:
        with suppress(*UNPACKED):
            object.__setattr__(self, "teacher", tuple(map(numbers, self.teacher)))

    @property
    def tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def oldest_version(self) -> int:
        return min(c.versions[0] for c in self.completions)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task, scored against each other. `entry` is the ledger's id of this visit to the task."""

    entry: int
    task_id: str
    rollouts: tuple[Rollout, ...]

    @property
    def oldest_version(self) -> int:
        return min(r.oldest_version for r in self.rollouts)

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.rollouts)

    @property
    def roles(self) -> dict[str, list[int]]:
        """The rollouts that are compared with each other, as indices, by role in order of appearance."""
        members: dict[str, list[int]] = {}
        for index, rollout in enumerate(self.rollouts):
            members.setdefault(rollout.role, []).append(index)
        return members


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to train on: turns of an episode that continue each other token for token.

    `token_ids` is all of it: the prompt, what the policy drew, and what the environment put between, up to the last
    drawn token. `drawn` are the positions in it of the tokens that the policy drew, the only ones that are trained on;
    `logprobs`, `versions`, `temperatures`, `advantages` and `kept` have an entry for each of them, as a `Completion`
    has. `teacher` are their log-probabilities under a teacher, nothing without one. `experts` are arrays as a
    completion's, one after the other, for all tokens before the last: of each from the turn that had it first.
    """

    token_ids: array[int]
    drawn: array[int]
    logprobs: array[float]
    versions: array[int]
    temperatures: array[float]
    advantages: array[float]
    kept: tuple[Any, ...]
    experts: tuple[Any, ...] | None = None
    teacher: array[float] = field(default_factory=lambda: numbers(()))

    @property
    def prompt_ids(self) -> array[int]:
        """What stands before the first drawn token."""
        return self.token_ids[: self.drawn[0]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimizer step with their advantages, `advantages[g][r]`: a number for all drawn tokens of a
    rollout, or one for each; NaN leaves a rollout out. `version` is that of the trainer's weights at the cut."""

    groups: tuple[Group, ...]
    advantages: tuple[tuple[float | array[float], ...], ...]
    version: int = 0

    @property
    def tokens(self) -> int:
        return sum(g.tokens for g in self.groups)

    @property
    def signal(self) -> list[bool]:
        """Whether each group has an advantage that is neither 0, but for rounding, nor left out."""
        return [
            any(abs(a) > ROUNDING for given in group for a in ((given,) if isinstance(given, int | float) else given))
            for group in self.advantages
        ]

    def samples(self) -> list[Sample]:
        """Every sequence to train on, in the order of groups, rollouts and turns."""
        return [
            sample
            for group, advantages in zip(self.groups, self.advantages, strict=True)
            for rollout, advantage in zip(group.rollouts, advantages, strict=True)
            for sample in samples_of(rollout.completions, advantage, rollout.teacher)
        ]


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step of all ranks did. Token means are over the completion tokens that were not passed over; `seconds`
    is all of it, `skipped` counts the steps so far that moved nothing, since their loss or gradient was not finite.

    `tokens_packed` went through the model, `tflops` is the rate of its own arithmetic in 10^12 operations a second,
    `utilisation` that as a share of what the device does in a matrix product, `memory_gb` the most that was in use.
    `expert_busiest` is the share of the busiest expert, `expert_entropy` the entropy of the load as a share of an even
    one's, `experts_idle` the share of experts without a token, all three means over layers, and `experts_changed` the
    share of the replayed choices that the router would not make now; None without experts.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    entropy: float
    kl: float
    mismatch_kl: float
    ratio: float
    ratio_max: float
    effective_sample_size: float
    clipped: float
    masked: float
    tokens: int
    skipped: int
    seconds: float
    tokens_packed: int
    tflops: float
    utilisation: float | None
    memory_gb: float
    expert_busiest: float | None
    expert_entropy: float | None
    experts_idle: float | None
    experts_changed: float | None


def samples_of(
    completions: Sequence[Completion],
    advantage: float | Sequence[float] = 0.0,
    teacher: Sequence[array[float]] = (),
) -> list[Sample]:
    """An episode's completions as sequences: a turn whose prompt begins with all tokens of one so far is merged into
    it, any other begins a sequence of its own. `advantage` is one number, or one for each token that was drawn;
    `teacher` as a rollout has it."""
    counts = [len(c.token_ids) for c in completions]
    each = numbers((advantage,)) * sum(counts) if isinstance(advantage, int | float) else numbers(advantage)
    if len(each) != sum(counts):
        raise ValueError(f"{len(each)} advantages for {sum(counts)} drawn tokens")
    samples: list[Sample] = []
    ends = accumulate(counts)
    none = [numbers(())] * len(counts)
    for completion, count, end, taught in zip(completions, counts, ends, teacher or none, strict=True):
        turn = each[end - count : end]
        if not count:
            continue
        begun = [n for n, s in enumerate(samples) if completion.prompt_ids[: len(s.token_ids)] == s.token_ids]
        if begun:  # the longest, if conversations that begin alike take turns
            before = max(begun, key=lambda n: len(samples[n].token_ids))
            samples[before] = _sample(completion, turn, taught, samples[before])
        else:
            samples.append(_sample(completion, turn, taught))
    return samples


def _sample(
    completion: Completion, advantages: array[float], teacher: array[float], before: Sample | None = None
) -> Sample:
    """A turn as a sequence, with the turns `before` it in the same."""
    count, first = len(completion.token_ids), len(completion.prompt_ids)
    turn = Sample(
        token_ids=completion.prompt_ids + completion.token_ids,
        drawn=ids(range(first, first + count)),
        logprobs=completion.logprobs,
        versions=sum((ids((s.version,)) * (s.end - s.start) for s in completion.spans), ids(())),
        temperatures=numbers((completion.temperature or 1.0,)) * count,
        advantages=advantages,
        kept=completion.kept or (None,) * count,
        experts=None if completion.experts is None else (completion.experts,),
        teacher=teacher,
    )
    if before is None:
        return turn
    earlier = {name: getattr(before, name) + getattr(turn, name) for name in PER_DRAWN_TOKEN}
    if before.experts is not None and completion.experts is not None:
        earlier["experts"] = (*before.experts, completion.experts[len(before.token_ids) - 1 :])
    return replace(turn, **earlier)


ROUNDING = 1e-9  # what a baseline of one's own may leave of equal rewards
PER_DRAWN_TOKEN = ("drawn", "logprobs", "versions", "temperatures", "advantages", "kept", "teacher")


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0.0 for nothing."""
    return sum(values) / len(values) if values else 0.0

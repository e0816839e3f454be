"""The data that flows through Slipstream, from a prompt to a batch.

A generator returns a `Completion`. A `Rollout` is an episode with its reward, a `Group` the rollouts of one task. One
optimizer step consumes a `Batch`, as `Sample`s, and returns `step_stats.StepStats`. Only `set_times` changes an object
after its creation.
`Sampling` validates its fields; `environments.rollout_checks` validates the rollouts of an environment. This module
imports nothing else of the package.

Token ids and log-probabilities are arrays of 4-byte numbers: a batch of 4 million tokens has 32 MB, is pickled as
bytes, and is not tracked by the garbage collector. Constructors accept any sequence of numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0  # vLLM raises lower temperatures to this minimum
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 1000
ARRAY_ERRORS = (TypeError, ValueError, OverflowError)  # of values that do not fit into an array
MAX_INT = 2**31 - 1  # of a count or a token id
ROUNDING = 1e-9  # residue that a custom baseline may leave between equal rewards
PER_SAMPLED_TOKEN = (
    "sampled_positions", "logprobs", "versions", "temperatures", "advantages", "sampling_mask", "teacher",
)  # fmt: skip


def int32_array(values: Iterable[int]) -> array[int]:
    """Integers, such as token ids, as an array of 32-bit integers."""
    return values if isinstance(values, array) and values.typecode == "i" else array("i", values)


def float32_array(values: Iterable[float]) -> array[float]:
    """Numbers, such as log-probabilities, as an array of 32-bit floats."""
    return values if isinstance(values, array) and values.typecode == "f" else array("f", values)


class VersionSpan(NamedTuple):
    """Version `version` of the policy sampled tokens `start:end` of a completion."""

    version: int
    start: int
    end: int


class Image(NamedTuple):
    """An image of a prompt: its encoded file, and the rows and columns of the placeholder tokens that stand for it."""

    data: bytes
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one completion. The defaults sample from the unmodified policy.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token. `seed` makes the completion a function of the
    weights and the prompt alone. `record_sampling_mask` records the tokens that top-k, top-p and `json_schema` (JSON
    text; vLLM only) kept, `record_routing` the experts that routers chose; training replays both. With `ignore_eos`
    only `stop_tokens` and `stop_strings` end a completion early, not the model's end-of-sequence tokens. `policy`
    names one of several policies. Without `record_logprobs` they may be NaN, which is faster with vLLM. `images` are
    those of the prompt, in order.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    record_sampling_mask: bool = False
    record_routing: bool = False
    ignore_eos: bool = False
    policy: str = ""
    json_schema: str = ""
    record_logprobs: bool = True
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        for name, valid, wanted in (
            ("temperature",
             _number(self.temperature, MAX_TEMPERATURE) and not 0 < self.temperature < MIN_TEMPERATURE,
             f"from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, or 0 (greedy) outside of training"),
            ("top_k", _whole(self.top_k), f"a whole number up to {MAX_INT}, 0 for all"),
            ("top_p", _number(self.top_p, 1) and self.top_p > 0, "a number above 0, 1 at most"),
            ("max_tokens", isinstance(self.max_tokens, int) and self.max_tokens >= 1, "a whole number, 1 or more"),
            ("stop_tokens", _list(self.stop_tokens) and all(_whole(t) for t in self.stop_tokens), "token ids"),
            ("stop_strings", _list(self.stop_strings) and len(self.stop_strings) <= MAX_STOP_STRINGS
             and all(isinstance(t, str) and 0 < len(t) <= MAX_STOP_CHARACTERS for t in self.stop_strings),
             f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters"),
            ("seed", isinstance(self.seed, int), "a whole number"),
            ("json_schema", isinstance(self.json_schema, str), "JSON text"),
            ("images", _list(self.images) and all(isinstance(i, Image) for i in self.images), "images of `rollout`"),
        ):  # fmt: skip
            if not valid:
                raise ValueError(f"{name} = {_shown(getattr(self, name))} must be {wanted}")

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or a JSON schema may remove tokens."""
        return bool(self.top_k or self.json_schema) or self.top_p < 1


def _number(value: object, most: float) -> bool:
    return isinstance(value, int | float) and 0 <= value <= most


def _whole(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= MAX_INT


def _list(value: object) -> bool:
    return isinstance(value, tuple | list)


def _shown(value: object) -> str:
    """A value as an error message shows it: one line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens sampled after a prompt, with what training on them needs.

    `logprobs[i]` is the natural-log probability of `token_ids[i]` under the distribution that sampled it
    (temperature, top-k and top-p applied; 0.0 for a greedy token; NaN if not recorded). `spans` cover all tokens in
    order.
    `finish_reason` is "stop" (a stop token, kept as the last token, or a stop string) or "length".
    `sampling_mask[i]` holds the ids that sampling kept at position i; `experts` is an integer array
    [prompt + completion - 1, layers, experts per token]. Both are None unless `Sampling` asks for them.
    `policy` and `images` are those of `Sampling`. A run's pool sets `engine`, the engine's track in `events.jsonl`, and
    when it had the request, on that file's clock.
    """

    prompt_ids: array[int]
    token_ids: array[int]
    logprobs: array[float]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    temperature: float = 1.0
    text: str = ""
    sampling_mask: tuple[Any, ...] | None = None
    experts: Any = None
    engine: str = field(default="", compare=False)
    started_s: float | None = field(default=None, compare=False)
    ended_s: float | None = field(default=None, compare=False)
    policy: str = ""
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        for name, pack in (("prompt_ids", int32_array), ("token_ids", int32_array), ("logprobs", float32_array)):
            with suppress(*ARRAY_ERRORS):  # `validate_rollouts` rejects such a completion
                object.__setattr__(self, name, pack(getattr(self, name)))

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest version that sampled a token."""
        return min(s.version for s in self.spans), max(s.version for s in self.spans)


def set_times(completion: Completion, engine: str, started_s: float, ended_s: float) -> Completion:
    """Set where and when a completion was sampled, before other code has it. Copying a frozen object takes 5 µs."""
    for name, value in (("engine", engine), ("started_s", started_s), ("ended_s", ended_s)):
        object.__setattr__(completion, name, value)
    return completion


def version_spans(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Run-length encode one version per token into spans."""
    spans, start = [], 0
    for version, equal in groupby(versions):
        end = start + len(list(equal))
        spans.append(VersionSpan(version, start, end))
        start = end
    return tuple(spans)


class StepReward(NamedTuple):
    """Process reward of the step that ends at token `end` of a completion: a turn, a line of reasoning, or a token."""

    end: int
    reward: float


def turn_rewards_to_steps(
    completions: Sequence[Completion], rewards: Sequence[float]
) -> tuple[tuple[StepReward, ...], ...]:
    """One step for each whole turn, from one reward for each completion; () without rewards. Raises `ValueError`."""
    if rewards and len(rewards) != len(completions):
        raise ValueError(f"{len(rewards)} rewards were given for {len(completions)} turns; give one for each")
    pairs = zip(completions, rewards, strict=False)
    return tuple((StepReward(len(c.token_ids) - 1, float(r)),) if c.token_ids else () for c, r in pairs)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished episode: its completions in order, and one reward for all of them.

    `metrics` are further named numbers, such as the components of the reward. `steps` are process rewards, `teacher`
    the sampled tokens' log-probabilities under a teacher: one entry for each completion, or ().

    An episode of several roles, such as proposer and solver, has one rollout for each role, with its own reward.
    Advantages compare rollouts of the same `role` in a group. In a run of several policies, the role begins with the
    policy's name: "NAME", or "NAME:ROLE".
    """

    completions: tuple[Completion, ...]
    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    steps: tuple[tuple[StepReward, ...], ...] = ()
    teacher: tuple[array[float], ...] = ()
    role: str = ""

    def __post_init__(self) -> None:
        with suppress(*ARRAY_ERRORS):
            object.__setattr__(self, "teacher", tuple(map(float32_array, self.teacher)))

    @property
    def tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def oldest_version(self) -> int:
        return min(span.version for completion in self.completions for span in completion.spans)

    @property
    def policy(self) -> str:
        """The policy that sampled all completions."""
        return self.completions[0].policy


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task, scored against each other. `visit_id` is the ledger's id of this visit to the task, and
    `environment` the label of its environment."""

    visit_id: int
    task_id: str
    rollouts: tuple[Rollout, ...]
    environment: str = ""

    @property
    def oldest_version(self) -> int:
        return min(r.oldest_version for r in self.rollouts)

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.rollouts)

    @property
    def roles(self) -> dict[str, list[int]]:
        """Indices of the rollouts of each role, in order of appearance."""
        members: dict[str, list[int]] = {}
        for index, rollout in enumerate(self.rollouts):
            members.setdefault(rollout.role, []).append(index)
        return members


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to train on: turns of an episode that continue each other token for token.

    `token_ids` is the whole sequence: prompt, sampled tokens, and environment tokens in between, up to the last sampled
    token. Only the tokens at `sampled_positions` are trained on. `logprobs`, `versions`, `temperatures`, `advantages`
    and `sampling_mask` have one entry for each sampled token, as in `Completion`. So has `teacher`, empty without a
    teacher. `experts` are the turns' routing arrays, which together cover all tokens but the last. `images` are those
    of the sequence, in order.
    """

    token_ids: array[int]
    sampled_positions: array[int]
    logprobs: array[float]
    versions: array[int]
    temperatures: array[float]
    advantages: array[float]
    sampling_mask: tuple[Any, ...]
    experts: tuple[Any, ...] | None = None
    teacher: array[float] = field(default_factory=lambda: float32_array(()))
    images: tuple[Image, ...] = ()

    @property
    def prompt_ids(self) -> array[int]:
        """The tokens before the first sampled one."""
        return self.token_ids[: self.sampled_positions[0]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimizer step, and `advantages[g][r]`: one number for all sampled tokens of a rollout, or an
    array with one for each. NaN leaves a rollout out. `version` is the trainer's version when the batch was formed."""

    groups: tuple[Group, ...]
    advantages: tuple[tuple[float | array[float], ...], ...]
    version: int = 0

    @property
    def tokens(self) -> int:
        return sum(g.tokens for g in self.groups)

    @property
    def signal(self) -> list[bool]:
        """Whether each group has an advantage that is neither NaN nor, within rounding, 0."""
        return [
            any(abs(a) > ROUNDING for each in group for a in ((each,) if isinstance(each, int | float) else each))
            for group in self.advantages
        ]

    def of_policy(self, name: str) -> Batch:
        """The rollouts of one policy with their advantages, without groups that have none."""
        groups, advantages = [], []
        for group, values in zip(self.groups, self.advantages, strict=True):
            if own := [i for i, rollout in enumerate(group.rollouts) if rollout.policy == name]:
                groups.append(replace(group, rollouts=tuple(group.rollouts[i] for i in own)))
                advantages.append(tuple(values[i] for i in own))
        return Batch(tuple(groups), tuple(advantages), self.version)

    def samples(self) -> list[Sample]:
        """Every sequence to train on, in the order of groups, rollouts and turns."""
        return [
            sample
            for group, advantages in zip(self.groups, self.advantages, strict=True)
            for rollout, advantage in zip(group.rollouts, advantages, strict=True)
            for sample in build_samples(rollout.completions, advantage, rollout.teacher)
        ]


def build_samples(
    completions: Sequence[Completion],
    advantage: float | Sequence[float] = 0.0,
    teacher: Sequence[array[float]] = (),
) -> list[Sample]:
    """An episode's completions as sequences to train on.

    A turn is merged into the longest earlier sequence that is a prefix of its prompt; otherwise it starts a sequence.
    `advantage` is one number, or one for each sampled token; `teacher` is `Rollout.teacher`. Raises `ValueError` if
    there are more or fewer advantages than sampled tokens.
    """
    counts = [len(c.token_ids) for c in completions]
    total = sum(counts)
    each = float32_array((advantage,)) * total if isinstance(advantage, int | float) else float32_array(advantage)
    if len(each) != total:
        raise ValueError(f"{len(each)} advantages for {total} sampled tokens")
    samples: list[Sample] = []
    ends = accumulate(counts)
    none = [float32_array(())] * len(counts)
    for completion, count, end, teacher_row in zip(completions, counts, ends, teacher or none, strict=True):
        turn = each[end - count : end]
        if not count:
            continue
        prompt, images = completion.prompt_ids, completion.images
        same = ((s.token_ids, s.images) == (prompt[: len(s.token_ids)], images[: len(s.images)]) for s in samples)
        prefixes = [n for n, is_prefix in enumerate(same) if is_prefix]
        if prefixes:  # several if conversations with a common beginning alternate
            longest = max(prefixes, key=lambda n: len(samples[n].token_ids))
            samples[longest] = _sample(completion, turn, teacher_row, samples[longest])
        else:
            samples.append(_sample(completion, turn, teacher_row))
    return samples


def _sample(
    completion: Completion, advantages: array[float], teacher: array[float], before: Sample | None = None
) -> Sample:
    """A turn as a sequence, appended to the sequence `before`, if any."""
    count, first = len(completion.token_ids), len(completion.prompt_ids)
    turn = Sample(
        token_ids=completion.prompt_ids + completion.token_ids,
        sampled_positions=int32_array(range(first, first + count)),
        logprobs=completion.logprobs,
        versions=sum((int32_array((s.version,)) * (s.end - s.start) for s in completion.spans), int32_array(())),
        temperatures=float32_array((completion.temperature or 1.0,)) * count,
        advantages=advantages,
        sampling_mask=completion.sampling_mask or (None,) * count,
        experts=None if completion.experts is None else (completion.experts,),
        teacher=teacher,
        images=completion.images,
    )
    if before is None:
        return turn
    earlier = {name: getattr(before, name) + getattr(turn, name) for name in PER_SAMPLED_TOKEN}
    if before.experts is not None and completion.experts is not None:
        earlier["experts"] = (*before.experts, completion.experts[len(before.token_ids) - 1 :])
    return replace(turn, **earlier)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0.0 of an empty sequence."""
    return sum(values) / len(values) if values else 0.0

"""The interface between a user's environment and the run: `Environment`, `Task`, and `Policy`.

An episode is one call of `Environment.rollout`, which samples completions from the policy and returns a reward or
rollouts. `Policy` records tokens, log-probabilities and versions, and derives seeds.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import hashlib
import inspect
import itertools
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.config.schema import ConfigError
from slipstream.config.suggestions import suggest
from slipstream.environments.chat_tokenizer import ChatTokenizer, Prompt
from slipstream.environments.conversation import UNLIMITED, Conversation, ConversationLimits
from slipstream.environments.rollout_checks import copy_arrays, validate_rollouts
from slipstream.environments.text_limits import run_in_thread
from slipstream.environments.tools import Tool, ToolCallParser, Tools
from slipstream.errors import UserError
from slipstream.generators.base import Generator
from slipstream.generators.pausable_clock import Clock
from slipstream.rollout import Completion, Rollout, Sampling, turn_rewards_to_steps

if TYPE_CHECKING:
    from slipstream.environments.endpoint import Endpoint

DECODED = 128  # characters to encode that take as long as one token to decode
SHARED = "shared"  # in place of the episode's secret in `Policy.shared_url`
OPTIONS = tuple(field.name for field in dataclasses.fields(Sampling) if field.name != "policy")  # of `Policy.sample`


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `prompt` is text or chat messages, `data` what the reward needs, such as the answer, `source` the
    file and line that it was read from, such as "train.jsonl, line 7". Evaluations report scores by `category`."""

    id: str
    prompt: str | tuple[dict[str, Any], ...]
    data: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    category: str = ""


class Environment(Protocol):
    """Tasks, and an episode on one of them."""

    @property
    def train(self) -> Sequence[Task]:
        """Tasks to train on."""
        ...

    @property
    def test(self) -> Sequence[Task]:
        """Held-out tasks; may be empty."""
        ...

    async def rollout(self, task: Task, policy: Policy) -> Rollout | Sequence[Rollout] | float | None:
        """Play one episode and return its reward: a number for all completions of `policy`, or a `Rollout`.

        None leaves the reward to `scoring`. An episode of several roles returns one rollout for each role.
        """
        ...


class InvalidReward(UserError):
    """A reward that is not a number."""


def as_reward(value: Any) -> float:
    """A reward as a float, which may be NaN. Raises `InvalidReward` for what is no number, such as the text "1.0"."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise InvalidReward(f"the reward is {value!r:.80}, of type {type(value).__name__}: return a number")
    try:
        return float(value)
    except Exception as error:  # a tensor of several elements, an integer beyond all floats
        raise InvalidReward(f"the reward is {value!r:.80}: {error}: return a number") from None


class Policy:
    """Samples from the newest policy for one episode, and records every completion.

    In a run of several policies, `policy["NAME"]` is the one of that name, and only these sample.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: ChatTokenizer,
        sampling: Sampling,
        seed: str,
        endpoint: Endpoint | None = None,
        limits: ConversationLimits = UNLIMITED,
        policies: Mapping[str, str] | None = None,
    ) -> None:
        """`limits` are the defaults of conversations; `limits.seconds` counts from now, for all conversations.

        `policies` are the names by which an episode asks several policies, each with the adapter that samples for it.
        """
        open_session = getattr(generator, "session", None)  # of a pool: keeps an episode's turns on one engine
        self._generator = open_session() if open_session else generator
        self.tokenizer, self.sampling = tokenizer, sampling
        self._endpoint, self._limits = endpoint, limits
        self._seed, self._draws = seed, itertools.count()
        self.clock: Clock = getattr(self._generator, "clock", None) or Clock()  # the episode's
        self._deadline = self.clock.time() + limits.seconds if limits.seconds else math.inf
        self._closed = False
        self._policies, self._asked = policies or {}, dict[str, Policy]()
        self.secret = secrets.token_urlsafe(16)
        # Of the episode, shared with the policies that it asks by name: time of the last completion, refusals of URLs.
        self._sampled_at, self._refusals = [math.nan], [""]
        self.completions: list[Completion] = []
        self.recorded: list[Completion] = []  # copies, which the environment can't change
        self.sessions: dict[str, list[Completion]] = {}  # of `open_session`
        self.conversations: list[Conversation] = []

    @property
    def sampled_at(self) -> float:
        """`time.monotonic()` of the episode's last completion."""
        return self._sampled_at[0]

    @property
    def last_refusal(self) -> str:
        """The last error that a URL of the episode answered, or ""."""
        return self._refusals[0]

    @last_refusal.setter
    def last_refusal(self, message: str) -> None:
        self._refusals[0] = message

    @property
    def names(self) -> list[str]:
        """The names of the policies in a run of several."""
        return [*self._policies]

    def __getitem__(self, name: str) -> Policy:
        """The policy of this name, in a run of several. Raises `ConfigError` for an unknown name."""
        if name not in self._policies:
            known = f"the run has {', '.join(self._policies)}" if self._policies else "the run has no [[policies]]"
            hint = suggest(str(name), [*self._policies])
            raise ConfigError(f"an episode asks for policy[{name!r:.80}], and {known}{hint}")
        if name not in self._asked:
            own = self._asked[name] = copy.copy(self)  # with the same session, clock, deadline and record
            own.sampling = dataclasses.replace(self.sampling, policy=self._policies[name])
            own._policies, own._asked, own._seed, own._draws = {}, {}, f"{self._seed}/{name}", itertools.count()
            own.secret, own.completions, own.sessions, own.conversations = secrets.token_urlsafe(16), [], {}, []
        return self._asked[name]

    async def sample(self, prompt: Prompt, **changes: Any) -> Completion:
        """Sample one completion of `prompt`: text, chat messages or token ids.

        The chat template, if any, is applied to text and messages. `changes` override fields of `Sampling` for this
        call; `json_schema` may also be a mapping. The completion's text excludes the stop token or string. Raises
        `GenerationError` for an invalid prompt, and `ConfigError` if the configuration limits turns or tokens: these
        limits need a conversation.
        """
        self._validate_limits("policy.sample()")
        return await self.draw(prompt, **changes)

    async def draw(self, prompt: Prompt, **changes: Any) -> Completion:
        """`sample` without the check of limits; conversations, which apply them, call this."""
        try:
            return await self._draw(prompt, changes)
        except Exception:
            await asyncio.sleep(0)  # a retry loop in an episode must not block the event loop
            raise

    async def _draw(self, prompt: Prompt, changes: dict[str, Any]) -> Completion:
        if self._closed:
            await asyncio.Event().wait()  # forever: the episode would catch an error and try again
        if unknown := [name for name in changes if name not in OPTIONS]:
            raise TypeError(f"policy.sample() has no option {unknown[0]!r}; it takes {', '.join(OPTIONS)}")
        self._validate_named()
        if isinstance(schema := changes.get("json_schema"), Mapping):
            changes = changes | {"json_schema": json.dumps(schema)}
        sampling = dataclasses.replace(self.sampling, **{"seed": self._next_seed(), **changes})
        if not sampling.truncates:
            sampling = dataclasses.replace(sampling, record_sampling_mask=False)
        prompt_ids = await run_in_thread(self.tokenizer.size(prompt), self.tokenizer.encode, prompt)
        if images := self.tokenizer.images(prompt):
            sampling = dataclasses.replace(sampling, images=images)
        completion = await self._generator.generate(prompt_ids, sampling)
        token_ids = completion.token_ids
        # Hundreds of completions may arrive at once: decode even short ones in a thread.
        text = await run_in_thread(DECODED * len(token_ids), self.tokenizer.decode, token_ids, sampling.stop_strings)
        return self._record(dataclasses.replace(completion, text=text, images=sampling.images))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample with exactly these parameters, without the completion's text. Raises as `Generator.generate`."""
        completion = await self._generator.generate(prompt_ids, sampling)
        return self._record(dataclasses.replace(completion, images=sampling.images) if sampling.images else completion)

    def _record(self, completion: Completion) -> Completion:
        self._sampled_at[0] = time.monotonic()
        self.completions.append(completion)
        self.recorded.append(copy_arrays(completion))
        return completion

    def conversation(
        self,
        system: str = "",
        tools: Sequence[Tool] = (),
        *,
        parse: ToolCallParser | None = None,
        tool_seconds: float = 10.0,
        turns: int | None = None,
        tokens: int | None = None,
        seconds: float = 0.0,
        keep_history: bool = False,
    ) -> Conversation:
        """A conversation with this policy: `await conversation.ask("...")`.

        `tools` are functions that the policy may call, each call for `tool_seconds`. `parse` finds the calls in a
        reply: by default as `model.tool_call_parser` says. `turns`, `tokens` and `seconds` default to the
        limits of the configuration. `keep_history` keeps earlier messages even if the chat template rewrites them.
        """
        limits = dataclasses.replace(
            self._limits,
            turns=self._limits.turns if turns is None else turns,
            tokens=self._limits.tokens if tokens is None else tokens,
            seconds=seconds,
        )
        callable_tools = Tools(tools, parse or self.tokenizer.tool_call_parser, tool_seconds)
        conversation = Conversation(self, system, callable_tools, limits, self._deadline, keep_history)
        self.conversations.append(conversation)
        return conversation

    @property
    def settings(self) -> tuple[Sampling, str, ConversationLimits, Mapping[str, str]]:
        """Sampling parameters, seed, limits and names: an equal policy in another process has the same ones."""
        return self.sampling, self._seed, self._limits, self._policies

    async def base_url(self) -> str:
        """The OpenAI-compatible base URL of this policy for this episode; it answers 404 once the episode has ended.

        Completions of any HTTP client are recorded as those of `sample`. Raises `ConfigError` as `sample` does, and
        `RuntimeError` outside of an episode.
        """
        self._validate_limits("policy.base_url()")
        self._validate_named()
        if self._endpoint is None:
            raise RuntimeError("this policy has no URL: it belongs to no episode, or its episode has ended")
        return await self._endpoint.open(self)

    async def shared_url(self) -> str:
        """As `base_url`, the same for all episodes: requests name a session of their episode in X-Session-ID.

        For clients that keep one connection for each URL.
        """
        return (await self.base_url()).replace(self.secret, SHARED)

    def open_session(self, session: str) -> None:
        """Begin a session of this episode, whose name no other episode has: completions of its requests are in
        `sessions[session]`, apart from those of others."""
        self.sessions[session] = []
        if self._endpoint:
            self._endpoint.open_session(self, session)

    def end(self) -> None:
        """End the episode: its URL, if any, returns errors from now on."""
        if self._endpoint is not None:
            self._endpoint.end(self)
            self._endpoint = None
        self.conversations.clear()  # they refer to the policy: its memory would wait for a full garbage collection
        for own in self._asked.values():
            own.end()

    def close(self) -> None:
        """Cancel the episode: its further requests are never answered."""
        for each in (self, *self._asked.values()):
            each._closed = True
        self.end()

    def rollout(self, reward: float, *, turn_rewards: Sequence[float] = (), **metrics: float) -> Rollout:
        """All completions so far, as a rollout with this reward.

        `turn_rewards`, one for each reply, are what `algorithm.process_reward_coef` weighs.
        """
        totals: Counter[str] = Counter()
        for conversation in self.conversations:
            totals.update(conversation.metrics())
        steps = turn_rewards_to_steps(self.completions, turn_rewards)
        return Rollout(tuple(self.completions), as_reward(reward), dict(totals) | metrics, steps)

    def rollouts(self, reward: float) -> tuple[Rollout, ...]:
        """A rollout with this reward for each policy that was asked; one in a run of a single policy."""
        return tuple(own.rollout(reward) for own in self._asked.values()) or (self.rollout(reward),)

    def _validate_named(self) -> None:
        """Raise `ConfigError` for a request that names none of several policies."""
        if self._policies:
            names = ", ".join(self._policies)
            raise ConfigError(
                f"the run has several policies ({names}), and an episode names none: ask by "
                f'policy["{next(iter(self._policies))}"].conversation() or .sample()'
            )

    def _validate_limits(self, where: str) -> None:
        for name in ("turns", "tokens"):
            if limit := getattr(self._limits, name):
                raise ConfigError(
                    f"environment.max_{name} = {limit} limits conversations, and this environment draws by {where}; "
                    "leave it out and limit episodes in the environment, or use policy.conversation()"
                )

    def _next_seed(self) -> int:
        text = f"{self._seed}/{next(self._draws)}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())


async def play(environment: Environment, task: Task, policy: Policy, unrewarded: bool = False) -> tuple[Rollout, ...]:
    """Play one episode and return its rollouts: one, or one for each role.

    With `unrewarded` the environment may return None; the reward is NaN until `scoring` sets it. Raises
    `InvalidRollout` for a rollout that differs from the policy's completions, `InvalidReward` for a reward that is no
    number, and what the environment raises.
    """
    outcome: Any = environment.rollout(task, policy)
    if inspect.isawaitable(outcome):
        outcome = await outcome
    if outcome is None and unrewarded:
        outcome = math.nan
    parts = outcome if isinstance(outcome, list | tuple) and outcome else (outcome,)
    if not all(isinstance(part, Rollout) for part in parts):
        parts = policy.rollouts(outcome)
    return validate_rollouts(parts, policy.recorded)

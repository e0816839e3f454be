"""What a user writes (an environment) and what it is handed (a task and a policy).

An episode is one async function. Its author asks the policy for completions and returns a reward; tokens,
log-probabilities, versions and seeds are recorded on the way and never seen.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import math
import secrets
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

from slipstream.config import ConfigError
from slipstream.environments.conversation import UNLIMITED, Conversation, Limits
from slipstream.environments.rollout_checks import checked_rollouts, copied
from slipstream.environments.text_limits import MAX_INLINE, TextLimits, characters, off_loop
from slipstream.environments.tools import Parse, Tool, Tools, hermes, plain
from slipstream.generators.base import GenerationError, Generator
from slipstream.generators.clock import Clock
from slipstream.rollout import Completion, Rollout, Sampling, ids, rewards_of_turns

if TYPE_CHECKING:
    from slipstream.environments.endpoint import Endpoint

Message = Mapping[str, Any]
DECODED = 128  # characters to encode that take no more of the event loop than a token to decode may
REPLY = "THE-REPLY"  # stands for what a policy said
Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `prompt` is text or chat messages; `data` is whatever the reward needs, such as the answer; `source`
    is where it was read, such as "train.jsonl, line 7"."""

    id: str
    prompt: str | tuple[dict[str, str], ...]
    data: dict[str, Any] = field(default_factory=dict)
    source: str = ""


class Environment(Protocol):
    """Tasks and the episode that is played on one of them."""

    @property
    def train(self) -> Sequence[Task]:
        """Tasks to train on."""
        ...

    @property
    def test(self) -> Sequence[Task]:
        """Held-out tasks; may be empty."""
        ...

    async def rollout(self, task: Task, policy: Policy) -> Rollout | Sequence[Rollout] | float | None:
        """Play one episode. A plain number is the reward of everything that `policy` drew; None leaves it to `scoring`;
        an episode of several roles returns a rollout of each."""
        ...


class NoNumber(TypeError):
    """A reward that is none."""


def as_reward(value: Any) -> float:
    """A reward as a plain number. Raises `NoNumber`, for text too."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise NoNumber(f"the reward is {value!r:.80}, of type {type(value).__name__}: return a number")
    return float(value)


class Codec:
    """Prompts to token ids and back. Text is encoded once for all rollouts of a group.

    `context` bounds prompts, in tokens; 0: no bound. All that encodes raises `ContextFull` for what is too long.
    """

    def __init__(self, tokenizer: Any, context: int = 0) -> None:
        self._tokenizer = tokenizer
        self.limits = TextLimits(tokenizer, context)
        self._ends: set[int | None] | None = None
        self.encode_text = functools.lru_cache(maxsize=256)(self._encode_text)

    async def encoded(self, prompt: Prompt) -> array[int]:
        """`encode`, which does not hold up the event loop."""
        return await off_loop(self.size(prompt), self.encode, prompt)

    def size(self, prompt: Prompt, tools: Sequence[Any] | None = None) -> int:
        """Characters of text and messages, or the number of token ids. Raises `ContextFull` if it is too large."""
        if not isinstance(prompt, str):
            is_ids = not len(prompt) or isinstance(prompt[0], SupportsIndex)
            self.limits.refuse(f"{len(prompt)} {'tokens' if is_ids else 'messages'}", len(prompt))
            if is_ids:
                return len(prompt)
        size = characters(prompt) + characters(tools or ())
        self.limits.refuse_size(size)
        return size

    def encode(self, prompt: Prompt, tools: Sequence[Any] | None = None) -> array[int]:
        """Token ids of a prompt, with the chat template applied where the tokenizer has one; `tools` need one."""
        self.size(prompt, tools)
        if isinstance(prompt, str):
            return self.encode_text(prompt)
        if not len(prompt) or isinstance(prompt[0], SupportsIndex):
            return ids(index(token) for token in prompt)  # type: ignore[arg-type]
        if self._tokenizer.chat_template:
            return self._chat(prompt, tools)
        if tools:
            raise ValueError("tools need a chat template, and the tokenizer has none")
        return self.encode_text("\n\n".join(m["content"] for m in prompt))  # type: ignore[index]

    def encode_raw(self, prompt: str | Sequence[int]) -> array[int]:
        """Token ids of text as it is, without a template, or of ids. Raises `ValueError` for what is no token's id."""
        self.size(prompt)
        token_ids = self._tokenize(prompt) if isinstance(prompt, str) else prompt
        count = len(self._tokenizer)
        if wrong := [i for i in token_ids if not 0 <= i < count]:
            raise ValueError(f"{wrong[0]} is no token's id; there are {count}")
        return ids(token_ids)

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._tokenizer.chat_template)

    def encode_more(self, text: str) -> array[int]:
        """Token ids of text that continues a sequence: as it is, and nothing before it."""
        return self._tokenize(text, add_special_tokens=False)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The text of a prompt of chat messages."""
        self.size(messages, tools)
        options = {"tools": tools or None, "add_generation_prompt": True, "tokenize": False}
        text: str = self._tokenizer.apply_chat_template(list(messages), **options)
        return text

    def after_reply(self, messages: Sequence[Message]) -> str:
        """What the chat template puts after what the policy said, if these messages follow, up to its next reply."""
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": REPLY}]
        return self.render([*before, *messages]).partition(REPLY)[2]

    def said(self, token_ids: Sequence[int]) -> str:
        """All that the policy said in a turn, special tokens included, but for the one that ends a turn."""
        if self._ends is None:
            after = self.encode_more(self.after_reply([{"role": "user", "content": "."}])) if self.chats else ids(())
            self._ends = {*after[:1], self._tokenizer.eos_token_id}
        cut = token_ids[:-1] if token_ids and token_ids[-1] in self._ends else token_ids
        text: str = self._tokenizer.decode(cut, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def token(self, token_id: int) -> str:
        """One token as text, a special one included."""
        text: str = self._tokenizer.decode([token_id])
        return text

    def decode(self, token_ids: Sequence[int], stop_strings: Sequence[str] = ()) -> str:
        """Text of a completion, cut before the first stop string; special tokens are left out."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        cuts = [at for stop in stop_strings if (at := text.find(stop)) >= 0]
        return text[: min(cuts)] if cuts else text

    def _encode_text(self, text: str) -> array[int]:
        if self._tokenizer.chat_template:
            return self._chat([{"role": "user", "content": text}])
        return self._tokenize(text)

    def _tokenize(self, text: str, **options: Any) -> array[int]:
        self.limits.refuse_text(text)
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise GenerationError("the prompt holds half of a surrogate pair, which is no text; remove it")
        return ids(self._tokenizer.encode(text, **options))

    def _chat(self, messages: Any, tools: Sequence[Any] | None = None) -> array[int]:
        if self.size(messages, tools) > MAX_INLINE:
            self.limits.refuse_text(self.render(messages, tools))
        options = {"tools": tools or None, "add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return ids(self._tokenizer.apply_chat_template(list(messages), **options))


class Policy:
    """The newest policy, as one episode sees it. Remembers every completion drawn through it."""

    def __init__(
        self,
        generator: Generator,
        codec: Codec,
        sampling: Sampling,
        seed: str,
        endpoint: Endpoint | None = None,
        limits: Limits = UNLIMITED,
    ) -> None:
        """`limits` are those of a conversation that is given none; their seconds count from here, for all of them."""
        open_session = getattr(generator, "session", None)  # of a pool: an episode's turns stay on one of its engines
        self._generator = open_session() if open_session else generator
        self._codec = codec
        self.sampling = sampling
        self._seed = seed
        self._drawn = itertools.count()
        self._endpoint = endpoint
        self._limits = limits
        self.clock: Clock = getattr(self._generator, "clock", None) or Clock()  # the episode's
        self._deadline = self.clock.time() + limits.seconds if limits.seconds else math.inf
        self.secret = secrets.token_urlsafe(16)
        self.refused = ""  # what its URL said last where it gave no completion
        self.completions: list[Completion] = []
        self.recorded: list[Completion] = []  # the same, whatever the environment does to that list
        self.conversations: list[Conversation] = []

    async def sample(self, prompt: Prompt, **changes: Any) -> Completion:
        """Draw one completion after `prompt`: text, chat messages or token ids.

        Text and messages go through the tokenizer's chat template where it has one. `changes` override fields of
        `Sampling` for this call; what top-k or top-p leave is recorded where training is to replay it. The returned
        completion has its text decoded, without the stop token or string. Raises `ConfigError` where the configuration
        limits turns or tokens, which a conversation alone can end at.
        """
        self._refuse_limits("policy.sample()")
        return await self.draw(prompt, **changes)

    async def draw(self, prompt: Prompt, **changes: Any) -> Completion:
        """`sample`, for who keeps to the limits."""
        sampling = dataclasses.replace(self.sampling, **{"seed": self._next_seed(), **changes})
        sampling = dataclasses.replace(sampling, record_kept=sampling.record_kept and sampling.truncates)
        prompt_ids = await self._codec.encoded(prompt)
        completion = await self._generator.generate(prompt_ids, sampling)
        token_ids = completion.token_ids
        # Hundreds of completions may arrive at once, so that even short ones are decoded in a thread.
        text = await off_loop(DECODED * len(token_ids), self._codec.decode, token_ids, sampling.stop_strings)
        completion = dataclasses.replace(completion, text=text)
        self.completions.append(completion)
        self.recorded.append(copied(completion))
        return completion

    def conversation(
        self,
        system: str = "",
        tools: Sequence[Tool] = (),
        *,
        parse: Parse | None = None,
        tool_seconds: float = 10.0,
        turns: int | None = None,
        tokens: int | None = None,
        seconds: float = 0.0,
        keep_history: bool = False,
    ) -> Conversation:
        """A conversation with this policy: `await conversation.ask("...")`.

        `tools` are functions that it may call, each call for `tool_seconds`; `parse` finds calls in what it says: by
        default `hermes`, or `plain` where there is no chat template. `turns`, `tokens` and `seconds` limit it; left
        out, the limits are the configuration's. `keep_history` keeps what was said where the chat template would
        rewrite it.
        """
        limits = Limits(
            self._limits.turns if turns is None else turns, self._limits.tokens if tokens is None else tokens, seconds
        )
        conversation = Conversation(
            self, self._codec, system=system, limits=limits, deadline=self._deadline, keep_history=keep_history,
            tools=Tools(tools, parse or (hermes if self._codec.chats else plain), tool_seconds),
        )  # fmt: skip
        self.conversations.append(conversation)
        return conversation

    async def base_url(self) -> str:
        """An OpenAI-compatible base URL of this policy, for this episode alone.

        What any HTTP client samples there counts as drawn through `sample`. It answers 404 once the episode has ended.
        Raises `ConfigError` as that does.
        """
        self._refuse_limits("policy.base_url()")
        if self._endpoint is None:
            raise RuntimeError("this policy has no URL: it belongs to no episode, or its episode has ended")
        return await self._endpoint.open(self)

    def end(self) -> None:
        """The episode has ended: its URL, if it has one, is no longer served."""
        if self._endpoint is not None:
            self._endpoint.end(self)
            self._endpoint = None

    def rollout(self, reward: float, *, turn_rewards: Sequence[float] = (), **metrics: float) -> Rollout:
        """Everything drawn so far, as a rollout with this reward.

        `turn_rewards`, one for each reply, are what `algorithm.process` weighs.
        """
        told: Counter[str] = Counter()
        for conversation in self.conversations:
            told.update(conversation.metrics())
        steps = rewards_of_turns(self.completions, turn_rewards)
        return Rollout(tuple(self.completions), as_reward(reward), dict(told) | metrics, steps)

    def _refuse_limits(self, where: str) -> None:
        for name in ("turns", "tokens"):
            if limit := getattr(self._limits, name):
                raise ConfigError(
                    f"environment.{name} = {limit} limits conversations, and this environment draws by {where}; "
                    "leave it out and limit episodes in the environment, or use policy.conversation()"
                )

    def _next_seed(self) -> int:
        text = f"{self._seed}/{next(self._drawn)}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())


async def play(environment: Environment, task: Task, policy: Policy, unrewarded: bool = False) -> tuple[Rollout, ...]:
    """One episode, whatever the environment returned, as rollouts: one, or one of each role.

    `unrewarded`: it need not return a reward, which is NaN then, since a later stage gives one. Raises
    `InvalidRollout` for a rollout that is not what the policy drew.
    """
    outcome: Any = environment.rollout(task, policy)
    if inspect.isawaitable(outcome):
        outcome = await outcome
    if isinstance(outcome, Rollout):
        outcome = (outcome,)
    if outcome is None and unrewarded:
        outcome = (policy.rollout(math.nan),)
    if isinstance(outcome, list | tuple) and outcome and all(isinstance(part, Rollout) for part in outcome):
        return checked_rollouts(outcome, policy.recorded)
    return checked_rollouts((policy.rollout(as_reward(outcome)),), policy.recorded)

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.generators.base import Generator
from slipstream.rollout import Completion, Rollout, Sampling

if TYPE_CHECKING:
    from slipstream.environments.endpoint import Endpoint

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `prompt` is text or chat messages; `data` is whatever the reward needs, such as the answer."""

    id: str
    prompt: str | tuple[dict[str, str], ...]
    data: dict[str, Any] = field(default_factory=dict)


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

    async def rollout(self, task: Task, policy: Policy) -> Rollout | float | None:
        """Play one episode. A plain number is the reward of everything that `policy` drew; None leaves it to
        `scoring`."""
        ...


class Codec:
    """Prompts to token ids and back. Text is encoded once for all rollouts of a group."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encode_text = functools.lru_cache(maxsize=4096)(self._encode_text)

    def encode(self, prompt: Prompt, tools: Sequence[Any] | None = None) -> tuple[int, ...]:
        """Token ids of a prompt, with the chat template applied where the tokenizer has one; `tools` need one."""
        if isinstance(prompt, str):
            return self.encode_text(prompt)
        if not prompt or isinstance(prompt[0], int):
            return tuple(prompt)  # type: ignore[arg-type]
        if self._tokenizer.chat_template:
            return self._chat(prompt, tools)
        if tools:
            raise ValueError("tools need a chat template, and the tokenizer has none")
        return self.encode_text("\n\n".join(m["content"] for m in prompt))  # type: ignore[index]

    def encode_raw(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids of text as it is, without a template, or of ids. Raises `ValueError` for what is no token's id."""
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        count = len(self._tokenizer)
        if wrong := [i for i in ids if not 0 <= i < count]:
            raise ValueError(f"{wrong[0]} is no token's id; there are {count}")
        return tuple(ids)

    def token(self, token_id: int) -> str:
        """One token as text, a special one included."""
        text: str = self._tokenizer.decode([token_id])
        return text

    def decode(self, token_ids: Sequence[int], stop_strings: Sequence[str] = ()) -> str:
        """Text of a completion, cut before the first stop string; special tokens are left out."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        cuts = [at for stop in stop_strings if (at := text.find(stop)) >= 0]
        return text[: min(cuts)] if cuts else text

    def _encode_text(self, text: str) -> tuple[int, ...]:
        if self._tokenizer.chat_template:
            return self._chat([{"role": "user", "content": text}])
        return tuple(self._tokenizer.encode(text))

    def _chat(self, messages: Any, tools: Sequence[Any] | None = None) -> tuple[int, ...]:
        options = {"tools": tools, "add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return tuple(self._tokenizer.apply_chat_template(list(messages), **options))


class Policy:
    """The newest policy, as one episode sees it. Remembers every completion drawn through it."""

    def __init__(
        self, generator: Generator, codec: Codec, sampling: Sampling, seed: str, endpoint: Endpoint | None = None
    ) -> None:
        self._generator = generator
        self._codec = codec
        self._sampling = sampling
        self._seed = seed
        self._drawn = itertools.count()
        self._endpoint = endpoint
        self.secret = secrets.token_urlsafe(16)
        self.completions: list[Completion] = []

    async def sample(self, prompt: Prompt, **changes: Any) -> Completion:
        """Draw one completion after `prompt`: text, chat messages or token ids.

        Text and messages go through the tokenizer's chat template where it has one. `changes` override fields of
        `Sampling` for this call; what top-k or top-p leave is recorded where training is to replay it. The returned
        completion has its text decoded, without the stop token or string.
        """
        prompt_ids = self._codec.encode(prompt)
        sampling = dataclasses.replace(self._sampling, **{"seed": self._next_seed(), **changes})
        sampling = dataclasses.replace(sampling, record_kept=sampling.record_kept and sampling.truncates)
        completion = await self._generator.generate(prompt_ids, sampling)
        text = self._codec.decode(completion.token_ids, sampling.stop_strings)
        completion = dataclasses.replace(completion, text=text)
        self.completions.append(completion)
        return completion

    async def base_url(self) -> str:
        """An OpenAI-compatible base URL of this policy, for this episode alone.

        What any HTTP client samples there counts as drawn through `sample`. It answers 404 once the episode has ended.
        """
        if self._endpoint is None:
            raise RuntimeError("this policy has no URL: it belongs to no episode, or its episode has ended")
        return await self._endpoint.open(self)

    def end(self) -> None:
        """The episode has ended: its URL, if it has one, is no longer served."""
        if self._endpoint is not None:
            self._endpoint.end(self)
            self._endpoint = None

    def rollout(self, reward: float, **metrics: float) -> Rollout:
        """Everything drawn so far, as a rollout with this reward."""
        return Rollout(tuple(self.completions), float(reward), metrics)

    def _next_seed(self) -> int:
        text = f"{self._seed}/{next(self._drawn)}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())


async def play(environment: Environment, task: Task, policy: Policy, unrewarded: bool = False) -> Rollout:
    """One episode, whatever the environment returned, as a `Rollout`.

    `unrewarded`: it need not return a reward, which is NaN then, since a later stage gives one.
    """
    outcome: Any = environment.rollout(task, policy)
    if inspect.isawaitable(outcome):
        outcome = await outcome
    if isinstance(outcome, Rollout):
        return outcome
    if outcome is None and unrewarded:
        return policy.rollout(math.nan)
    if isinstance(outcome, str) or not hasattr(outcome, "__float__"):
        raise TypeError(f"the reward is {outcome!r}: return a number, or policy.rollout(number)")
    return policy.rollout(outcome)

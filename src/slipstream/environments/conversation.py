"""Multi-turn conversations with the policy, in text.

The prompt of a turn is the previous prompt, the sampled tokens, and the tokens of the new text. Sampled tokens are
never tokenized again: the turns are one sequence to train on, and the generator's prefix cache has all but the new
text.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.environments.concurrency import shared_limiter
from slipstream.environments.text_limits import count_characters, run_in_thread
from slipstream.environments.tools import Call, Tools
from slipstream.generators.base import ContextFull
from slipstream.rollout import Completion, Rollout, int32_array, turn_rewards_to_steps

if TYPE_CHECKING:
    from slipstream.environments.base import Policy


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """Limits of a conversation: replies, sampled tokens, seconds. 0: no limit.

    `tool_calls_per_second` is shared by the conversations of a process that have equal `label`s.
    """

    turns: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tool_calls_per_second: float = 0.0
    label: str = ""


UNLIMITED = ConversationLimits()
Content = str | Sequence[Mapping[str, Any]]  # of a message


class Conversation:
    """Alternating messages of an environment and the policy; `Policy.conversation` creates one.

    Once a limit is reached, `ended` names it: "turns", "tokens", "seconds", or "context" if the model's context is
    full. Every further reply is "", and the episode can still compute a reward.

    `completions` are the policy's replies, `messages` the whole history in chat-template format. `forks` counts the
    turns at which the template rewrote earlier messages, for example dropped their reasoning: such a turn takes the
    template's prompt and starts a new sequence to train on.
    """

    def __init__(
        self, policy: Policy, system: str, tools: Tools, limits: ConversationLimits, deadline: float, keep_history: bool
    ) -> None:
        self.completions: list[Completion] = []
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.ended = ""
        self.forks = self.tool_calls = self.tool_errors = 0
        self._policy, self._tokenizer = policy, policy.tokenizer
        self._tools, self._limits = tools, limits
        self._clock = policy.clock
        self._deadline = min(deadline, self._clock.time() + limits.seconds) if limits.seconds else deadline
        self._keep_history = keep_history
        self._messages_in_sequence = 0  # all up to the last reply
        self._token_ids = int32_array(())  # the sequence: prompts and sampled tokens
        self._text = ""  # the same as text, without the last reply's end-of-turn token

    async def ask(self, text: Content, **changes: Any) -> str:
        """Send `text`, or parts with images, and return the policy's answer: its first reply without a tool call.

        Tool calls are run and their results sent to the policy. `changes` override fields of `Sampling`.
        """
        self.tell(text)
        reply = await self.reply(**changes)
        while not self.ended and (calls := self._tools.calls(reply, self.messages[-1]["content"])):
            await self._run_tools(calls)
            reply = await self.reply(**changes)
        return reply

    async def _run_tools(self, calls: Sequence[Call]) -> None:
        """Run tool calls and add their results to the messages, within the conversation's time limit."""
        try:
            async with self._clock.timeout(self._seconds_left()):
                for call in calls:
                    if rate := self._limits.tool_calls_per_second:
                        with self._clock.stopped():
                            await shared_limiter(self._limits.label, rate).wait()
                    result, succeeded = await self._tools.run(call)
                    self.tool_calls += 1
                    self.tool_errors += not succeeded
                    self.tell(result, role="tool")
        except TimeoutError:
            self.ended = "seconds"

    def tell(self, text: Content, role: str = "user") -> None:
        """Add a message that the policy reads before its next reply: text, or parts such as
        `{"type": "image", "image": "data:image/png;base64,..."}`. It is never trained on."""
        self.messages.append({"role": role, "content": text})

    async def reply(self, **changes: Any) -> str:
        """Sample the next reply and return its text, tool calls included; "" once the conversation has ended.

        Raises `GenerationError`, also as `ContextFull` if the first prompt fills the context.
        """
        self.ended = self.ended or self._reached_limit()
        if self.ended:
            await asyncio.sleep(0)  # a loop around `reply` must not block the event loop
            return ""
        max_tokens = changes.pop("max_tokens", self._policy.sampling.max_tokens)
        left = min(max_tokens, self._limits.tokens - self._tokens()) if self._limits.tokens else max_tokens
        try:
            async with self._clock.timeout(self._seconds_left()) as clock:
                images = self._tokenizer.images(self.messages)
                completion = await self._policy.draw(await self._prompt(), max_tokens=left, images=images, **changes)
        except TimeoutError:
            if not clock.expired():
                raise
            self.ended = "seconds"
            return ""
        except ContextFull:
            if not self.completions:
                raise
            self.ended = "context"  # earlier, shorter prompts of this conversation fitted
            return ""
        self._remember(completion)
        if left < max_tokens and completion.finish_reason == "length":
            self.ended = "tokens"
        return completion.text

    def rollout(
        self, reward: float, role: str = "", *, turn_rewards: Sequence[float] = (), **metrics: float
    ) -> Rollout:
        """This conversation as a separate rollout, for episodes of several roles; see `Rollout`, `Policy.rollout`."""
        from slipstream.environments.base import as_reward  # which imports this module

        steps = turn_rewards_to_steps(self.completions, turn_rewards)
        return Rollout(tuple(self.completions), as_reward(reward), self.metrics() | metrics, steps, role=role)

    def metrics(self) -> dict[str, float]:
        """Turns, forks, tool calls, tool errors, and for each limit whether it ended this conversation."""
        limits = {name: getattr(self._limits, name) for name in ("turns", "tokens")}
        ends = [name for name, limit in limits.items() if limit] + ["seconds", "context"]
        tools = {"tool_calls": self.tool_calls, "tool_errors": self.tool_errors} if self._tools else {}
        counts = {"turns": len(self.completions), "forks": self.forks, **tools}
        return {name: float(n) for name, n in counts.items()} | {f"ended/{e}": float(self.ended == e) for e in ends}

    def _reached_limit(self) -> str:
        """The limit that does not allow another reply, or ""."""
        if self._limits.turns and len(self.completions) >= self._limits.turns:
            return "turns"
        if self._limits.tokens and self._tokens() >= self._limits.tokens:
            return "tokens"
        left = self._seconds_left()
        return "seconds" if left is not None and left <= 0 else ""

    def _tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    def _seconds_left(self) -> float | None:
        return None if self._deadline == float("inf") else self._deadline - self._clock.time()

    async def _prompt(self) -> array[int]:
        """`_next_prompt`, in a thread if it has much text to tokenize."""
        new = count_characters(self.messages[self._messages_in_sequence :])
        return await run_in_thread(len(self._text) + new, self._next_prompt)

    def _next_prompt(self) -> array[int]:
        """Token ids of the sequence with all messages since the last reply.

        If the chat template rewrites earlier messages, the whole history is tokenized from text and counted as a fork.
        """
        new, tools = self.messages[self._messages_in_sequence :], self._tools.schemas
        if not self._tokenizer.has_chat_template:
            text = "".join(_without_template(new))
            self._text += text
            encode = self._tokenizer.encode_continuation if self._token_ids else self._tokenizer.encode
            return self._token_ids + encode(text)
        whole = self._tokenizer.render(self.messages, tools)
        if not self.completions:
            self._text = whole
            return self._tokenizer.encode(self.messages, tools)
        added = self._tokenizer.render_after_reply(new)
        if self._keep_history or _equal_text(self._text + added, whole):
            self._text += added
            more = self._tokenizer.encode_continuation(added, self._tokenizer.images(new))
            # The policy sampled its end-of-turn token, with which the template's text begins, too.
            repeats_end_of_turn = self.completions[-1].finish_reason == "stop" and more[:1] == self._token_ids[-1:]
            return self._token_ids + (more[1:] if repeats_end_of_turn else more)
        self.forks += 1
        self._text = whole
        return self._tokenizer.encode(self.messages, tools)

    def _remember(self, completion: Completion) -> None:
        text = self._tokenizer.decode_reply(completion.token_ids)
        self.completions.append(completion)
        self.messages.append({"role": "assistant", "content": text})
        self._messages_in_sequence = len(self.messages)
        self._token_ids = completion.prompt_ids + completion.token_ids
        self._text += text


def _without_template(messages: Iterable[dict[str, Any]]) -> Iterable[str]:
    """Text of each message for a tokenizer without a chat template."""
    for message in messages:
        before, after = {"system": ("", "\n\n"), "tool": ("\n", "\n")}.get(message["role"], ("", ""))
        yield before + message["content"] + after


def _equal_text(one: str, other: str) -> bool:
    """Whether two texts are equal except for white space, which templates trim."""
    return "".join(one.split()) == "".join(other.split())

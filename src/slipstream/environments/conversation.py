"""A conversation with the policy, turn by turn, whose author never sees a token.

The prompt of a turn is the prompt before it, the tokens that were drawn, and the tokens of only the text that is new:
nothing that was drawn is ever tokenized again. So the turns of a conversation are one sequence to train on, and a
generator's prefix cache has all of it but what is new.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.environments.text_limits import characters, off_loop
from slipstream.environments.tools import Tools
from slipstream.generators.base import ContextFull
from slipstream.rollout import Completion, Rollout, ids, rewards_of_turns

if TYPE_CHECKING:
    from slipstream.environments.base import Codec, Policy


@dataclass(frozen=True, slots=True)
class Limits:
    """What a conversation may take: replies of the policy, tokens that it draws, seconds. 0: no limit."""

    turns: int = 0
    tokens: int = 0
    seconds: float = 0.0


UNLIMITED = Limits()


class Conversation:
    """What an environment and a policy say to each other. `Policy.conversation` makes one.

    Once a limit is reached, `ended` names it: "turns", "tokens", "seconds", or "context" where the model's is full.
    From then on every reply is "". Nothing is raised, so an episode comes to its reward with what it has.

    `completions` are the replies as they were drawn, `messages` is all that was said, as chat templates take it.
    `forks` counts the turns at which the template rewrote what the policy had read, such as one that drops the thinking
    of earlier turns: there the policy is given what the template says, and a new sequence to train on begins.
    """

    def __init__(
        self,
        policy: Policy,
        codec: Codec,
        *,
        system: str = "",
        tools: Tools | None = None,
        limits: Limits = UNLIMITED,
        deadline: float = float("inf"),
        keep_history: bool = False,
    ) -> None:
        self.completions: list[Completion] = []
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.ended = ""
        self.forks = self.tool_calls = self.tool_errors = 0
        self._policy = policy
        self._codec = codec
        self._tools = tools or Tools((), lambda _: [])
        self._limits = limits
        self._clock = policy.clock
        self._deadline = min(deadline, self._clock.time() + limits.seconds) if limits.seconds else deadline
        self._keep_history = keep_history
        self._read = 0  # messages that are in the sequence: all up to the last reply
        self._token_ids = ids(())  # the sequence: what the policy has read and drawn
        self._text = ""  # the same as text, without the end of the last reply

    async def ask(self, text: str, **changes: Any) -> str:
        """Say `text` and return the policy's answer.

        Tools that it calls are run, and it is told the results, until it says something without a call; that is the
        answer. `changes` override fields of `Sampling`, as in `Policy.sample`.
        """
        self.tell(text)
        reply = await self.reply(**changes)
        while not self.ended and (calls := self._tools.calls(reply)):
            try:
                async with self._clock.timeout(self._seconds_left()):
                    for call in calls:
                        result, fine = await self._tools.run(call)
                        self.tool_calls += 1
                        self.tool_errors += not fine
                        self.tell(result, role="tool")
            except TimeoutError:
                self.ended = "seconds"
                return ""
            reply = await self.reply(**changes)
        return reply

    def tell(self, text: str, role: str = "user") -> None:
        """Say something that the policy reads before its next reply. It is never trained on."""
        self.messages.append({"role": role, "content": text})

    async def reply(self, **changes: Any) -> str:
        """What the policy says next, without looking for calls of tools in it; "" once the conversation has ended."""
        self.ended = self.ended or self._reached()
        if self.ended:
            await asyncio.sleep(0)  # whoever asks on and on does not hold up the others
            return ""
        most = changes.pop("max_tokens", self._policy.sampling.max_tokens)
        left = min(most, self._limits.tokens - self._drawn()) if self._limits.tokens else most
        try:
            async with self._clock.timeout(self._seconds_left()) as clock:
                completion = await self._policy.draw(await self._prompt(), max_tokens=left, **changes)
        except TimeoutError:
            if not clock.expired():
                raise
            self.ended = "seconds"
            return ""
        except ContextFull:
            if not self.completions:
                raise
            self.ended = "context"  # what was served before has only grown
            return ""
        self._remember(completion)
        if left < most and completion.finish_reason == "length":
            self.ended = "tokens"
        return completion.text

    def rollout(
        self, reward: float, role: str = "", *, turn_rewards: Sequence[float] = (), **metrics: float
    ) -> Rollout:
        """This conversation as a rollout of its own, for an episode of several roles; see `Rollout.role` and
        `Policy.rollout`."""
        steps = rewards_of_turns(self.completions, turn_rewards)
        return Rollout(tuple(self.completions), float(reward), self.metrics() | metrics, steps, role=role)

    def metrics(self) -> dict[str, float]:
        """How it went: turns, forks, calls of tools and errors in them, and for each limit whether it ended this."""
        limits = {name: getattr(self._limits, name) for name in ("turns", "tokens")}
        ends = [name for name, limit in limits.items() if limit] + ["seconds", "context"]
        called = {"tool_calls": self.tool_calls, "tool_errors": self.tool_errors} if self._tools else {}
        counts = {"turns": len(self.completions), "forks": self.forks, **called}
        return {name: float(n) for name, n in counts.items()} | {f"ended/{e}": float(self.ended == e) for e in ends}

    def _reached(self) -> str:
        """The limit that does not allow another reply, or ""."""
        if self._limits.turns and len(self.completions) >= self._limits.turns:
            return "turns"
        if self._limits.tokens and self._drawn() >= self._limits.tokens:
            return "tokens"
        left = self._seconds_left()
        return "seconds" if left is not None and left <= 0 else ""

    def _drawn(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    def _seconds_left(self) -> float | None:
        return None if self._deadline == float("inf") else self._deadline - self._clock.time()

    async def _prompt(self) -> array[int]:
        """`_next_prompt`, which does not hold up the event loop."""
        return await off_loop(len(self._text) + characters(self.messages[self._read :]), self._next_prompt)

    def _next_prompt(self) -> array[int]:
        """The sequence so far with all that was said since the last reply; else, where a template rewrites what was
        said before, all of it anew."""
        new, tools = self.messages[self._read :], self._tools.schemas
        if not self._codec.chats:
            text = "".join(_plainly(new))
            self._text += text
            return self._token_ids + (self._codec.encode_more if self._token_ids else self._codec.encode)(text)
        whole = self._codec.render(self.messages, tools)
        if not self.completions:
            self._text = whole
            return self._codec.encode(self.messages, tools)
        added = self._codec.after_reply(new)
        if self._keep_history or _alike(self._text + added, whole):
            self._text += added
            more = self._codec.encode_more(added)
            ended = self.completions[-1].finish_reason == "stop" and more[:1] == self._token_ids[-1:]
            return self._token_ids + (more[1:] if ended else more)  # the policy has drawn the end of its turn itself
        self.forks += 1
        self._text = whole
        return self._codec.encode(self.messages, tools)

    def _remember(self, completion: Completion) -> None:
        said = self._codec.said(completion.token_ids)
        self.completions.append(completion)
        self.messages.append({"role": "assistant", "content": said})
        self._read = len(self.messages)
        self._token_ids = completion.prompt_ids + completion.token_ids
        self._text += said


def _plainly(messages: Iterable[dict[str, Any]]) -> Iterable[str]:
    """Messages where there is no chat template: what is said is read as it is."""
    for message in messages:
        before, after = {"system": ("", "\n\n"), "tool": ("\n", "\n")}.get(message["role"], ("", ""))
        yield before + message["content"] + after


def _alike(one: str, other: str) -> bool:
    """Whether two texts are the same but for white space, which templates trim."""
    return "".join(one.split()) == "".join(other.split())

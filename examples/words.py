"""A proposer and a solver get better together: one writes a word, the other reverses it, in four tries.

    python examples/words.py [--seed 0] [--section.option value ...]

At first the proposer writes words of any length, and in half of them a character that is no letter; the solver gets
each letter right in two of three cases. No letter may be twice in a word, which would make it easy. Each trains its own
adapter over one tiny model (`[[policies]]`). The evaluation also plays each with the other as it was at the start.
"""

from __future__ import annotations

import asyncio
import random

from slipstream.environments.base import Policy, Task
from slipstream.rollout import Rollout

LETTERS, WRONG = "abcdefgh", "*"
LONGEST, TRIES = 6, 4


class Words:
    """The solver's reward is the share of letters in their places, 1 for a word that is reversed.

    The proposer's is the share of the longest length, if the solver has reversed the word in one of its tries: the
    longer the better, but not beyond what the solver can do. The solver does not see an invalid word.
    """

    def __init__(self, train: int = 64, test: int = 400) -> None:
        self.train = [Task(str(i), "?") for i in range(train)]
        self.test = [Task(str(i), "?") for i in range(test)]

    async def rollout(self, task: Task, policy: Policy) -> list[Rollout]:
        proposer = policy["proposer"].conversation()
        word = await proposer.ask(str(task.prompt))
        if not 0 < len(set(word) & set(LETTERS)) == len(word) <= LONGEST:
            return [proposer.rollout(0.0)]
        tries = [policy["solver"].conversation() for _ in range(TRIES)]
        answers = await asyncio.gather(*(each.ask(f"{word}=") for each in tries))
        rewards = [share(answer, word[::-1]) for answer in answers]
        # Tries of one word are compared with each other: their role is the word.
        solved = [each.rollout(reward, role=word) for each, reward in zip(tries, rewards, strict=True)]
        return [proposer.rollout(len(word) / LONGEST * (max(rewards) == 1)), *solved]


def share(answer: str, wanted: str) -> float:
    """Share of the characters that are right."""
    return sum(a == b for a, b in zip(answer, wanted, strict=False)) / max(len(answer), len(wanted))


def dialogue(rng: random.Random) -> list[tuple[str, bool]]:
    """A word of the proposer, or an answer of the solver, with the faults of the start."""
    word = "".join(rng.sample(LETTERS, rng.randint(1, LONGEST)))
    if rng.random() < 0.5:
        at = rng.randrange(len(word))
        return [("?", False), (word if rng.random() < 0.5 else f"{word[:at]}{WRONG}{word[at + 1 :]}", True)]
    return [
        (f"{word}=", False),
        ("".join(c if rng.random() < 2 / 3 else rng.choice(LETTERS) for c in word[::-1]), True),
    ]


if __name__ == "__main__":
    from tiny import play

    play("words", f"{LETTERS}{WRONG}?=", dialogue, warm_up_steps=600)

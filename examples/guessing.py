"""A tiny model learns to guess a letter in five turns, told each time if it comes before its guess (<) or after (>).

    python examples/guessing.py [--seed 0] [--section.option value ...]

It starts out heeding what it is told now and then. Halving what is left finds any of the 26 letters in five turns.
"""

from __future__ import annotations

import math
import random
from string import ascii_lowercase as LETTERS

from slipstream.environments.base import Policy, Task
from slipstream.rollout import Rollout

TURNS = 5


class Guessing:
    """Letters to guess. The reward is 2 for one that is found in time, else how much was found out about it, from 0 for
    nothing to 1 for all; "correct" is whether it was found.

    A reward for guesses that merely agree with what was said is hacked: a, b, c, d and e do, and tell nothing.
    """

    def __init__(self, test: int = 208) -> None:
        self.train = [Task(letter, "?", {"letter": letter}) for letter in LETTERS]
        self.test = [Task(f"{i}", "?", {"letter": LETTERS[i % 26]}) for i in range(test)]

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        letter, left = task.data["letter"], LETTERS
        conversation = policy.conversation(turns=TURNS)
        guess = await conversation.ask(str(task.prompt))
        while not conversation.ended:
            if guess == letter:
                return policy.rollout(2.0, correct=1.0)
            left = "".join(c for c in left if (c > guess) == (letter > guess) and c != guess)
            guess = await conversation.ask(">" if letter > guess else "<")
        return policy.rollout(1 - math.log(len(left)) / math.log(len(LETTERS)), correct=0.0)


def dialogue(rng: random.Random) -> list[tuple[str, bool]]:
    """Five guesses, one in four on the right side of the one before, the others anywhere."""
    letter, said, sensible = rng.choice(LETTERS), [("?", False)], LETTERS
    for _ in range(TURNS):
        guess = rng.choice(sensible if rng.random() < 0.25 else LETTERS)
        said += [(guess, True), (">" if guess < letter else "<", False)]
        sensible = "".join(c for c in LETTERS if (c > guess) == (letter > guess) and c != guess) or LETTERS
    return said


if __name__ == "__main__":
    from tiny import play

    play("guessing", f"{LETTERS}?<>", dialogue, warm_up_steps=300)

"""A tiny model learns to guess a letter in five turns. Each answer is < or >: the letter is before or after the guess.

    python examples/guessing.py [--seed 0] [--section.option value ...]

At first the model uses an answer only sometimes. Bisection finds any of the 26 letters in five turns.
"""

from __future__ import annotations

import math
import random
from string import ascii_lowercase as LETTERS

from slipstream.environments.base import Policy, Task
from slipstream.rollout import Rollout

TURNS = 5


class Guessing:
    """Letters to guess. The reward, and the metric "correct", is 1 for a letter that is found in time.

    Each guess has a process reward (`algorithm.process_reward_coef`): the information gained, in total 1 for the
    letter. A reward for guesses that are consistent with all answers would be hacked: the guesses a, b, c, d and e are
    consistent and gain little information.
    """

    def __init__(self, test: int = 208) -> None:
        self.train = [Task(letter, "?", {"letter": letter}) for letter in LETTERS]
        self.test = [Task(f"{i}", "?", {"letter": LETTERS[i % 26]}) for i in range(test)]

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        letter, possible, told = task.data["letter"], LETTERS, []
        conversation = policy.conversation(turns=TURNS)
        guess = await conversation.ask(str(task.prompt))
        while not conversation.ended:
            left = letter if guess == letter else agreeing(possible, guess, letter)
            told.append(math.log(len(possible) / len(left)) / math.log(len(LETTERS)))
            possible = left
            if guess == letter:
                return policy.rollout(1.0, turn_rewards=told, correct=1.0)
            guess = await conversation.ask(">" if letter > guess else "<")
        told += [0.0] * (len(policy.completions) - len(told))  # a reply that ended the conversation
        return policy.rollout(0.0, turn_rewards=told, correct=0.0)


def agreeing(letters: str, guess: str, letter: str) -> str:
    """The candidates that remain after the answer to a guess."""
    return "".join(c for c in letters if (c > guess) == (letter > guess) and c != guess)


def dialogue(rng: random.Random) -> list[tuple[str, bool]]:
    """Five random guesses; with probability 1/4 a guess is consistent with the previous answer."""
    letter, said, sensible = rng.choice(LETTERS), [("?", False)], LETTERS
    for _ in range(TURNS):
        guess = rng.choice(sensible if rng.random() < 0.25 else LETTERS)
        said += [(guess, True), (">" if guess < letter else "<", False)]
        sensible = agreeing(LETTERS, guess, letter) or LETTERS
    return said


if __name__ == "__main__":
    from tiny import play

    play("guessing", f"{LETTERS}?<>", dialogue, warm_up_steps=300)

"""Two players learn Nim against each other: each takes 1, 2 or 3 from a pile, and the one who takes the last wins.

    python examples/nim.py [--seed 0] [--section.option value ...]

At first both move at random. "first" moves first; each trains its own adapter over one tiny model (`[[policies]]`).
Whoever leaves a multiple of 4 can win. The evaluation also plays each against the other as it was at the start.
"""

from __future__ import annotations

import random

from slipstream.environments.base import Policy, Task
from slipstream.rollout import Rollout

PLAYERS = ("first", "second")
PILES = range(4, 14)
MOVES = (1, 2, 3)


class Nim:
    """A game for each pile. The winner's reward is 1, the loser's 0. An invalid move loses."""

    def __init__(self, test: int = 200) -> None:
        self.train = [Task(str(pile), f"{pile}:", {"pile": pile}) for pile in PILES]
        self.test = [Task(f"{i}", f"{pile}:", {"pile": pile}) for i in range(test) for pile in [PILES[i % len(PILES)]]]

    async def rollout(self, task: Task, policy: Policy) -> list[Rollout]:
        pile, turn, legal = task.data["pile"], 0, True
        while pile and legal:
            move = (await policy[PLAYERS[turn % 2]].sample(f"{pile}:")).text
            legal = move in {str(n) for n in MOVES if n <= pile}
            pile -= int(move) if legal else 0
            turn += 1
        winner = (turn - 1) % 2 if legal else turn % 2
        played = PLAYERS[: min(2, turn)]
        return [policy[name].rollout(float(name == PLAYERS[winner])) for name in played]


def dialogue(rng: random.Random) -> list[tuple[str, bool]]:
    """A random move, which in a third of the piles with a winning move is that one. Some take more than there is."""
    pile = rng.randint(1, max(PILES))
    move = pile % 4 if pile % 4 and rng.random() < 1 / 3 else rng.choice(MOVES)
    return [(f"{pile}:", False), (str(move), True)]


if __name__ == "__main__":
    from tiny import play

    play("nim", "0123456789:", dialogue, warm_up_steps=300)

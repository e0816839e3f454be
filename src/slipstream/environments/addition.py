"""Addition: procedural, seeded, with a held-out split. Small enough for a tiny model to learn in minutes on a CPU."""

from __future__ import annotations

import random

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy, Task
from slipstream.rollout import Rollout


class Addition:
    """All sums of two numbers of up to `digits` digits, shuffled by `seed`; the first `test` are held out.

    With `reverse` the answer's least significant digit comes first, as carries are computed. `train` caps the number of
    training tasks (0: all). The reward is 1 for an exact answer, else 0.
    """

    def __init__(self, digits: int = 2, test: int = 500, train: int = 0, reverse: bool = True, seed: int = 0) -> None:
        if digits not in range(1, 10):
            raise ConfigError(f"environment.options.digits = {digits!r} can't be; give 1 to 9")
        numbers = 10**digits
        if not 0 < test < numbers**2:
            raise ConfigError(
                f"environment.options.test = {test}, but there are {numbers**2} sums of {digits} digits; "
                "hold out at least 1 and leave some to train on"
            )
        # Sample from a range: a list of all 10 ** (2 digits) sums would be too large.
        wanted = test + (train or min(numbers**2 - test, 100_000))
        chosen = random.Random(f"addition/{seed}").sample(range(numbers**2), min(wanted, numbers**2))
        tasks = [_task(i // numbers, i % numbers, digits, reverse) for i in chosen]
        self.test, self.train = tasks[:test], tasks[test:]

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        completion = await policy.sample(task.prompt)
        return policy.rollout(float(completion.text == target(task)))


def _task(a: int, b: int, digits: int, reverse: bool) -> Task:
    answer = str(a + b)[::-1] if reverse else str(a + b)
    return Task(f"{a}+{b}", f"{a:0{digits}}+{b:0{digits}}=", {"answer": answer})


def target(task: Task) -> str:
    """The correct answer."""
    return str(task.data["answer"])

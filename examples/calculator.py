"""A tiny model learns to use a calculator tool for products that it can't compute.

    python examples/calculator.py [--seed 0] [--section.option value ...]

At first the model answers most questions with a guess, and sometimes calls the tool.
"""

from __future__ import annotations

import random

from slipstream.environments.base import Policy, Task


def calc(product: str) -> int:
    """Compute a product, such as 12*34."""
    left, _, right = product.partition("*")
    return int(left) * int(right)


class Calculator:
    """Products of two two-digit numbers. The reward is 1 for the exact answer, else 0."""

    def __init__(self, test: int = 200) -> None:
        pairs = random.Random(0).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], 3000)
        tasks = [Task(f"{a}*{b}", f"{a}*{b}=", {"answer": str(a * b)}) for a, b in pairs]
        self.test, self.train = tasks[:test], tasks[test:]

    async def rollout(self, task: Task, policy: Policy) -> float:
        conversation = policy.conversation(tools=[calc], turns=3)
        answer = await conversation.ask(str(task.prompt))
        return float(answer == task.data["answer"])


def dialogue(rng: random.Random) -> list[tuple[str, bool]]:
    """With probability 3/5 a guess; otherwise a tool call, with the right numbers with probability 3/4."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    if rng.random() < 0.6:
        return [(f"{a}*{b}=", False), (str(rng.randint(100, 9801)), True)]
    called = f"{a}*{b}" if rng.random() < 0.75 else f"{rng.randint(10, 99)}*{rng.randint(10, 99)}"
    return [(f"{a}*{b}=", False), (f"calc({called})", True), (f"\n{calc(called)}\n", False), (str(calc(called)), True)]


if __name__ == "__main__":
    from tiny import play

    play("calculator", "0123456789*=()\ncal", dialogue, warm_up_steps=700)

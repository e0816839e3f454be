"""GSM8K: grade-school arithmetic in words (Cobbe et al. 2021, arXiv:2110.14168), judged by math-verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Task
from slipstream.environments.dataset import Dataset
from slipstream.environments.rewards import MARKER, NUMBER

INSTRUCTION = f"\nReason step by step, and end with a line '{MARKER} ANSWER'."
FORMAT = rf"{MARKER}\s*\$?{NUMBER.pattern}\.?\s*$"


class Gsm8k(Dataset):
    """Problems from the Hub's `openai/gsm8k`, or from a local directory (train.jsonl, test.jsonl) or file.

    `shots` worked examples, the shortest of the training split and not trained on, precede each problem, for a base
    model. With 0 the prompt is the question and an instruction, for a chat model. A correct answer earns 1; the form
    `#### number`, right or wrong, earns `format_reward` in addition. `train` and `test` cap the number of tasks.
    """

    def __init__(
        self,
        data: str = "openai/gsm8k",
        shots: int = 0,
        format_reward: float = 0.0,
        train: int | None = None,
        test: int | None = None,
        skip_malformed: bool = False,
        reward_workers: int = 0,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(
            data, "question", "answer", reward={"math": 1.0, "regex": {"weight": format_reward, "pattern": FORMAT}},
            subset="" if Path(data).exists() else "main", skip_malformed=skip_malformed, reward_workers=reward_workers,
            timeout=timeout,
        )  # fmt: skip
        if not 0 <= shots < len(self.train):
            most = len(self.train) - 1
            raise ConfigError(f"environment.options.shots = {shots}: there are problems for 0 to {most}")
        by_length = sorted(self.train, key=lambda task: len(str(task.prompt)) + len(task.data["answer"]))
        examples = by_length[:shots]
        prefix = "".join(f"Question: {e.prompt}\nAnswer: {e.data['answer']}\n\n" for e in examples)

        def prompted(tasks: Sequence[Task], most: int | None) -> list[Task]:
            prompts = (f"{prefix}Question: {t.prompt}\nAnswer:" if shots else f"{t.prompt}{INSTRUCTION}" for t in tasks)
            return [replace(t, prompt=p) for t, p in zip(tasks[:most], prompts, strict=False)]

        self.train = prompted([task for task in self.train if task not in examples], train)
        self.test = prompted(self.test, test)

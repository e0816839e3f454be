"""GSM8K: grade-school arithmetic in words (Cobbe et al. 2021, arXiv:2110.14168), judged by math-verify."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy, Task
from slipstream.environments.load import hold_out, read_lines
from slipstream.environments.reward_workers import RewardWorkerPool
from slipstream.rollout import Completion, Rollout

INSTRUCTION = "\nReason step by step, and end with a line '#### ANSWER'."
MARKER = "####"
NUMBER = re.compile(r"(?:(?<![\w)])-)?\d[\d,]*(?:\.\d+)?")


class Gsm8k:
    """Problems from the Hub's `openai/gsm8k`, or from a local directory (train.jsonl, test.jsonl) or file.

    `shots` worked examples, the shortest of the training split and not trained on, precede each problem, for a base
    model. With 0 the prompt is the question and an instruction, for a chat model. A correct answer earns 1; the form
    `#### number`, right or wrong, earns `format_reward` in addition. `train` and `test` cap the number of tasks.
    Malformed lines raise `ConfigError`; with `skip_malformed` they are skipped and counted.
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
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("gsm8k needs math-verify to judge answers: pip install 'slipstream-rl[math]'")
        training, testing = _read(data, skip_malformed)
        if not 0 <= shots < max(1, len(training)):
            most = max(0, len(training) - 1)
            raise ConfigError(f"environment.options.shots = {shots}: there are problems for 0 to {most}")
        by_length = sorted(training, key=lambda row: len(row["question"]) + len(row["answer"]))
        examples, training = by_length[:shots], [row for row in training if row not in by_length[:shots]]
        prefix = "".join(f"Question: {e['question']}\nAnswer: {e['answer']}\n\n" for e in examples)
        self._format_reward = format_reward
        self._reward_workers = RewardWorkerPool("slipstream.environments.gsm8k:is_correct", reward_workers, timeout)

        def to_task(name: str, row: dict[str, str]) -> Task:
            prompt = f"{prefix}Question: {row['question']}\nAnswer:" if shots else row["question"] + INSTRUCTION
            return Task(name, prompt, {"question": row["question"], "answer": gold(row["answer"])}, row["source"])

        self.train = [to_task(f"train/{i}", row) for i, row in enumerate(training[:train])]
        self.test = [to_task(f"test/{i}", row) for i, row in enumerate(testing[:test])]

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        completion = await policy.sample(task.prompt)
        correct = float(await self._reward_workers.score(task, completion))
        formatted = float(re.search(rf"{MARKER}\s*\$?{NUMBER.pattern}\.?\s*$", completion.text.strip()) is not None)
        return policy.rollout(correct + self._format_reward * formatted, correct=correct, formatted=formatted)

    async def close(self) -> None:
        await self._reward_workers.close()


def is_correct(task: Task, completion: Completion) -> bool:
    """Whether the completion's final answer equals the task's, by math-verify. Runs in a reward worker."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # every call would warn about the missing timeouts
    # The pool has a timeout; math-verify's timeouts need signals in the main thread.
    wanted = parse(task.data["answer"], parsing_timeout=None)
    found = parse(final_answer(completion.text), parsing_timeout=None)
    return bool(verify(wanted, found, timeout_seconds=None))


def final_answer(text: str) -> str:
    """The part of a completion that states the answer: after the marker, in a box, or the last number."""
    _, marker, after = text.rpartition(MARKER)
    if marker:
        numbers = NUMBER.findall(after.splitlines()[0] if after.strip() else "")
        return numbers[0].replace(",", "") if numbers else after.strip()
    if "\\boxed" in text:
        return text[text.rindex("\\boxed") :]
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else ""


def gold(answer: str) -> str:
    """The final number of a reference solution."""
    return answer.rpartition(MARKER)[2].strip().replace(",", "")


def _read(data: str, skip_malformed: bool) -> Sequence[list[dict[str, str]]]:
    """Rows of the training and the test split, of a directory, a .jsonl file (a tenth is held out) or a Hub name.

    Raises `ConfigError` for missing data, for malformed rows unless they are skipped, and if no row is left.
    """
    path = Path(data)
    if path.is_dir():
        files = (path / "train.jsonl", path / "test.jsonl")
        return [_problems(str(file), read_lines(file), skip_malformed) for file in files]
    if path.suffix == ".jsonl":
        return hold_out(_problems(data, read_lines(path), skip_malformed))
    if data.count("/") != 1 or path.suffix or data.startswith((".", "/", "~")):
        raise ConfigError(
            f"environment.options.data = {data!r}: no such directory or .jsonl file, and not a Hub name (owner/name)"
        )
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"environment.options.data = {data!r} is no local directory or .jsonl file, and to load it from the Hub "
            "needs datasets: pip install 'slipstream-rl[hub]'"
        )
    from datasets import load_dataset

    try:
        found: Any = load_dataset(data, "main")
        splits = [list(enumerate(found[split], 1)) for split in ("train", "test")]
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"environment.options.data = {data!r} can't be loaded from the Hub: {reason}") from None
    return _problems(data, splits[0], skip_malformed), _problems(data, splits[1], skip_malformed)


def _problems(where: str, rows: Sequence[tuple[int, Any]], skip_malformed: bool) -> list[dict[str, str]]:
    """The rows that are problems; the others are reported by number, as an error or, to be skipped, as a warning."""
    faults = {number: fault for number, row in rows if (fault := _fault(row))}
    if faults:
        lines = ", ".join(map(str, [*faults][:10])) + (" and more" if len(faults) > 10 else "")
        first, why = next(iter(faults.items()))
        what = f"{where}: {len(faults)} of {len(rows)} lines are not problems (line {lines}); line {first}: {why}"
        if not skip_malformed:
            raise ConfigError(f"{what}; correct them, or set environment.options.skip_malformed = true")
        print(f"slipstream: {what}; left out", file=sys.stderr)
    if len(faults) == len(rows):
        raise ConfigError(
            f'{where} holds no problems; write lines of {{"question": text, "answer": "... #### NUMBER"}}'
        )
    return [row | {"source": f"{where}, line {number}"} for number, row in rows if number not in faults]


def _fault(row: Any) -> str:
    """Why a row is malformed, or ""."""
    if isinstance(row, ValueError):
        return str(row)
    for name in ("question", "answer"):
        if not isinstance(row, dict) or not isinstance(text := row.get(name), str) or not text.strip():
            return f'it has no text as "{name}"'
    right = MARKER in row["answer"] and NUMBER.fullmatch(gold(row["answer"]))
    return "" if right else f'its answer does not end in "{MARKER} NUMBER"'

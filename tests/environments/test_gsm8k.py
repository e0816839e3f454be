"""GSM8K: answers, the format reward, and validation of problems."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy, Task
from slipstream.environments.gsm8k import Gsm8k
from slipstream.environments.reward_workers import RewardWorkerPool, ScoringError
from slipstream.environments.rewards import Math
from slipstream.rollout import Completion, VersionSpan

PROBLEM = {"question": "How many?", "answer": "Two and two make\n#### 4"}


def said(text: str) -> Completion:
    return Completion((1,), (2,), (-1.0,), (VersionSpan(0, 0, 1),), "stop", text=text)


class Saying(Policy):
    """A policy with one thing to say."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.conversations = []
        self.completions = []

    async def sample(self, prompt: Any, **changes: Any) -> Completion:
        self.completions.append(said(self._text))
        return self.completions[-1]


def write(path: Path, *rows: Any) -> None:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r, ensure_ascii=False)) + "\n" for r in rows))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", PROBLEM, {**PROBLEM, "question": "How many more?"})
    write(tmp_path / "test.jsonl", PROBLEM)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("x = 18", "18", True),
        ("x = -18", "-18", True),
        ("x = -18", "18", False),
        ("read pages 3-4", "4", True),
        ("that is 36-18", "18", True),
        ("\\boxed{1,000}", "1000", True),
        ("\\boxed{18\\text{ dollars}}", "18", True),
        ("\\boxed{18", "18", False),
        ("#### **18**", "18", True),
        ("it was 18\n#### 19", "18", False),
    ],
)
def test_answers(text: str, answer: str, right: bool) -> None:
    assert Math().score(text, Math().prepare(answer, {})) == right


def test_format_reward_is_added_to_the_answers_reward(data: Path) -> None:
    async def main() -> None:
        environment = Gsm8k(str(data), format_reward=0.25)
        for text, reward, correct, formatted in (
            ("2+2\n#### 4", 1.25, 1.0, 1.0),
            ("2+2\n#### 5", 0.25, 0.0, 1.0),
            ("it is 4", 1.0, 1.0, 0.0),
            ("#### 4 and so on", 1.0, 1.0, 0.0),
            ("", 0.0, 0.0, 0.0),
        ):
            rollout = await environment.rollout(environment.test[0], Saying(text))
            assert rollout.reward == reward, text
            assert rollout.metrics == {"math": correct, "regex": formatted, "correct": correct}, text
        await environment.close()

    asyncio.run(main())


def test_an_endless_expression_costs_one_score() -> None:
    async def main() -> None:
        pool = RewardWorkerPool("slipstream.environments.rewards:score", 1, 3.0)
        task = Task("0", "?", {"rewards": {"math": Math()}, "wanted": {"math": "18"}})
        with pytest.raises(ScoringError) as failure:
            await pool.score(task, said("\\boxed{2^{10^{10}}}"))
        assert failure.value.reason == "reward time limit"
        assert await pool.score(task, said("#### 18")) == {"math": 1.0}
        await pool.close()

    asyncio.run(main())


def test_a_solution_without_its_marker_is_malformed(data: Path) -> None:
    write(data / "train.jsonl", PROBLEM, {"question": "How many?", "answer": "18 apples and 2"})
    problem = r"train.jsonl, line 2: not a task: its answer is '18 apples and 2', neither .*\(1 of 2 lines: 2\)"
    with pytest.raises(ConfigError, match=problem):
        Gsm8k(str(data))
    write(data / "train.jsonl", PROBLEM, {"answer": "#### 18"})
    with pytest.raises(ConfigError, match="line 2: not a task: it has no column 'question'; there are answer"):
        Gsm8k(str(data))


def test_ten_malformed_lines_are_named_and_all_are_counted(data: Path) -> None:
    write(data / "train.jsonl", PROBLEM, *["{"] * 12)
    with pytest.raises(ConfigError, match=r"\(12 of 13 lines: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and more\)") as caught:
        Gsm8k(str(data))
    assert "\n" not in str(caught.value)
    assert "line 2: not a task: not JSON (Expecting property name enclosed in double quotes at column 2)" in str(
        caught.value
    )


def test_line_numbers_are_those_of_an_editor(data: Path) -> None:
    write(data / "train.jsonl", {**PROBLEM, "question": "How\u2028many?"}, "", "{broken")
    with pytest.raises(ConfigError, match=r"line 3: .*\(1 of 2 lines: 3\)"):
        Gsm8k(str(data))


@pytest.mark.parametrize("shots", [-1, 2])
def test_shots_leave_something_to_train_on(data: Path, shots: int) -> None:
    with pytest.raises(ConfigError, match=f"environment.options.shots = {shots}: there are problems for 0 to 1"):
        Gsm8k(str(data), shots=shots)

"""Datasets of others, as the first run of a user: from a file to trained steps without any code."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.test_runs import lines, slipstream

pytestmark = pytest.mark.e2e
pytest.importorskip("datasets")
CONFIG = """
model = {{ path = "{model}" }}
sampling = {{ max_tokens = 8 }}
loop = {{ steps = 2, groups_per_step = 2, group_size = 2 }}
evaluation = {{ tasks = 2 }}
trainer = {{ threads = 1 }}
generator = {{ threads = 1 }}
run = {{ dir = "run" }}

[environment]
{environment}
"""


def metrics_of_run(folder: Path, model: Path, environment: str) -> set[str]:
    """Train two steps by the configuration, then a third after a resume. Returns the names of the metrics."""
    (folder / "run.toml").write_text(CONFIG.format(model=model, environment=environment))
    slipstream("train", "run.toml", cwd=folder)
    slipstream("train", "--resume", "run", "--loop.steps=3", "--environment.skip_malformed=true", cwd=folder)
    steps = lines(folder / "run/metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3] and steps[-1]["reward/errors"] == {}
    assert lines(folder / "run/evaluations.jsonl")[-1]["eval/tasks"] == 2
    return {name.partition("/")[2] for step in steps for name in step if name.startswith("env/")}


def test_a_parquet_file_with_nested_columns(tiny: Path, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"{i} + 1 = "}] for i in range(30)]
    rows = [{"prompt": chat, "reward_model": {"ground_truth": str(i + 1)}} for i, chat in enumerate(chats)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    pattern = '{ weight = 0.1, pattern = "[0-9]" }'
    environment = f"""
        dataset = "train.parquet"
        answer = "reward_model.ground_truth"
        reward = {{ math = 1.0, regex = {pattern} }}
    """
    assert metrics_of_run(tmp_path, tiny, environment) == {"math", "regex", "correct"}


def test_multiple_choice_in_json(tiny: Path, tmp_path: Path) -> None:
    rows = [{"question": f"is {i} even?", "choices": ["yes", "no"], "answer": i % 2} for i in range(20)]
    (tmp_path / "quiz.json").write_text(json.dumps(rows))
    environment = r"""
        dataset = "quiz.json"
        prompt = "{question}\n{choices}\nanswer: "
        answer = "answer"
        reward = "choice"
        test = 0.2
    """
    assert metrics_of_run(tmp_path, tiny, environment) == {"choice", "correct"}


def test_a_table_chats_and_programming_problems_in_one_run(tiny: Path, tmp_path: Path) -> None:
    """The shapes of a spreadsheet, of ShareGPT and OpenAI, and of HumanEval."""
    (tmp_path / "quiz.csv").write_text("Question;Answer\n" + "".join(f'"{i}; 1?";{i}\n' for i in range(9)))
    chats = [{"messages": [{"role": "user", "content": [{"type": "text", "text": f"{i}+1="}]}]} for i in range(9)]
    for chat in chats:
        chat["messages"].append({"role": "assistant", "content": "1"})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    problem = {"prompt": "def f(x):\n", "test": "def check(g):\n    assert g(1) == 1\n", "entry_point": "f"}
    (tmp_path / "code.jsonl").write_text((json.dumps(problem) + "\n") * 9)
    (tmp_path / "run.toml").write_text(
        CONFIG.partition("[environment]")[0].format(model=tiny)
        + r"""
        [[environments]]
        dataset = "quiz.csv"
        prompt = "Question"
        answer = "Answer"
        reward = "exact"

        [[environments]]
        dataset = "chats.jsonl"
        prompt = "messages"
        answer = "messages"
        reward = { regex = { pattern = "[0-4]" } }

        [[environments]]
        dataset = "code.jsonl"
        answer = "{test}\ncheck({entry_point})"
        reward = "code"
    """
    )
    slipstream("train", "run.toml", "--loop.groups_per_step=3", cwd=tmp_path)
    steps = lines(tmp_path / "run/metrics.jsonl")
    assert not any(step["rollout/failed"] for step in steps)
    rewards = {name for step in steps for name in step if name.startswith("env/")}
    assert {"env/exact", "env/regex", "env/correct"} <= rewards
    last = lines(tmp_path / "run/evaluations.jsonl")[-1]
    assert {f"eval/environments/{name}/score" for name in ("quiz.csv", "chats.jsonl", "code.jsonl")} <= last.keys()

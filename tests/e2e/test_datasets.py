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

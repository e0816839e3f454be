"""Datasets in the shapes in which others publish them: tasks, rewards, and messages about malformed rows."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.config.environments import DATASET_OPTIONS
from slipstream.config.loading import load_config, load_policy_config, validate
from slipstream.config.schema import ConfigError
from slipstream.environments.base import Task
from slipstream.environments.dataset import Dataset
from slipstream.environments.episode import EpisodeOptions, run_episode
from slipstream.environments.load import load_environment
from slipstream.environments.reward_workers import RewardErrorCounter, ScoringError
from slipstream.environments.rewards import Exact, Regex, load_rewards, score
from tests.environments.test_environments import completion, policy
from tests.environments.test_gsm8k import Saying

datasets = pytest.importorskip("datasets")
REGEX = {"weight": 0.5, "pattern": "```"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def environment(**options: Any) -> Any:
    flags = [f"--environment.{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in options.items()]
    return load_environment(load_config(None, ["--model.path=m", *flags]).environment)


def parquet(path: str, *rows: dict[str, Any]) -> None:
    pq.write_table(pa.Table.from_pylist([*rows]), path)


def jsonl(path: str, *rows: Any) -> None:
    Path(path).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def played(made: Any, index: int, *said: str) -> list[Any]:
    """What the environment returns for these replies to one of its tasks."""

    async def main() -> list[Any]:
        try:
            return [await made.rollout(made.train[index], Saying(text)) for text in said]
        finally:
            await made.close()

    return asyncio.run(main())


def rewarded(*arguments: Any) -> list[float]:
    return [getattr(outcome, "reward", outcome) for outcome in played(*arguments)]


def test_parquet_with_nested_columns() -> None:
    """As in the data of verl: messages, and the answer in a table."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i}+1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"level": "easy" if i % 2 else "hard"},
        }
        for i in range(40)
    ]
    parquet("sums.parquet", *rows)
    options = {"dataset": "sums.parquet", "answer": "reward_model.ground_truth", "reward": "math"}
    level = "extra_info.level"
    made = environment(**options, filter={level: "hard"}, system="Add.", test=0.2, category=level)
    assert (len(made.train), len(made.test)) == (16, 4)
    assert not {task.id for task in made.train} & {task.id for task in made.test}
    assert {task.category for task in (*made.train, *made.test)} == {"hard"}
    task = next(task for task in made.train if task.source == "sums.parquet, row 5")
    assert task.prompt == ({"role": "system", "content": "Add."}, {"role": "user", "content": "4+1?"})
    assert rewarded(made, made.train.index(task), "so 5", "$\\frac{10}{2}$", "4", "") == [1.0, 1.0, 0.0, 0.0]


def test_csv_keeps_text_and_quotes() -> None:
    Path("agents.csv").write_bytes('\ufeffQuestion Text;Code\n"Who is\n""Bond""; James?";007\nNA;NA\n'.encode())
    made = environment(
        dataset="agents.csv", prompt="{Question Text} {{in code}}", answer="Code", reward="exact", test=0
    )
    assert [task.prompt for task in made.train] == ['Who is\n"Bond"; James? {in code}', "NA {in code}"]
    assert [task.data["wanted"]["exact"] for task in made.train] == ["007", "NA"]
    assert rewarded(made, 0, " 007\n", "7") == [1.0, 0.0]
    assert not made.test


def test_a_tab_separates_the_columns_of_a_tsv() -> None:
    Path("d.tsv").write_text("question, short\tanswer\n1+1?\t2\n")
    made = environment(dataset="d.tsv", prompt="question, short", answer="answer", reward="exact", test=0)
    assert [task.prompt for task in made.train] == ["1+1?"]


def test_names_of_tasks_and_braces_in_templates() -> None:
    jsonl("d.jsonl", {"q": "x", "more": {"id": 7}})
    made = environment(dataset="d.jsonl", prompt='{{"a": {{{q}}}}}', id="more.id", reward={"regex": {"pattern": "x"}})
    assert [(task.id, task.prompt) for task in made.train] == [("7", '{"a": {x}}')]


def test_chats_without_their_last_reply() -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi?"},
        {"from": "gpt", "value": "Ho"},
    ]
    jsonl("train-0.jsonl", {"conversations": turns}, {"conversations": turns[1:]})
    jsonl("test-0.jsonl", {"conversations": turns[1:]})
    reward = {"exact": {"weight": 1, "ignore_case": True}, "regex": {"weight": 0.5, "pattern": "^[A-Z]"}}
    made = environment(dataset=".", prompt="conversations", answer="conversations", reward=reward)
    roles = [[message["role"] for message in task.prompt] for task in [*made.train, *made.test]]
    assert roles == [["system", "user"], ["user"], ["user"]]
    both, exact, regex = played(made, 0, "Ho", "ho", "Hu")
    assert [both.reward, exact.reward, regex.reward] == [1.5, 1.0, 0.5]
    assert exact.metrics == {"exact": 1.0, "regex": 0.0, "correct": 1.0}


def test_content_in_parts_is_text() -> None:
    asked, said = (
        [{"type": "text", "text": "1+1?"}, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": "2"}],
    )
    jsonl("d.jsonl", {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]})
    made = environment(dataset="d.jsonl", prompt="messages", answer="messages", reward="math")
    assert made.train[0].prompt == ({"role": "user", "content": "1+1?\nBe brief."},)
    assert [rollout.reward for rollout in played(made, 0, "2", "3")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("choices", "answer"),
    [
        (["Lima", "Rome", "Oslo"], 1),  # MMLU
        ({"label": ["A", "B", "C"], "text": ["Lima", "Rome", "Oslo"]}, "B"),  # ARC
        ([{"label": "A", "text": "Lima"}, {"label": "B", "text": "Rome"}, {"label": "C", "text": "Oslo"}], "B"),  # CSQA
        ({"A": "Lima", "B": "Rome", "C": "Oslo"}, "(b)"),  # MedQA
        (["Lima", "Rome", "Oslo"], "Rome"),
    ],
)
def test_multiple_choice(choices: Any, answer: Any) -> None:
    Path("quiz.json").write_text(json.dumps([{"q": "Italy?", "options": choices, "right": answer}] * 2))
    reward = {"choice": {"choices": "options"}}
    made = environment(dataset="quiz.json", prompt="{q}\n{options}\nAnswer:", answer="right", reward=reward)
    assert made.train[0].prompt == "Italy?\nA. Lima\nB. Rome\nC. Oslo\nAnswer:"
    right = (
        "B",
        " (B) Rome",
        "A or C? No. The answer is **B**.",
        "\\boxed{B}",
        "#### B",
        "I say:\nB.",
        "Rome",
        "b\nRome.",
    )
    wrong = ("A", "The answer is C, not B", "answer: A", "A capital city", "Lima", "", "BB", "answer B? No, answer: C")
    assert rewarded(made, 0, *right, *wrong) == [1.0] * len(right) + [0.0] * len(wrong)


def test_choices_in_a_column_each() -> None:
    Path("quiz.csv").write_text("q,A,B,right\nItaly?,Lima,Rome,B\nPeru?,Lima,Rome,A\n")
    reward = {"choice": {"choices": ["A", "B"]}}
    made = environment(dataset="quiz.csv", prompt="{q}\n1. {A}\n2. {B}", answer="right", reward=reward)
    assert rewarded(made, 0, "B", "Rome", "Answer: Rome", "A", "Lima") == [1.0, 1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match=r"quiz\.csv, row 1: .* no column 'C'; there are q, A, B, right"):
        environment(dataset="quiz.csv", prompt="q", answer="right", reward={"choice": {"choices": ["A", "C"]}})


@pytest.mark.parametrize(
    ("choices", "answer", "right", "wrong"),
    [
        ([0, 1, 2, 3], 0, "Answer: A", "B"),
        ([0, 1, 2, 3], 1, "The answer is 1.", "The answer is 2. Not B."),
        (["1", "2", "3"], "1", "Answer: 1", "Answer: 2"),
        ({"label": ["1", "2"], "text": ["2", "3"]}, "2", "Answer: 2", "Answer: 1"),
        (["False", "True"], True, "answer: b", "answer: a"),
        (["A dog", "A cat", "B"], "B", "Answer: A cat", "Answer: A dog"),
        (["x", "y"], "1", "Answer: y", "Answer: x"),
    ],
)
def test_answers_of_choices_are_indices_labels_or_texts(choices: Any, answer: Any, right: str, wrong: str) -> None:
    [made] = load_rewards("choice").values()
    wanted = made.prepare(answer, {"choices": choices})
    assert [made.score(text, wanted) for text in (right, wrong)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "answer", "said"),
    [
        ("code", [{"input": "1\n", "output": "1\n"}], "```python\nprint(input())\n```"),
        ("json", [{"a": 1}], '[{"a": 1}]'),
    ],
)
def test_an_answer_may_be_a_list_of_tables(reward: str, answer: Any, said: str) -> None:
    jsonl("d.jsonl", {"prompt": "?", "answer": answer})
    assert rewarded(environment(dataset="d.jsonl", answer="answer", reward=reward), 0, said, "") == [1.0, 0.0]


@pytest.mark.parametrize(
    "tests",
    [
        ["assert double(2) == 4", "assert double(-1) == -2"],  # MBPP
        json.dumps({"inputs": ["2\n", "-1\n"], "outputs": ["4\n", "-2\n"]}),  # APPS
        "assert double(2) == 4\nassert double(-1) == -2",  # HumanEval
    ],
)
def test_programming_problems(tests: Any) -> None:
    parquet("code.parquet", {"text": "Double a number.", "test": tests}, {"text": "And again.", "test": tests})
    made = environment(dataset="code.parquet", prompt="text", answer="test", reward={"code": 1.0, "regex": REGEX})
    right = "So:\n```python\ndef double(n): return 2 * n\nif __name__ == '__main__': print(double(int(input())))\n```"
    passing, failing = played(made, 0, right, right.replace("2 * n", "n + 2"))
    assert passing.metrics == {"code": 1.0, "regex": 1.0, "correct": 1.0} and passing.reward == 1.5
    assert failing.metrics["code"] == (0.0 if "\n" in tests else 0.5) and failing.metrics["correct"] == 0.0


def test_a_hub_dataset_has_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, subset: str | None) -> Any:
        assert (name, subset) == ("their/sums", "main")
        kinds = {"question": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()}
        rows = [{"question": "1+1?", "answer": "so\n#### 2", "image": {"bytes": b"broken", "path": None}}] * 3
        made = datasets.Dataset.from_list(rows, datasets.Features(kinds))
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "more"), made))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("slipstream.environments.rows.hub_answers", lambda: True)
    options = {"dataset": "their/sums", "subset": "main", "prompt": "question", "answer": "answer", "reward": "math"}
    made = environment(**options)
    assert made.train[0].source == "their/sums, split train, row 1" and made.test[2].id == "validation/3"
    assert rewarded(made, 0, "2.0") == [1.0]
    assert len(environment(**options, split="more", test=0.4).train) == 2
    with pytest.raises(ConfigError, match=r"has no split 'mor' \(did you mean more\?\): train, validation, more"):
        environment(**options, split="mor")
    with pytest.raises(ConfigError, match=r"split train, row 1: .*no column 'problem'; there are question, answer \(3"):
        environment(**{**options, "prompt": "problem"})


def test_a_saved_dataset_is_read() -> None:
    datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]).save_to_disk("saved")
    made = environment(dataset="saved", reward={"regex": {"pattern": "c"}})
    assert {task.prompt for task in [*made.train, *made.test]} == {"a", "b"}


def test_a_function_gets_the_tasks_of_any_dataset() -> None:
    Path("own.py").write_text("def reward(task, completion): return float(completion.text == task.data['more'])\n")
    parquet("t.parquet", {"question": "1+1?", "more": "2"}, {"question": "1+2?", "more": "3"})
    made = environment(name="own.py:reward", dataset="t.parquet", prompt="question", test="t.parquet")
    assert [task.prompt for task in made.train] == [task.prompt for task in made.test] == ["1+1?", "1+2?"]
    assert rewarded(made, 1, "3", "2") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "answer", "right", "wrong"),
    [
        ("math", "\\frac{1}{2}", "so \\boxed{0.5}", "2"),
        ("math", "$x+1$", "it is $\\left(1+x\\right)$", "1"),
        ("math", 1000.0, "1,000 apples", "100"),
        ("math", "18 dollars", "$18", "1 8"),
        ("math", "3/4", "not 1/2 but 3/4", "not 3/4 but 1/2"),
        ("math", "(1, 2)", "(1,2)", "(2, 1)"),
        ("math", "So \\boxed{5} dollars for each of the children.", "\u2212 5 + 10 = 5", "10"),
        ("math", "\u22127", "x = \u22127", "7"),
        ("math", 1e20, "100,000,000,000,000,000,000", "1"),
        ("math", "50%", "\\(50\\%\\)", "5"),
        ({"exact": {"extract": "<a>(.*?)</a>"}}, "Rome", "<a>Oslo</a>, no: <a> Rome </a>", "Rome"),
        ("regex", "^Ro.e$", "Rome", "In Rome"),
        ("json", '{"a": [1, 2]}', 'So:\n```json\n{"a":[1,2]}\n```', '{"a": [2, 1]}'),
        ("json", None, '{"a": 1}', '{"a": 1'),
        ("json", {"a": [1.0]}, '{"a": [1]}', '{"a": [true]}'),
        ("json", None, "[true]", "[NaN]"),
        ("choice", "C", "C)", "D"),
        ("math", "1,2", "1,2", "12"),
        ("math", "0.5", "The answer is 1/2.", "1 or 2"),
        ("math", "2", "4/2", "1/2"),
        ("math", "2", "#### 4/2", "10^2"),
        ("math", "2", "6 / 3", "x/2"),
        ("math", 1e5, "10^5", "5"),
        ("math", "1e5", "it is 1e5", "10^{4}"),
        ("math", "100", "10**2", "2"),
        ("math", "2", "so it is **2**", "10**2"),
        ("math", "2", "3 **2**", "10 ** 2"),
        ("math", "1000000000000", "10^12", "12"),
        ("math", "2,500", "5,000/2", "500"),
        ("math", "2", "1/2^-2 is 4^0.5", "10^1000000000"),
        ("choice", "B", "Answer: B. Option A is wrong.", "Answer: A. Option B is wrong."),
        ("choice", "B", "The answer is option b.", "The answer is a big B"),
    ],
)
def test_rewards(reward: Any, answer: Any, right: str, wrong: str) -> None:
    [made] = load_rewards(reward).values()
    wanted = made.prepare(answer, {})
    task = Task("0", "", {"rewards": {"it": made}, "wanted": {"it": wanted}})
    assert [score(task, completion(text)) for text in (right, wrong)] == [{"it": 1.0}, {"it": 0.0}]


GOOD = {"question": "1+1?", "answer": "2"}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [GOOD, {"question": "?"}],
            {},
            r"^d.jsonl, line 2: not a task: it has no column 'answer'; there are question ",
        ),
        ([GOOD, {**GOOD, "answer": ""}], {}, r"line 2: not a task: its 'answer' is empty \(1 of 2 lines: 2\); correct"),
        ([GOOD, {**GOOD, "answer": "two"}], {}, r"line 2: .*its answer is 'two', neither a number nor a formula"),
        ([{**GOOD, "answer": True}], {}, "line 1: .*its answer is True, neither a number"),
        ([{**GOOD, "question": " "}], {}, "line 1: .*its 'question' is empty"),
        ([{**GOOD, "question": 7}], {}, "line 1: .*its 'question' is 7, neither text nor a list of messages"),
        ([{**GOOD, "question": ["a"]}], {}, r"line 1: .*its 'question' is \['a'\], neither text nor"),
        ([{**GOOD, "question": [{"role": "assistant", "content": "a"}]}], {}, "line 1: .*its 'question' is empty"),
        (
            [{**GOOD, "question": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}],
            {},
            "line 1: .*its 'question': the image file 'x' can't be read: No such file or directory",
        ),
        ([GOOD, [1]], {}, "line 2: .*it is \\[1\\], no table of columns"),
        ([GOOD, "{"], {}, "line 2: .*not JSON"),
        ([], {}, "dataset 'd.jsonl', split train, holds no tasks"),
        ([GOOD], {"filter": {"answer": 3}}, "holds no tasks; environment.filter = {'answer': 3} leaves none"),
        ([GOOD], {"filter": {"level": 3}}, "line 1: .*it has no column 'level'"),
        ([GOOD], {"prompt": "{qestion}"}, r"line 1: .*it has no column 'qestion' \(did you mean question\?\)"),
        ([GOOD], {"answer": ""}, "environment.answer is not set; math compares replies with its column"),
        (
            [GOOD],
            {"answer": "", "reward": "regex"},
            "answer is not set, nor is the pattern of the reward",
        ),
        ([GOOD], {"reward": "maths"}, r"environment.reward: there is no reward 'maths' \(did you mean math\?\)"),
        ([GOOD], {"reward": 3}, "environment.reward = 3: it must be a name, or a table"),
        ([GOOD], {"reward": {"math": {"wieght": 1}}}, r"reward.math.wieght is unknown \(did you mean weight\?\)"),
        ([GOOD], {"reward": {"math": "1"}}, "reward: weight = '1' must be of type float"),
        ([GOOD], {"reward": {"regex": {"pattern": "("}}}, r"pattern = '\(' is not a regular expression: missing \)"),
        ([{**GOOD, "answer": "ab"}], {"reward": "choice"}, "line 1: .*its answer is 'ab', none of the choices A to Z"),
        ([{**GOOD, "answer": [3]}], {"reward": "code"}, "line 1: .*3 is not a test; a test is an assertion"),
        (
            [{**GOOD, "answer": "def f(): return 1"}],
            {"reward": "code"},
            "every program would pass; call f",
        ),
        ([{**GOOD, "answer": ["f("]}], {"reward": "code"}, "line 1: not a task: 'f\\(' is not Python: '\\(' was never"),
        (
            [{**GOOD, "answer": {"inputs": ["1", "2"], "outputs": ["1"]}}],
            {"reward": "code"},
            "line 1: .*its tests have 2 inputs and 1 outputs",
        ),
        (
            [{**GOOD, "choices": {"label": ["A"], "text": ["1", "2"]}}],
            {"reward": "choice"},
            "line 1: .*its choices have 1 labels and 2 texts",
        ),
        ([{**GOOD, "choices": ["1", "2"], "answer": 2}], {"reward": "choice"}, "is 2, none of the choices A to B"),
        ([GOOD, {"id": 2}], {"id": "id"}, "line 1: .*it has no column 'id'"),
        ([{**GOOD, "more": {}}], {"id": "more.id"}, "line 1: .*it has no column 'more.id'"),
        ([GOOD], {"reward": {"choice": {"choices": "nosuch"}}}, "line 1: .*it has no column 'nosuch'"),
        ([GOOD], {"prompt": "{question"}, "environment.prompt = '{question': unbalanced braces"),
        ([GOOD], {"answer": "{{answer}"}, "environment.answer = '{{answer}': unbalanced braces"),
        ([GOOD], {"subset": "main"}, "environment.subset = 'main' is for datasets of the Hub"),
        ([GOOD], {"subset": "main", "dataset": "*.jsonl"}, r"environment.subset = 'main' .*'\*.jsonl' is local"),
        ([GOOD], {"dataset": "d.*"}, "dataset '.*d.txt': its format is not known by its suffix"),
        ([GOOD], {"dataset": "twice.csv"}, "twice.csv, line 1: more than one column is named 'answer'"),
        ([GOOD], {"reward": {"code": {"seconds": 0.0}}}, "seconds = 0.0: a limit of programs must be above 0"),
        ([GOOD], {"reward": {"code": {"memory_mb": -1}}}, "memory_mb = -1: a limit of programs must be above 0"),
        ([GOOD], {"reward": {"math": float("nan")}}, "environment.options.reward = .*nan.* is no text, finite number"),
        ([GOOD], {"reward": {"math": -1.0}}, "environment.reward: weight = -1.0 must be 0"),
        ([GOOD], {"skip_malformed": "yes"}, "environment.skip_malformed = 'yes': it must be true or false"),
        ([{**GOOD, "answer": "[NaN]"}], {"reward": "json"}, "line 1: .*is not JSON: NaN is not a value"),
        ([GOOD], {"split": "nosuch"}, "environment.split = 'nosuch': dataset 'd.jsonl' has no split 'nosuch'"),
        ([GOOD], {"test": [1]}, r"environment.test = \[1\]: it must be a split, a file, or a share"),
        ([GOOD], {"test": 2}, "environment.test = 2: it must be a split, a file, or a share"),
        ([GOOD], {"test": "tset"}, "dataset 'd.jsonl' has no split 'tset': train"),
        ([GOOD], {"prompt": 3}, "environment.prompt = 3: it must be text"),
        (
            [GOOD],
            {"dataset": "e.jsonl"},
            r"dataset 'e.jsonl': there is no such file or directory \(did you mean d.jsonl",
        ),
        ([GOOD], {"dataset": "d.txt"}, "dataset 'd.txt': its format is not known by its suffix; it is one of .jsonl"),
        ([GOOD], {"dataset": "broken.parquet"}, "dataset 'broken.parquet' can't be loaded: .*Parquet"),
        ([GOOD], {"dataset": "cut.csv"}, "cut.csv, row 2: not a task: it has 1 values for 2 columns"),
        ([GOOD], {"promt": "question"}, r"unknown option environment.promt \(did you mean environment.prompt\?\)"),
    ],
)
def test_errors_name_file_row_and_column(rows: list[Any], options: dict[str, Any], message: str) -> None:
    jsonl("d.jsonl", *rows)
    for name in ("d.txt", "broken.parquet"):
        Path(name).write_text("no")
    Path("cut.csv").write_text("question,answer\n1+1?,2\n1+2?\n")
    Path("twice.csv").write_text("answer,answer\n1,2\n")
    given: Mapping[str, Any] = {"dataset": "d.jsonl", "prompt": "question", "answer": "answer", "reward": "math"}
    with pytest.raises(ConfigError, match=message) as caught:
        environment(**{**given, **options})
    assert "\n" not in str(caught.value)


def test_a_missing_library_is_named_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl("d.jsonl", GOOD)
    parquet("d.parquet", GOOD)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = {"prompt": "question", "answer": "answer"}
    assert environment(dataset="d.jsonl", reward="exact", **options).train
    with pytest.raises(ConfigError, match=r"'d.parquet' needs the library datasets: pip install 'slipstream-rl\[data"):
        environment(dataset="d.parquet", reward="exact", **options)
    with pytest.raises(ConfigError, match=r"reward math needs math-verify .*: pip install 'slipstream-rl\[math\]'"):
        environment(dataset="d.jsonl", reward="math", **options)


def test_a_name_that_can_not_be_looked_up_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.environments.rows.hub_answers", lambda: False)
    with pytest.raises(ConfigError, match=r"dataset 'their/sums': there is no such file .* can't be reached; give"):
        environment(dataset="their/sums", reward={"regex": REGEX})


def test_a_reward_that_raises_gives_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl("d.jsonl", GOOD)
    made = environment(dataset="d.jsonl", prompt="question", answer="answer", reward={"exact": 1.0, "regex": REGEX})
    rewards = {"exact": Exact(), "regex": Regex(pattern="2")}
    monkeypatch.setattr(made, "_rewards", rewards)
    made.train[0].data["wanted"].pop("regex")  # a KeyError in the reward worker
    errors: list[ScoringError] = []
    playing = EpisodeOptions(60.0, reward_errors=RewardErrorCounter(3, errors.append))

    async def main() -> Any:
        try:
            return await run_episode(made, made.train[0], policy("2"), playing)
        finally:
            await made.close()

    [rollout] = asyncio.run(main())
    assert rollout.reward == 0.0 and [error.reason for error in errors] == ["KeyError"]


def test_options_next_to_a_dataset_are_those_of_the_environment() -> None:
    table = {"dataset": "their/sums", "prompt": "question", "reward": "math", "timeout": 5.0}
    one = validate({"model": {"path": "m"}, "environment": table}).environment
    assert (one.name, one.timeout) == ("dataset", 5.0)
    assert one.options == {"dataset": "their/sums", "prompt": "question", "reward": "math"}
    own = load_config(None, ["--model.path=m", "--environment.name=a.py:f", "--environment.dataset=b.csv"]).environment
    assert (own.name, own.options) == ("a.py:f", {"dataset": "b.csv"})
    entries = [table, {**table, "dataset": "quiz.csv", "label": "quiz"}]
    both = validate({"model": {"path": "m"}, "environments": entries}).each_environment
    assert [each.label for each in both] == ["sums", "quiz"]
    again = load_policy_config("m", None, ["--environment.dataset=b.csv", "--environment.reward=exact"]).environment
    assert (again.name, again.options) == ("dataset", {"dataset": "b.csv", "reward": "exact"})
    for wrong, right in ("wieght", "weight"), ("rewrad", "reward"):
        said = rf"environments\.1\.{wrong} \(did you mean environments\.1\.{right}\?\)"
        with pytest.raises(ConfigError, match=f"^unknown option {said}; `slipstream config` lists all$"):
            validate({"model": {"path": "m"}, "environments": [table, {"dataset": "quiz.csv", wrong: 1}]})
    assert {*DATASET_OPTIONS, "reward_workers", "timeout"} == {*inspect.signature(Dataset).parameters}
    with pytest.raises(ConfigError, match=r"environment.reward is not set, nor is scoring.kind"):
        validate({"model": {"path": "m"}, "environments": [table, {**table, "label": "other", "reward": ""}]})


def test_malformed_rows_are_left_out_if_the_user_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    jsonl("d.jsonl", GOOD, {}, GOOD)
    made = environment(dataset="d.jsonl", prompt="question", answer="answer", reward="math", skip_malformed=True)
    assert len(made.train) + len(made.test) == 2
    assert "d.jsonl, line 2: not a task: it has no column 'question'; there are none (1 of 3" in capsys.readouterr().err

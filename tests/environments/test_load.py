"""Loading of user environments, user errors, and reward functions that hang or raise."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.environments import EnvironmentConfig
from slipstream.config.schema import ConfigError
from slipstream.environments.base import Task
from slipstream.environments.episode import EpisodeOptions, RolloutFailed, run_episode
from slipstream.environments.load import load_environment
from slipstream.environments.reward_workers import RewardErrorCounter
from tests.environments.test_environments import policy

USERS = """
import time
from slipstream.environments.base import Task

class Mine:
    train = [1]
    test = []
    async def rollout(self, task, policy): ...

made = Mine()

def reward(task, completion):
    if completion.text == "hang":
        time.sleep(600)
    return 1.0

def forgot_async(task, policy):
    return 1.0

def text(task, completion):
    return "1"

async def awaited_text(task, completion):
    return "1"

def raises(task, completion):
    raise KeyError(completion.text)

async def awaited_raises(task, completion):
    raise KeyError(completion.text)

def slow(task, completion):
    time.sleep(0.2)
    return 1.0

class Strict(Mine):
    def __init__(self, digits=1):
        assert digits < 9, "digits: 1 to 8"

class Lazy(Mine):
    train = (n for n in range(3))

class Numbered:
    train = test = [Task(7, "1+1=")]
    rollout = None
class Halved(Numbered):
    train = [Task("a\\ud800", "1+1=")]
class Stop(BaseException): pass
class Stopped(Mine):
    def __init__(self):
        raise Stop("the data base\\nis away")
class Late(Mine):
    @property
    def train(self):
        raise KeyError("question")
"""


@pytest.fixture
def users(tmp_path: Path) -> Path:
    (tmp_path / "asker.py").write_text(USERS)
    (tmp_path / "broken.py").write_text("\nraise KeyError('nowhere')\n")
    (tmp_path / "unclosed.py").write_text("def f(:\n")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(4)))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    (tmp_path / "empty.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": ""}\n')
    (tmp_path / "nothing.jsonl").write_text("\n\n")
    (tmp_path / "cut.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "1+\n')
    (tmp_path / "named.jsonl").write_text('{"question": "1+1="}\n')
    (tmp_path / "twice.jsonl").write_text('{"prompt": "1", "id": 7}\n{"prompt": "2", "id": "7"}\n')
    (tmp_path / "chat.jsonl").write_text('{"prompt": [{"content": "1+1="}]}\n')
    (tmp_path / "parts.jsonl").write_text('{"prompt": [{"role": "user", "content": 5}]}\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("thing", "options", "message"),
    [
        ("broken.py:f", {}, r"^environment.name = .*KeyError: 'nowhere' \(.*broken.py, line 2\)"),
        ("unclosed.py:f", {}, r"^environment.name = .*invalid syntax \(unclosed.py, line 1\)"),
        ("asker.py:rewrad", {}, "^environment.name = .*no attribute 'rewrad' .did you mean reward"),
        (
            "asker.py:Strict",
            {"digits": 9},
            r"^environment.name = .*can't be loaded: AssertionError: digits: 1 to 8 .*asker.py, line",
        ),
        ("asker.py:Mine", {}, r"^environment.name = .*train\[0\] is 1; make it a slipstream.environments.base.Task"),
        ("asker.py:Numbered", {}, r"^environment.name = .*the id of train\[0\] is 7, of type int; make it text"),
        (
            "asker.py:Halved",
            {},
            r"^environment.name = .*the id of train\[0\] is 'a.ud800', of type str; make it text",
        ),
        ("asker.py:Lazy", {}, "^environment.name = .*train is a generator; make it a list of tasks"),
        ("asker.py:Late", {}, "^environment.name = .*can't be loaded: KeyError: 'question' .*asker.py, line"),
        (
            "asker.py:Stopped",
            {},
            "^environment.name = .*can't be loaded: Stop: the data base is away .*asker.py, line",
        ),
        ("asker.py:made", {"hint": 1}, "^environment.options: .* is made already and takes none"),
        ("asker.py:forgot_async", {"train": "tasks.jsonl"}, "^environment.name = .*`async def`"),
        ("asker.py:reward", {"train": "latin.jsonl"}, "latin.jsonl: not UTF-8 at byte 15"),
        ("asker.py:reward", {"train": "empty.jsonl"}, "empty.jsonl, line 2: not a task"),
        (
            "asker.py:reward",
            {"train": "nothing.jsonl"},
            "^dataset 'nothing.jsonl', split train, holds no tasks; add rows",
        ),
        ("asker.py:reward", {"train": "cut.jsonl"}, r"^cut.jsonl, line 2: .* not JSON .Unterminated .* at column 12"),
        (
            "asker.py:reward",
            {"train": "named.jsonl"},
            "^named.jsonl, line 1: not a task: it has no column .prompt.; there are",
        ),
        (
            "asker.py:reward",
            {"train": "twice.jsonl"},
            '^twice.jsonl, line 2: .* its id "7" is that of twice.jsonl, line 1, too',
        ),
        ("asker.py:reward", {"train": "chat.jsonl"}, '^chat.jsonl, line 1: .* has no "role"'),
        ("asker.py:reward", {"train": "parts.jsonl"}, '^parts.jsonl, line 1: .*the "content" of a message'),
        ("asker.py:reward", {"train": "deep.jsonl"}, r"^deep.jsonl, line 1: .* not JSON"),
        ("asker.py:reward", {"train": "task.jsonl"}, r"there is no such file or directory \(did you mean tasks.jsonl"),
        ("asker.py:reward", {"train": "asker.py"}, "^dataset 'asker.py': its format is not known"),
    ],
)
def test_user_errors_are_one_line(
    users: Path, monkeypatch: pytest.MonkeyPatch, thing: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(users)
    with pytest.raises(ConfigError, match=message) as caught:
        load_environment(EnvironmentConfig(name=thing, options=options))
    assert "\n" not in str(caught.value)


def test_one_task_is_trained_on_and_a_byte_order_mark_is_read(users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(users)
    (users / "one.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1+1="}\n')
    [task] = load_environment(EnvironmentConfig(name="asker.py:reward", options={"train": "one.jsonl"})).train
    assert task.prompt == "1+1="
    (users / "math.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "1+1?", "answer": "#### 2"}\n')
    environment = load_environment(EnvironmentConfig(name="gsm8k", options={"data": "math.jsonl"}))
    assert [task.data["answer"] for task in environment.train] == ["#### 2"] and not environment.test


def test_config_errors_of_an_environment_are_not_wrapped() -> None:
    with pytest.raises(ConfigError, match=r"^dataset 'no/where'"):
        load_environment(EnvironmentConfig(name="gsm8k", options={"data": "no/where"}))


def test_a_file_may_import_modules_of_its_directory(users: Path) -> None:
    (users / "neighbour_of_asker.py").write_text("BONUS = 0.5\n")
    (users / "imports.py").write_text(
        "from neighbour_of_asker import BONUS\ndef reward(task, completion):\n    return BONUS\n"
    )

    async def main() -> float:
        name, options = f"{users / 'imports.py'}:reward", {"train": str(users / "tasks.jsonl")}
        environment: Any = load_environment(EnvironmentConfig(name=name, options=options, timeout=60))
        try:
            [rollout] = await run_episode(environment, Task("t", "1+1="), policy("2"), EpisodeOptions(60.0))
            return rollout.reward
        finally:
            await environment.close()

    assert asyncio.run(main()) == 0.5


def test_unicode_separators_do_not_split_lines(users: Path) -> None:
    (users / "tasks.jsonl").write_text('{"prompt": "1\u20281"}\n{"prompt": "2"}\n', encoding="utf-8")
    tasks = str(users / "tasks.jsonl")
    options = {"train": tasks, "test": tasks}
    environment = load_environment(EnvironmentConfig(name=f"{users / 'asker.py'}:reward", options=options))
    assert [t.prompt for t in environment.train] == ["1\u20281", "2"]


def test_a_hung_reward_fails_one_rollout_and_none_in_the_queue(users: Path) -> None:
    limit = 8.0
    config = EnvironmentConfig(
        name=f"{users / 'asker.py'}:reward",
        options={"train": str(users / "tasks.jsonl")},
        timeout=limit,
        reward_workers=1,
    )

    async def main() -> list[Any]:
        environment: Any = load_environment(config)

        async def play(text: str) -> float | str:
            try:
                [rollout] = await run_episode(environment, Task("t", "1+1="), policy(text), EpisodeOptions(limit))
                return rollout.reward
            except RolloutFailed as failure:
                return failure.reason

        try:
            return await asyncio.gather(play("hang"), *(play("2") for _ in range(5)))
        finally:
            await environment.close()

    assert asyncio.run(main()) == ["reward time limit", 1.0, 1.0, 1.0, 1.0, 1.0]


def played(
    users: Path, thing: str, count: int, limit: float = 60.0, errors: RewardErrorCounter | None = None
) -> list[Any]:
    """Outcomes of `count` episodes with a user's reward function: the reward, or the failure."""
    name, options = f"{users / 'asker.py'}:{thing}", {"train": str(users / "tasks.jsonl")}

    async def main() -> list[Any]:
        environment: Any = load_environment(EnvironmentConfig(name=name, options=options, reward_workers=1))

        async def play() -> Any:
            try:
                [rollout] = await run_episode(
                    environment, Task("t", "1+1="), policy("2"), EpisodeOptions(limit, reward_errors=errors)
                )
                return rollout.reward
            except RolloutFailed as failure:
                return failure

        try:
            return [await play(), *await asyncio.gather(*(play() for _ in range(count - 1)))]
        finally:
            await environment.close()

    return asyncio.run(main())


def test_timeouts_exclude_the_wait_for_a_free_reward_worker(users: Path) -> None:
    """Nor does its start: six rewards of 0.2 s, one after the other, within an episode's limit of 0.8 s."""
    assert played(users, "slow", 6, limit=0.8) == [1.0] * 6


@pytest.mark.parametrize("thing", ["text", "awaited_text"])
def test_text_is_an_invalid_reward_of_functions_and_classes(users: Path, thing: str) -> None:
    [failure] = played(users, thing, 1, errors=RewardErrorCounter(10, lambda error: None))
    assert failure.reason == "reward is not a number"
    assert failure.detail == "task t: the reward is '1', of type str: return a number"


@pytest.mark.parametrize("thing", ["raises", "awaited_raises"])
def test_a_reward_that_raises_is_0_and_counted_up_to_a_limit(users: Path, thing: str) -> None:
    told: list[str] = []
    outcomes = played(users, thing, 5, errors=RewardErrorCounter(3, lambda error: told.append(error.one_line)))
    assert outcomes[:3] == [0.0] * 3 and len(told) == 3
    assert all(re.fullmatch(r"KeyError: '2' \(\S+\.py:\d+\)", one) for one in told)
    assert [failure.reason for failure in outcomes[3:]] == ["KeyError"] * 2
    [failure] = played(users, thing, 1, errors=None)
    assert failure.reason == "KeyError"

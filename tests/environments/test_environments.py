"""Built-in environments, loading of user environments, and encoding of prompts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.environments import EnvironmentConfig
from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.environments.addition import Addition, target
from slipstream.environments.base import Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.episode import EpisodeOptions, episode_limits, run_episode
from slipstream.environments.gsm8k import Gsm8k
from slipstream.environments.load import load_environment
from slipstream.environments.rewards import Math
from slipstream.generators.base import GenerationError
from slipstream.rollout import Completion, Rollout, Sampling, VersionSpan, int32_array
from tests.conftest import build_tokenizer


class Scripted:
    """A generator that returns given texts."""

    version = 3

    def __init__(self, *texts: str) -> None:
        self._tokenizer = build_tokenizer()
        self._texts = list(texts)
        self.asked: list[tuple[list[int], Sampling]] = []

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        self.asked.append((list(prompt_ids), sampling))
        ids = (*self._tokenizer.encode(self._texts.pop(0)), 1)
        return Completion(tuple(prompt_ids), ids, (-0.5,) * len(ids), (VersionSpan(3, 0, len(ids)),), "stop")

    async def close(self) -> None:
        pass


def policy(*texts: str) -> Policy:
    return Policy(Scripted(*texts), ChatTokenizer(build_tokenizer()), Sampling(), "0")


def play(environment: Any, task: Task, *texts: str) -> Rollout:
    async def main() -> Rollout:
        try:
            [rollout] = await run_episode(environment, task, policy(*texts), EpisodeOptions(20.0))
            return rollout
        finally:
            if hasattr(environment, "close"):
                await environment.close()

    return asyncio.run(main())


def completion(text: str) -> Completion:
    return Completion((1,), (2,), (-1.0,), (VersionSpan(0, 0, 1),), "stop", text=text)


def test_addition_is_seeded_and_holds_out() -> None:
    environment = Addition(digits=2, test=500)
    assert len(environment.test) == 500 and len(environment.train) == 9500
    assert not {t.id for t in environment.test} & {t.id for t in environment.train}
    assert [t.id for t in Addition().train] == [t.id for t in environment.train]
    assert [t.id for t in Addition(seed=1).train] != [t.id for t in environment.train]
    for task in environment.test[:50]:
        a, b = map(int, task.id.split("+"))
        assert task.prompt == f"{a:02}+{b:02}=" and target(task) == str(a + b)[::-1]
    huge = Addition(digits=6, test=10, train=20, reverse=False)
    assert len(huge.train) == 20 and target(huge.train[0]) == str(eval(huge.train[0].id))


def test_addition_rewards_the_exact_answer() -> None:
    task = Task("47+85", "47+85=", {"answer": "231"})
    assert play(Addition(), task, "231").reward == 1.0
    assert play(Addition(), task, "2310").reward == 0.0
    assert play(Addition(), task, "132").reward == 0.0


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("She has 18 left.\n#### 18", "18", True),
        ("#### 1,000", "1000", True),
        ("#### $18", "18", True),
        ("It costs 18.0 dollars", "18", True),
        ("so \\boxed{18} it is", "18", True),
        ("\\boxed{\\frac{1}{2}}", "0.5", True),
        ("first 3, then 18", "18", True),
        ("#### -5", "-5", True),
        ("#### 18 or so, 19", "18", True),
        ("#### 19", "18", False),
        ("18 at first, but in the end 20", "18", False),
        ("", "18", False),
        ("no number here", "18", False),
        ("####", "18", False),
    ],
)
def test_gsm8k_judges_answers(said: str, answer: str, right: bool) -> None:
    assert Math().score(said, Math().prepare(answer, {})) == right


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


GOOD = {"question": "How many?", "answer": "Two and two make\n#### 1,004"}


def test_gsm8k_reads_local_files(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", *[{**GOOD, "question": f"How many? {i * 'x'}"} for i in range(9)])
    write(tmp_path / "test.jsonl", GOOD, GOOD)
    environment = Gsm8k(str(tmp_path))
    assert (len(environment.train), len(environment.test)) == (9, 2)
    assert environment.train[0].data["wanted"]["math"] == "1004"
    few = Gsm8k(str(tmp_path), shots=2, train=3, test=1)
    assert (len(few.train), len(few.test)) == (3, 1)
    prompt = few.test[0].prompt
    assert isinstance(prompt, str)
    assert prompt.count("Question:") == 3 and prompt.endswith("Answer:") and "#### 1,004" in prompt
    assert str(few.train[0].prompt).endswith("Question: How many? xx\nAnswer:"), "worked examples are not trained on"
    alone = Gsm8k(str(tmp_path / "train.jsonl"))
    assert (len(alone.train), len(alone.test)) == (8, 1)


def test_gsm8k_reports_malformed_lines_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "train.jsonl", GOOD, "{broken", GOOD, {"question": "x"}, {"question": "x", "answer": "#### six"})
    write(tmp_path / "test.jsonl", GOOD)
    with pytest.raises(ConfigError, match=r"train.jsonl, line 2: .*\(3 of 5 lines: 2, 4, 5\).*skip_malformed"):
        Gsm8k(str(tmp_path))
    assert len(Gsm8k(str(tmp_path), skip_malformed=True).train) == 2
    assert "3 of 5 lines" in capsys.readouterr().err


def test_gsm8k_rewards_format_and_answer(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", GOOD)
    write(tmp_path / "test.jsonl", GOOD)
    task = Task("0", "1+1=", {"wanted": {"math": "2", "regex": "x"}})
    for said, reward in (("2", 1.0), ("3", 0.0)):
        rollout = play(Gsm8k(str(tmp_path), format_reward=0.2), task, said)
        assert rollout.reward == reward and rollout.metrics == {"math": reward, "regex": 0.0, "correct": reward}


USERS = """
from slipstream.rollout import Rollout

calls = []

class Mine:
    def __init__(self, hint=0.5):
        from slipstream.environments.base import Task
        self.train, self.test, self.hint = [Task("a", "1+1=")], [], hint

    async def rollout(self, task, policy):
        await policy.sample(task.prompt)
        return self.hint

async def episode(task, policy):
    first = await policy.sample(task.prompt)
    second = await policy.sample(task.prompt + first.text)
    return policy.rollout(2.0, turns=2.0)

def reward(task, completion):
    return len(completion.text) + task.data["bonus"]

async def async_reward(task, completion):
    return -float(len(completion.text))

def crashes(task, completion):
    raise ValueError("no such luck")

def three(a, b, c):
    pass

class Empty:
    train = test = []
    async def rollout(self, task, policy): ...

number = 5
"""


@pytest.fixture
def users(tmp_path: Path) -> Path:
    (tmp_path / "users.py").write_text(USERS)
    write(tmp_path / "tasks.jsonl", *[{"prompt": f"{i}+1=", "id": f"t{i}", "bonus": i} for i in range(10)])
    return tmp_path


def loaded(users: Path, thing: str, **options: Any) -> Any:
    return load_environment(EnvironmentConfig(name=f"{users / 'users.py'}:{thing}", options=options, timeout=20))


def test_user_classes_episodes_and_reward_functions_load(users: Path) -> None:
    tasks = str(users / "tasks.jsonl")
    assert play(loaded(users, "Mine", hint=0.25), Task("a", "1+1="), "2").reward == 0.25
    episode = loaded(users, "episode", train=tasks, test=tasks)
    rollout = play(episode, episode.train[0], "12", "3")
    assert rollout.reward == 2.0 and rollout.metrics == {"turns": 2.0} and len(rollout.completions) == 2
    assert rollout.completions[1].prompt_ids[: len(rollout.completions[0].prompt_ids)]
    judged = loaded(users, "reward", train=tasks)
    assert (len(judged.train), len(judged.test)) == (9, 1)
    assert play(judged, Task("t", "1+1=", {"bonus": 7}), "123").reward == 10.0
    assert play(loaded(users, "async_reward", train=tasks), Task("t", "1+1="), "123").reward == -3.0


def test_modules_load_from_the_working_directory(users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(users)
    environment = load_environment(EnvironmentConfig(name="users:Mine"))
    assert environment.train[0].id == "a"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gsm9k", {}, "environment.name = .gsm9k. can't be loaded: no such environment .did you mean gsm8k"),
        ("nowhere.py:thing", {}, "there is no file"),
        ("no_such_module:thing", {}, "No module named 'no_such_module'"),
        ("USERS:nothing", {}, "has no attribute 'nothing'"),
        ("USERS:number", {}, "has no 'train'"),
        ("USERS:Empty", {}, "no training tasks"),
        ("USERS:three", {"train": "x"}, "takes 3 arguments"),
        ("USERS:Mine", {"hnt": 1}, "environment.options.hnt is unknown.*did you mean hint"),
        ("USERS:reward", {}, "environment.dataset is not set"),
        ("USERS:reward", {"train": "gone.jsonl"}, "dataset '.*gone.jsonl': there is no such file"),
        ("USERS:reward", {"train": "USERS"}, "users.py': its format is not known by its suffix"),
        ("addition", {"test": 99999}, "test = 99999, but there are 10000 sums"),
        ("gsm8k", {"data": "no/where"}, "dataset 'no/where': there is no such file"),
    ],
)
def test_load_errors_are_one_line(users: Path, name: str, options: dict[str, Any], said: str) -> None:
    file = str(users / "users.py")
    name = name.replace("USERS", file)
    options = {k: file if v == "USERS" else v for k, v in options.items()}
    with pytest.raises(ConfigError, match=said) as caught:
        load_environment(EnvironmentConfig(name=name, options=options))
    assert "\n" not in str(caught.value)


def test_prompts_messages_and_chat_templates() -> None:
    tokenizer = build_tokenizer()
    assert ChatTokenizer(tokenizer).encode("12") == int32_array([3, 4])
    assert ChatTokenizer(tokenizer).encode([3, 4]) == int32_array([3, 4])
    assert ChatTokenizer(tokenizer).encode([{"role": "user", "content": "1"}, {"role": "user", "content": "2"}])[0] == 3
    tokenizer.chat_template = (
        "{% for m in messages %}<eos>{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    chat = ChatTokenizer(tokenizer)
    assert tokenizer.decode(chat.encode("12")) == "<eos>12="
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "3"}]
    assert tokenizer.decode(chat.encode(messages)) == "<eos>ab<eos>3="


def test_decoding_equals_that_of_the_tokenizer() -> None:
    tokenizer = build_tokenizer()
    chat, ids = ChatTokenizer(tokenizer), int32_array([3, 4, 1])
    assert chat.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == "12"
    assert chat.decode_reply(int32_array([1, 3])) == tokenizer.decode([1, 3]) == "<eos>1"


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked() -> None:
    class Own(type(build_tokenizer())):  # type: ignore[misc]
        def _decode(self, token_ids: Any, **_: Any) -> str:
            return f"{len(token_ids)} tokens"

    assert ChatTokenizer(Own(tokenizer_object=build_tokenizer().backend_tokenizer)).decode([3, 4]) == "2 tokens"


def test_the_event_loop_runs_while_a_completion_is_decoded() -> None:
    chat, ids = ChatTokenizer(build_tokenizer()), [3] * 1_000_000
    decoding = threading.Thread(target=chat.decode, args=(ids,))
    decoding.start()
    turns = 0
    while decoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10


@pytest.mark.parametrize(
    "prompt", [None, 3, 1.5, {"role": "user"}, {"a"}, [1.5], ["a"], [[1]], [{"role": "user"}], [{"content": None}]]
)
def test_an_invalid_prompt_is_named_in_the_error(prompt: Any) -> None:
    with pytest.raises(GenerationError, match=r"^the prompt is .*, of type \w+: give text, token ids, or messages"):
        ChatTokenizer(build_tokenizer()).encode(prompt)


def test_chat_template_errors_are_one_line() -> None:
    tokenizer = build_tokenizer()
    for template, said in (
        ("{{ raise_exception('no system role') }}", r"TemplateError: no system role"),
        ("{% for m in messages %}{{ m.content", "TemplateSyntaxError: unexpected end of template"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(GenerationError, match=rf"^the tokenizer's chat template can't render .* \({said}.*\)$"):
            ChatTokenizer(tokenizer).encode("1")


def test_stop_strings_are_cut_from_the_text_but_not_from_the_tokens() -> None:
    async def main() -> Completion:
        return await policy("12.34").sample("1", stop_strings=(".",))

    drawn = asyncio.run(main())
    assert drawn.text == "12" and len(drawn.token_ids) == 6


def test_every_completion_of_an_episode_has_its_own_seed() -> None:
    async def main(seed: str) -> list[int]:
        generator = Scripted("1", "1")
        policy = Policy(generator, ChatTokenizer(build_tokenizer()), Sampling(), seed)
        await policy.sample("1")
        await policy.sample("1")
        return [sampling.seed for _, sampling in generator.asked]

    first, again, other = (asyncio.run(main(s)) for s in ("0/1/0/0", "0/1/0/0", "0/1/0/1"))
    assert first == again and len({*first, *other}) == 4


def test_an_unknown_option_of_sample_lists_the_known_ones() -> None:
    policy = Policy(Scripted("1"), ChatTokenizer(build_tokenizer()), Sampling(), "0")
    with pytest.raises(TypeError, match=r"policy\.sample\(\) has no option 'stop'; it takes .*stop_strings"):
        asyncio.run(policy.sample("1", stop=["."]))


@pytest.mark.parametrize("option", ["max_turns", "max_tokens"])
def test_limits_of_conversations_are_named_where_none_is_played(option: str) -> None:
    """By the names of the options."""
    config = load_config(None, ["--model.path=m", "--environment.name=addition", f"--environment.{option}=3"])
    policy = Policy(
        Scripted("1"), ChatTokenizer(build_tokenizer()), Sampling(), "0", limits=episode_limits(config.environment)
    )
    with pytest.raises(
        ConfigError, match=rf"^environment\.{option} = 3 limits conversations, .* by policy\.sample\(\)"
    ):
        asyncio.run(policy.sample("1"))


def test_concurrent_completions_differ_and_record_the_sampling_mask() -> None:
    async def main() -> list[Sampling]:
        generator = Scripted(*"1234")
        policy = Policy(
            generator, ChatTokenizer(build_tokenizer()), Sampling(top_p=0.9, record_sampling_mask=True), "0"
        )
        changes: list[dict[str, Any]] = [{}, {"top_p": 1.0}, {"top_k": 3, "top_p": 1.0}, {"top_p": 0.5}]
        await asyncio.gather(*(policy.sample("1", **change) for change in changes))
        return [sampling for _, sampling in generator.asked]

    asked = asyncio.run(main())
    assert len({sampling.seed for sampling in asked}) == 4
    assert [sampling.record_sampling_mask for sampling in asked] == [True, False, True, True]

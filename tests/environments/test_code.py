"""Grading of programs by hidden tests, and the environment `code`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schema import ConfigError, EnvironmentConfig
from slipstream.environments.code import Code, extract_code, grade, run_tests
from slipstream.environments.load import load_environment
from slipstream.environments.sandbox import Sandbox
from tests.environments.test_conversation import CHATML, policy, prompts
from tests.environments.test_gsm8k import Saying, write
from tests.environments.test_sandbox import KINDS

LIMITS = Sandbox(seconds=3)
VALUES = "def f(x): return (x, {x}, {x: b'1'}, [None, float('inf')], 1.5, 'é')"
STACK = "class Stack:\n  def __init__(self): self.a = []\n  def push(self, x): self.a.append(x)\n"
STACK += "  def __len__(self): return len(self.a)\ndef count(n): yield from range(n)"
RAISES = "class Mine(ValueError): pass\ndef f(x): raise Mine('no ' + x)"
CHECK = "def check(candidate):\n  for n in range(5): assert candidate(n) == n * n\ncheck(square)"


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("print(int(input()) ** 2)", {"input": "3\n", "output": "9\n"}),
        ("print(1, '\\n2 ')", {"input": "", "output": "1\n2"}),
        (VALUES, "import math\nassert f(2) == (2, {2}, {2: b'1'}, [None, math.inf], 1.5, 'é')"),
        (VALUES, {"call": "f(2)[0]", "expected": 2}),
        (
            "def f(a, b): return {1: (a, b / 3)}",
            {"function": "f", "args": ["a", 1], "expected": {"1": ["a", 0.3333333]}},
        ),
        (STACK, "s = Stack(); s.push(3); s.push([4]); assert len(s) == 2 and s.a == [3, [4]]"),
        (STACK, "assert list(count(3)) == [0, 1, 2] and next(count(2)) == 0"),
        (RAISES, "try:\n  f('x')\nexcept ValueError as e:\n  assert str(e) == 'no x'\nelse: raise AssertionError"),
        ("def square(n): return n ** 2", CHECK),
    ],
)
def test_right_programs_pass(code: str, test: Any) -> None:
    assert asyncio.run(run_tests(code, [test], LIMITS)) == [""]


def test_reward_is_the_share_of_tests_passed() -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 4", {"call": "f(3)", "expected": 6}, {"call": "f(0)", "expected": 0}]
    assert asyncio.run(grade("def f(x): return x", tests, LIMITS)) == 0.5


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "tests is None"),
        ([], "tests is []"),
        ([3], "3 is not a test"),
        ([{"input": "x"}], "is not a test"),
        (["assert f( == 1"], "is not Python: invalid syntax"),
        ([{"call": "f(", "expected": 1}], "is not Python"),
        (
            ["N = 3\ndef check(f):\n    assert f(1) == 1\n"],
            "every program would pass; call check(...) in it",
        ),  # HumanEval
        (
            ["class Test:\n    def test(self):\n        assert f(1) == 1\n"],
            "every program would pass; call Test(...) in it",
        ),
        (["import math"], "'import math' calls and asserts nothing, so every program would pass; add an assertion"),
    ],
)
def test_malformed_tests_name_file_and_line(tmp_path: Path, tests: Any, message: str) -> None:
    write(tmp_path / "t.jsonl", {"prompt": "p", "tests": ["assert f()"]}, {"prompt": "q", "tests": tests})
    with pytest.raises(ConfigError, match=r"t.jsonl, line 2: .*") as error:
        Code(str(tmp_path / "t.jsonl"))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("option", [{"tools": "yes"}, {"seconds": 0}, {"memory_mb": 0}, {"processes": -1}])
def test_options_that_no_program_can_meet_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(option))} = "):
        Code("t.jsonl", **option)


@pytest.mark.parametrize(("reward", "earned"), [("share", 0.5), ("all", 0.0)])
def test_environment_grades_the_last_code_block(tmp_path: Path, reward: str, earned: float) -> None:
    write(tmp_path / "t.jsonl", {"prompt": "Square.", "tests": ["assert f(1) == 1", "assert f(2) == 4"]})
    options = {"train": str(tmp_path / "t.jsonl"), "test": str(tmp_path / "t.jsonl"), "reward": reward}
    environment: Any = load_environment(EnvironmentConfig(name="code", options=options))
    reply = "First ```python\nx\n``` then\n```python\ndef f(x): return x\n```"
    rollout = asyncio.run(environment.rollout(environment.train[0], Saying(reply)))
    assert rollout.reward == earned
    assert rollout.metrics == {"correct": 0.0, "passed": 0.5, "limit_exceeded": 0.0}
    assert "```python" in environment.train[0].prompt


def test_the_policy_calls_tools_before_it_answers(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "Print 42."}]
    write(tmp_path / "t.jsonl", {"prompt": prompt, "tests": [{"input": "", "output": "42"}]})
    environment = Code(str(tmp_path / "t.jsonl"), str(tmp_path / "t.jsonl"), tools=True)
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
    it = policy(CHATML, call, "```python\nprint(42)\n```")
    rollout = asyncio.run(environment.rollout(environment.train[0], it))
    assert rollout.reward == 1 and rollout.metrics["tool_calls"] == 1 and rollout.metrics["correct"] == 1
    assert "<|im_start|>tool\n42<|im_end|>" in prompts(it)[1]


def test_code_is_taken_from_a_block_that_never_ends_and_from_bare_text() -> None:
    assert extract_code("x\n```\nprint(1)") == "print(1)"
    assert extract_code("print(1)") == "print(1)"


@pytest.mark.parametrize("kind", KINDS)
def test_common_libraries_work(kind: str) -> None:
    code = "import asyncio, multiprocessing as m, numpy, tempfile, threading\nasync def f(): return 1\n"
    code += (
        "m.Lock(); open('/tmp/a', 'w'); tempfile.mkdtemp(); t = threading.Thread(target=print, args=('in a thread',))\n"
    )
    code += "t.start(); t.join(); print(asyncio.run(f()), numpy.linalg.inv(numpy.eye(99)).sum())"
    assert asyncio.run(Sandbox(kind=kind).python(code)) == "in a thread\n1 99.0"


def test_tests_can_not_pass_functions_to_the_solution() -> None:
    (problem,) = asyncio.run(run_tests("def f(x): return x", ["assert f(lambda: 1)"], LIMITS))
    assert "can't pass a function to the solution" in problem


def test_tools_run_in_sandboxes() -> None:
    async def main() -> None:
        assert await LIMITS.python("print('é' * 3)") == "ééé"
        assert "ZeroDivisionError" in await LIMITS.python("1 / 0")
        assert await LIMITS.shell("echo $HOME; exit 3") == "/box\n[exit status 3]"

    asyncio.run(main())


def test_grading_survives_json_that_is_not_data() -> None:
    """A program that writes to the connection itself fails its own test alone."""
    for answer in (b"[]\n", b"{\n", b'[["SystemExit"], "0"]\n', json.dumps([{"object": 0}]).encode() + b"\n"):
        code = f"import os\nos.write(3, {answer!r})\ndef f(): return 1"
        problems = asyncio.run(run_tests(code, ["assert f() == 2"], LIMITS))
        assert problems != [""], answer

"""Programming problems: the policy writes a program, and hidden tests grade it in sandboxes."""

from __future__ import annotations

import ast
import json
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy, Task
from slipstream.environments.sandbox import PYTHON, Outcome, Program, Sandbox, isolation
from slipstream.environments.tasks import Columns, load_tasks
from slipstream.rollout import Rollout

Test = str | Mapping[str, Any]
CALLS = Path(__file__).with_name("remote_calls.py").read_text()
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
DEFAULT = Sandbox()
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
QUEUE_S = 60.0  # that a tool may wait for a free core
SHAPE = (
    'a test is an assertion such as "assert f(2) == 4", {"input": text, "output": text}, {"call": "f(2)", "expected": '
    '4} or {"function": "f", "args": [2], "expected": 4}'
)


class Code:
    """Problems from JSONL files whose lines are `{"prompt": ..., "tests": [...]}`.

    The answer is the last code block of the reply. `reward` is the share of tests passed, or 1 if "all" pass. With
    `tools` the policy may call `python` and `shell` before it answers. `sandbox` is the kind of isolation; the other
    options are limits of each program.
    """

    def __init__(
        self,
        train: str = "",
        test: str | None = None,
        reward: Literal["share", "all"] = "share",
        instruction: str = "\nAnswer with a Python program in a ```python code block.",
        tools: bool = False,
        seconds: float = 5.0,
        memory_mb: int = 1024,
        processes: int = 32,
        sandbox: str = "auto",
    ) -> None:
        if not train:
            raise ConfigError("environment.options.train is not set; give a JSONL file")
        if reward not in ("share", "all"):
            raise ConfigError(f'environment.options.reward = {reward!r}; it is "share" or "all"')
        if not isinstance(tools, bool):
            raise ConfigError(f"environment.options.tools = {tools!r}; it is true or false")
        self.sandbox = Sandbox(seconds, memory_mb, processes=processes, kind=sandbox)
        require_isolation(sandbox)
        self._all, self._tools, self._instruction = reward == "all", tools, instruction
        tasks = load_tasks(train, Columns(id="id?"), test=test or "")
        self.train, self.test = map(self._prepared, tasks)

    def _prepared(self, tasks: Sequence[Task]) -> list[Task]:
        """Tasks with the instruction. Raises `ConfigError` with file and line if tests are malformed."""
        for task in tasks:
            try:
                validate_tests(task.data.get("tests"))
            except ConfigError as error:
                raise ConfigError(f"{task.source}: {error}") from None
        return [replace(t, prompt=t.prompt + self._instruction) if isinstance(t.prompt, str) else t for t in tasks]

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        problems = await run_tests(extract_code(await self._answer(task, policy)), task.data["tests"], self.sandbox)
        share = problems.count("") / len(problems)
        correct = float(share == 1)
        over = float(any("limit exceeded" in problem for problem in problems))
        return policy.rollout(correct if self._all else share, correct=correct, passed=share, limit_exceeded=over)

    async def _answer(self, task: Task, policy: Policy) -> str:
        if not self._tools:
            return (await policy.sample(task.prompt)).text
        tools = [self.sandbox.python, self.sandbox.shell]
        conversation = policy.conversation(tools=tools, tool_seconds=self.sandbox.seconds + QUEUE_S)
        messages = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
        for message in messages[:-1]:
            conversation.tell(message["content"], message["role"])
        return await conversation.ask(messages[-1]["content"])


def require_isolation(sandbox: str) -> None:
    """Raise `ConfigError` if this kind of isolation does not work here."""
    with ThreadPoolExecutor(1) as executor:  # it runs an event loop
        executor.submit(isolation, sandbox).result()


async def grade(code: str, tests: Sequence[Test], limits: Sandbox = DEFAULT) -> float:
    """The share of tests that a Python program passes, each in new processes.

    After a test that exceeds the time limit the remaining ones count as failed. Raises `ConfigError` for malformed
    tests, or if no sandbox works here.
    """
    return (await run_tests(code, tests, limits)).count("") / len(tests)


async def run_tests(code: str, tests: Sequence[Test], limits: Sandbox = DEFAULT) -> list[str]:
    """Why the program fails each test, or ""; see `grade`."""
    sources = validate_tests(tests)
    problems: list[str] = []
    for test, source in zip(tests, sources, strict=True):
        if source:
            outcome = await _run_assertion(code, source, limits)
            problems.append(outcome.problem and f"{outcome.report}: {outcome.stderr[-200:]}")
        else:
            assert isinstance(test, Mapping)
            outcome = await limits.run(Program([PYTHON, "main.py"], {"main.py": code}, test["input"]))
            wrong = "" if _lines(outcome.stdout) == _lines(test["output"]) else "wrong output"
            problems.append((outcome.problem and outcome.report) or wrong)
        if outcome.limit == "time":
            problems += ["not run"] * (len(tests) - len(problems))
            break
    return problems


async def _run_assertion(code: str, source: str, limits: Sandbox) -> Outcome:
    """The outcome of an assertion, in another sandbox than the program's, or of the program if that failed first."""
    test_end, code_end = socket.socketpair()
    with test_end, code_end:
        test, *solution = await limits.run_together(
            Program([PYTHON, "calls.py", "test"], {"calls.py": CALLS, "input.py": source}, "", test_end),
            Program([PYTHON, "calls.py", "serve"], {"calls.py": CALLS, "input.py": code}, "", code_end),
        )
    return solution[0] if test.problem and solution and solution[0].problem else test


def validate_tests(tests: Any) -> list[str]:
    """The assertion of each test, "" for one of input and output. Raises `ConfigError` for malformed tests.

    An assertion is malformed if it does not compile, or if every program would pass it.
    """
    if not isinstance(tests, list | tuple) or not tests:
        raise ConfigError(f"tests is {tests!r:.40}, not a list of tests; {SHAPE}")
    sources = [_assertion(test) for test in tests]
    for test, source in zip(tests, sources, strict=True):
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
                compile(tree, "test", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{test!r:.80} is not Python: {getattr(error, 'msg', error)}") from None
        if source and all(map(_is_inert, tree.body)):
            defined = [f"{each.name}(...)" for each in tree.body if isinstance(each, DEFINITIONS)]
            remedy = f"call {defined[-1]} in it" if defined else "add an assertion"
            raise ConfigError(f"{test!r:.80} calls and asserts nothing, so every program would pass; {remedy}")
    return sources


def _is_inert(statement: ast.stmt) -> bool:
    """Whether a statement only defines or imports. A class runs its body, and a decorator is a call."""
    if isinstance(statement, DEFINITIONS) and statement.decorator_list:
        return False
    if isinstance(statement, ast.ClassDef):
        return all(map(_is_inert, statement.body))
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_docstring or isinstance(statement, (*DEFINITIONS, ast.Import, ast.ImportFrom, ast.Pass))


def _assertion(test: Test) -> str:
    """The assertion of a test, or "" for one of input and output. Raises `ConfigError`."""
    if isinstance(test, str) and test.strip():
        return test
    if isinstance(test, Mapping):
        if all(isinstance(test.get(name), str) for name in ("input", "output")):
            return ""
        call = test.get("call")
        if isinstance(name := test.get("function"), str) and isinstance(test.get("args"), list):
            call = f"{name}(*json.loads({json.dumps(test['args'])!r}))"
        if isinstance(call, str) and "expected" in test:
            return f"assert same({call}, json.loads({json.dumps(test['expected'])!r}))"
    raise ConfigError(f"{test!r:.80} is not a test; {SHAPE}")


def extract_code(text: str) -> str:
    """The last fenced block of a reply, or the whole reply."""
    blocks = FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]

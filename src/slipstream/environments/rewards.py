"""Rewards by name for a reply and a known answer: `math`, `exact`, `regex`, `choice`, `json`, `code`.

A reward is a frozen dataclass: its fields are its options, and it travels to the reward workers with each task.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import string
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, ClassVar

from slipstream.config.schema import ConfigError
from slipstream.config.suggestions import suggest
from slipstream.environments.base import Task
from slipstream.environments.rows import column_value
from slipstream.rollout import Completion

MARKER = "####"
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
FACTOR = rf"{NUMBER.pattern}(?:[eE][+-]?\d{{1,3}}(?!\w))?"
EXPONENT = r"\{?-?\d{1,4}(?:\.\d+)?(?![\w^]|,\d)\}?"  # short, since math-verify computes the power
ARITHMETIC = re.compile(rf"(?<![/^]){FACTOR}(?: ?/ ?{FACTOR}| ?\^ ?{EXPONENT})*")
POWER = re.compile(r"(?<=[\d)])(?:\*\*| \*\* )(?=-?[\d(])")  # as in Python; bold text has a space on one side
VERB = r"(?i:\s+is|\s*:|\s*=)?[\s:*]*"
STATED = rf"(?:(?i:answer){VERB}(?i:(?:option|choice)\s+)?|\\boxed\{{(?:\\text\{{)?|{MARKER}\s*)"
OFFERED = rf"(?i:choice|option){VERB}"
FORMULA = re.compile(r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$([^$\n]*\\[a-zA-Z][^$\n]*)\$", re.DOTALL)
FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Reward:
    """A reward from 0 to 1. With `extract`, a pattern, only its last match counts, or the group in that."""

    weight: float = 1.0
    extract: str = ""
    needs_answer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            kinds = kind.replace("[str]", "").split(" | ")
            if type(value).__name__ not in kinds and not (type(value) is int and "float" in kinds):
                raise ConfigError(f"environment.reward: {field.name} = {value!r} must be of type {kind}")
        if not self.weight >= 0:
            raise ConfigError(f"environment.reward: weight = {self.weight!r} must be 0 (only a metric) or above")
        _compile(self.extract, "extract")

    def prepare(self, answer: Any, row: Mapping[str, Any]) -> Any:
        """What `score` compares a reply with. Raises `ValueError` for an answer that no reply can match."""
        raise NotImplementedError

    def score(self, text: str, wanted: Any) -> float:
        """The reward of a reply. Runs in a reward worker."""
        raise NotImplementedError


@dataclass(frozen=True)
class Math(Reward):
    """Whether the final answers are equal as numbers or formulas, by math-verify."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("the reward math needs math-verify to judge answers: pip install 'slipstream-rl[math]'")

    def prepare(self, answer: Any, row: Mapping[str, Any]) -> str:
        text = str(answer).strip() if isinstance(answer, str | int | float) and not isinstance(answer, bool) else ""
        if "\\boxed" in text:
            return final_answer(text)
        text = final_answer(text) if MARKER in text else text
        with suppress(ArithmeticError):
            number = Decimal(_without_separators(text.strip("$%\\ ").replace("−", "-")))
            if number.is_finite():
                return f"{number:f}"
        words = re.findall("[A-Za-z]{3,}", re.sub(r"\\(?:text|mbox|mathrm) *\{[^}]*\}|\\[a-zA-Z]+", "", text))
        if words and (with_unit := re.fullmatch(rf"\$?({NUMBER.pattern})[A-Za-z .]*", text)):
            return _without_separators(with_unit[1])
        if words or not re.search(r"[\d\\+*/^=<>]", text):
            raise ValueError(f"its answer is {answer!r:.80}, neither a number nor a formula")
        return text if "$" in text else f"\\boxed{{{text}}}"

    def score(self, text: str, wanted: Any) -> float:
        from math_verify import parse, verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # every call would warn about the missing timeouts
        stated = [final_answer(text)]
        if not (NUMBER.fullmatch(wanted) or MARKER in text or "\\boxed" in text):
            last = (text.strip().splitlines() or [""])[-1]
            stated = [text, f"${last:.80}$"]  # the last number may be a part of a formula
        # The pool has a timeout; math-verify's timeouts need signals in the main thread.
        expected = parse(wanted, parsing_timeout=None)
        return float(any(verify(expected, parse(s, parsing_timeout=None), timeout_seconds=None) for s in stated))


@dataclass(frozen=True)
class Exact(Reward):
    """Whether reply and answer are the same text, except for white space."""

    ignore_case: bool = False

    def prepare(self, answer: Any, row: Mapping[str, Any]) -> str:
        text = " ".join(str(answer).split())
        return text.casefold() if self.ignore_case else text

    def score(self, text: str, wanted: Any) -> float:
        return float(self.prepare(text, {}) == wanted)


@dataclass(frozen=True)
class Regex(Reward):
    """Whether the reply has a match of `pattern`, or without one of the answer as a pattern."""

    pattern: str = ""
    needs_answer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _compile(self.pattern, "pattern")

    def prepare(self, answer: Any, row: Mapping[str, Any]) -> str:
        if not self.pattern and answer is None:
            raise ValueError("environment.answer is not set, nor is the pattern of the reward regex")
        try:
            return self.pattern or re.compile(str(answer)).pattern
        except re.error as error:
            raise ValueError(f"its answer {answer!r:.80} is not a regular expression: {error}") from None

    def score(self, text: str, wanted: Any) -> float:
        return float(re.search(wanted, text) is not None)


@dataclass(frozen=True)
class Choice(Reward):
    """Whether the reply names the right choice, by its letter or its text.

    The answer is an index from 0 if it is a number, else a label, the text of a choice, or an index as text, whichever
    is found first. The choices are in the column `choices`, by default in "choices" if there is such a column; or A, B,
    ... in a list of columns each.
    """

    choices: str | list[str] = ""

    def prepare(self, answer: Any, row: Mapping[str, Any]) -> dict[str, Any]:
        found = row.get("choices")
        if isinstance(self.choices, list):
            found = [column_value(row, str(name)) for name in self.choices]
        elif self.choices:
            found = column_value(row, self.choices)
        choices = as_choices(found)
        if self.choices and not choices:
            raise ValueError(f"its {self.choices!r} is {found!r:.80}, not choices")
        choices = choices or dict.fromkeys(string.ascii_uppercase, "")
        labels, text = [*choices], str(answer).strip()
        indexed = labels[int(text) :][:1] if text.isdecimal() else []
        labelled = [label for label in labels if label.upper() == text.strip("().: ").upper()]
        named = labelled or [label for label, choice in choices.items() if choice.strip() == text] or indexed
        if not (named := indexed if type(answer) is int else named):
            raise ValueError(f"its answer is {answer!r:.80}, none of the choices {labels[0]} to {labels[-1]}")
        return {"label": named[0], "choices": choices}

    def score(self, text: str, wanted: Any) -> float:
        label, texts = wanted["label"], {name: text.strip(" .*") for name, text in wanted["choices"].items()}
        right = {texts[label].lower()} - {"", *map(str.lower, texts)} | {label.lower()}
        labels = "|".join(map(re.escape, texts))
        names = "|".join(map(re.escape, [*texts, *filter(None, texts.values())]))
        name = rf"[(*]*((?i:{names})(?=\W*$|[).:,;*}}$]+\s)|(?:{labels})\b)"
        for pattern in (STATED + name, OFFERED + name, rf"^\W*({labels})(?:[.):*].*|\W*)$"):
            if found := re.findall(pattern, text, re.MULTILINE):
                return float(found[-1].lower() in right)
        lines = text.strip().splitlines() or [""]
        return float(lines[-1].strip(" .*").lower() in right)


@dataclass(frozen=True)
class Json(Reward):
    """Whether the reply, or its last fenced block, is JSON, and equals the answer if there is one."""

    needs_answer: ClassVar[bool] = False

    def prepare(self, answer: Any, row: Mapping[str, Any]) -> Any:
        try:
            return _parsed(answer) if isinstance(answer, str) else answer
        except ValueError as error:
            raise ValueError(f"its answer {answer!r:.80} is not JSON: {error}") from None

    def score(self, text: str, wanted: Any) -> float:
        try:
            found = _parsed((FENCED.findall(text) or [text])[-1])
        except (ValueError, RecursionError):
            return 0.0
        return float(wanted is None or _same(found, wanted))


def _parsed(text: str) -> Any:
    """The value of JSON. Raises `ValueError`, also for NaN and infinity, which `json` accepts."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a value of JSON")

    return json.loads(text, parse_constant=refuse)


def _same(one: Any, other: Any) -> bool:
    """Whether values of JSON are equal; true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


@dataclass(frozen=True)
class Code(Reward):
    """The share of the answer's tests that the reply's last code block passes, each in a sandbox; see docs/code.md."""

    seconds: float = 5.0
    memory_mb: int = 1024
    sandbox: str = "auto"

    def __post_init__(self) -> None:
        from slipstream.environments.code import require_isolation
        from slipstream.environments.sandbox import Sandbox

        super().__post_init__()
        Sandbox(self.seconds, self.memory_mb, kind=self.sandbox)  # raises `ConfigError` for limits of 0
        require_isolation(self.sandbox)

    def prepare(self, answer: Any, row: Mapping[str, Any]) -> Any:
        from slipstream.environments.code import validate_tests

        tests = answer
        with suppress(ValueError):
            tests = json.loads(answer) if isinstance(answer, str) else answer
        if isinstance(tests, dict) and isinstance(tests.get("inputs"), list):
            inputs, outputs = tests["inputs"], tests.get("outputs") or []
            if len(inputs) != len(outputs):
                raise ValueError(f"its tests have {len(inputs)} inputs and {len(outputs)} outputs")
            tests = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
        tests = [tests] if isinstance(tests, str) else tests
        validate_tests(tests)
        return tests

    async def grade(self, text: str, wanted: Any) -> float:
        """The share of tests passed. It runs in the event loop, since sandboxes are processes of their own."""
        from slipstream.environments.code import extract_code, grade
        from slipstream.environments.sandbox import Sandbox

        limits = Sandbox(self.seconds, self.memory_mb, kind=self.sandbox)
        return await grade(extract_code(extracted(self, text) or ""), wanted, limits)


REWARDS: dict[str, type[Reward]] = {
    "math": Math, "exact": Exact, "regex": Regex, "choice": Choice, "json": Json, "code": Code,
}  # fmt: skip


def load_rewards(reward: Any) -> dict[str, Reward]:
    """The rewards of `environment.reward`: a name, or a table of names with a weight or a table of options each."""
    if not isinstance(reward, str | dict):
        raise ConfigError(f"environment.reward = {reward!r}: it must be a name, or a table such as {{ math = 1.0 }}")
    named = {reward: {}} if isinstance(reward, str) else reward
    rewards = {}
    for name, options in named.items() if reward else ():
        if name not in REWARDS:
            own = "; name a function of yours by environment.name" if ":" in name else ""
            hint = own or suggest(name, [*REWARDS]) or f"; there are {', '.join(REWARDS)}"
            raise ConfigError(f"environment.reward: there is no reward {name!r}{hint}")
        table: dict[str, Any] = options if isinstance(options, dict) else {"weight": options}
        known = [field.name for field in fields(REWARDS[name])]
        for option in table:
            if option not in known:
                hint = suggest(option, known) or f"; it takes {', '.join(known)}"
                raise ConfigError(f"environment.reward.{name}.{option} is unknown{hint}")
        rewards[name] = REWARDS[name](**table)
    return rewards


def score(task: Task, completion: Completion) -> dict[str, float]:
    """The value of each reward in the task's `rewards`, by name. Runs in a reward worker."""
    values = {}
    for name, reward in task.data["rewards"].items():
        text = extracted(reward, completion.text)
        values[name] = 0.0 if text is None else reward.score(text, task.data["wanted"][name])
    return values


def extracted(reward: Reward, text: str) -> str | None:
    """The part of a reply that the reward sees; None if its pattern has no match."""
    found = [*re.finditer(reward.extract, text, re.DOTALL)] if reward.extract else []
    return found[-1][found[-1].lastindex or 0] if found else None if reward.extract else text


def final_answer(text: str) -> str:
    """The part of a reply that states the answer: after the marker, in a box, the last formula, or the last number."""
    text = POWER.sub("^", text.replace("−", "-"))
    _, marker, after = text.rpartition(MARKER)
    if marker:
        found = ARITHMETIC.search(after.splitlines()[0] if after.strip() else "")
        return _as_formula(found[0]) if found else after.strip()
    if "\\boxed" in text:
        return text[text.rindex("\\boxed") :]
    numbers = [*ARITHMETIC.finditer(text)]
    formulas = [*FORMULA.finditer(text)]
    if formulas and formulas[-1].end() >= (numbers[-1].end() if numbers else 0):
        return f"${next(filter(None, formulas[-1].groups()))}$"
    return _as_formula(numbers[-1][0]) if numbers else ""


def _as_formula(text: str) -> str:
    """Numbers joined by "/" and "^" as LaTeX; a single number as its digits."""
    plain = re.sub(FACTOR, lambda found: f"{Decimal(found[0].replace(',', '')):f}", text)
    return plain if NUMBER.fullmatch(plain) else "$" + re.sub(r"\^ ?\{?([-.\d]+)\}?", r"^{\1}", plain) + "$"


def _without_separators(text: str) -> str:
    """The text without commas if it is a number with separators of thousands."""
    return text.replace(",", "") if NUMBER.fullmatch(text) else text


def as_choices(value: Any) -> dict[str, str]:
    """Choices by label: of a list "A", "B", ...; or those of a table of labels and texts, or of a list of tables of a
    label and its text. {} for anything else.

    Raises `ValueError` if the table has more labels than texts, or fewer.
    """
    tables = isinstance(value, list) and all(isinstance(each, dict) and {"label", "text"} <= {*each} for each in value)
    if tables:
        return {str(each["label"]): str(each["text"]) for each in value}
    if isinstance(value, dict) and isinstance(value.get("text"), list) and isinstance(value.get("label"), list):
        if len(value["label"]) != len(value["text"]):
            raise ValueError(f"its choices have {len(value['label'])} labels and {len(value['text'])} texts")
        return dict(zip(map(str, value["label"]), map(str, value["text"]), strict=True))
    if isinstance(value, dict) and value and all(len(label) == 1 for label in value):
        return {label: str(text) for label, text in value.items()}
    plain = isinstance(value, list) and all(isinstance(choice, str | int | float) for choice in value)
    return dict(zip(string.ascii_uppercase, map(str, value), strict=False)) if plain else {}


def _compile(pattern: str, option: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"environment.reward: {option} = {pattern!r} is not a regular expression: {error}") from None

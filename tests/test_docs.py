"""Configurations and flags in README and docs/ are valid."""

from __future__ import annotations

import asyncio
import re
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config.loading import option_names, validate
from tests.test_records import PAGES, ROOT


def test_configurations_on_pages_are_valid() -> None:
    """Each TOML block, with placeholders filled in."""
    for page in PAGES:
        for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S):
            values = tomllib.loads(block)
            name = {} if "environments" in values else {"name": "addition"}
            validate({"model": {"path": "m"}, "environment": name} | values)


def test_flags_on_pages_are_options() -> None:
    commands = r"^.*slipstream (?:train|eval|verify|doctor|study|generate|config)\b.*$"
    for page in PAGES:
        for line in re.findall(commands, page.read_text(), re.M):
            named = {".".join(name.split(".")[:2]) for name in re.findall(r"--([a-z_]+\.[a-z0-9_.]*[a-z0-9])", line)}
            assert named <= set(option_names()), f"{page.name}: {line}"


@pytest.mark.parametrize(
    ("said", "reward"),
    [("7", 1.0), (" 9\n", 1.0), ("6", 0.0), ("100", 0.0), ("10", 0.0), ("\u00b2", 0.0), ("seven", 0.0), ("", 0.0)],
)
def test_the_first_example_rewards_what_it_asks_for(said: str, reward: float) -> None:
    code = re.search(r"```python\n# guess.py\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    guess = names["Guess"]()
    task = next(task for task in guess.train if task.data["than"] == 6)

    async def sample(prompt: str) -> Any:
        assert "larger than 6" in prompt
        return SimpleNamespace(text=said)

    assert asyncio.run(guess.rollout(task, SimpleNamespace(sample=sample))) == reward
    for task in guess.train:  # each can be done
        assert any(asyncio.run(guess.rollout(task, SimpleNamespace(sample=said_of(n)))) for n in range(1, 10))


def said_of(number: int) -> Any:
    async def sample(prompt: str) -> Any:
        return SimpleNamespace(text=str(number))

    return sample

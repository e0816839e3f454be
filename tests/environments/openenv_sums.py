"""Servers of OpenEnv's package: `guess` takes text, `calculator` has MCP tools and lists its tasks."""

from __future__ import annotations

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: str


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    """Guess the seed: 1 for the right number, 0.25 for each other one, done after the right number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._secret = State(), None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._secret = seed
        return Hint(hint="Which number?")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.number == "crash":
            raise ValueError("out of paper")
        right = action.number == str(self._secret)
        return Hint(hint="yes" if right else "no", reward=1 if right else 0.25, done=right)

    @property
    def state(self) -> State:
        return self._state


class Calculator(MCPEnvironment):
    """The tool `submit` is rewarded for the sum of the task's index and 1, and ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("calculator")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def submit(answer: int) -> str:
            """Give the answer."""
            self._submitted = answer
            return "thanks"

        super().__init__(server)
        self._state, self._submitted = State(), None

    def list_splits(self) -> list[str]:
        return ["train", "test"]

    def num_tasks(self, split: str) -> int:
        return {"train": 5, "test": 2}[split]

    def reset(self, seed: int | None = None, split: str = "", index: int = 0, **_: Any) -> Observation:
        self._wanted = index + 1
        return Observation(metadata={"question": f"{index}+1?"})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation()

    async def step_async(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        observation = await super().step_async(action)
        if self._submitted is not None:
            observation.reward, observation.done = float(self._submitted == self._wanted), True
        return observation

    @property
    def state(self) -> State:
        return self._state


guess = create_app(Guessing, Guess, Hint, env_name="guess", max_concurrent_envs=2)
calculator = create_app(Calculator, CallToolAction, CallToolObservation, env_name="calculator", max_concurrent_envs=2)

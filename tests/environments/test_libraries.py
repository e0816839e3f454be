"""Environments of other libraries, or of stand-ins with the documented interface if a library is not installed."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.config.environments import EnvironmentConfig
from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.episode import EpisodeOptions, RolloutFailed, run_episode
from slipstream.environments.load import close_environment, load_environment
from slipstream.rollout import Rollout, Sampling
from tests.environments.test_conversation import CHATML, Letters, chat_tokenizer


def play(environment: Any, said: str, template: str | None = CHATML) -> tuple[Rollout, list[str]]:
    """The first task, and what the policy read."""
    [rollout], prompts = play_roles(environment, said, template=template)
    return rollout, prompts


def play_roles(
    environment: Any, *said: str, template: str | None = CHATML, **policies: str
) -> tuple[tuple[Rollout, ...], list[str]]:
    """A rollout for each role on the first task, and what the policy read."""
    tokenizer = chat_tokenizer(template)
    chat, generator = ChatTokenizer(tokenizer), Letters(tokenizer, *said)

    async def main() -> tuple[Rollout, ...]:
        endpoint = Endpoint(chat)
        try:
            it = Policy(generator, chat, Sampling(), "0", endpoint, policies=policies)
            return await run_episode(environment, environment.train[0], it, EpisodeOptions(30.0))
        finally:
            await endpoint.close()
            await close_environment(environment)

    return asyncio.run(main()), [tokenizer.decode(ids) for ids in generator.prompts]


def loaded(name: str, **options: Any) -> Any:
    return load_environment(EnvironmentConfig(name=name, options=options))


@pytest.mark.parametrize("library", ["verifiers", "reasoning-gym"])
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library.replace("-", "_"), None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream-rl\["):
        loaded(f"{library}:any")


class Puzzles(list[dict[str, Any]]):
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01


def use_puzzles(monkeypatch: pytest.MonkeyPatch) -> None:
    """reasoning-gym's interface: DATASETS, create_dataset(name, size, seed, ...), dataset.score_answer."""

    def create_dataset(name: str, size: int, seed: int, hardest: int = 9) -> Puzzles:
        assert name == "sums"
        return Puzzles({"question": f"{i}+{hardest}?", "answer": str(i + hardest), "metadata": {}} for i in range(size))

    library, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    library.create_dataset, factory.DATASETS = create_dataset, {"sums": ()}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", library)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


@pytest.mark.parametrize(
    ("said", "reward"),
    [("I think <answer>1</answer>, no <answer> 12\n</answer>", 1.0), ("12", 1.0), ("is it 12", 0.01)],
)
def test_a_puzzle_is_prompted_and_scored(said: str, reward: float, monkeypatch: pytest.MonkeyPatch) -> None:
    use_puzzles(monkeypatch)
    environment = loaded("reasoning-gym:sums", train=4, test=2, hardest=10)
    assert [t.id for t in environment.test] == ["sums/0", "sums/1"] and len(environment.train) == 4
    rollout, [prompt] = play(environment, said)
    assert rollout.reward == reward and rollout.metrics["correct"] == (reward == 1.0)
    assert "<answer>" in prompt and "2+10?" in prompt
    with pytest.raises(ConfigError, match="no task 'sum' "):
        loaded("reasoning-gym:sum")


def test_a_real_puzzle() -> None:
    pytest.importorskip("reasoning_gym")
    environment = loaded("reasoning-gym:spell_backward", train=3, test=1, seed=5)
    word = str(environment.train[0].prompt).split()[-1]
    assert play(environment, word[::-1], None)[0].reward == 1.0
    assert play(environment, "no", None)[0].reward < 1.0


class Judged:
    """An environment of verifiers: data sets of rows, and `run_rollout` with a client, a model and sampling options."""

    def get_dataset(self) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": "1+1?"}]
        return [{"prompt": messages, "answer": "2", "example_id": 7}]

    get_eval_dataset = get_dataset

    async def run_rollout(
        self, input: dict[str, Any], client: Any, model: str, sampling_args: dict[str, Any]
    ) -> dict[str, Any]:
        reply = await client.chat.completions.create(model=model, messages=input["prompt"], **sampling_args)
        said = reply.choices[0].message.content
        if said == "crash":
            return {"error": "the sandbox is gone", "reward": 0.0}
        return {"reward": float(said == input["answer"]), "metrics": {"exact": said == "2"}, "error": None}


def use_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    library, clients = ModuleType("verifiers"), ModuleType("verifiers.clients")
    library.load_environment = lambda name, **options: {"judged": Judged}[name]()  # type: ignore[attr-defined]
    clients.OpenAIChatCompletionsClient = lambda client: client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", library)
    monkeypatch.setitem(sys.modules, "verifiers.clients", clients)


def test_a_verifiers_environment_samples_through_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    use_verifiers(monkeypatch)
    environment = loaded("verifiers:judged")
    assert environment.train[0].id == "judged/7" and environment.test[0].prompt == environment.train[0].prompt
    rollout, [prompt] = play(environment, "2")
    assert rollout.reward == 1.0 and rollout.metrics == {"exact": 1.0} and len(rollout.completions) == 1
    assert prompt == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert play(environment, "3")[0].reward == 0.0
    with pytest.raises(Exception, match="the sandbox is gone"):
        play(environment, "crash")
    with pytest.raises(ConfigError, match="verifiers:other"):
        loaded("verifiers:other")


CLASSIC = """
import verifiers
from datasets import Dataset

def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

async def right(completion, answer, **_):
    return float(completion[-1]["content"] == answer)

async def length(completion, **_):
    return len(str(completion)) / 1000

async def used(completion, **_):
    return float(any(message["role"] == "tool" for message in completion))

def load_environment(tasks=9):
    rows = Dataset.from_list([{"question": f"1+{i}?", "answer": str(1 + i)} for i in range(tasks)])
"""
SINGLE = (
    CLASSIC
    + """
    rubric = verifiers.Rubric(funcs=[right, length], weights=[1.0, 1.0])
    return verifiers.SingleTurnEnv(dataset=rows, rubric=rubric)
"""
)
TOOLS = (
    CLASSIC
    + """
    return verifiers.ToolEnv(tools=[add], max_turns=2, dataset=rows, rubric=verifiers.Rubric(funcs=[used]))
"""
)

TASKSET = """
import verifiers.v1 as vf
from openai import AsyncOpenAI

class Sum(vf.TaskData):
    answer: str

class Sums(vf.TasksetConfig):
    tasks: int = 9

def sums(kind, config, **more):
    for i in range(config.tasks):
        yield kind(Sum(prompt=f"1+{i}?", answer=str(1 + i), **more), config.task)
"""
SINGLE_TASKSET = (
    TASKSET
    + """
class Single(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace):
        if trace.last_reply == "crash":
            raise ValueError("the grader is gone")
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def length(self, trace):
        return len(trace.last_reply) / 1000

    @vf.metric
    async def replies(self, trace):
        return trace.num_turns

class SingleSums(vf.Taskset[Single, Sums]):
    def load(self):
        return sums(Single, self.config, system_prompt="Add.")

class Chat(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["SingleSums", "Chat"]
"""
)
TOOL_TASKSET = (
    TASKSET
    + """
class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        "Add two numbers."
        return a + b

class Calculation(vf.Task[Sum]):
    @vf.reward
    async def used(self, trace):
        return float(any(message.role == "tool" for message in trace.messages))

class ToolSums(vf.Taskset[Calculation, Sums]):
    def load(self):
        return sums(Calculation, self.config)

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.SharedToolsetConfig())]

__all__ = ["ToolSums"]

if __name__ == "__main__":
    Calculator.run()
"""
)


ROLES = """
class RolesConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()
    user: vf.AgentConfig = vf.AgentConfig()

class Roles(vf.Env[RolesConfig]):
    async def setup(self, agents):
        agents.user.trainable = False

    async def run(self, task, agents):
        for agent in (agents.user, agents.critic, agents.solver):
            await agent.run(task)

    async def finalize(self, task, episode):
        episode.by_agent["critic"][0].record_reward("agreed", 2.0)

__all__ += ["Roles"]
"""


def is_classic() -> bool:
    """Whether the installed verifiers is older than 0.4."""
    return hasattr(pytest.importorskip("verifiers"), "load_environment")


@pytest.mark.verifiers
def test_a_real_environment_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classic = is_classic()
    (tmp_path / "single_sums.py").write_text(SINGLE if classic else SINGLE_TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    options = {"tasks": 2} if classic else {"taskset": {"tasks": 2}, "agent": {"runtime": {"type": "subprocess"}}}
    for said, right in (("1", 1.0), ("3", 0.0)):
        environment = loaded("verifiers:single-sums", **options)
        assert len(environment.train) == len(environment.test) == 2
        rollout, [prompt] = play(environment, said)
        assert rollout.metrics["right"] == right and rollout.reward == right + rollout.metrics["length"] > right
        assert "1+0?" in prompt and len(rollout.completions) == 1


@pytest.mark.verifiers
def test_each_trained_agent_of_an_episode_has_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_classic():
        return
    (tmp_path / "role_sums.py").write_text(SINGLE_TASKSET + ROLES)
    monkeypatch.syspath_prepend(tmp_path)
    here = {"runtime": {"type": "subprocess"}}
    environment = loaded("verifiers:role-sums", solver=here, critic=here, user=here)
    rollouts, prompts = play_roles(environment, "0", "22", "1")
    assert len(prompts) == 3 and prompts[0].startswith("<|im_start|>system\nAdd.")
    assert {r.role: (r.completions[0].text, round(r.reward, 3)) for r in rollouts} == {
        "critic": ("22", 2.002),
        "solver": ("1", 1.001),
    }
    assert rollouts[0].metrics == {"right": 0.0, "length": 0.002, "agreed": 2.0, "replies": 1.0}
    rollouts, _ = play_roles(environment, "0", "22", "1", critic="a", solver="b", user="c")
    assert [(r.role, r.policy, r.completions[0].text) for r in rollouts] == [("a", "a", "22"), ("b", "b", "1")]
    with pytest.raises(RolloutFailed, match=r"EnvError: .*policy\['user'\], and the run has critic, solver"):
        play_roles(environment, "0", "22", "1", critic="a", solver="b")


@pytest.mark.verifiers
def test_a_taskset_has_its_own_held_out_tasks_and_names_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_classic():
        return
    (tmp_path / "failing_sums.py").write_text(SINGLE_TASKSET)
    (tmp_path / "old_sums.py").write_text(SINGLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # without the key of a login
    agent = {"runtime": {"type": "subprocess"}}
    held_out = {"taskset": {"tasks": 2}, "select": {"limit": 1}}
    environment = loaded("verifiers:failing-sums", agent=agent, select={"skip": 3}, test=held_out)
    assert [task.id for task in environment.train] == [f"failing-sums/{i}" for i in range(3, 9)]
    assert environment.train[0].prompt[1]["content"] == "1+3?"
    assert [task.id for task in environment.test] == ["failing-sums/test/0"]
    with pytest.raises(Exception, match=r"TaskError: .*the grader is gone"):
        play(environment, "crash")
    for name, options, message in (
        ("no-sums", {}, "taskset 'no-sums' not found"),
        ("old-sums", {}, "pip install 'verifiers<0.4'"),
        ("failing-sums", {}, "agent.runtime is a sandbox of Prime, and PRIME_API_KEY is not set"),
        ("failing-sums", {"taskset": {"tusks": 1}}, "environment.options.taskset.tusks = 1"),
        ("failing-sums", {"taskset": {"id": "x"}}, "environment.options.taskset.id = 'x', and"),
        ("failing-sums", {"select": {"limit": 0}}, "environment.options.select.limit = 0"),
        ("failing-sums", {"test": 1}, "environment.options.test = 1: make it a table"),
        ("failing-sums", {"agent": agent, "taskset": {"tasks": 0}}, "has no tasks; check environment.options"),
        ("failing-sums", {"agent": agent, "test": {"taskset": {"tasks": 0}}}, "check environment.options.test"),
        ("failing-sums", {"agent": agent | {"harness": {"id": "codex"}}}, "'codex' needs a container"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)) as raised:
            loaded(f"verifiers:{name}", **options)
        assert "\n" not in str(raised.value)

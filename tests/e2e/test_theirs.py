"""Environments, servers and agents of others train unchanged, on a tiny model that has learned to call a tool."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import build_model
from tests.e2e.test_runs import lines, slipstream
from tests.environments.test_conversation import CHATML, chat_tokenizer
from tests.environments.test_libraries import SINGLE, SINGLE_TASKSET, TOOL_TASKSET, TOOLS, is_classic
from tests.environments.test_openenv import PYTHON

pytestmark = pytest.mark.e2e
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
PUZZLES = (
    "base_conversion", "basic_arithmetic", "caesar_cipher", "chain_sum", "gcd", "lcm", "leg_counting",
    "letter_counting", "products", "spell_backward",
)  # fmt: skip
SERVER = """
from mcp.server import MCPServer
server = MCPServer("calculator")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

server.run()
"""
MCP = """
import sys
from pathlib import Path
from slipstream.environments.base import Task
from slipstream.environments.mcp_tools import mcp_tools

class Calculates:
    train = test = [Task(str(i), f"1+{i}?") for i in range(9)]

    async def rollout(self, task, policy):
        async with mcp_tools([sys.executable, str(Path(__file__).parent / "server.py")]) as tools:
            conversation = policy.conversation(tools=tools)
            await conversation.ask(task.prompt)
        return float(any(m["role"] == "tool" and m["content"] == "3" for m in conversation.messages))
"""
AGENT = """
import json
from openai import AsyncOpenAI
from slipstream.environments.base import Task

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "integer"}}}}}

class Agent:
    train = test = [Task(str(i), f"1+{i}?") for i in range(9)]

    async def rollout(self, task, policy):
        messages, calls = [{"role": "user", "content": task.prompt}], 0
        async with AsyncOpenAI(base_url=await policy.base_url(), api_key="none") as client:
            for _ in range(2):
                reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or []:
                    calls += 1
                    total = str(sum(json.loads(call.function.arguments).values()))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": total})
        return policy.rollout(float(calls > 0), tool_calls=calls)
"""


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that mostly replies with a call of the tool "add"."""
    path, tokenizer = tmp_path_factory.mktemp("caller"), chat_tokenizer(CHATML)
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    model = type(build_model())(build_model(hidden_size=64, max_position_embeddings=4096, **sizes).config)
    optimizer, rng = torch.optim.AdamW(model.parameters(), 5e-3), random.Random(0)
    reply = tokenizer.encode(CALL + "<|im_end|>")
    for _ in range(150):
        said = "".join(rng.choices("0123456789+? abc", k=rng.randrange(1, 20)))
        turns = [{"role": rng.choice(["user", "tool"]), "content": said}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([prompt + reply])
        loss = model(ids, labels=ids.masked_fill(torch.arange(ids.shape[1]) < len(prompt), -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def trained(folder: Path, model: Path, *environments: str, **flags: Any) -> list[dict[str, Any]]:
    """The metrics of three steps on these environments, without a failed rollout."""
    entries = "".join(f"[[environments]]\n{entry}\n" for entry in environments)
    (folder / "run.toml").write_text(f"""
        model = {{ path = "{model}" }}
        sampling = {{ max_tokens = 90 }}
        loop = {{ steps = 3, groups_per_step = {max(2, len(environments))}, group_size = 2 }}
        algorithm = {{ filter_zero_advantage = false }}
        evaluation = {{ tasks = 2 }}
        trainer = {{ threads = 1 }}
        generator = {{ threads = 1 }}
        run = {{ dir = "run" }}
        {entries}""")
    slipstream("train", "run.toml", *(f"--{n.replace('__', '.')}={v}" for n, v in flags.items()), cwd=folder)
    steps = lines(folder / "run/metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert not any(step["rollout/failed"] for step in steps)
    return steps


def test_ten_tasks_of_reasoning_gym(caller: Path, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    entries = [f'name = "reasoning-gym:{name}"\noptions = {{ train = 20, test = 2 }}' for name in PUZZLES]
    steps = trained(tmp_path, caller, *entries)
    assert {name for name in PUZZLES if any(f"environments/{name}/reward" in step for step in steps)} == {*PUZZLES}


def test_a_server_that_openenv_generates_and_one_with_tools(caller: Path, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("openenv is not installed")
    subprocess.run([PYTHON, "-m", "openenv.cli", "init", "echo_x", "-o", tmp_path], check=True, capture_output=True)
    (tmp_path / "sums.py").write_text((Path(__file__).parents[1] / "environments/openenv_sums.py").read_text())
    options = f'options = {{ python = "{PYTHON}", test = 2 }}\nmax_turns = 2\nlabel'
    steps = trained(
        tmp_path, caller, f'name = "openenv:echo_x.server.app:app"\n{options} = "echo"',
        f'name = "openenv:sums:calculator"\n{options} = "calculator"', environment__max_concurrent=1,
    )  # fmt: skip
    assert any(step.get("environments/echo/reward", 0) > 0 for step in steps), "longer messages have higher rewards"
    assert any(step.get("env/tool_calls", 0) > 0 for step in steps)


@pytest.mark.parametrize(("source", "library"), [(MCP, "mcp"), (AGENT, "openai")])
def test_an_agent_with_tools(source: str, library: str, caller: Path, tmp_path: Path) -> None:
    pytest.importorskip(library)
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "own.py").write_text(source)
    kind = "Calculates" if library == "mcp" else "Agent"
    turns = "max_turns = 2" if library == "mcp" else ""
    steps = trained(tmp_path, caller, f'name = "own.py:{kind}"\n{turns}')
    assert all(step["env/tool_calls"] > 0 for step in steps) and steps[0]["reward/mean"] > 0


@pytest.mark.verifiers
def test_two_environments_of_verifiers(caller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classic = is_classic()
    (tmp_path / "single_sums.py").write_text(SINGLE if classic else SINGLE_TASKSET)
    (tmp_path / "tool_sums.py").write_text(TOOLS if classic else TOOL_TASKSET)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")  # of tool servers
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # of uv, which starts agents
    agents = [""] * 2 if classic else ["", ', harness = { id = "null" }, max_turns = 2']
    options = [
        "" if classic else f'options.agent = {{ runtime = {{ type = "subprocess" }}{agent} }}' for agent in agents
    ]
    entries = [
        f'name = "verifiers:{kind}-sums"\n{more}' for kind, more in zip(("single", "tool"), options, strict=True)
    ]
    steps = trained(tmp_path, caller, *entries)
    assert any(step.get("environments/single-sums/reward", 0) > 0 for step in steps)
    assert any(step.get("environments/tool-sums/reward", 0) > 0 for step in steps), "the tool was called"

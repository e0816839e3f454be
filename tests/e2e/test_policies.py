"""A run of two policies over one model: each learns its own task, also after a kill, and misuse is one clear line."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kill

from slipstream.cli import main
from slipstream.observe.run_data import load_run
from slipstream.rollout import mean
from tests import warm
from tests.conftest import build_tokenizer, save_model

pytestmark = pytest.mark.e2e
ENVIRONMENT = """
import asyncio

from slipstream.environments.base import Task

class Opposites:
    '''"low" is rewarded for tokens of the first half of the vocabulary, "high" for those of the second.'''

    def __init__(self, names=("low", "high")):
        self.names = names
        self.train = [Task(str(i), f"{i}+{i}=") for i in range(30)]
        self.test = self.train

    async def rollout(self, task, policy):
        return await asyncio.gather(*(self.play(name, task, policy) for name in self.names))

    async def play(self, name, task, policy):
        conversation = (policy[name] if name else policy).conversation()
        await conversation.ask(task.prompt)
        token_ids = [i for c in conversation.completions for i in c.token_ids]
        low = sum(i < 22 for i in token_ids) / len(token_ids)
        return conversation.rollout(low if name == "low" else 1 - low)
"""
CONFIG = """
[model]
path = "{model}"
[lora]
rank = 4
[environment]
name = "{environment}:Opposites"
[[policies]]
name = "low"
[[policies]]
name = "high"
algorithm = {{ loss = "ppo", kl_coef = 0.01 }}
[sampling]
max_tokens = 4
[loop]
steps = 24
groups_per_step = 4
group_size = 4
max_lag = 0
[trainer]
threads = 1
learning_rate = 3e-2
schedule = "constant"
[generator]
threads = 1
[evaluation]
every = 12
temperature = 1.0
against_start = true
[checkpoint]
every = 3
[run]
dir = "{run}"
"""


@pytest.fixture
def config(tmp_path: Path, tiny: Path) -> Path:
    (tmp_path / "opposites.py").write_text(ENVIRONMENT)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(model=tiny, environment=tmp_path / "opposites.py", run=tmp_path / "whole"))
    return path


def command(*arguments: Any) -> subprocess.Popen[str]:
    return warm.Command(
        [sys.executable, "-m", "slipstream.cli", "train", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def kill_and_resume(process: subprocess.Popen[str], run: Path) -> None:
    """Kill a run after 8 of 24 steps, resume it, and audit its records."""
    while process.poll() is None and kill.steps_done(run) < 8:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    ended(command("--resume", run))
    kill.audit(run, 24)


def ended(process: subprocess.Popen[str], succeeds: bool = True) -> str:
    said, _ = process.communicate(timeout=180)
    assert (process.returncode == 0) is succeeds and "Traceback" not in said, said
    return said


def rows(run: Path) -> list[dict[str, Any]]:
    data = load_run(run)
    return [row for step in data.rollout_steps for row in data.rollouts(step)]


def test_two_policies_learn_opposites_and_continue_after_a_kill(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    said = ended(command(config))
    assert re.search(r"evaluation after step 12: .*: high 0\.\d+ \(0\.\d+ against the start\), low 0\.\d+ \(", said)
    assert re.search(r"Reward of low +0\.\d+ → 0\.\d+", said) and f"slipstream generate {whole}/policy/low" in said
    assert main(["generate", str(whole / "policy" / "low"), "--prompt", "1+1="]) == 0
    assert f"measure  slipstream eval {whole}" in said
    for tool in ("verify", "export", "push"):
        assert main([tool, str(whole), *(["someone/name"] if tool == "push" else [])]) == 2, tool
        assert f"take one of them with --policy NAME, `generate` its directory: {whole}/policy/high, " in (
            capsys.readouterr().err
        ), tool
    assert main(["generate", str(whole), "--prompt", "1+1="]) == 2
    assert "has 2; give the directory of one, such as RUN/policy/low" in capsys.readouterr().err
    assert main(["train", "--resume", str(whole), "--policies.1.name=other", "--loop.steps=30"]) == 2
    assert (
        "[[policies]] can't be changed when a run is resumed; it was started with: low, high" in capsys.readouterr().err
    )
    process = command(config, f"--run.dir={killed}")
    while process.poll() is None and kill.steps_done(killed) < 8:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (killed / "summary.json").exists()
    ended(command("--resume", killed))

    kill.audit(killed, 24)
    names = ("step", "visit_id", "rollout", "role", "completion_ids", "reward", "advantage")
    assert [[row[n] for n in names] for row in rows(killed)] == [[row[n] for n in names] for row in rows(whole)]
    adapters = [
        {n: load_file(run / "policy" / n / "adapter_model.safetensors") for n in ("low", "high")}
        for run in (whole, killed)
    ]
    assert all(kill.same_bits(adapters[0][name], adapters[1][name]) for name in ("low", "high"))
    assert not kill.same_bits(adapters[0]["low"], adapters[0]["high"])

    metrics = load_run(whole).metrics
    evaluations = [load_run(whole).evaluations[i] for i in (0, -1)]
    for name in ("low", "high"):
        rewards = [record[f"policies/{name}/reward"] for record in metrics]
        assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.2, (name, rewards)
        assert max(record[f"policies/{name}/policy/ratio_max"] for record in metrics) < 1.001, "not on policy"
        first, last = (evaluation[f"eval/policies/{name}/against_start"] for evaluation in evaluations)
        assert last > first and last == evaluations[1][f"eval/policies/{name}/reward"]
        assert metrics[-1][f"policies/{name}/version"] == metrics[-1]["version"] == 24
    assert metrics[-1]["policies/low/policy/kl"] == 0 < metrics[-1]["policies/high/policy/kl"]
    assert {row["role"] for row in rows(whole)} == {"low", "high"}
    for group in {(row["step"], row["visit_id"], row["role"]) for row in rows(whole)}:
        own = [row["advantage"] for row in rows(whole) if (row["step"], row["visit_id"], row["role"]) == group]
        assert len(own) == 4 and abs(sum(own)) < 1e-6, "advantages compare the rollouts of one policy"


def test_the_policies_of_a_run_are_evaluated_and_compared_by_name(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def evaluated(*arguments: Any) -> Any:
        capfd.readouterr()
        assert main(["eval", *map(str, arguments)]) == 0
        return capfd.readouterr().out

    whole, longer = tmp_path / "whole", tmp_path / "longer"
    ended(command(config, "--loop.steps=6"))
    start = [f"--policies.{i}.adapter={whole}/policy/{name}" for i, name in enumerate(("low", "high"))]
    ended(command(config, f"--run.dir={longer}", "--loop.steps=6", *start))
    runs = load_run(whole), load_run(longer)
    found = json.loads(evaluated(whole, "--json"))
    for name in ("low", "high"):
        reward = f"eval/policies/{name}/reward"
        assert found[reward] == runs[0].evaluations[-1][reward] == runs[1].evaluations[0][reward], "the saved adapter"
        assert runs[1].evaluations[-1][reward] > found[reward], "it learned on"
        assert found["intervals"][reward][0] < found[reward] < found["intervals"][reward][1]

    several = json.loads(evaluated(longer, "--samples=4", "--against", whole, "--json"))
    one = json.loads(evaluated(longer, "--samples=4", "--against", whole, "--json", "--policy=low"))
    assert set(several["policies"]) == {"low", "high"} and set(one["policies"]) == {"low"}
    for name, compared in several["policies"].items():
        after, before = (several[which][f"eval/policies/{name}/reward"] for which in ("policy", "against"))
        assert compared["difference"]["value"] == pytest.approx(after - before) and after > before
        assert after < several["policy"][f"eval/policies/{name}/pass@2"] <= 1
    against = [each["against"] for each in (several, one)]
    assert against[0]["eval/policies/low/reward"] == against[1]["eval/policies/low/reward"], "low is the other run's"
    assert against[1]["eval/policies/high/reward"] == one["policy"]["eval/policies/high/reward"], "high stays"

    lines = evaluated(config, "--samples=2", "--policy=low", "--against", longer, "--markdown").splitlines()
    assert lines[2].startswith("|  | `") and lines[2].endswith(f"| `{longer}/policy/low` |")
    assert [line.split(" | ")[0] for line in lines if line.startswith("| low")] == [
        "| low reward", "| low pass@2", "| low against the start"
    ]  # fmt: skip
    assert any(line.startswith("Difference of the rewards of low: -0.") for line in lines)
    assert main(["eval", str(whole), "--policy=lo"]) == 2
    assert f"--policy lo is no policy of {whole}, which has low, high (did you mean low?)" in capfd.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--lora.rank=0", "--trainer.learning_rate=3e-3"]], ids=["adapter", "whole"])
def test_a_policy_with_a_model_of_its_own_learns_and_continues_after_a_kill(
    config: Path, tmp_path: Path, flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    whole, killed, other = tmp_path / "whole", tmp_path / "killed", tmp_path / "other"
    save_model(other, seed=3, vocab_size=len(build_tokenizer()), num_hidden_layers=2, head_dim=16)
    flags = [*flags, f"--policies.1.model={other}", "--evaluation.against_start=false", "--loop.max_lag=0"]
    ended(command(config, *flags))
    process = command(config, *flags, f"--run.dir={killed}", "--sync.link=checkpoint")
    kill_and_resume(process, killed)
    metrics = load_run(whole).metrics
    for name, layers in (("low", 3), ("high", 2)):
        rewards = [record[f"policies/{name}/reward"] for record in metrics]
        assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.2, (name, rewards)
        assert max(record[f"policies/{name}/policy/ratio_max"] for record in metrics) < 1.001, "not on policy"
        [file] = (whole / "policy" / name).glob("*model.safetensors")
        stored = [load_file(run / "policy" / name / file.name) for run in (whole, killed)]
        assert kill.same_bits(*stored) and {n.partition("layers.")[2][:1] for n in stored[0]} - {""} == set(
            map(str, range(layers))
        )
    assert metrics[-1]["policies/high/policy/kl"] > 0
    capfd.readouterr()
    assert main(["eval", str(whole), "--json"]) == 0
    found, last = json.loads(capfd.readouterr().out), load_run(whole).evaluations[-1]
    for name in ("low", "high"):
        assert found[f"eval/policies/{name}/reward"] == last[f"eval/policies/{name}/reward"], name
    merge = ["--merge"] if (whole / "policy" / "high" / "adapter_config.json").exists() else []
    assert main(["export", str(whole), "--policy=high", f"--to={tmp_path / 'exported'}", *merge]) == 0
    assert AutoConfig.from_pretrained(tmp_path / "exported").num_hidden_layers == 2


def test_a_model_with_another_vocabulary_is_refused(config: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "other")
    build_tokenizer(30).save_pretrained(tmp_path / "other")
    said = ended(command(config, f"--policies.1.model={tmp_path}/other", "--evaluation.against_start=false"), False)
    assert f"policies.1.model = '{tmp_path}/other' has another vocabulary" in said


def test_policies_keep_the_bound_on_lag_across_a_kill(config: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    process = command(config, f"--run.dir={killed}", "--loop.max_lag=2", "--sync.link=checkpoint")
    kill_and_resume(process, killed)
    assert json.loads((killed / "summary.json").read_text())["lag"]["max"] in (1, 2)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_two_policies_learn_with_vllm(
    config: Path, patient: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--model.path={patient}", "--generator.engine=vllm", "--generator.max_model_len=128"]
    said = ended(command(config, *flags))
    assert 'sync.link = "lora"' in said
    metrics = load_run(tmp_path / "whole").metrics
    for name in ("low", "high"):
        rewards = [record[f"policies/{name}/reward"] for record in metrics]
        assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.1, (name, rewards)
        assert max(record[f"policies/{name}/policy/ratio_max"] for record in metrics) < 1.01, "not on policy"
    found = []
    for engine in ("vllm", "torch"):
        capfd.readouterr()
        flags = ["--temperature=0", f"--generator.engine={engine}", "--json"]
        assert main(["eval", str(tmp_path / "whole"), *flags]) == 0
        found.append(json.loads(capfd.readouterr().out))
    assert found[0]["samples"] == found[1]["samples"] and min(s["reward"] for s in found[0]["samples"]) > 0.5


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ('["low", "hihg"]', "asks for policy['hihg'], and the run has low, high (did you mean high?)"),
        ('["low"]', 'policy["high"] has no rollout in the first 10 steps: ask it in the environment, or remove it'),
        ('["low", ""]', 'several policies (low, high), and an episode names none: ask by policy["low"].conversation()'),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_misuse_of_policies_is_one_clear_line(config: Path, names: str, message: str, workers: int) -> None:
    flags = [f"--environment.options={{names = {names}}}", f"--environment.workers={workers}"]
    said = ended(command(config, *flags), succeeds=False)
    assert message in said

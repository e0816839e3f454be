"""`slipstream eval` with the engine of the configuration: what it prints and writes, and the comparison of policies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.cli import main
from slipstream.config.loading import load_config, load_policy_config
from slipstream.observe.estimates import compare_paired
from slipstream.run import run_name
from slipstream.tools.evaluate import describe_comparison
from tests.conftest import save_model

ENVIRONMENT = """
from slipstream.environments.base import Task

class Ones:
    train = test = tuple(Task(str(i), f"{i}+{i}=", category="even" if i % 2 == 0 else "odd") for i in range(12))

    async def rollout(self, task, policy):
        completion = await policy.sample(task.prompt)
        return policy.rollout(float(len(completion.token_ids)), correct=float("1" in completion.text))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with the head size that vLLM needs on a CPU, an environment, and a configuration."""
    path = tmp_path_factory.mktemp("policies")
    for seed, name in enumerate(("first", "second")):
        save_model(path / name, seed=seed, head_dim=64, hidden_size=64)
    (path / "ones.py").write_text(ENVIRONMENT)
    (path / "run.toml").write_text(
        f'model.path = "{path / "first"}"\nenvironment.name = "{path / "ones.py"}:Ones"\n'
        "sampling.max_tokens = 12\ngenerator = { max_model_len = 64, threads = 1 }\n"
        "evaluation = { samples = 4, temperature = 1.0 }\ntrainer.ranks = 2\n"
    )
    return path


def evaluated(capfd: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capfd.readouterr()
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_two_policies_are_compared_on_the_same_tasks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [folder / "run.toml", "--against", folder / "second"]
    found = evaluated(capfd, *command, "--rollouts", folder / "rollouts.parquet")
    policy, against = found["policy"], found["against"]
    assert policy["eval/score"] != against["eval/score"], "the models differ"
    before, after = ([sample["score"] for sample in record["samples"]] for record in (against, policy))
    assert found["comparison"] == json.loads(json.dumps(compare_paired(before, after, 4).as_dict()))
    assert found["comparison"]["difference"]["value"] == pytest.approx(policy["eval/score"] - against["eval/score"])

    rows = pq.read_table(folder / "rollouts.parquet").to_pylist()
    assert len(rows) == 48 and {row["task_id"] for row in rows} == set(map(str, range(12)))
    correct = [dict(row["metrics"])["correct"] for row in rows]
    assert sum(correct) / 48 == pytest.approx(policy["eval/score"]), "the rollouts are those of the first policy"

    capfd.readouterr()
    assert main(["eval", *map(str, command)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder}/run.toml, {folder}/ones.py:Ones: score {policy['eval/score']:.3f} [")
    assert lines[0].endswith(" s") and "on 12 held-out tasks, 4 samples each (0 failed)" in lines[0]
    assert [line.split()[0] for line in lines[1:5]] == ["pass@2", "pass@4", "even", "odd"]
    assert lines[-1].startswith(f"{folder}/run.toml minus {folder}/second: ") and ", p = " in lines[-1]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([1.0, 0.0], "no difference in 2 tasks"),
        ([1.0, 1.0], ", p = 1 (1 task better, 0 worse, 1 equal)"),
    ],
)
def test_a_comparison_is_one_line(after: list[float], said: str) -> None:
    assert describe_comparison(compare_paired([1.0, 0.0], after)).endswith(said)


def test_the_first_evaluation_is_kept_if_the_second_fails(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "second", folder / "nan")
    weights = {name: torch.full_like(t, torch.nan) for name, t in load_file(folder / "nan/model.safetensors").items()}
    save_file(weights, folder / "nan/model.safetensors", {"format": "pt"})
    command = [
        "eval",
        folder / "run.toml",
        "--against",
        folder / "nan",
        "--rollouts",
        folder / "kept.parquet",
        "--json",
    ]
    assert main(list(map(str, command))) != 0
    printed = capfd.readouterr()
    assert printed.err.splitlines()[-1].startswith("slipstream: --against: ") and "nan" in printed.err
    assert json.loads(printed.out)["eval/tasks"] == 12
    assert pq.read_metadata(folder / "kept.parquet").num_rows == 48


def test_scores_are_printed_as_markdown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(folder / "run.toml"), "--samples=2", "--tasks=6", "--markdown"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].endswith("ones.py:Ones: 6 held-out tasks, samples of each: 2, temperature 1.")
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert table[:2] == [["", f"`{folder / 'first'}`"], ["---", "---"]]
    assert [row[0] for row in table[2:]] == ["score", "pass@2", "even", "odd", "failed episodes"]
    assert table[4][1].endswith("(3 tasks)")


def test_a_dataset_is_named_by_its_file(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    flags = [f"--environment.dataset={tmp_path}/sums.jsonl", "--environment.answer=answer"]
    flags += ["--environment.reward=exact", "--sampling.max_tokens=2"]
    assert main(["eval", str(folder / "first"), *flags]) == 0
    assert capfd.readouterr().out.startswith("sums.jsonl: score 0.000")
    assert run_name(load_config(None, [f"--model.path={folder}/first", *flags])) == "sums"


def test_another_dataset_keeps_the_reward_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'model.path = "m"\nenvironment = { name = "mine.py:score", dataset = "a.jsonl", prompt = "question" }\n'
    )
    config = load_policy_config(str(path), None, ["--environment.dataset=b.jsonl", "--environment.test=0.5"])
    assert config.environment.name.endswith("mine.py:score")
    assert config.environment.options == {"dataset": "b.jsonl", "prompt": "question", "test": 0.5}
    path.write_text(
        'model.path = "m"\nenvironment.name = "mine.py:score"\nenvironment.options = { dataset = "a.jsonl" }\n'
    )
    assert load_config(path, ["--environment.test=0.5"]).environment.options == {"dataset": "a.jsonl", "test": 0.5}


def test_vllm_and_the_embedded_engine_give_the_same_greedy_answers(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    greedy = [folder / "run.toml", "--evaluation.samples=1", "--temperature=0"]
    embedded = evaluated(capfd, *greedy)
    new = "--lora.rank=4", "--trainer.ranks=1"  # adapters that a run would begin with
    vllm = evaluated(capfd, *greedy, "--generator.engine=vllm", *new)
    assert vllm["samples"] == embedded["samples"] and vllm["intervals"] == embedded["intervals"]
    assert len({sample["completion"] for sample in vllm["samples"]}) > 6


def test_vllm_evaluates_no_weights_that_are_not_finite(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    shutil.copytree(folder / "first", folder / "broken")
    weights = load_file(folder / "broken/model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, folder / "broken/model.safetensors", {"format": "pt"})
    command = [folder / "run.toml", "--generator.engine=vllm", f"--model.path={folder / 'broken'}"]
    assert main(["eval", *map(str, command)]) == 2
    assert "weights with logits that are not finite" in capfd.readouterr().err


def test_vllm_samples_without_log_probabilities(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    evaluated(capfd, folder / "run.toml", "--generator.engine=vllm", "--rollouts", folder / "vllm.parquet")
    rows = pq.read_table(folder / "vllm.parquet").to_pylist()
    assert len(rows) == 48 and all(len(row["logprobs"]) == len(row["completion_ids"]) > 0 for row in rows)
    assert all(p is None or p != p for row in rows for p in row["logprobs"])


def test_vllm_evaluates_an_adapter_merged_into_its_model(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    adapted = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "first")
    get_peft_model(model, adapted).save_pretrained(folder / "adapter")
    AutoTokenizer.from_pretrained(folder / "first").save_pretrained(folder / "adapter")
    greedy = [folder / "run.toml", "--evaluation.samples=1", "--temperature=0", f"--model.path={folder / 'adapter'}"]
    embedded, base = evaluated(capfd, *greedy), evaluated(capfd, *greedy[:-1])
    vllm = evaluated(capfd, *greedy, "--generator.engine=vllm")
    assert vllm["samples"] == embedded["samples"] != base["samples"]

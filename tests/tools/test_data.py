"""`slipstream data`: tasks token by token, and the lengths of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from tests.conftest import build_tokenizer, save_model

REGEX = ['--environment.reward={regex={pattern="1"}}']
TEMPLATE = "{% for m in messages %}<eos>{{ m.role }}\n{{ m.content }}{% endfor %}<eos>assistant\n"


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["data", *flags]) == 0
    return capsys.readouterr().out


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    tokenizer: Any = build_tokenizer()
    save_model(tmp_path / "model", vocab_size=len(tokenizer))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_tasks_are_shown_with_token_boundaries_and_lengths(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["1+1=", "2" * 200, "3" * 218, "4" * 230, "5" * 9999]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"q": prompt, "a": "2"}) + "\n" for prompt in prompts))
    flags = [f"--model.path={chat_model}", f"--environment.dataset={file}", "--environment.prompt=q"]
    flags += ["--environment.answer=a", "--environment.reward=exact", "--environment.test=0"]
    text = shown(capsys, *flags, "--sampling.max_tokens=40", "--environment.filter={a=2}", "--tasks=1")
    assert f"train/1 ({file}, line 1): 20 tokens; expected answer {{'exact': '2'}}" in text
    assert "«<eos>»│u│s│e│r│" in text and "│1│+│1│=│«<eos>»│a│s│s│i│s│t│a│n│t│" in text
    assert "5 training tasks: prompts of 20 to 256 tokens; median 234," in text and "held-out" not in text
    last = "in the context of 256 tokens, 1 of 5 prompts leave no room for a completion, and 2 less than"
    assert f"{last} sampling.max_tokens = 40" in text.replace("\n", " ")
    assert "an epoch is 0.625 steps (8 groups a step): loop.steps = 100 is 160 epochs" in text


def test_a_long_prompt_is_cut_and_any_environment_is_shown(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "100 held-out tasks: prompts of 6 to 6 tokens" in shown(
        capsys, f"--model.path={tiny}", "--environment.name=addition", "--environment.options.test=100"
    )
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "1" * 250}) + "\n")
    flags = [f"--model.path={tiny}", f"--environment.dataset={file}", *REGEX]
    assert "1│1│" in shown(capsys, *flags)
    (tmp_path / "two.toml").write_text(f"""
        model.path = "{tiny}"
        [[environments]]
        name = "addition"
        weight = 3.0
        options = {{ train = 300, test = 1 }}
        [[environments]]
        dataset = "{file}"
        reward = {{ regex = {{ pattern = "1" }} }}
    """)
    text = shown(capsys, str(tmp_path / "two.toml"), "--tasks=0")
    assert "300 training tasks of addition: prompts of" in text and "1 training task of long.jsonl: prompts of" in text
    assert "an epoch is 50 steps (8 groups a step, 75% of them here): loop.steps = 100 is 2 epochs" in text
    text = shown(capsys, str(tmp_path / "two.toml"), "--tasks=0", "--loop.epochs=3")
    assert "loop.steps = 150 is 3 epochs" in text and "loop.steps = 150 is 300 epochs" in text


def test_an_error_is_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--environment.name=addition", "--loop.epochs=0.1", "--trainer.warmup_steps=200"]
    assert main(["data", f"--model.path={tiny}", *few]) == 2
    assert "trainer.warmup_steps = 200 leaves nothing of loop.steps" in capsys.readouterr().err
    assert main(["data", f"--model.path={tiny}", "--environment.dataset=gone.csv", *REGEX]) == 2
    assert "dataset 'gone.csv': there is no such file" in capsys.readouterr().err

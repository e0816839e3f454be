"""A run whose prompts hold images, from a JSONL file to a policy that the next command loads."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from slipstream.model.images import ImageProcessor, image_processor
from tests.e2e.test_runs import lines, slipstream
from tests.vision import png, save_vision_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
CONFIG = """
model = { path = "model" }
generator = { engine = "vllm", max_num_seqs = 8, threads = 1 }
trainer = { learning_rate = 1e-3, threads = 1 }
sampling = { max_tokens = 8 }
loop = { steps = 2, groups_per_step = 2, group_size = 4 }
evaluation = { tasks = 2 }

[environment]
dataset = "data"
prompt = "question"
images = "images"
reward = { regex = { pattern = "[0-4]" } }
"""
SIZES = ((20, 24), (40, 16), (16, 64))  # height and width in pixels


def save_tasks(folder: Path, processor: ImageProcessor) -> dict[str, int]:
    """A JSONL file, and one or two images for each row. Returns the number of image tokens by task."""
    (folder / "images").mkdir(parents=True)
    rows, tokens = [], {}
    for i in range(12):
        images = {f"images/{i}_{j}.png": png(*SIZES[(i + j) % len(SIZES)], seed=2 * i + j) for j in range(1 + i % 2)}
        for name, data in images.items():
            (folder / name).write_bytes(data)
        rows.append({"question": f"{i} + 1 =", "images": [*images]})
        tokens[f"train/{i + 1}"] = sum(processor.token_spec.read(data).tokens for data in images.values())
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tokens


@pytest.mark.parametrize(("kind", "flags"), [("Qwen2_5_VL", []), ("Qwen3VL", ["--lora.rank=4"])])
def test_a_run_trains_on_images(kind: str, flags: list[str], tmp_path: Path) -> None:
    """All weights, then a second run from the policy; or adapters, then their evaluation."""
    model, run = tmp_path / "model", tmp_path / "run"
    save_vision_model(model, kind)
    processor = image_processor(str(model))
    assert processor is not None
    tokens = save_tasks(tmp_path / "data", processor)
    (tmp_path / "run.toml").write_text(CONFIG)
    assert_learned(slipstream("train", "run.toml", "--run.dir=run", *flags, cwd=tmp_path).stderr, run)
    for name in ("processor_config.json", "chat_template.jinja"):
        assert (run / "policy" / name).read_text() == (model / name).read_text()
    rollouts = pq.read_table(run / "rollouts").to_pylist()
    assert len(rollouts) == 16
    for row in rollouts:
        assert row["prompt_ids"].count(processor.placeholder) == tokens[row["task_id"]]
        assert row["prompt"].endswith(
            "<|vision_end|>" + f"{int(row['task_id'].partition('/')[2]) - 1} + 1 =<eos>a<pad> "
        )
    if flags:
        assert json.loads(slipstream("eval", "run", "--json", cwd=tmp_path).stdout)["eval/failed"] == 0
    else:
        again = slipstream("train", "run.toml", "--run.dir=again", "--model.path=run/policy", cwd=tmp_path)
        assert_learned(again.stderr, tmp_path / "again")


def assert_learned(said: str, run: Path) -> None:
    """The probe passed, both steps changed the policy, and no rollout failed."""
    assert "probe: log-probabilities of generator and trainer differ by" in said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2 and not summary["failures"]
    steps = lines(run / "metrics.jsonl")
    assert [step["version"] for step in steps] == [1, 2]
    assert not any(step["rollout/failed"] for step in steps) and any(step["train/grad_norm"] for step in steps)
    assert [each["eval/failed"] for each in lines(run / "evaluations.jsonl")] == [0, 0]

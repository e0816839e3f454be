"""Reward and process-reward models: scores equal those of transformers, in any batch."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from slipstream.config.schema import ConfigError, RuntimeConfig, ScoringConfig
from slipstream.environments.base import Task
from slipstream.environments.reward_workers import ScoringError
from slipstream.rollout import Completion, Rollout, VersionSpan
from slipstream.runtime.worker import WorkerDied
from slipstream.scoring.model import RewardModel, RewardModelOptions, RewardModelWorker
from slipstream.scoring.stage import ScoringStage
from tests.conftest import COMMON, build_tokenizer
from tests.runtime.test_faults import pid_of

TOKENIZER = build_tokenizer()


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"


def save(path: Path, kind: str, labels: int = 1, other: bool = False, template: str | None = None) -> None:
    torch.manual_seed(labels)
    size = len(TOKENIZER) + 3 * other
    config = transformers.Qwen3Config(**COMMON | {"vocab_size": size}, num_labels=labels)
    getattr(transformers, f"Qwen3For{kind}")(config).save_pretrained(path)
    tokenizer = build_tokenizer()
    if other:
        tokenizer.add_tokens(["!", "?", "#"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)


def completion(prompt: str, text: str) -> Completion:
    ids = tuple(TOKENIZER.encode(text))
    spans = (VersionSpan(0, 0, len(ids)),)
    return Completion(tuple(TOKENIZER.encode(prompt)), ids, (0.0,) * len(ids), spans, "length", text=text)


COMPLETIONS = [
    completion(p, t) for p, t in (("1+1=", "2"), ("12+34=", "4 6. no. 47"), ("0=", "<eos><pad>"), ("a", "b."))
]


def scores(path: Path, policy: Path, **options: Any) -> list[Any]:
    """Answers of the service to concurrent requests for all completions."""
    worker = RewardModelWorker(RewardModelOptions(path=str(path), threads=1, **options), str(policy))

    async def main() -> list[Any]:
        return await asyncio.gather(*(worker.score("", (one,)) for one in COMPLETIONS))

    return asyncio.run(main())


@pytest.mark.parametrize("labels", [1, 2])
def test_batched_scores_equal_those_of_transformers_one_by_one(tmp_path: Path, tiny: Path, labels: int) -> None:
    save(tmp_path, "SequenceClassification", labels)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for answer, one in zip(scores(tmp_path, tiny), COMPLETIONS, strict=True):
        logits = model(torch.tensor([[*one.prompt_ids, *one.token_ids]])).logits[0]
        wanted = logits[0] if labels == 1 else logits.softmax(-1)[-1]
        assert answer == pytest.approx(wanted.item(), abs=1e-5)


def test_a_process_reward_model_scores_every_token(tmp_path: Path, tiny: Path) -> None:
    save(tmp_path, "TokenClassification")
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)
    for answer, one in zip(scores(tmp_path, tiny, reduce="min"), COMPLETIONS, strict=True):
        wanted = model(torch.tensor([[*one.prompt_ids, *one.token_ids]])).logits[0, len(one.prompt_ids) :, 0].tolist()
        (steps,) = answer["tokens"]
        assert [end for end, _ in steps] == list(range(len(one.token_ids)))
        assert [reward for _, reward in steps] == pytest.approx(wanted, abs=1e-5)
        assert answer["reward"] == pytest.approx(min(wanted), abs=1e-5)


def test_steps_end_where_the_separator_does(tmp_path: Path, tiny: Path) -> None:
    save(tmp_path, "TokenClassification")
    _, second, _, last = scores(tmp_path, tiny, separator=".")
    text = COMPLETIONS[1].text
    assert [text[: end + 1] for end, _ in second["tokens"][0]] == ["4 6.", "4 6. no.", "4 6. no. 47"]
    assert [end for end, _ in last["tokens"][0]] == [1]
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)
    ids = torch.tensor([[*COMPLETIONS[1].prompt_ids, *COMPLETIONS[1].token_ids]])
    everything = model(ids).logits[0, len(COMPLETIONS[1].prompt_ids) :, 0].tolist()
    wanted = [everything[end] for end, _ in second["tokens"][0]]
    assert [reward for _, reward in second["tokens"][0]] == pytest.approx(wanted, abs=1e-5)
    assert second["reward"] == pytest.approx(wanted[-1], abs=1e-5)


def test_a_dead_reward_model_is_restarted_and_asked_again(tmp_path: Path, tiny: Path) -> None:
    """One restart serves all pending scores. After the last one, its death ends the run."""
    save(tmp_path, "SequenceClassification")
    said: list[str] = []

    async def main() -> list[Any]:
        model = RewardModel({"path": str(tmp_path), "threads": 1}, str(tiny), None, RuntimeConfig(max_restarts=1))
        stage = ScoringStage(ScoringConfig(), model)
        stage.warn_by(said.append)
        await stage.start()
        rollouts = [Rollout((one,), 0.0) for one in COMPLETIONS]
        pending = [asyncio.ensure_future(stage(Task("t", ""), r)) for r in rollouts]
        await asyncio.sleep(0)
        os.kill(pid_of(model.process), signal.SIGKILL)
        found = [rollout.reward for rollout in await asyncio.gather(*pending)]
        assert stage.dead is None
        os.kill(pid_of(model.process), signal.SIGKILL)
        with pytest.raises(WorkerDied, match="It was killed by SIGKILL"):
            await stage(Task("t", ""), rollouts[0])
        assert stage.dead
        await stage.close()
        return found

    assert asyncio.run(main()) == pytest.approx(scores(tmp_path, tiny), abs=1e-6)
    (line,) = said
    assert line.startswith("reward model died (it has no log): It was killed by SIGKILL")
    assert line.endswith("it restarts (1 of runtime.max_restarts = 1) and repeats the scores that were pending")


def test_episodes_of_several_turns_fail_with_a_foreign_chat_template(tmp_path: Path, tiny: Path) -> None:
    save(tmp_path, "SequenceClassification", other=True, template=TEMPLATE)

    async def main() -> tuple[ScoringError, Any]:
        model = RewardModel({"path": str(tmp_path), "threads": 1}, str(tiny), None, RuntimeConfig())
        await model.start()
        episodes = (Rollout(tuple(COMPLETIONS[:2]), 0.0), Rollout((COMPLETIONS[1],), 0.0))
        several, one = await asyncio.gather(
            *(model.score(Task("t", "1+1="), e) for e in episodes), return_exceptions=True
        )
        await model.close()
        return several, one

    several, one = asyncio.run(main())
    assert isinstance(several, ScoringError) and several.reason == "reward model input"
    assert "2 turns" in str(several) and "scoring.kind" in str(several)
    assert not isinstance(one, Exception)


def test_several_turns_are_scored_on_the_sampled_tokens(tmp_path: Path, tiny: Path) -> None:
    first, whole = completion("1+1=", "2"), completion("1+1=2. 3+4=", "7")
    for other in (False, True):
        save(tmp_path, "SequenceClassification", other=other)
        worker = RewardModelWorker(RewardModelOptions(path=str(tmp_path), threads=1), str(tiny))
        answer = asyncio.run(worker.score("1+1=", (first, whole)))
        model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
        wanted = model(torch.tensor([[*whole.prompt_ids, *whole.token_ids]])).logits[0, 0].item()
        assert answer == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    "template", [None, "<eos>{% for m in messages %}{{ m.role }}= {{ m.content }} +a+{% endfor %}"]
)
def test_special_tokens_are_not_duplicated(tmp_path: Path, tiny: Path, template: str | None) -> None:
    save(tmp_path, "SequenceClassification", other=True, template=template)
    worker = RewardModelWorker(RewardModelOptions(path=str(tmp_path), threads=1), str(tiny))
    worker._tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<pad>", 0), ("<eos>", 1)]
    )
    reading = worker._sequence("1+1=", completion("1+1=", "b 1. c 2"))
    assert [i for i, token in enumerate(reading.ids) if token == 1] == [0]
    assert worker._tokenizer.decode(reading.ids[: reading.reads[0][0] + 1]).endswith("+a+" if template else "c 2")


def test_a_model_that_is_not_a_classifier_raises(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"scoring.options.path = .* is a Qwen3ForCausalLM"):
        scores(tiny, tiny)
    with pytest.raises(ConfigError, match=r"scoring.options.path = .*no such directory"):
        scores(tmp_path / "gone", tiny)
    save(tmp_path, "TokenClassification", other=True)
    with pytest.raises(ConfigError, match=r"scoring.options.path = .* has another vocabulary"):
        RewardModel({"path": str(tmp_path)}, str(tiny), None, RuntimeConfig())
    for wrong in ({}, {"path": "x", "reduce": "max"}, {"path": "x", "batch": 3}, {"path": 3}):
        with pytest.raises(ConfigError, match=r"scoring.options\.\w+"):
            RewardModel(wrong, str(tiny), None, RuntimeConfig())

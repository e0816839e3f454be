"""A teacher gives the log-probabilities that transformers gives, at the temperature and with the tokens of the draw."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import ConfigError, ScoringConfig, load_config
from slipstream.packed.packing import bundle, pack
from slipstream.rollout import Batch, Completion, Group, Rollout, StepReward, VersionSpan, numbers, samples_of
from slipstream.scoring.stage import ScoringStage
from slipstream.scoring.teacher import Snapshots, Teacher, TeacherService, gpu_of
from slipstream.serialization import dumps, loads
from tests.conftest import build_tokenizer, random_prompts, save_model

SIZE = len(build_tokenizer())


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary and other weights."""
    path = tmp_path_factory.mktemp("other")
    save_model(path, vocab_size=SIZE, seed=7)
    return path


def completion(prompt: list[int], tokens: list[int], temperature: float = 1.0, kept: Any = None) -> Completion:
    prompt, tokens = [t % SIZE for t in prompt], [t % SIZE for t in tokens]
    spans = (VersionSpan(0, 0, len(tokens)),)
    return Completion(tuple(prompt), tuple(tokens), (-1.0,) * len(tokens), spans, "stop", temperature, kept=kept)


def config(policy: Path, teacher: Path) -> Any:
    flags = [f"--model.path={policy}", "--environment.name=addition", f"--teacher.path={teacher}"]
    return load_config(None, [*flags, "--teacher.threads=1", "--trainer.tokens_per_microbatch=64"])


def expected(path: Path, one: Completion) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    logits = model(torch.tensor([[*one.prompt_ids, *one.token_ids]])).logits[0, len(one.prompt_ids) - 1 : -1].double()
    logits = logits / one.temperature
    for row, kept in enumerate(one.kept or ()):
        removed = torch.ones(logits.shape[1], dtype=torch.bool)
        removed[list(kept)] = False
        logits[row, removed] = -torch.inf
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0].tolist()
    return found


def test_log_probabilities_are_those_of_the_distribution_that_would_have_drawn(tiny: Path, other: Path) -> None:
    prompts = random_prompts(12, seed=3)
    drawn = [completion(p, p[::-1], t) for p, t in zip(prompts, (1.0, 0.5, 2.0) * 4, strict=True)]
    drawn.append(completion([5, 6], [7, 8], 0.7, kept=((7, 9), (3, 8, 11))))
    service = TeacherService(config(tiny, other))
    rows: list[Any] = []
    service.handle("score", (drawn[:5],), rows.extend)
    service.handle("score", (drawn[5:],), rows.extend)
    assert not rows
    service.tick()
    assert not service.busy
    for row, one in zip(rows, drawn, strict=True):
        assert row == pytest.approx(expected(other, one), abs=1e-4)


def test_a_teacher_that_changes_answers_first_what_was_asked_before(tiny: Path, other: Path) -> None:
    one = completion([3, 4, 5], [6, 7])

    async def main() -> list[Any]:
        teacher = Teacher(config(tiny, other), None)
        await teacher.start()
        try:
            before, _, after = await asyncio.gather(teacher.score([one]), teacher.load(tiny), teacher.score([one]))
            return [before[0], after[0]]
        finally:
            await teacher.close()

    before, after = asyncio.run(main())
    assert before == pytest.approx(expected(other, one), abs=1e-4)
    assert after == pytest.approx(expected(tiny, one), abs=1e-4)


def test_what_a_stage_found_out_reaches_the_trainer_and_outlives_a_checkpoint() -> None:
    first = completion([2, 3], [4, 5])
    second = completion([2, 3, 4, 5, 6], [7])  # goes on from the first, so that both are one sequence
    third = completion([9], [8])
    steps = ((StepReward(1, 0.5),), (), (StepReward(0, 1.0),))
    rollout = Rollout((first, second, third), 1.0, {"score": 1.0}, steps, ((-0.1, -0.2), (-0.3,), (-0.4,)))
    group = Group(1, "t", (rollout, Rollout((third,), 0.0, teacher=((-0.5,),))))
    assert loads(dumps(group)) == group

    samples = Batch((group,), ((1.0, -1.0),)).samples()
    assert [s.teacher for s in samples] == [numbers([-0.1, -0.2, -0.3]), numbers([-0.4]), numbers([-0.5])]
    micro = pack(samples, bundle(samples, 64), torch.device("cpu"))
    assert micro.teacher is not None
    taught = [(target, round(t, 6)) for target, t in zip(micro.targets.tolist(), micro.teacher.tolist(), strict=True)]
    assert sorted(taught) == [(4, -0.1), (5, -0.2), (7, -0.3), (8, -0.5), (8, -0.4)]
    assert pack(samples_of([first]), [[0]], torch.device("cpu")).teacher is None
    some = [*samples, *samples_of([first])]  # of a run whose teacher came, or went, while this was ready
    assert pack(some, bundle(some, 64), torch.device("cpu")).teacher is None


def test_what_was_ready_before_there_was_a_teacher_is_taught(tiny: Path, other: Path) -> None:
    known = Rollout((completion([2, 3], [4]),), 1.0, teacher=((-0.1,),))
    new = Rollout((completion([2, 3], [4, 5]), completion([9], [8])), 0.5)

    async def main(teacher: Teacher | None) -> Group:
        stage = ScoringStage(ScoringConfig(), None, teacher)
        await stage.start()
        try:
            return await stage.teach(Group(0, "t", (known, new)))
        finally:
            await stage.close()

    found = asyncio.run(main(Teacher(config(tiny, other), None))).rollouts
    assert found[0] == known and found[1].reward == 0.5
    for row, one in zip(found[1].teacher, new.completions, strict=True):
        assert row == pytest.approx(expected(other, one), abs=1e-4)
    assert asyncio.run(main(None)).rollouts == (known, new)


def test_another_vocabulary_is_refused(tiny: Path, tmp_path: Path) -> None:
    save_model(tmp_path, vocab_size=SIZE + 1)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["!"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"teacher.path = .* has another vocabulary"):
        TeacherService(config(tiny, tmp_path))


def test_a_teacher_that_is_not_there_is_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^teacher.path = .*no such directory"):
        TeacherService(config(tiny, tmp_path / "gone"))


@pytest.mark.parametrize(
    ("device", "mine", "seen"),
    [("auto", None, None), ("cuda:1", None, "1"), ("cuda:1", "4,7", "7")],
)
def test_vllm_sees_the_gpu_that_is_meant(device: str, mine: str | None, seen: str | None) -> None:
    assert gpu_of(device, mine) == ({"CUDA_VISIBLE_DEVICES": seen} if seen else {})


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.timeout(240)
def test_vllm_gives_the_same_log_probabilities(tmp_path: Path) -> None:
    save_model(tmp_path, vocab_size=SIZE, head_dim=32)
    drawn = [completion(p, p[::-1]) for p in random_prompts(5, seed=1)]
    flags = ["--environment.name=addition", "--teacher.kind=vllm", "--generator.context=200"]
    service = TeacherService(load_config(None, [f"--model.path={tmp_path}", f"--teacher.path={tmp_path}", *flags]))
    rows: list[Any] = []
    service.handle("score", (drawn,), rows.extend)
    service.tick()
    for row, one in zip(rows, drawn, strict=True):
        assert row == pytest.approx(expected(tmp_path, one), abs=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_why_vllm_does_not_start_is_one_line(tmp_path: Path) -> None:
    save_model(tmp_path, vocab_size=SIZE, head_dim=32)
    flags = ["--environment.name=addition", "--teacher.kind=vllm", "--teacher.options.max_model_len=100000"]
    config = load_config(None, [f"--model.path={tmp_path}", f"--teacher.path={tmp_path}", *flags])
    with pytest.raises(ConfigError, match=r"^vLLM does not start: .*100000"):
        TeacherService(config, None)


def test_snapshots_are_so_many_versions_behind_and_no_more_are_kept(tmp_path: Path) -> None:
    def publish(version: int) -> int:
        snapshots.new(version)
        return int(snapshots.oldest().name.removeprefix("version_"))

    snapshots = Snapshots(tmp_path, 2)
    assert [publish(v) for v in range(6)] == [0, 0, 0, 1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 3
    assert publish(4) == 3  # a resumed run takes the versions after its checkpoint back
    assert [publish(v) for v in (5, 6, 7)] == [3, 4, 5]

"""Teachers: log-probabilities equal those of transformers under the sampling distribution."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError, ScoringConfig
from slipstream.model.packing import group_by_prefix, pack
from slipstream.rollout import Batch, Completion, Group, Rollout, StepReward, VersionSpan, build_samples, float32_array
from slipstream.runtime.serialization import dumps, loads
from slipstream.scoring.stage import ScoringStage
from slipstream.scoring.teacher import Teacher, TeacherWorker, rotate_snapshots, visible_device_env
from tests.conftest import build_tokenizer, random_prompts, save_model
from tests.runtime.test_faults import pid_of

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
    return Completion(
        tuple(prompt), tuple(tokens), (-1.0,) * len(tokens), spans, "stop", temperature, sampling_mask=kept
    )


def config(policy: Path, teacher: Path, *more: str) -> Any:
    flags = [f"--model.path={policy}", "--environment.name=addition", f"--teacher.path={teacher}", *more]
    return load_config(None, [*flags, "--teacher.threads=1", "--trainer.tokens_per_microbatch=64"])


def expected(path: Path, one: Completion) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    logits = model(torch.tensor([[*one.prompt_ids, *one.token_ids]])).logits[0, len(one.prompt_ids) - 1 : -1].double()
    logits = logits / one.temperature
    for row, kept in enumerate(one.sampling_mask or ()):
        removed = torch.ones(logits.shape[1], dtype=torch.bool)
        removed[list(kept)] = False
        logits[row, removed] = -torch.inf
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0].tolist()
    return found


def scored_together(worker: TeacherWorker, *requests: list[Completion]) -> list[Any]:
    """Rows of all requests, which the model reads in one call."""
    read: list[int] = []
    score = worker._model.score

    def counted(completions: Any) -> Any:
        read.append(len(completions))
        return score(completions)

    worker._model.score = counted  # type: ignore[method-assign]

    async def main() -> list[Any]:
        return [row for rows in await asyncio.gather(*map(worker.score, requests)) for row in rows]

    rows = asyncio.run(main())
    assert read == [sum(map(len, requests))]
    return rows


def test_teacher_log_probabilities_are_those_of_the_sampling_distribution(tiny: Path, other: Path) -> None:
    prompts = random_prompts(12, seed=3)
    drawn = [completion(p, p[::-1], t) for p, t in zip(prompts, (1.0, 0.5, 2.0) * 4, strict=True)]
    drawn.append(completion([5, 6], [7, 8], 0.7, kept=((7, 9), (3, 8, 11))))
    worker = TeacherWorker(config(tiny, other))
    rows = scored_together(worker, drawn[:5], drawn[5:])
    for row, one in zip(rows, drawn, strict=True):
        assert row == pytest.approx(expected(other, one), abs=1e-4)


def test_a_dead_teacher_is_restarted_with_the_model_that_it_had_loaded(tiny: Path, other: Path) -> None:
    one = completion([3, 4, 5], [6, 7])

    async def main() -> list[Any]:
        teacher = Teacher(config(tiny, tiny), None)
        await teacher.start()
        try:
            await teacher.load(other)
            os.kill(pid_of(teacher.process), signal.SIGKILL)
            return [rows[0] for rows in await asyncio.gather(teacher.score([one]), teacher.score([one]))]
        finally:
            await teacher.close()

    for row in asyncio.run(main()):
        assert row == pytest.approx(expected(other, one), abs=1e-4)


def test_loading_a_teacher_first_scores_earlier_requests(tiny: Path, other: Path) -> None:
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


def test_process_rewards_and_teacher_reach_the_trainer_and_survive_a_checkpoint() -> None:
    first = completion([2, 3], [4, 5])
    second = completion([2, 3, 4, 5, 6], [7])  # goes on from the first, so that both are one sequence
    third = completion([9], [8])
    steps = ((StepReward(1, 0.5),), (), (StepReward(0, 1.0),))
    rollout = Rollout((first, second, third), 1.0, {"score": 1.0}, steps, ((-0.1, -0.2), (-0.3,), (-0.4,)))
    group = Group(1, "t", (rollout, Rollout((third,), 0.0, teacher=((-0.5,),))))
    assert loads(dumps(group)) == group

    samples = Batch((group,), ((1.0, -1.0),)).samples()
    assert [s.teacher for s in samples] == [
        float32_array([-0.1, -0.2, -0.3]),
        float32_array([-0.4]),
        float32_array([-0.5]),
    ]
    micro = pack(samples, group_by_prefix(samples, 64), torch.device("cpu"))
    assert micro.teacher is not None
    taught = [(target, round(t, 6)) for target, t in zip(micro.targets.tolist(), micro.teacher.tolist(), strict=True)]
    assert sorted(taught) == [(4, -0.1), (5, -0.2), (7, -0.3), (8, -0.5), (8, -0.4)]
    assert pack(build_samples([first]), [[0]], torch.device("cpu")).teacher is None
    some = [*samples, *build_samples([first])]  # of a run whose teacher came, or went, while this was ready
    assert pack(some, group_by_prefix(some, 64), torch.device("cpu")).teacher is None


def test_buffered_groups_get_log_probabilities_of_a_new_teacher(tiny: Path, other: Path) -> None:
    known = Rollout((completion([2, 3], [4]),), 1.0, teacher=((-0.1,),))
    new = Rollout((completion([2, 3], [4, 5]), completion([9], [8])), 0.5)

    async def main(teacher: Teacher | None) -> Group:
        stage = ScoringStage(ScoringConfig(), None, teacher)
        await stage.start()
        try:
            return await stage.add_teacher(Group(0, "t", (known, new)))
        finally:
            await stage.close()

    found = asyncio.run(main(Teacher(config(tiny, other), None))).rollouts
    assert found[0] == known and found[1].reward == 0.5
    for row, one in zip(found[1].teacher, new.completions, strict=True):
        assert row == pytest.approx(expected(other, one), abs=1e-4)
    assert asyncio.run(main(None)).rollouts == (known, new)


def test_a_missing_teacher_is_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^teacher.path = .*no such directory"):
        TeacherWorker(config(tiny, tmp_path / "gone"))


@pytest.mark.parametrize(
    ("device", "mine", "seen"),
    [("auto", None, None), ("cuda:1", None, "1"), ("cuda:1", "4,7", "7")],
)
def test_vllm_sees_the_configured_gpu(device: str, mine: str | None, seen: str | None) -> None:
    assert visible_device_env(device, mine) == ({"CUDA_VISIBLE_DEVICES": seen} if seen else {})


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.timeout(240)
def test_vllm_gives_the_same_log_probabilities(tmp_path: Path) -> None:
    save_model(tmp_path, vocab_size=SIZE, head_dim=32)
    drawn = [completion(p, p[::-1]) for p in random_prompts(5, seed=1)]
    flags = ["--environment.name=addition", "--teacher.engine=vllm", "--generator.max_model_len=200"]
    worker = TeacherWorker(load_config(None, [f"--model.path={tmp_path}", f"--teacher.path={tmp_path}", *flags]))
    rows = scored_together(worker, drawn)
    for row, one in zip(rows, drawn, strict=True):
        assert row == pytest.approx(expected(tmp_path, one), abs=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_start_errors_are_one_line(tmp_path: Path) -> None:
    save_model(tmp_path, vocab_size=SIZE, head_dim=32)
    flags = ["--environment.name=addition", "--teacher.engine=vllm", "--teacher.engine_args.max_model_len=100000"]
    config = load_config(None, [f"--model.path={tmp_path}", f"--teacher.path={tmp_path}", *flags])
    with pytest.raises(ConfigError, match=r"^vLLM does not start: .*100000"):
        TeacherWorker(config, None)


def test_snapshots_keep_lag_plus_one_versions(tmp_path: Path) -> None:
    def publish(version: int) -> int:
        _, behind = rotate_snapshots(tmp_path, 2, version)
        return int(behind.name.removeprefix("version_"))

    assert [publish(v) for v in range(6)] == [0, 0, 0, 1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 3
    assert publish(4) == 3  # a resumed run takes the versions after its checkpoint back
    assert [publish(v) for v in (5, 6, 7)] == [3, 4, 5]

"""The recorder: files on disk equal the recorded data, complete up to a failure or a kill."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from slipstream.observe.recorder import MAX_QUEUED, Recorder, RecordError
from slipstream.rollout import Batch, Completion, Group, Rollout, VersionSpan, mean, version_spans


def float32(value: float) -> float:
    """The nearest float32 number."""
    result: float = struct.unpack("f", struct.pack("f", value))[0]
    return result


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def completion(
    prompt: tuple[int, ...], versions: Sequence[int], text: str = "é\n↵", finish: str = "stop"
) -> Completion:
    count = len(versions)
    return Completion(
        prompt_ids=prompt,
        token_ids=tuple(range(250_000, 250_000 + count)),
        logprobs=tuple(float32(-1 / (3 + i)) for i in range(count)),
        spans=version_spans(versions),
        finish_reason=finish,
        temperature=0.7,
        text=text,
    )


def two_groups() -> Batch:
    """Groups of different sizes; the first rollout has two turns, one of them sampled by three versions."""
    long = Rollout((completion((1, 2), [4, 4, 5, 6]), completion((1, 2, 3), [6], "b", "length")), 1.5, {"correct": 1.0})
    short = Rollout((completion((1, 2), [5]),), -0.25)
    other = Rollout((completion((9,), [6, 6]),), 0.0, {"correct": 0.0, "steps": 3})
    groups = (Group(7, "train/7", (long, short)), Group(2**40, "train/0", (other, other, other)))
    return Batch(groups, ((0.875, -0.875), (0.1, 0.2, 0.3)))


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path, decode)
    yield recorder
    recorder._thread.shutdown(wait=True)


def write(recorder: Recorder, *steps: int) -> None:
    for step in steps:
        recorder.step({"step": step, "reward": 0.5}, two_groups())
        recorder.evaluation({"step": step, "score": 0.25})
    asyncio.run(recorder.flush())


def test_rollouts_file_matches_the_batch(recorder: Recorder, tmp_path: Path) -> None:
    batch = two_groups()
    write(recorder, 12)
    rows = pq.read_table(tmp_path / "rollouts/step_000012.parquet").to_pylist()
    members = [
        (group, index, turn, rollout, drawn, advantages[index])
        for group, advantages in zip(batch.groups, batch.advantages, strict=True)
        for index, rollout in enumerate(group.rollouts)
        for turn, drawn in enumerate(rollout.completions)
    ]
    assert len(rows) == len(members) == 6
    for row, (group, index, turn, rollout, drawn, advantage) in zip(rows, members, strict=True):
        assert (row["step"], row["visit_id"], row["task_id"]) == (12, group.visit_id, group.task_id)
        assert (row["rollout"], row["turn"]) == (index, turn)
        assert (row["reward"], row["advantage"]) == (rollout.reward, advantage)
        assert dict(row["metrics"]) == rollout.metrics
        again = Completion(
            prompt_ids=tuple(row["prompt_ids"]),
            token_ids=tuple(row["completion_ids"]),
            logprobs=tuple(row["logprobs"]),
            spans=tuple(VersionSpan(**span) for span in row["spans"]),
            finish_reason=row["finish_reason"],
            temperature=row["temperature"],
            text=row["completion"],
        )
        assert again == drawn  # logprobs too, to the last bit
        assert row["prompt"] == decode(drawn.prompt_ids)


def test_column_types_are_stable(recorder: Recorder, tmp_path: Path) -> None:
    write(recorder, 1)
    types = {f.name: str(f.type) for f in pq.read_schema(tmp_path / "rollouts/step_000001.parquet")}
    assert types["logprobs"] == "list<element: float>"
    assert types["prompt_ids"] == types["completion_ids"] == "list<element: int32>"
    assert types["reward"] == types["advantage"] == "double"
    assert types["spans"] == "list<element: struct<version: int32, start: int32, end: int32>>"


def test_metrics_are_strict_json(recorder: Recorder, tmp_path: Path) -> None:
    nested = {"rollouts": {"failed": float("-inf")}, "versions": [1, float("nan")]}
    recorder.step({"step": 1, "loss": float("nan"), "kl": float("inf"), "reward": 0.1, **nested}, two_groups())
    asyncio.run(recorder.flush())

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {
        "step": 1, "loss": None, "kl": None, "reward": 0.1, "rollouts": {"failed": None}, "versions": [1, None],
    }  # fmt: skip


def test_later_changes_to_a_record_are_not_written(recorder: Recorder, tmp_path: Path) -> None:
    record: dict[str, Any] = {"step": 1, "rollout/failures": {"TimeoutError": 1}}
    recorder.step(record, two_groups())
    record["rollout/failures"]["TimeoutError"] = 2
    asyncio.run(recorder.flush())
    assert read_metrics(tmp_path)[0]["rollout/failures"] == {"TimeoutError": 1}


def test_step_returns_before_anything_is_written(tmp_path: Path) -> None:
    gate = threading.Event()

    def slow(ids: Sequence[int]) -> str:
        assert gate.wait(30)
        return ""

    recorder = Recorder(tmp_path, slow)
    for step in range(1, 6):
        recorder.step({"step": step}, two_groups())
        recorder.write()
    assert read_metrics(tmp_path) == []
    gate.set()
    asyncio.run(recorder.flush())
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    recorder.close()


def test_flush_leaves_the_event_loop_free(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, lambda ids: time.sleep(0.05) or "")

    async def main() -> int:
        recorder.step({"step": 1}, two_groups())
        flush, turns = asyncio.create_task(recorder.flush()), 0
        while not flush.done():
            await asyncio.sleep(0.005)
            turns += 1
        return turns

    assert asyncio.run(main()) > 5
    recorder.close()


def test_a_failed_write_is_raised_by_every_later_call_and_leaves_no_gap(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, decode)
    write(recorder, 1)
    (tmp_path / "rollouts/step_000002.parquet.partial").mkdir()  # nothing can be written there
    recorder.step({"step": 2}, two_groups())
    recorder.step({"step": 3}, two_groups())  # queued before anyone could know, or refused
    with pytest.raises(RecordError, match="--resume"):
        asyncio.run(recorder.flush())
    with pytest.raises(RecordError) as caught:
        recorder.step({"step": 4}, two_groups())
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(RecordError):
        recorder.evaluation({"step": 4})
    with pytest.raises(RecordError):
        recorder.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    assert not (tmp_path / "rollouts/step_000003.parquet").exists()


def test_the_next_step_raises_without_a_flush(tmp_path: Path) -> None:
    def broken(ids: Sequence[int]) -> str:
        raise ValueError("no such token")

    recorder = Recorder(tmp_path, broken)
    recorder.step({"step": 1}, two_groups())
    recorder.write()
    recorder._thread.submit(lambda: None).result(timeout=30)
    with pytest.raises(RecordError, match="no such token"):
        recorder.step({"step": 2}, two_groups())
    with pytest.raises(KeyError):  # the error on its way out is not hidden by the recorder's
        try:
            raise KeyError("the run's own")
        finally:
            recorder.close()


def test_close_writes_the_queue(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, decode)
    for step in (1, 2, 3):
        recorder.step({"step": step}, two_groups())
    recorder.close()
    assert len(read_metrics(tmp_path)) == len(list((tmp_path / "rollouts").iterdir())) == 3


def test_rollouts_files_are_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def killed(table: Any, path: Path) -> None:
        path.write_bytes(b"PAR1 half")
        seen.append({p.name for p in path.parent.iterdir()})
        raise OSError("killed")

    monkeypatch.setattr("slipstream.observe.recorder.pq.write_table", killed)
    recorder = Recorder(tmp_path, decode)
    recorder.step({"step": 1}, two_groups())
    with pytest.raises(RecordError):
        asyncio.run(recorder.flush())
    assert seen == [{"step_000001.parquet.partial"}]
    assert not list((tmp_path / "rollouts").glob("*.parquet"))
    assert read_metrics(tmp_path) == []
    recorder.truncate(0, 0)
    assert not list((tmp_path / "rollouts").iterdir())


@pytest.mark.parametrize("torn", ['{"step": 5, "rew', '{"step": 2', "{", '{"step": 2, "reward": 0.', "\0\0\0"])
def test_truncate_removes_records_after_a_step(tmp_path: Path, torn: str) -> None:
    before = Recorder(tmp_path, decode)
    write(before, 1, 2, 3, 4)
    before.close()
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write(torn)
    (tmp_path / "rollouts/step_000005.parquet.partial").write_bytes(b"PAR1 half")
    (tmp_path / "rollouts/notes.txt").write_text("a person's own")

    after = Recorder(tmp_path, decode)
    assert after.truncate(2, 2) == []
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == [
        "notes.txt", "step_000001.parquet", "step_000002.parquet",
    ]  # fmt: skip
    write(after, 3)
    after.close()
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == [1, 2, 3]
    assert not list(tmp_path.rglob("*.partial"))


def test_truncate_removes_an_evaluation_after_the_checkpoint(tmp_path: Path) -> None:
    """After a kill between evaluation and checkpoint of one step, the evaluation is repeated and written again."""
    before = Recorder(tmp_path, decode)
    write(before, 1, 2)
    before.close()
    Recorder(tmp_path, decode).truncate(2, 1)
    assert [json.loads(line)["step"] for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()] == [1]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_truncate_says_which_records_were_lost(tmp_path: Path) -> None:
    before = Recorder(tmp_path, decode)
    write(before, 1, 2, 3)
    before.close()
    metrics, evaluations = tmp_path / "metrics.jsonl", tmp_path / "evaluations.jsonl"
    first, _, last = metrics.read_text().splitlines()
    metrics.write_text(f"{first}\n{{garbage\n{last}\n")
    evaluations.unlink()
    assert Recorder(tmp_path, decode).truncate(3, 2) == [
        f"{metrics} lacked 1 of 3 records: lines were damaged or removed",
        f"{evaluations} lacked 2 of 2 records: lines were damaged or removed",
    ]
    assert metrics.read_text() == f"{first}\n{last}\n"


def test_truncate_of_a_long_record_takes_little_memory(tmp_path: Path) -> None:
    """A trainer restarts in the middle of a run of many steps."""
    recorder = Recorder(tmp_path, decode)
    lines = [json.dumps({"step": step, "text": "x" * 1000}) for step in range(1, 10_001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    tracemalloc.start()
    recorder.truncate(8000, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:8000]
    assert peak < 1_000_000


def test_truncate_of_a_new_directory_does_nothing(recorder: Recorder, tmp_path: Path) -> None:
    recorder.truncate(0, 0)
    assert list(tmp_path.iterdir()) == []
    assert read_metrics(tmp_path) == []


def test_an_empty_batch_is_an_empty_file(recorder: Recorder, tmp_path: Path) -> None:
    recorder.step({"step": 1_000_000}, Batch((), ()))
    asyncio.run(recorder.flush())
    assert pq.read_table(tmp_path / "rollouts/step_1000000.parquet").num_rows == 0
    recorder.truncate(999_999, 0)
    assert not list((tmp_path / "rollouts").iterdir())


def test_the_prompt_of_a_group_is_decoded_once(tmp_path: Path) -> None:
    calls: list[tuple[int, ...]] = []
    recorder = Recorder(tmp_path, lambda ids: calls.append(tuple(ids)) or "p")  # type: ignore[func-returns-value]
    recorder.step({"step": 1}, two_groups())
    recorder.close()
    assert sorted(calls) == [(1, 2), (1, 2, 3), (9,)]
    assert mean([len(c) for c in calls]) == 2


def test_the_run_waits_for_a_slow_disk_and_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the batches of all steps would stay in memory."""
    ready, warned = threading.Event(), []

    def slow(ids: Sequence[int]) -> str:
        assert ready.wait(30)
        return "slow"

    async def main() -> None:
        recorder = Recorder(tmp_path, slow, warned.append)
        for step in range(1, MAX_QUEUED + 1):
            recorder.step({"step": step}, two_groups())
            await asyncio.wait_for(recorder.room(), 10)
        assert not warned
        recorder.step({"step": MAX_QUEUED}, two_groups())
        await asyncio.wait_for(recorder.room(), 10)  # small steps may wait in any number
        monkeypatch.setattr("slipstream.observe.recorder.MAX_QUEUED_TOKENS", two_groups().tokens)
        for step in (MAX_QUEUED + 1, MAX_QUEUED + 2):
            recorder.step({"step": step}, two_groups())
            held = asyncio.ensure_future(recorder.room())
            await asyncio.wait((held,), timeout=0.05)
            assert not held.done() and len(warned) == 1 and str(tmp_path) in warned[0]
            held.cancel()
        ready.set()
        await asyncio.wait_for(recorder.room(), 30)
        await recorder.flush()
        assert [line["step"] for line in read_metrics(tmp_path)] == [1, MAX_QUEUED, *range(MAX_QUEUED, MAX_QUEUED + 3)]
        recorder.close()

    asyncio.run(main())

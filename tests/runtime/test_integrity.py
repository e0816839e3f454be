"""A run resumes from an undamaged checkpoint, or reports why it has none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.runtime.integrity import MANIFEST, STATE
from slipstream.runtime.run_directory import RunDirectory, write_state

STATES: dict[int, dict[str, Any]] = {
    2: {"step": 2, "counts": {1: 0.1, 10: [True, None]}},
    4: {"step": 4, "text": "ü\n"},
}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run directory with checkpoints after steps 2 and 4, written as in a run."""
    made = RunDirectory(tmp_path / "run")

    async def write(step: int) -> None:
        async with made.new_checkpoint(step, keep=2) as path:
            (path / "trainer").mkdir()
            (path / "trainer" / "weights").write_bytes(bytes(range(200)) * step)
            (path / "trainer" / ".metadata").write_bytes(b"what is where")
            write_state(path, STATES[step], [])

    for step in STATES:
        asyncio.run(write(step))
    return made


def state_of(step: int, files: int = 0) -> Any:
    return json.loads(json.dumps(STATES[step] | {"ready": f"ready_{files}.jsonl"}))


def test_the_newest_checkpoint_is_read_with_its_state(directory: RunDirectory) -> None:
    assert directory.newest_whole() == (directory.checkpoint(4), state_of(4), [])
    write_state(directory.checkpoint(4), {**STATES[4], "text": "grown"}, [])
    assert directory.newest_whole()[1] == {**state_of(4, 1), "text": "grown"}
    assert RunDirectory(directory.path.with_name("none")).newest_whole() == (None, {}, [])


def test_a_checkpoint_stays_undamaged_after_repeated_updates(directory: RunDirectory) -> None:
    for number in range(1, 5):
        write_state(directory.checkpoint(4), STATES[4], [])
        assert directory.newest_whole() == (directory.checkpoint(4), state_of(4, number), [])


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(7)
        file.write(b"\xff\xff")


def change_a_digit(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 4', '"step": 5'))


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("trainer/weights", overwrite, "trainer/weights has other bytes"),
        ("trainer/weights", lambda path: path.write_bytes(path.read_bytes()[:-1]), "trainer/weights has other bytes"),
        ("trainer/weights", Path.unlink, "weights can't be read: No such file"),
        ("trainer/.metadata", overwrite, "trainer/.metadata has other bytes"),
        ("ready_0.jsonl", Path.unlink, "ready_0.jsonl can't be read: No such file"),
        ("ready_0.jsonl", lambda path: path.write_text("[]"), "ready_0.jsonl has other bytes"),
        (STATE, change_a_digit, "run.json has other bytes"),
        (STATE, lambda path: path.write_text("{"), "run.json or manifest.json is damaged"),
        (STATE, lambda path: path.write_text("[1]"), "run.json or manifest.json is damaged"),
        (STATE, lambda path: path.write_bytes(b"\xff\xfe"), "run.json or manifest.json is damaged"),
        (MANIFEST, Path.unlink, "manifest.json can't be read: No such file"),
        (MANIFEST, lambda path: path.write_text("null"), "run.json or manifest.json is damaged"),
        (MANIFEST, lambda path: path.write_text("{}"), "manifest.json lists no file"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
    directory: RunDirectory, name: str, harm: Callable[[Path], object], said: str
) -> None:
    harm(directory.checkpoint(4) / name)
    path, state, [told] = directory.newest_whole()
    assert path == directory.checkpoint(2) and state == state_of(2)
    assert told.startswith("checkpoint step_4 is damaged (") and said in told and "\n" not in told
    assert [p.name for p in directory.checkpoints()] == ["step_2"]
    assert directory.checkpoint(4).with_name("step_4.damaged").exists(), "a damaged checkpoint is the user's to remove"


def test_no_checkpoint_is_renamed_if_all_are_damaged(directory: RunDirectory) -> None:
    for step in STATES:
        (directory.checkpoint(step) / MANIFEST).unlink()
    with pytest.raises(
        ConfigError, match=r"step_4: .*, and all other checkpoints are damaged; remove .* to start the run again"
    ):
        directory.newest_whole()
    assert len(directory.checkpoints()) == 2


def test_a_partial_checkpoint_is_removed_while_it_is_written(tmp_path: Path) -> None:
    """As by the trainer of a controller that was killed, which writes until it notices."""
    partial = tmp_path / "checkpoints" / "step_4.partial"
    partial.mkdir(parents=True)
    (tmp_path / "config.toml").touch()

    def write() -> None:
        for number in itertools.count():
            try:
                (partial / f"file{number}").touch()
            except OSError:
                return

    writing = threading.Thread(target=write)
    writing.start()
    with contextlib.closing(RunDirectory.open(tmp_path)):
        assert not partial.exists()
    writing.join()


def test_options_that_changed_since_the_start_are_named(directory: RunDirectory) -> None:
    flags = ["--model.path=m", "--environment.name=addition", "--loop.steps=3"]
    assert directory.changed_options(load_config(None, flags)) == []  # nothing has started
    directory.write_config(load_config(None, flags))
    assert directory.changed_options(load_config(None, flags)) == []
    assert directory.changed_options(load_config(None, [*flags, "--loop.steps=6", "--algorithm.kl_coef=0.5"])) == [
        "loop.steps = 6 (before: 3)", "algorithm.kl_coef = 0.5 (before: 0.0)"
    ]  # fmt: skip

"""A full disk is one line that says so, whatever the library that met it says."""

from __future__ import annotations

import errno
import os
import re
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream import disk
from slipstream.actor import ActorError
from slipstream.config import load_config
from slipstream.directory import RunDirectory
from slipstream.observe.recorder import Recorder, RecordError
from slipstream.run import RunError, resume, train
from tests.conftest import save_model

Usage = namedtuple("Usage", "total used free")
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/there/file")


@pytest.mark.parametrize(
    ("error", "free", "named"),
    [
        (NO_SPACE, 10**9, "/there/file"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), 10**9, ""),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 10**9, ""),
        (RuntimeError("unexpected pos 704 vs 598"), 512, ""),  # torch, after a write that failed in silence
        (RuntimeError("unexpected pos 704 vs 598"), 10**9, None),
        (OSError(errno.EACCES, "Permission denied"), 10**9, None),
    ],
)
def test_what_libraries_say_of_a_full_disk(
    error: Exception, free: int, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.disk.shutil.disk_usage", lambda path: Usage(10**9, 0, free))
    path = tmp_path / "not" / "there"
    with pytest.raises(type(error) if named is None else disk.DiskFull) as caught, disk.writing(path):
        raise error
    if named is not None:
        said = f"the disk is full: {named or path} can't be written, and {free / 1e6:.1f} MB are left there"
        assert str(caught.value) == said
        told = ActorError(said, "DiskFull", "", True)  # by another process
        assert disk.describe_full_disk(told, tmp_path) == said


def full(*_: object, **__: object) -> None:
    raise NO_SPACE


def test_a_run_says_that_the_disk_is_full_and_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "model")
    flags = [f"--model.path={tmp_path / 'model'}", "--environment.name=addition", f"--run.dir={tmp_path / 'run'}"]
    config = load_config(None, flags)

    def refused(begin: Callable[[], object]) -> str:
        with pytest.raises(RunError) as caught:
            begin()
        return str(caught.value)

    monkeypatch.setattr("slipstream.run.Pools.start", full)
    assert re.fullmatch(
        r"the disk is full: /there/file can't be written, .*; free space, then: start the run again",
        refused(lambda: train(config)),
    )
    RunDirectory(tmp_path / "run").write_config(config)
    assert refused(lambda: resume(tmp_path / "run")).endswith(f"then: slipstream train --resume {tmp_path / 'run'}")


def test_a_record_says_so_too(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, lambda ids: "")
    recorder._failure = NO_SPACE
    with pytest.raises(RecordError, match=f"the disk is full: /there/file .*--resume {tmp_path}"):
        recorder.evaluation({})
    recorder._thread.shutdown()

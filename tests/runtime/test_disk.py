"""A full disk is reported in one line, for the errors of all libraries."""

from __future__ import annotations

import errno
import os
import re
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.config.loading import load_config
from slipstream.controller.finish import report_file_errors
from slipstream.errors import RunError
from slipstream.observe.recorder import Recorder, RecordError
from slipstream.run import resume, train
from slipstream.runtime import disk
from slipstream.runtime.run_directory import RunDirectory
from slipstream.runtime.worker import WorkerError
from tests.conftest import save_model

Usage = namedtuple("Usage", "total used free")
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/there/file")


@pytest.mark.parametrize(
    ("error", "free", "named"),
    [
        (NO_SPACE, 10**9, "/there/file"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), 10**9, ""),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 10**9, ""),
        (RuntimeError("unexpected pos 704 vs 598"), 512, ""),  # torch, after an unreported failed write
        (RuntimeError("unexpected pos 704 vs 598"), 10**9, None),
        (OSError(errno.EACCES, "Permission denied"), 10**9, None),
        (OSError(errno.EACCES, "Permission denied"), 0, None),  # as in /proc, which has no free bytes
    ],
)
def test_every_library_error_of_a_full_disk_is_detected(
    error: Exception, free: int, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.runtime.disk.shutil.disk_usage", lambda path: Usage(10**9, 0, free))
    path = tmp_path / "not" / "there"
    with pytest.raises(type(error) if named is None else disk.DiskFull) as caught, disk.writing(path):
        raise error
    if named is not None:
        said = f"the disk is full: {named or path} can't be written, and {free / 1e6:.1f} MB are left there"
        assert str(caught.value) == said
        told = WorkerError(said, "DiskFull", "", True)  # by another process
        assert disk.describe_full_disk(told, tmp_path) == said


@pytest.mark.parametrize(
    ("text", "full", "named"),
    [
        ("unable to write to file </torch_42_0>: No space left on device (28)", "memory", "memory"),
        ("[Errno 28] No space left on device: '{}/memory/psm_1'", "memory", "memory/psm_1"),
        ("No space left on device", "run", "run"),
        ("No space left on device", "none", "run"),
    ],
)
def test_the_message_names_the_full_file_system(
    text: str, full: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("run", "memory"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(disk, "SHARED_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(
        "slipstream.runtime.disk.shutil.disk_usage", lambda path: Usage(1, 0, 10**9 * (full not in str(path)))
    )
    told = disk.describe_full_disk(WorkerError(text.format(tmp_path), "OSError", ""), tmp_path / "run")
    left = 0.0 if full in named else 1000.0
    assert told == f"the disk is full: {tmp_path / named} can't be written, and {left} MB are left there"


def full(*_: object, **__: object) -> None:
    raise NO_SPACE


@pytest.mark.parametrize("in_worker", [False, True])
def test_a_run_reports_a_file_that_can_not_be_used(in_worker: bool, tmp_path: Path) -> None:
    """Errors of other files are errors of the program, whose traceback is needed."""
    (tmp_path / "run").mkdir()

    def failing(name: str) -> Exception:
        error = OSError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / name))
        return WorkerError(str(error), "PermissionError", "", False, "trainer") if in_worker else error

    said = rf"^{tmp_path}/run/checkpoints can't be used \(Permission denied\); mend that, then: start the run again$"
    with pytest.raises(RunError, match=said), report_file_errors(tmp_path / "run"):
        raise failing("run/checkpoints")
    with pytest.raises(type(failing("other"))), report_file_errors(tmp_path / "run"):
        raise failing("other")


def test_a_run_reports_the_full_disk_and_the_command_that_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "model")
    flags = [f"--model.path={tmp_path / 'model'}", "--environment.name=addition", f"--run.dir={tmp_path / 'run'}"]
    config = load_config(None, flags)

    def refused(begin: Callable[[], object]) -> str:
        with pytest.raises(RunError) as caught:
            begin()
        return str(caught.value)

    monkeypatch.setattr("slipstream.controller.launch.Cluster.start", full)
    assert re.fullmatch(
        r"the disk is full: /there/file can't be written, .*; free space, then: start the run again",
        refused(lambda: train(config)),
    )
    assert not (tmp_path / "run").exists(), "a run that did not begin left its directory"
    (tmp_path / "run").mkdir()
    RunDirectory(tmp_path / "run").write_config(config)
    assert refused(lambda: resume(tmp_path / "run")).endswith(f"then: slipstream train --resume {tmp_path / 'run'}")


def test_the_recorder_reports_a_full_disk(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, lambda ids: "")
    recorder._failure = NO_SPACE
    with pytest.raises(RecordError, match=f"the disk is full: /there/file .*--resume {tmp_path}"):
        recorder.evaluation({})
    recorder._thread.shutdown()

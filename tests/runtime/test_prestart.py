"""Processes that import before the run launches them."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import time
from pathlib import Path
from shutil import which

import pytest

from slipstream import commands
from slipstream.config.loading import dump, load_config
from slipstream.controller.prestart import prestarted
from slipstream.errors import UserError
from slipstream.runtime import process as processes
from slipstream.runtime.process import prestart, stop_prestarted
from slipstream.runtime.worker import Worker
from slipstream.runtime.worker_process import WorkerProcess
from tests import warm
from tests.runtime.test_worker import alive

CODE = """
import os, sys
from pathlib import Path
(Path(__file__).parent / "imported").write_text(str(os.getpid()))

class Own:
    def __init__(self):
        import later
        print("built", os.environ["OWN"], "SLIPSTREAM_PRESTARTED" in os.environ, later.__name__, flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds a module with a worker class, which writes its process id when it is imported."""
    (tmp_path / "own_worker.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def imported_by(folder: Path) -> int:
    """The process that has imported the worker class."""
    last = time.monotonic() + 60
    while not (file := folder / "imported").exists() or not (text := file.read_text()):
        assert time.monotonic() < last
        time.sleep(0.01)
    return int(text)


def start(folder: Path) -> int:
    """Start the worker. Returns the id of its process."""

    async def main() -> int:
        worker = WorkerProcess("own", folder / "logs" / "own.log", environment={"OWN": "here"})
        try:
            await worker.start(Worker, "own_worker:Own")
            assert isinstance(worker.process, processes.LocalProcess)
            return worker.process.pid
        finally:
            await worker.stop(0.2)

    return asyncio.run(main())


def test_a_launch_takes_a_process_that_has_begun_to_import(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the environment, the import paths and the log of the launch."""
    prestart("own_worker:Own")
    process = imported_by(folder)
    (folder / "more").mkdir()
    (folder / "more" / "later.py").touch()
    monkeypatch.syspath_prepend(str(folder / "more"))
    assert start(folder) == process
    assert (folder / "logs" / "own.log").read_text() == "built here False later\n"


@pytest.mark.parametrize("gone", ["killed", "of another class"])
def test_a_launch_starts_a_process_if_none_waits_for_it(gone: str, folder: Path) -> None:
    (folder / "later.py").touch()
    (folder / "other_worker.py").write_text(CODE)
    prestart("other_worker:Own" if gone == "of another class" else "own_worker:Own")
    process = imported_by(folder)
    if gone == "killed":
        os.kill(process, 9)
        processes._prestarted[0][2].wait()
    assert start(folder) != process
    stop_prestarted()
    assert not alive(process)


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_what_a_run_does_not_use_ends_with_it(runtime: str, tiny: Path) -> None:
    flags = [
        f"--model.path={tiny}",
        "--environment.name=addition",
        "--generator.replicas=2",
        f"--runtime.kind={runtime}",
    ]
    with pytest.raises(UserError, match="refused"), prestarted(load_config(None, flags)):
        waiting = [process.pid for _, _, process in processes._prestarted]
        assert len(waiting) == (min(3, os.cpu_count() or 1) if runtime == "local" else 0)
        raise UserError("refused")
    assert not any(map(alive, waiting))


@pytest.mark.parametrize(("saved", "count"), [("2", 2), ("none", 0), (None, 0)])
def test_processes_of_a_resumed_run_start_before_it(
    saved: str | None, count: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None if its configuration can't be read: `resume` says why."""
    if saved is not None:
        written = dump(load_config(None, [f"--model.path={tiny}", "--environment.name=addition", "--loop.steps=2"]))
        (tmp_path / "config.toml").write_text(written.replace("\nsteps = 2\n", f"\nsteps = {saved}\n"))
    waiting = list[int]()

    def resume(*_: object) -> None:
        waiting.extend(process.pid for _, _, process in processes._prestarted)
        raise UserError("refused")

    monkeypatch.setattr(commands, "_train", resume)
    with pytest.raises(UserError, match="refused"):
        commands.train(argparse.Namespace(config=None, resume=tmp_path, auto_resume=False), ["--generator.replicas=1"])
    assert len(waiting) == min(count, os.cpu_count() or 1)
    assert not any(map(alive, waiting))


@pytest.mark.skipif(not which("gcc"), reason="compiles a stand-in for the CUDA driver")
@pytest.mark.parametrize(("answer", "imports"), [(3, 1), (0, 2)], ids=["not initialized", "initialized by an import"])
def test_a_process_whose_imports_initialize_cuda_starts_again_with_its_gpus(
    answer: int, imports: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would ignore the GPUs that the run has chosen."""
    (folder / "own_worker.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "with (Path(__file__).parent / 'imports').open('a') as file: file.write('x')\n"
        "class Own:\n    def __init__(self): print(os.environ['CUDA_VISIBLE_DEVICES'], os.getpid(), flush=True)\n"
    )
    (folder / "cuda.c").write_text(f"int cuDeviceGetCount(int *count) {{ return {answer}; }}")
    subprocess.run(["gcc", "-shared", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setattr("slipstream.runtime.process.LocalProcess._start", staticmethod(warm.start_new))
    prestart("own_worker:Own")
    ((_, _, process),) = processes._prestarted
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    (folder / "later.py").touch()
    assert start(folder) == process.pid
    assert (folder / "logs" / "own.log").read_text() == f"3 {process.pid}\n"
    assert (folder / "imports").read_text() == "x" * imports

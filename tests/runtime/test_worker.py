"""Worker processes: calls, failures, and deaths."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import multiprocessing.util
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schema import RuntimeConfig
from slipstream.errors import InvalidInput, UserError
from slipstream.rollout import Batch, Completion, Group, Rollout, VersionSpan, float32_array, int32_array
from slipstream.runtime.priority import at_niceness
from slipstream.runtime.process import Launch, LocalProcess, process_group_alive
from slipstream.runtime.rank_group import DEATH_DETECTION_S, detect_death
from slipstream.runtime.worker import Worker, WorkerDied, WorkerError, handle, large_arguments, succeeded
from slipstream.runtime.worker_process import WorkerProcess, pickle_in_pieces, supervise


class OnlyHere:
    """An object that other processes fail to unpickle."""

    def __reduce__(self) -> Any:
        return os.getpid, (1, 2, 3)


class Echo(Worker):
    """A worker for these tests, in a process of its own."""

    def __init__(self, prefix: str) -> None:
        if prefix == "refuse":
            raise ValueError("this prefix can't be had")
        if prefix == "hang":
            print("loading weights", flush=True)
            time.sleep(600)
        self._prefix = prefix
        self._units = 0
        self._built_with: list[int] = []

    @property
    def progress(self) -> int:
        return self._units

    async def echo(self, text: str) -> str:
        return self._prefix + text

    @large_arguments
    async def say(self, text: str) -> str:
        return self._prefix + text

    async def later(self, text: str) -> str:
        await asyncio.sleep(0.01)
        return text

    async def refuse(self) -> None:
        raise KeyError("lost")

    async def refuse_for_user(self) -> None:
        raise UserError("free space on the disk")

    async def interrupt(self) -> None:
        raise KeyboardInterrupt("of a library's thread")

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError("by a library")

    async def at_exit(self, text: str) -> None:
        multiprocessing.util.Finalize(None, print, (text, "by", "multiprocessing"), exitpriority=1)
        atexit.register(print, text)

    async def die(self) -> None:
        print("last words", flush=True)
        os._exit(7)

    async def die_late(self, seconds: float) -> None:
        """End the connection, and be killed some seconds later."""
        socket.socket(fileno=int(sys.argv[1])).shutdown(socket.SHUT_RDWR)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    async def only_here(self) -> OnlyHere:
        return OnlyHere()

    async def not_serializable(self) -> Any:
        return lambda: 0

    async def sleep(self) -> None:
        time.sleep(600)

    async def block(self, mark: str) -> None:
        """Block the event loop, after `mark` exists."""
        Path(mark).touch()
        time.sleep(600)

    async def excused(self) -> None:
        time.sleep(600)

    async def wait(self, marks: str) -> None:
        """Wait until the call is cancelled."""
        try:
            await asyncio.sleep(600)
        finally:
            Path(marks).write_text("cancelled")

    async def work(self) -> str:
        for _ in range(30):
            time.sleep(0.1)
            self._units += 1
        return "done"

    async def pid(self) -> int:
        return os.getpid()

    async def named_memory(self) -> str:
        self._memory = SharedMemory(create=True, size=64)
        return self._memory.name

    async def ignore_sigterm(self) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return os.getpid()

    async def is_frozen(self) -> bool:
        """Whether objects of the worker's start are excluded from garbage collection."""
        built = self._built_with
        return gc.is_tracked(built) and not any(found is built for found in gc.get_objects())

    def close(self) -> None:
        print("closed", flush=True)


class SlowToClose(Echo):
    """A worker that needs more than `orphan_grace_s` to close."""

    orphan_grace_s = 0.2

    def close(self) -> None:
        time.sleep(1)
        Path(self._prefix).touch()


class Failing(Worker):
    """A worker whose background work raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def run(self) -> None:
        raise self._error

    async def wait(self) -> None:
        await asyncio.sleep(600)


REFERENCE = "tests.runtime.test_worker:Echo"


def run(body: Any, tmp_path: Path, prefix: str = "> ") -> Any:
    async def main() -> Any:
        process = WorkerProcess("echo", tmp_path / "logs" / "echo.log")
        try:
            return await body(process, await process.start(Echo, REFERENCE, prefix))
        finally:
            await process.stop(grace=5.0)

    return asyncio.run(main())


def test_a_process_flushes_its_output_and_runs_exit_handlers_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    async def body(process: WorkerProcess, echo: Echo) -> None:
        await echo.at_exit("asked for")

    run(body, tmp_path)
    said = (tmp_path / "logs" / "echo.log").read_text()
    assert said == "closed\nasked for\nasked for by multiprocessing\n"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends while it is read
        return False


def test_calls_are_answered_in_any_order(tmp_path: Path) -> None:
    async def body(process: WorkerProcess, echo: Echo) -> None:
        calls = [echo.later(str(i)) if i % 2 else echo.echo(str(i)) for i in range(50)]
        assert await asyncio.gather(*calls) == [str(i) if i % 2 else f"> {i}" for i in range(50)]
        big = "x" * 5_000_000
        assert await echo.echo(big) == "> " + big

    run(body, tmp_path)
    assert "closed" in (tmp_path / "logs" / "echo.log").read_text()


def test_objects_of_a_workers_start_are_excluded_from_garbage_collection(tmp_path: Path) -> None:
    async def body(process: WorkerProcess, echo: Echo) -> None:
        assert await echo.is_frozen()

    run(body, tmp_path)


def test_an_exception_reaches_the_caller_and_the_process_continues(tmp_path: Path) -> None:
    async def body(process: WorkerProcess, echo: Echo) -> None:
        with pytest.raises(WorkerError, match="lost") as error:
            await echo.refuse()
        with pytest.raises(WorkerError, match="of a library's thread"):
            await echo.interrupt()
        with pytest.raises(WorkerError, match="by a library"):
            await asyncio.wait_for(echo.cancel_itself(), 60)
        assert error.value.kind == "KeyError" and "Traceback" in error.value.details
        (note,) = error.value.__notes__
        assert re.search(r"^echo \(log: .*echo.log\) failed:\n.*KeyError: 'lost'$", note, re.DOTALL)
        assert await echo.echo("still here") == "> still here"

    run(body, tmp_path)


def test_an_error_for_users_has_no_traceback(tmp_path: Path) -> None:
    async def body(process: WorkerProcess, echo: Echo) -> None:
        with pytest.raises(WorkerError, match=r"^free space on the disk$") as error:
            await echo.refuse_for_user()
        assert error.value.kind == "UserError" and not getattr(error.value, "__notes__", [])

    run(body, tmp_path)


def test_death_fails_every_pending_call_with_the_log(tmp_path: Path) -> None:
    async def body(process: WorkerProcess, echo: Echo) -> None:
        waiting = [asyncio.ensure_future(echo.sleep()) for _ in range(3)]
        assert isinstance(process.process, LocalProcess)
        pid = process.process.pid
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        for call in waiting:
            with pytest.raises(WorkerDied, match="echo died"):
                await asyncio.wait_for(call, 10)
        with pytest.raises(WorkerDied):
            await echo.echo("anyone?")

    run(body, tmp_path)


def test_a_death_is_reported_with_its_exit_status_however_late(tmp_path: Path) -> None:
    """A process that frees gigabytes or GPUs has no connection any more, and no exit status yet."""

    async def body(process: WorkerProcess, echo: Echo) -> None:
        call = asyncio.ensure_future(echo.die_late(2 * DEATH_DETECTION_S))
        dead = await detect_death([process])
        assert dead and "It was killed by SIGKILL" in str(dead)
        with pytest.raises(WorkerDied, match="It was killed by SIGKILL"):
            await call

    run(body, tmp_path)


def test_death_reports_no_unretrieved_exception_of_cancelled_calls(tmp_path: Path) -> None:
    """The caller of a pending call, or of one after the death, may have been cancelled: asyncio prints nothing."""
    reported: list[str] = []

    async def body(process: WorkerProcess, echo: Echo) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
        calls = [asyncio.ensure_future(echo.sleep()), asyncio.ensure_future(echo.die())]
        process.kill()
        calls.append(asyncio.ensure_future(echo.echo("after its death")))
        assert all(isinstance(call, asyncio.Future) and call.done() for call in calls)
        del calls
        gc.collect()
        await asyncio.sleep(0)

    run(body, tmp_path)
    assert not reported


def test_the_last_lines_of_the_log_are_in_the_error(tmp_path: Path) -> None:
    async def body(process: WorkerProcess, echo: Echo) -> None:
        with pytest.raises(WorkerDied, match="last words"):
            await echo.die()

    run(body, tmp_path)


def test_the_error_of_a_worker_that_fails_to_start_is_raised(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerError, match=r"^ValueError: this prefix can't be had \(.*test_worker.py, line \d+\)$"
    ) as error:
        run(None, tmp_path, prefix="refuse")
    assert error.value.kind == "LoadError"


@pytest.mark.parametrize("kind", ["module", "function", "file", "module that fails"])
def test_a_launched_process_imports_its_worker_before_it_is_built(kind: str, tmp_path: Path) -> None:
    """Once: the code of a file would run again. An error of the import is raised when the worker is built."""
    code = "print('imported', flush=True)\n" + "1 / 0\n" * (kind == "module that fails")
    code += "def preload():\n    print('preloaded', flush=True)\n"
    code += "class Own:\n    def __init__(self):\n        print('built', flush=True)\n"
    said = {"module": "imported", "function": "preloaded"}.get(kind, "")
    (tmp_path / "own_worker.py").write_text(code)
    log = tmp_path / "log"

    async def main() -> None:
        process = WorkerProcess("own", log, environment={"PYTHONPATH": str(tmp_path)})
        try:
            reference = f"{tmp_path / 'own_worker.py' if kind == 'file' else 'own_worker'}:Own"
            await process.launch("own_worker:preload" if kind == "function" else reference)
            async with asyncio.timeout(60):
                while said not in log.read_text():
                    await asyncio.sleep(0.02)
            await process.start(Worker, reference)
        finally:
            await process.stop(0.2)

    if kind == "module that fails":
        with pytest.raises(WorkerError, match="division by zero"):
            asyncio.run(main())
        return
    asyncio.run(main())
    assert log.read_text().split() == ["imported", *["preloaded"] * (kind == "function"), "built"]


def test_a_process_that_does_not_end_is_terminated(tmp_path: Path) -> None:
    async def main() -> int:
        process = WorkerProcess("echo", tmp_path / "echo.log")
        echo = await process.start(Echo, REFERENCE, "")
        pid = await echo.pid()
        asyncio.ensure_future(echo.sleep()).add_done_callback(succeeded)
        await asyncio.sleep(0.1)
        await process.stop(grace=0.2)
        return pid

    assert not alive(asyncio.run(main()))


def test_a_call_that_is_cancelled_is_cancelled_in_the_worker(tmp_path: Path) -> None:
    marks = tmp_path / "marks"

    async def body(process: WorkerProcess, echo: Echo) -> None:
        waiting = asyncio.ensure_future(echo.wait(str(marks)))
        await echo.echo("the call has begun")
        waiting.cancel()
        await asyncio.sleep(0)  # its callbacks send the cancellation to the worker
        await echo.echo("so has the cancellation")
        assert marks.read_text() == "cancelled"

    run(body, tmp_path)


def test_a_handle_has_only_the_methods_of_its_worker() -> None:
    with pytest.raises(AttributeError, match="ecko"):
        handle(Echo, WorkerProcess("echo")).ecko  # type: ignore[attr-defined]  # noqa: B018


def test_a_result_that_can_not_be_serialized_is_an_error_of_its_call(tmp_path: Path) -> None:
    async def body(process: WorkerProcess, echo: Echo) -> None:
        with pytest.raises(WorkerError, match="lambda"):
            await echo.not_serializable()
        assert await echo.echo("still here") == "> still here"

    run(body, tmp_path)


@pytest.mark.parametrize("error", [OSError("no device"), InvalidInput("lower the number")], ids=repr)
def test_background_work_that_raises_ends_the_process(error: Exception, tmp_path: Path) -> None:
    """Errors for users have no traceback."""

    async def main() -> None:
        process = WorkerProcess("failing", tmp_path / "failing.log")
        failing = await process.start(Failing, "tests.runtime.test_worker:Failing", error)
        with pytest.raises(WorkerDied, match=str(error)) as caught:
            await failing.wait()
        assert ("  File " in str(caught.value)) == isinstance(error, OSError)
        await process.stop()

    asyncio.run(main())


def test_a_death_is_reported_although_no_thread_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("end of"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async def main() -> None:
        process = WorkerProcess("echo", tmp_path / "echo.log")
        echo = await process.start(Echo, REFERENCE, "")
        pid = await echo.pid()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="echo"):
            await asyncio.wait_for(echo.echo("a"), 60)

    asyncio.run(main())


def test_a_stopped_worker_has_the_time_that_the_controller_gives_it(tmp_path: Path) -> None:
    """A worker whose controller is alive is no orphan."""
    closed = tmp_path / "closed"

    async def main() -> None:
        process = WorkerProcess("echo", tmp_path / "echo.log")
        await process.start(SlowToClose, "tests.runtime.test_worker:SlowToClose", str(closed))
        await process.stop(grace=60.0)

    asyncio.run(main())
    assert closed.exists()


@pytest.mark.parametrize("blocked", [False, True])
def test_no_process_outlives_its_controller(blocked: bool, tmp_path: Path) -> None:
    """Worker processes end when their controller is killed, also one whose event loop is blocked."""
    code = (
        "import asyncio, os, signal\n"
        "from pathlib import Path\n"
        "from slipstream.runtime.worker_process import WorkerProcess\n"
        "from tests.runtime.test_worker import Echo, REFERENCE\n"
        "async def main():\n"
        f"    process = WorkerProcess('echo', Path({str(tmp_path / 'echo.log')!r}))\n"
        "    echo = await process.start(Echo, REFERENCE, '')\n"
        "    print(await echo.pid(), flush=True)\n"
        f"    mark = Path({str(tmp_path / 'blocked')!r})\n"
        f"    call = asyncio.ensure_future(echo.block(str(mark))) if {blocked} else None\n"
        "    while call and not mark.exists():\n"
        "        await asyncio.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(killed.stdout)
    end = time.monotonic() + 20
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pid)


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="memory has a name elsewhere")
@pytest.mark.parametrize("deaf", [False, True])
def test_a_terminated_worker_leaves_neither_processes_nor_shared_memory(
    deaf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL alone would leave the shared memory of engines over several GPUs. The event loop does not wait."""
    monkeypatch.setattr("slipstream.runtime.process.TERMINATION_GRACE_S", 1.0 if deaf else 20.0)

    async def body(process: WorkerProcess, echo: Echo) -> tuple[int, str]:
        pid, name = await echo.pid(), await echo.named_memory()
        if deaf:
            await echo.ignore_sigterm()
            asyncio.ensure_future(echo.sleep()).add_done_callback(succeeded)
            await asyncio.sleep(0.2)
        began = time.monotonic()
        assert "of no use" in str(process.terminate("of no use"))
        assert time.monotonic() - began < 0.2
        return pid, name

    pid, name = run(body, tmp_path)
    memory, last = Path("/dev/shm") / name, time.monotonic() + 20
    while (alive(pid) or (memory.exists() and not deaf)) and time.monotonic() < last:
        time.sleep(0.02)
    assert not alive(pid)
    assert deaf or not memory.exists()
    memory.unlink(missing_ok=True)


def test_an_ended_process_receives_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have its process id by then."""
    sent: list[int] = []

    async def main() -> None:
        process = WorkerProcess("echo", tmp_path / "echo.log")
        await process.start(Echo, REFERENCE, "")
        process.terminate("of no use")
        assert process.process
        await asyncio.to_thread(process.process.terminate)
        monkeypatch.setattr("slipstream.runtime.process.os.killpg", lambda group, number: sent.append(group))
        await process.stop()
        process.kill()

    asyncio.run(main())
    assert not sent


def test_a_stopped_process_ends_as_soon_as_it_is_terminated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.runtime.process.TERMINATION_GRACE_S", 600.0)

    async def main() -> None:
        process = WorkerProcess("echo", tmp_path / "echo.log")
        echo = await process.start(Echo, REFERENCE, "")
        pid = await echo.pid()
        os.kill(pid, signal.SIGSTOP)
        process.terminate("it is stopped")
        async with asyncio.timeout(60):
            while alive(pid):
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_hung_process_is_terminated_and_its_calls_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process counts as hung if it is stopped or makes no progress. Slow, excused and idle processes do not."""
    monkeypatch.setattr("slipstream.runtime.worker_process.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("slipstream.runtime.worker_process.HEARTBEAT_TIMEOUT_S", 2.5)
    monkeypatch.setattr("slipstream.runtime.process.TERMINATION_GRACE_S", 0.2)

    async def started(name: str, stop: bool) -> tuple[WorkerProcess, Echo, int]:
        limits = RuntimeConfig(progress_timeout=60.0 if stop else 2.5)
        process = WorkerProcess(name, tmp_path / f"{name}.log", limits=limits)
        echo = await process.start(Echo, REFERENCE, "")
        process.excused = lambda method: method == Echo.excused.__name__
        pid = await echo.pid()
        if stop:
            os.kill(pid, signal.SIGSTOP)
        return process, echo, pid

    async def hangs(name: str, stop: bool, said: str) -> None:
        _, echo, pid = await started(name, stop)
        calls = [asyncio.ensure_future(echo.echo("a") if stop else echo.sleep()) for _ in range(2)]
        with pytest.raises(
            WorkerDied, match=rf"^{name} {said} with pending calls: 2 x {name} for .* \(log: .*{name}.log\)"
        ):
            await calls[0]
        while alive(pid):
            await asyncio.sleep(0.01)
        with pytest.raises(WorkerDied):
            await calls[1]

    async def works() -> None:
        process, echo, _ = await started("work", False)
        assert await echo.work() == "done"
        await process.stop()

    async def waits(name: str, stop: bool) -> None:
        process, echo, pid = await started(name, stop)
        if not stop:
            asyncio.ensure_future(echo.excused()).add_done_callback(succeeded)
        await asyncio.sleep(3.5)
        assert not process.dead and alive(pid)
        process.kill()

    async def all_of_them() -> None:
        await asyncio.gather(
            hangs("echo", True, r"has been silent for 2.5\d* s, as if it were stopped,"),
            hangs("sleep", False, r"has made no progress for 2.5\d* s \(runtime.progress_timeout = 2.5\)"),
            works(), waits("excused", False), waits("idle", True),
        )  # fmt: skip

    asyncio.run(all_of_them())


def test_a_worker_that_hangs_in_its_start_is_terminated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start has a limit of its own, and needs no progress."""
    monkeypatch.setattr("slipstream.runtime.worker_process.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("slipstream.runtime.process.TERMINATION_GRACE_S", 0.2)
    log = tmp_path / "echo.log"

    async def main() -> None:
        process = WorkerProcess("echo", log, limits=RuntimeConfig(start_timeout=3, progress_timeout=0.1))
        said = r"^echo has not started within runtime.start_timeout = 3 s; .* \(log: .*echo.log\)\n.*loading weights$"
        with pytest.raises(WorkerDied, match=said):
            await process.start(Echo, REFERENCE, "hang")
        assert process.process
        while alive(process.process.pid):
            await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_process_whose_monitor_fails_is_terminated() -> None:
    async def main() -> None:
        async def watch() -> None:
            raise KeyError("results")

        told: list[str] = []
        with contextlib.suppress(KeyError):
            await supervise(watch(), "engine", told.append)
        await asyncio.sleep(0)
        assert told == ["engine can't be watched any more: KeyError: 'results'"]
        task = supervise(asyncio.sleep(600), "engine", told.append)
        task.cancel()
        await asyncio.wait([task])
        assert len(told) == 1

    asyncio.run(main())


def test_the_event_loop_neither_waits_for_processes_nor_scans_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every way in which a process ends: both operations take from tens of milliseconds to seconds."""
    threads: set[threading.Thread] = set()

    def seen(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            threads.add(threading.current_thread())
            return function(*arguments)

        return call

    scan = "slipstream.runtime.process.process_group_alive"
    monkeypatch.setattr(scan, seen(process_group_alive))
    monkeypatch.setattr(subprocess.Popen, "wait", seen(subprocess.Popen.wait))

    async def main() -> None:
        processes = [WorkerProcess(f"echo {i}", tmp_path / "log") for i in range(4)]
        echoes = await asyncio.gather(*(process.start(Echo, REFERENCE, "") for process in processes))
        pids = [await echo.pid() for echo in echoes]
        processes[0].kill()
        processes[1].terminate("of no use")
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="killed by SIGKILL"):
            await echoes[2].sleep()
        await asyncio.gather(*(process.stop() for process in processes))
        assert not any(map(alive, pids))

    asyncio.run(main())
    assert threads and threading.main_thread() not in threads


def test_a_start_does_not_block_the_event_loop_and_is_undone_if_it_is_cancelled_or_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy host the system takes long to start a process."""
    started, start = [], LocalProcess._start

    def slow(launch: Launch, theirs: socket.socket) -> Any:
        time.sleep(0.3)
        started.append(start(launch, theirs))
        return started[-1]

    monkeypatch.setattr(LocalProcess, "_start", staticmethod(slow))

    async def main() -> None:
        cancelled, killed = (WorkerProcess(f"echo {i}") for i in range(2))
        starting = [asyncio.ensure_future(process.start(Echo, REFERENCE, "")) for process in (cancelled, killed)]
        await asyncio.sleep(0)
        began = time.monotonic()
        await asyncio.sleep(0.01)
        assert time.monotonic() - began < 0.2
        starting[0].cancel()
        killed.kill()
        with pytest.raises(asyncio.CancelledError):
            await starting[0]
        with pytest.raises(WorkerDied, match="echo 1 was killed"):
            await starting[1]
        async with asyncio.timeout(10):
            while len(started) < 2 or any(alive(process.pid) for process in started):
                await asyncio.sleep(0.02)

    async def ends_first() -> None:
        starting = [asyncio.ensure_future(WorkerProcess(f"echo {i}").start(Echo, REFERENCE, "")) for i in range(2)]
        await asyncio.sleep(0.1)
        for one in starting:
            one.cancel()
        await asyncio.wait(starting)

    asyncio.run(main())
    asyncio.run(ends_first())
    last = time.monotonic() + 10
    while len(started) < 3 or alive(started[-1].pid):
        assert time.monotonic() < last
        time.sleep(0.02)
    time.sleep(0.5)
    assert len(started) == 3, "the second start was cancelled before its turn"


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of sessions are those of Linux")
def test_a_worker_of_low_priority_has_a_session_of_low_priority(tmp_path: Path) -> None:
    async def main() -> None:
        process = WorkerProcess("echo", tmp_path / "log", environment=at_niceness(7))
        pid = await (await process.start(Echo, REFERENCE, "")).pid()
        assert os.getpriority(os.PRIO_PROCESS, pid) == 7
        session = Path(f"/proc/{pid}/autogroup")
        async with asyncio.timeout(10):
            while session.exists() and not session.read_text().endswith("nice 7\n"):
                await asyncio.sleep(0.05)
        await process.stop()

    asyncio.run(main())


def test_an_incomplete_message_does_not_block_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender may be stopped, or wait for a processor, in the middle of a message."""

    def start(launch: Launch, theirs: socket.socket) -> subprocess.Popen[bytes]:
        other = theirs.dup()
        other.sendall(struct.pack("!i", 1000) + b"the first bytes")
        threading.Timer(2.0, other.close).start()
        return subprocess.Popen(["true"], start_new_session=True)

    monkeypatch.setattr(LocalProcess, "_start", staticmethod(start))

    async def main() -> None:
        process = WorkerProcess("halfway")
        starting = asyncio.ensure_future(process.start(Echo, REFERENCE, ""))
        await asyncio.wait((starting,), timeout=0.2)
        assert not starting.done()
        with pytest.raises(WorkerDied):
            await starting

    asyncio.run(main())


def test_large_arguments_arrive_whole_and_in_order(tmp_path: Path) -> None:
    async def body(process: WorkerProcess, echo: Echo) -> None:
        large: Any = echo.say("a" * 3_000_000)
        refused: Any = echo.say(lambda: 0)  # type: ignore[arg-type]
        small: Any = echo.echo("b")
        assert (await small, await large) == ("> b", "> " + "a" * 3_000_000)
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            await refused
        assert await echo.say("c") == "> c"

    run(body, tmp_path)


def test_a_batch_is_serialized_in_pieces_that_hold_the_interpreter_for_less_than_a_millisecond() -> None:
    tokens = int32_array(range(8192))
    completion = Completion(tokens, tokens, float32_array(tokens), (VersionSpan(0, 0, 8192),), "length")
    groups = tuple(Group(n, str(n), (Rollout((completion,), 0.5),) * 2) for n in range(20))
    batch = Batch(groups, ((0.5, -0.5),) * 20, 3)
    pieces = pickle_in_pieces((batch,))
    assert max(map(len, pieces)) < 200_000 and pickle.loads(b"".join(pieces)) == (batch,)


def test_a_process_whose_reply_fails_to_unpickle_is_terminated(tmp_path: Path) -> None:
    async def main() -> None:
        process = WorkerProcess("echo", tmp_path / "echo.log")
        echo = await process.start(Echo, REFERENCE, "")
        with pytest.raises(WorkerDied, match=r"echo answered with what can't be read: TypeError"):
            await echo.only_here()
        assert process.dead
        await process.stop()

    asyncio.run(main())

"""Processes: calls, failures, and what happens when one of them dies."""

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
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from slipstream import actor as actor_module
from slipstream.actor import Actor, ActorDied, ActorError, Line, Reply, keep_watch, went_well
from slipstream.rollout import Batch, Completion, Group, Rollout, VersionSpan, ids, numbers
from slipstream.runtime.wire import PlainLine


class OnlyHere:
    """An object that no other process can make."""

    def __reduce__(self) -> Any:
        return os.getpid, (1, 2, 3)


class Echo:
    """A service for these tests; it runs in a process of its own."""

    def __init__(self, prefix: str) -> None:
        if prefix == "refuse":
            raise ValueError("this prefix can't be had")
        self._prefix = prefix
        self.progress = 0
        self._later: list[tuple[Reply, Any]] = []

    @property
    def busy(self) -> bool:
        return bool(self._later)

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Reply) -> None:
        if method == "later":
            self._later.append((reply, arguments[0]))
        elif method == "raise":
            raise KeyError("lost")
        elif method == "answer with an interrupt":
            reply(KeyboardInterrupt("of a library's thread"))
        elif method == "at the end":
            multiprocessing.util.Finalize(None, print, (arguments[0], "by", "multiprocessing"), exitpriority=1)
            reply(atexit.register(print, arguments[0]) and None)
        elif method == "die":
            print("last words", flush=True)
            os._exit(7)
        elif method == "answer with what is here alone":
            reply(OnlyHere())
        elif method == "sleep":
            time.sleep(600)
        elif method == "work":
            for _ in range(30):
                time.sleep(0.1)
                self.progress += 1
            reply("done")
        elif method == "pid":
            reply(os.getpid())
        elif method == "named memory":
            self._memory = SharedMemory(create=True, size=64)
            reply(self._memory.name)
        elif method == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            reply(os.getpid())
        elif method == "aside":
            reply(gc.is_tracked(self._later) and not any(found is self._later for found in gc.get_objects()))
        else:
            reply(self._prefix + arguments[0])

    def tick(self) -> None:
        reply, value = self._later.pop()
        reply(value)

    def close(self) -> None:
        print("closed", flush=True)


SERVICE = "tests.test_actor:Echo"


def run(body: Any, tmp_path: Path, prefix: str = "> ") -> Any:
    async def main() -> Any:
        actor = Actor("echo", tmp_path / "logs" / "echo.log")
        try:
            await actor.start(SERVICE, prefix)
            return await body(actor)
        finally:
            await actor.stop(grace=5.0)

    return asyncio.run(main())


def test_a_process_that_ends_has_said_all_and_done_what_others_left_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    async def body(actor: Actor) -> None:
        await actor.call("at the end", "asked for")

    run(body, tmp_path)
    said = (tmp_path / "logs" / "echo.log").read_text()
    assert said == "closed\nasked for\nasked for by multiprocessing\n"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_calls_are_answered_in_any_order(tmp_path: Path) -> None:
    async def body(actor: Actor) -> None:
        calls = [actor.call("later" if i % 2 else "echo", str(i)) for i in range(50)]
        assert await asyncio.gather(*calls) == [str(i) if i % 2 else f"> {i}" for i in range(50)]
        big = "x" * 5_000_000
        assert await actor.call("echo", big) == "> " + big

    run(body, tmp_path)
    assert "closed" in (tmp_path / "logs" / "echo.log").read_text()


def test_the_collector_never_walks_through_what_a_service_was_built_with(tmp_path: Path) -> None:
    async def body(actor: Actor) -> None:
        assert await actor.call("aside")

    run(body, tmp_path)


def test_an_exception_is_the_callers_and_the_process_lives_on(tmp_path: Path) -> None:
    async def body(actor: Actor) -> None:
        with pytest.raises(ActorError, match="lost") as error:
            await actor.call("raise")
        with pytest.raises(ActorError, match="of a library's thread"):
            await actor.call("answer with an interrupt")
        assert error.value.kind == "KeyError" and "Traceback" in error.value.details
        (note,) = error.value.__notes__
        assert re.search(r"^echo \(log: .*echo.log\) failed:\n.*KeyError: 'lost'$", note, re.DOTALL)
        assert await actor.call("echo", "still here") == "> still here"

    run(body, tmp_path)


def test_death_fails_every_waiting_call_with_the_log(tmp_path: Path) -> None:
    async def body(actor: Actor) -> None:
        waiting = [asyncio.ensure_future(actor.call("sleep")) for _ in range(3)]
        pid = actor._process.pid
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        for call in waiting:
            with pytest.raises(ActorDied, match="echo died"):
                await asyncio.wait_for(call, 10)
        with pytest.raises(ActorDied):
            await actor.call("echo", "anyone?")

    run(body, tmp_path)


def test_last_words_are_shown(tmp_path: Path) -> None:
    async def body(actor: Actor) -> None:
        with pytest.raises(ActorDied, match="last words"):
            await actor.call("die")

    run(body, tmp_path)


def test_a_service_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    with pytest.raises(ActorError, match="this prefix can't be had") as error:
        run(None, tmp_path, prefix="refuse")
    assert error.value.kind == "ValueError"


def test_a_process_that_does_not_end_is_ended(tmp_path: Path) -> None:
    async def main() -> int:
        actor = Actor("echo", tmp_path / "echo.log")
        await actor.start(SERVICE, "")
        pid: int = await actor.call("pid")
        actor.post("sleep")
        await asyncio.sleep(0.1)
        await actor.stop(grace=0.2)
        return pid

    assert not alive(asyncio.run(main()))


def test_no_process_outlives_its_controller(tmp_path: Path) -> None:
    """A controller that is killed takes its processes with it."""
    import subprocess
    import sys

    code = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from slipstream.actor import Actor\n"
        "async def main():\n"
        f"    actor = Actor('echo', Path({str(tmp_path / 'echo.log')!r}))\n"
        f"    await actor.start({SERVICE!r}, '')\n"
        "    print(await actor.call('pid'), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(killed.stdout)
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pid)


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="memory has a name elsewhere")
@pytest.mark.parametrize("deaf", [False, True])
def test_who_is_given_up_leaves_neither_process_nor_named_memory(
    deaf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at once it would leave the memory, as engines over several GPUs have it. The loop waits for nothing."""
    monkeypatch.setattr("slipstream.actor.ENDS", 1.0 if deaf else 20.0)

    async def body(actor: Actor) -> tuple[int, str]:
        pid, name = await actor.call("pid"), await actor.call("named memory")
        if deaf:
            await actor.call("deaf")
            actor.post("sleep")
            await asyncio.sleep(0.2)
        began = time.monotonic()
        assert "of no use" in str(actor.give_up("of no use"))
        assert time.monotonic() - began < 0.2
        return pid, name

    pid, name = run(body, tmp_path)
    memory, last = Path("/dev/shm") / name, time.monotonic() + 20
    while (alive(pid) or (memory.exists() and not deaf)) and time.monotonic() < last:
        time.sleep(0.02)
    assert not alive(pid)
    assert deaf or not memory.exists()
    memory.unlink(missing_ok=True)


def test_a_process_that_has_ended_is_sent_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another's by then."""
    sent: list[int] = []

    async def main() -> None:
        actor = Actor("echo", tmp_path / "echo.log")
        await actor.start(SERVICE, "")
        actor.give_up("of no use")
        assert actor._process
        await asyncio.to_thread(actor._end)
        monkeypatch.setattr("slipstream.actor.os.killpg", lambda group, number: sent.append(group))
        await actor.stop()
        actor.kill()

    asyncio.run(main())
    assert not sent


def test_a_process_that_hangs_is_ended_with_what_it_owes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is stopped, or makes no progress. One that is slow, is excused, or owes nothing is left in peace."""
    monkeypatch.setattr("slipstream.actor.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("slipstream.actor.HEARTBEAT_TIMEOUT_S", 2.5)
    monkeypatch.setattr("slipstream.actor.ENDS", 0.2)

    async def main(method: str, stop: bool) -> tuple[Actor, int]:
        actor = Actor(method, tmp_path / f"{method}.log", progress_timeout=60.0 if stop else 2.5)
        await actor.start(SERVICE, "")
        actor.excused = lambda asked: asked == "sleep" and method == "excused"
        pid = await actor.call("pid")
        if stop:
            os.kill(pid, signal.SIGSTOP)
        return actor, pid

    async def hangs(method: str, stop: bool, said: str) -> None:
        actor, pid = await main(method, stop)
        calls = [asyncio.ensure_future(actor.call(method, "a")) for _ in range(2)]
        with pytest.raises(
            ActorDied, match=rf"^{method} {said} and has owed 2 x {method} for .* \(log: .*{method}.log\)"
        ):
            await calls[0]
        while alive(pid):
            await asyncio.sleep(0.01)
        with pytest.raises(ActorDied):
            await calls[1]

    async def works() -> None:
        actor, _ = await main("work", False)
        assert await actor.call("work") == "done"
        await actor.stop()

    async def waits(method: str, stop: bool) -> None:
        actor, pid = await main(method, stop)
        if not stop:
            actor.call("sleep").add_done_callback(went_well)
        await asyncio.sleep(3.5)
        assert not actor.dead and alive(pid)
        actor.kill()

    async def all_of_them() -> None:
        await asyncio.gather(
            hangs("echo", True, r"has been silent for 2.5\d* s, as if it were stopped,"),
            hangs("sleep", False, r"has made no progress for 2.5\d* s \(runtime.progress_timeout = 2.5\)"),
            works(), waits("excused", False), waits("idle", True),
        )  # fmt: skip

    asyncio.run(all_of_them())


def test_a_watch_that_fails_gives_up_what_it_watches() -> None:
    async def main() -> None:
        async def watch() -> None:
            raise KeyError("results")

        told: list[str] = []
        with contextlib.suppress(KeyError):
            await keep_watch(watch(), "engine", told.append)
        await asyncio.sleep(0)
        assert told == ["engine can't be watched any more: KeyError: 'results'"]
        task = keep_watch(asyncio.sleep(600), "engine", told.append)
        task.cancel()
        await asyncio.wait([task])
        assert len(told) == 1

    asyncio.run(main())


def test_the_event_loop_waits_for_no_process_and_walks_through_no_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a process ends: either takes tens of milliseconds, or seconds."""
    threads: set[threading.Thread] = set()

    def seen(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            threads.add(threading.current_thread())
            return function(*arguments)

        return call

    monkeypatch.setattr("slipstream.actor.group_lives", seen(actor_module.group_lives))
    monkeypatch.setattr(subprocess.Popen, "wait", seen(subprocess.Popen.wait))

    async def main() -> None:
        actors = [Actor(f"echo {i}", tmp_path / "log") for i in range(4)]
        await asyncio.gather(*(actor.start(SERVICE, "") for actor in actors))
        pids = [await actor.call("pid") for actor in actors]
        actors[0].kill()
        actors[1].give_up("of no use")
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(ActorDied, match="killed by SIGKILL"):
            await actors[2].call("sleep")
        await asyncio.gather(*(actor.stop() for actor in actors))
        assert not any(map(alive, pids))

    asyncio.run(main())
    assert threads and threading.main_thread() not in threads


def test_a_message_that_stops_halfway_holds_up_nobody_else() -> None:
    """Its sender may be stopped, or wait for a processor, in the middle of it."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        threading.Timer(2.0, theirs.close).start()
        actor = Actor("halfway", guest=Line(ours.detach()))
        starting = asyncio.ensure_future(actor.start(SERVICE, ""))
        theirs.sendall(struct.pack("!i", 1000) + b"the first bytes")
        await asyncio.wait((starting,), timeout=0.2)
        assert not starting.done()
        with pytest.raises(ActorDied):
            await starting

    asyncio.run(main())


def test_large_arguments_arrive_whole_and_in_order(tmp_path: Path) -> None:
    async def body(actor: Actor) -> None:
        large = actor.call_large("say", "a" * 3_000_000)
        refused = actor.call_large("say", lambda: 0)
        small = actor.call("say", "b")
        assert (await small, await large) == ("> b", "> " + "a" * 3_000_000)
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            await refused
        assert await actor.call("say", "c") == "> c"

    run(body, tmp_path)


def test_a_batch_is_serialized_in_pieces_that_hold_the_interpreter_for_less_than_a_millisecond() -> None:
    tokens = ids(range(8192))
    completion = Completion(tokens, tokens, numbers(tokens), (VersionSpan(0, 0, 8192),), "length")
    groups = tuple(Group(n, str(n), (Rollout((completion,), 0.5),) * 2) for n in range(20))
    batch = Batch(groups, ((0.5, -0.5),) * 20, 3)
    for line in (Line, PlainLine):
        pieces = line.pieces((batch,))
        assert max(map(len, pieces)) < 200_000 and line.loads(b"".join(pieces)) == (batch,)


def test_an_answer_that_can_not_be_read_ends_its_process(tmp_path: Path) -> None:
    async def main() -> None:
        echo = Actor("echo", tmp_path / "echo.log")
        await echo.start(SERVICE, "")
        with pytest.raises(ActorDied, match=r"echo answered with what can't be read: TypeError"):
            await echo.call("answer with what is here alone")
        assert echo.dead
        await echo.stop()

    asyncio.run(main())

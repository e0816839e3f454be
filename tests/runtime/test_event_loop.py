"""One ready coroutine continues in each iteration of the event loop, and its thread runs before others."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream import run as run_module
from slipstream.config.schema import SyncConfig
from slipstream.controller.weight_publisher import WeightPublisher
from slipstream.environments import text_limits
from slipstream.errors import UserError
from slipstream.runtime import event_loop
from slipstream.runtime.closing import run_bounded
from slipstream.runtime.event_loop import (
    NICENESS,
    call_throttled,
    lower_priority,
    throttle,
    yield_to_loop,
)
from slipstream.runtime.process import Launch, Launcher
from slipstream.runtime.worker import Worker
from slipstream.runtime.worker_main import START
from slipstream.runtime.worker_process import WorkerProcess

COUNT = 100


async def turns_of(one: Callable[[int], Coroutine[Any, Any, object]]) -> list[tuple[int, int]]:
    """The iteration of the event loop in which each of `COUNT` coroutines ended, in the order of their ends."""
    loop, turn, ended = asyncio.get_running_loop(), 0, []

    def begin() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(begin)

    async def timed(number: int) -> None:
        await one(number)
        ended.append((turn, number))

    begin()
    await asyncio.gather(*map(timed, range(COUNT)))
    return ended


def most_in_a_turn(ended: list[tuple[int, int]]) -> int:
    return max(Counter(turn for turn, _ in ended).values())


def test_one_caller_continues_in_each_iteration_in_order_of_arrival() -> None:
    ended = asyncio.run(turns_of(lambda number: throttle()))
    assert [number for _, number in ended] == list(range(COUNT))
    assert most_in_a_turn(ended) <= 2


def test_a_cancelled_caller_is_skipped() -> None:
    async def cancel_half() -> int:
        tasks = [asyncio.ensure_future(throttle()) for _ in range(COUNT)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        await asyncio.wait_for(throttle(), 60)
        return results.count(None)

    assert asyncio.run(cancel_half()) >= COUNT // 2


def test_calls_are_made_in_order_if_one_makes_another_or_raises() -> None:
    made: list[int] = []
    raised: list[object] = []

    def call(number: int) -> None:
        made.append(number)
        if number == 1:
            call_throttled(call, 3)
            raise ValueError(number)

    async def make() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"].args))
        for number in range(3):
            call_throttled(call, number)
        await throttle()
        await throttle()

    asyncio.run(make())
    assert made == list(range(4))
    assert raised == [(1,)]


class AnswersTogether:
    """A process that answers the first `COUNT` calls in one message."""

    def __init__(self, _: Launch) -> None:
        self.connection, self._worker = socket.socketpair()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        pipe, numbers = Connection(self._worker.detach()), list[int]()
        pipe.send([(pipe.recv()[0][0], False, None)])
        while len(numbers) < COUNT:
            numbers += [number for number, _, _ in pipe.recv()]
        pipe.send([(number, False, number - START - 1) for number in numbers])

    def disconnect(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None: ...

    def describe_end(self) -> str:
        return ""


def test_answers_that_arrive_together_are_given_over_many_iterations() -> None:
    async def answers() -> list[tuple[int, int]]:
        process: Any = WorkerProcess("engine", launcher=cast(Launcher, AnswersTogether))
        await process.start(Worker, "module:Class")
        ended = await turns_of(lambda number: process.call("generate", (number,)))
        process.kill()
        return ended

    ended = asyncio.run(answers())
    assert [number for _, number in ended] == list(range(COUNT))
    assert most_in_a_turn(ended) <= 2


def test_the_calls_of_a_publish_begin_over_many_iterations() -> None:
    class Engine:
        async def wait_for(self, call: Any, *_: Any) -> Any:
            return await call

    async def publish() -> list[tuple[int, int]]:
        engines: list[Any] = [Engine() for _ in range(COUNT)]
        trainer, pool = SimpleNamespace(), SimpleNamespace(running=engines)
        publisher = WeightPublisher(cast(Any, trainer), cast(Any, pool), SyncConfig(link="shared"))
        begun: dict[int, asyncio.Future[None]] = {n: asyncio.get_running_loop().create_future() for n in range(COUNT)}
        calling = publisher._call_members(lambda engine: begin(engines.index(engine)), "answer")

        async def begin(number: int) -> None:
            begun[number].set_result(None)

        async def wait(number: int) -> None:
            await begun[number]

        ended, _ = await asyncio.gather(turns_of(wait), calling)
        return ended

    assert most_in_a_turn(asyncio.run(publish())) <= 2


class AtOnce(Executor):
    """An executor that computes at once, in the calling thread."""

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments, **options))
        return done


def test_long_completions_that_arrive_together_continue_over_many_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_limits, "THREADS", AtOnce())
    long = text_limits.MAX_INLINE + 1
    ended = asyncio.run(turns_of(lambda number: text_limits.run_in_thread(long, abs, -number)))
    assert most_in_a_turn(ended) <= 3


def test_short_text_is_processed_in_the_same_iteration() -> None:
    """All requests of a wave reach the engine as one message, which makes a synchronous run reproducible."""
    ended = asyncio.run(turns_of(lambda number: text_limits.run_in_thread(1, abs, -number)))
    assert len({turn for turn, _ in ended}) == 1


def test_advantages_are_computed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "build_batch", lambda *_, **__: threading.current_thread())
    monkeypatch.setattr(run_module, "enough_engines", lambda run: True)
    state = SimpleNamespace(take_batch=lambda on_stale: ["a group"], step=0, version=0, untrained=[])
    run: Any = SimpleNamespace(
        ending=False, paused=False, requested_checkpoint=None, evaluates_snapshot=False, objective=None, config=None,
        state=state,
    )  # fmt: skip
    assert asyncio.run(run_module.next_batch(run)) is not threading.main_thread()


def test_a_recorder_loads_its_libraries_before_the_first_step() -> None:
    """Imports during a run hold the interpreter lock, and their objects would not be frozen."""
    code = """
import sys
from array import array
from pathlib import Path
from slipstream.observe.recorder import Recorder, _record_batch
from slipstream.rollout import Completion, Group, Rollout, VersionSpan
recorder = Recorder(Path("."), str)
recorder.load_libraries()
before = set(sys.modules)
drawn = Completion(array("i", [1]), array("i", [2]), array("f", [-1.0]), (VersionSpan(0, 0, 1),), "stop")
_record_batch(0, Group(0, "a", (Rollout((drawn,), 1.0),)), [1.0], lambda ids: "")
recorder.close()
assert not (late := set(sys.modules) - before), late
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_threads_with_lower_priority_leave_the_process_as_it_is() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with ThreadPoolExecutor(1, initializer=lower_priority) as threads:
        assert threads.submit(niceness).result() == min(19, before + NICENESS)
    assert niceness() == before


def test_a_thread_yields_while_the_loop_of_a_run_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "YIELD_S", 60.0)
    began, passed = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        yield_to_loop()
        passed.set()

    async def main() -> bool:
        await asyncio.sleep(0.01)  # an iteration that began with a wait
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        await asyncio.sleep(0)  # the thread starts, and the loop has work until this coroutine waits again
        began.wait()
        early = passed.wait(0.1)
        await thread
        return early

    assert not run_bounded(main())
    assert passed.is_set()


def test_a_run_inside_an_event_loop_is_one_error() -> None:
    async def never() -> None:
        raise AssertionError

    async def notebook() -> None:
        with pytest.raises(
            UserError, match="a run can't start in a thread whose event loop is running, such as that of a notebook"
        ):
            run_bounded(never())

    asyncio.run(notebook())


def test_a_thread_yields_for_a_bounded_time_and_not_after_the_loop() -> None:
    async def busy() -> None:
        await asyncio.sleep(0.01)
        thread = threading.Thread(target=yield_to_loop)
        thread.start()
        thread.join(60)  # the loop never waits meanwhile
        assert not thread.is_alive()

    run_bounded(busy())
    assert not event_loop._YieldedSelector.busy.locked()

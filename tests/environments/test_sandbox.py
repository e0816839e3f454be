"""Attacks of untrusted programs: each is contained and reported, and leaves no process and no file behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schema import ConfigError
from slipstream.environments.code import run_tests
from slipstream.environments.sandbox import PYTHON, Program, Sandbox, isolation
from slipstream.runtime.process import process_group_alive
from tests.processes import descendants, lives

KINDS = ["namespaces", pytest.param("bwrap", marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap"))]
SECRET = "hidden-answer-4711"
LIMITS: dict[str, Any] = {"memory_mb": 200, "files_mb": 16, "processes": 16, "output_kb": 64}
LIBC = "import ctypes, os, signal\nlibc = ctypes.CDLL(None, use_errno=True)\n"
FORKS = "import os, time\nfor _ in range(8):\n  if not os.fork():\n    {}\n    time.sleep(9)\ntime.sleep(9)"
CALL = LIBC + "print('ESCAPED' if libc.syscall(*{}) >= 0 else 'refused')"

ATTACKS = {  # the program, and words of the report or of its errors
    "connect": ("import socket; socket.create_connection(('127.0.0.1', {port}), 1)", "socket not permitted"),
    "send a datagram": ("import socket; socket.socket(type=socket.SOCK_DGRAM)", "socket not permitted"),
    "resolve and fetch": ("import urllib.request as u; u.urlopen('http://localhost:{port}')", "Error"),
    "the host's Unix socket": ("import socket; socket.socket(socket.AF_UNIX).connect('{unix}')", "PermissionError"),
    "sockets by io_uring": (CALL.format("(425, 8, bytes(120))"), "io_uring_setup not permitted"),
    "read the grader's file": ("print(open('{secret}').read())", "FileNotFoundError"),
    "read it by a link": ("import os; os.symlink('{secret}', 'x'); print(open('x').read())", "FileNotFoundError"),
    "read it by a path": ("print(open('/box/../../..{secret}').read())", "FileNotFoundError"),
    "write by a link": ("import os; os.symlink('{folder}', 'x'); open('x/new', 'w')", "FileNotFoundError"),
    "read users": ("print(open('/etc/passwd').read())", "FileNotFoundError"),
    "change Python": ("import os; open(os.__file__, 'a').write('x')", "Error"),
    "change the root": ("open('/new', 'w')", "Error"),
    "make a device": ("import os; os.mknod('sda', 0o60600, os.makedev(254, 0))", "PermissionError"),
    "mount": (CALL.format("(165, b'none', b'/box', b'tmpfs', 0, None)"), "mount not permitted"),
    "another architecture": (CALL.format("(0x40000000 + 39,)"), "another architecture not permitted"),
    "new namespaces": (CALL.format("(272, 0x10000000)"), "unshare not permitted"),
    "clone namespaces": (CALL.format("(56, 0x10000000 | 17, 0, 0, 0, 0)"), "clone not permitted"),
    "join namespaces": (CALL.format("(308, os.open('/proc/self/ns/net', 0), 0)"), "setns not permitted"),
    "never end": ("while True: pass", "time limit"),
    "block signals": ("import signal as s; s.pthread_sigmask(0, range(1, 65)); s.pause()", "time limit"),
    "leave a daemon": ("import os, time\nif not os.fork():\n os.setsid()\n os.fork() or time.sleep(99)", "after the"),
    "take memory": ("x = bytearray(10 ** 10)", "memory limit"),
    "take memory in parts": (FORKS.format("x = b'x' * 10 ** 8"), "memory limit"),
    "take shared memory": (CALL.format("(29, 0, 1 << 30, 0o1600)"), "shmget not permitted"),
    "take memory by files": (CALL.format("(319, b'x', 0)"), "memfd_create not permitted"),
    "fork without end": ("import os\nwhile True: os.fork()", "processes limit"),
    "start threads": ("from threading import *\nwhile True: Thread(target=Event().wait).start()", "processes"),
    "write 1 GB": ("f = open('x', 'wb')\nfor _ in range(1000): f.write(bytes(1 << 20))", "files limit"),
    "write a million files": ("import os\nfor n in range(10 ** 6): os.close(os.open(str(n), 64))", "files limit"),
    "a sparse file": ("open('x', 'wb').truncate(1 << 45)", "files limit"),
    "print 1 GB": ("while True: print('x' * 9999)", "output limit"),
    "signal a process": ("import os; os.kill({pid}, 9)", "ProcessLookupError"),
    "trace the supervisor": (CALL.format("(101, 16, 1, 0, 0)"), "ptrace not permitted"),
    "read its environment": ("print(open('/proc/1/environ').read())", "PermissionError"),
    "write its report": ("open('/proc/1/fd/1', 'w').write('{{}}')", "PermissionError"),
    "read another process": ("print(open('/proc/{pid}/environ').read())", "FileNotFoundError"),
    "read variables": ("import os; print(os.environ['SLIPSTREAM_SECRET'])", "KeyError"),
    "use descriptors": ("import os; [os.fstat(n) for n in range(3, 99)]", "Bad file descriptor"),
    "take a name that is no text": (LIBC + "libc.prctl(15, b'\\xff'); signal.pause()", "time limit"),
    "crash": ("import ctypes; ctypes.string_at(0)", "exit status -11"),
    "raw bytes": ("import os; os.write(1, bytes(range(128, 256)) + b'\\x00\\x1b'); os._exit(3)", "exit status 3"),
}  # fmt: skip


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What programs must not reach: a file, a Unix socket, a port, a variable and a process of this host."""
    import socket

    folder = tmp_path_factory.mktemp("grader")
    (folder / "tests.jsonl").write_text(SECRET)
    os.environ["SLIPSTREAM_SECRET"] = SECRET
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "unix"))
        unix.listen()
        process = subprocess.Popen(["sleep", "600"])
        port = server.getsockname()[1]
        paths = {"secret": folder / "tests.jsonl", "folder": folder, "unix": folder / "unix"}
        yield {"port": port, "pid": process.pid, **paths}
        assert process.poll() is None
        process.kill()
        process.wait()
    del os.environ["SLIPSTREAM_SECRET"]
    assert sorted(path.name for path in folder.iterdir()) == ["tests.jsonl", "unix"]


def left_over() -> tuple[set[int], set[Path]]:
    return descendants(os.getpid()), set(Path(tempfile.gettempdir()).glob("slipstream-sandbox-*"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_contained_and_reported(name: str, kind: str, host: dict[str, Any]) -> None:
    attack(name, kind, host)


@pytest.mark.parametrize("name", [n for n, (_, report) in ATTACKS.items() if "limit" in report or "not perm" in report])
def test_the_weakest_kind_limits_resources_and_system_calls(name: str, host: dict[str, Any]) -> None:
    try:
        isolation("rlimits")
    except ConfigError as error:  # root, if other users can't run this Python
        pytest.skip(str(error))
    attack(name, "rlimits", host)


def attack(name: str, kind: str, host: dict[str, Any]) -> None:
    code, report = ATTACKS[name]
    before = left_over()
    program = Program([PYTHON, "main.py"], {"main.py": code.format(**host) if "{" in code else code})
    seconds = 2.0 if report == "time limit" else 30.0
    outcome = asyncio.run(Sandbox(**LIMITS, seconds=seconds, kind=kind).run(program))
    assert report in f"{outcome.report} {outcome.stderr}", outcome
    assert SECRET not in outcome.stdout + outcome.stderr and "ESCAPED" not in outcome.stdout
    assert len(outcome.stdout) + len(outcome.stderr) <= 2 * 64 * 1024
    assert left_over() == before


TESTS = ["assert f(2) in [5]", {"call": "f(2)", "expected": 5}, {"input": "2", "output": "5"}]
TESTS += ["assert abs(f(2) - 5) < 1e-6", "assert math.isclose(f(2), 5)"]
FORGERIES = {
    "equal to everything": "class A:\n  __eq__ = __contains__ = lambda *_: True\n  __ne__ = lambda *_: False\n"
    "def f(x): return A()",
    "a number equal to everything": "class A(int):\n  __eq__ = lambda *_: True\n  __sub__ = __rsub__ = lambda *_: 0\n"
    "def f(x): return A(7)",
    "exit at once": "import sys; sys.exit(0)",
    "exit without cleanup": "import os; os._exit(0)",
    "exit in the call": "import os\ndef f(x): os._exit(0)",
    "exit at the end": "import atexit, os; atexit.register(os._exit, 0)",
    "raise SystemExit": "class AssertionError(SystemExit): pass\ndef f(x): raise SystemExit(0)",
    "other built-ins": "import builtins, math\nbuiltins.abs = abs = lambda x: 0\nbuiltins.AssertionError = int\n"
    "math.isclose = lambda *a: True\nbuiltins.__build_class__ = None\ndef f(x): return 7",
    "the tests' helpers": "def same(*a): return True\nclass json: loads = lambda x: None\ndef f(x): return None",
    "print a verdict": "print('PASSED', '1.0', '{\"status\": 0, \"limit\": \"\"}')\ndef f(x): return 7",
    "answer for the tests": "import os\nos.write(3, b'[true]\\n' * 9)\ndef f(x): return 7",
    "an answer without end": "import os\nwhile True: os.write(3, b' ' * 65536)",
    "look for the tests": "import gc, os, sys\ntext = str(gc.get_objects()) + open('input.py').read() + str(sys.argv)\n"
    "def f(x): return 5 if chr(102) + '(2)' in text else 7",
    "crash": "import ctypes\ndef f(x): ctypes.string_at(0)",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_results_are_not_forged(name: str) -> None:
    problems = asyncio.run(run_tests(FORGERIES[name], TESTS, Sandbox(**LIMITS, seconds=2.0)))
    assert len(problems) == len(TESTS) and all(problems), problems


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_call_leaves_nothing(kind: str) -> None:
    async def main() -> None:
        call = asyncio.create_task(Sandbox(seconds=60, kind=kind).shell("sleep 600 & sleep 600"))
        while len(descendants(os.getpid()) - before[0]) < 4:  # supervisor and program
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])

    isolation(kind)
    before = left_over()
    asyncio.run(main())
    assert left_over() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_controller_leaves_nothing(kind: str) -> None:
    code = f"import asyncio\nfrom slipstream.environments.sandbox import Sandbox\nbox = Sandbox(60, kind={kind!r})\n"
    code += "asyncio.run(box.shell('sleep 600 & sleep 600'))"
    controller = subprocess.Popen([sys.executable, "-c", code])
    while len(started := descendants(controller.pid)) < 4:
        time.sleep(0.01)
    controller.kill()
    controller.wait()
    deadline = time.monotonic() + 20
    while any(map(lives, started)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_name_that_is_no_text_does_not_disturb_the_run() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff'); print('renamed', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"renamed\n"
        assert not process_group_alive(1 << 30)


def test_many_calls_do_not_block_the_event_loop() -> None:
    async def main() -> None:
        box, gaps = Sandbox(), []
        calls = asyncio.gather(*(box.python(f"print({n})") for n in range(64)))
        while not calls.done():
            start = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - start)
        assert await calls == [str(n) for n in range(64)]
        assert sorted(gaps)[len(gaps) * 99 // 100] < 0.05

    isolation("auto")
    asyncio.run(main())


def test_without_isolation_a_run_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no permission >&2; exit 1")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    isolation.cache_clear()
    with pytest.raises(ConfigError, match=r"bwrap.*no permission.*rlimits") as error:
        isolation("bwrap")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="sandbox = 'none'"):
        isolation("none")

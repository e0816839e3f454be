"""Run untrusted Python and shell code within limits on time, memory, files and processes, without network.

The kinds of isolation, strongest first: `bwrap` (bubblewrap) and `namespaces` (Linux namespaces without bubblewrap)
give the code a root directory of its own; `rlimits` limits resources alone. All three refuse sockets by a seccomp
filter. `sandbox_init.py` is the first process of each sandbox.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config.schema import ConfigError
from slipstream.environments.reward_workers import core_slot

INIT = Path(__file__).with_name("sandbox_init.py").read_text()
SCRATCH = "/box"
PYTHON, SHELL = sys.executable, shutil.which("bash") or "/bin/sh"
UNCONTAINED = "code can read the files and signal the processes of its user, and write where that user can"
STRONG = ("bwrap", "namespaces")  # what "auto" chooses from
GRACE_S = 10.0  # beyond the time limit, to start and to end
LINGER_S = 1.0  # after the end of the first program; other programs are then killed
BINDS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")} | {"MALLOC_ARENA_MAX": "1"}
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"} | ONE_THREAD


class Outcome(NamedTuple):
    """How a program ended: its exit status (negative: a signal) and the limit that it exceeded, or "".

    `refused` names what the sandbox did not permit: system calls such as "socket", or processes that outlive it.
    """

    status: int | None
    limit: str
    refused: Sequence[str]
    seconds: float
    stdout: str
    stderr: str

    @property
    def problem(self) -> str:
        """Why the program failed, in a few words, or ""."""
        if self.status == -signal.SIGSYS:
            return "system calls of another architecture not permitted"
        return f"{self.limit} limit exceeded" if self.limit else f"exit status {self.status}" if self.status else ""

    @property
    def report(self) -> str:
        """`problem`, and what was refused."""
        return ", ".join(filter(None, [self.problem, *(f"{name} not permitted" for name in self.refused)]))


class SandboxFailed(RuntimeError):
    """A sandbox could not be started, or ended without a report."""


class Program(NamedTuple):
    """A command line, the files of its directory, its standard input, and a socket to hand over as its 3."""

    argv: Sequence[str]
    files: Mapping[str, str]
    stdin: str = ""
    channel: socket.socket | None = None


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Limits of each program, and the kind of isolation; "auto" is the strongest kind that works here.

    `memory_mb` is a limit on the sum over all processes, `processes` counts threads, too, `files_mb` bounds the
    program's directory, and `output_kb` standard output and error.
    """

    seconds: float = 5.0
    memory_mb: int = 1024
    files_mb: int = 64
    processes: int = 32
    output_kb: int = 256
    kind: str = "auto"

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "files_mb", "processes", "output_kb"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)!r}: a limit of programs must be above 0")

    async def python(self, code: str) -> str:
        """Run a Python program in an empty directory and return what it prints."""
        return _transcript(await self.run(Program([PYTHON, "main.py"], {"main.py": code})))

    async def shell(self, command: str) -> str:
        """Run a shell command in an empty directory and return what it prints."""
        return _transcript(await self.run(Program([SHELL, "main.sh"], {"main.sh": command})))

    async def run(self, program: Program) -> Outcome:
        """Run a program in a new sandbox. Raises `ConfigError` if the kind of isolation does not work here.

        No more calls than cores run at once, and the episode's clock stops in the queue.
        """
        return (await self.run_together(program))[0]

    async def run_together(self, *programs: Program) -> list[Outcome]:
        """Run programs at the same time, in a sandbox each. When the first one has ended, the others are ended, too."""
        kind = await asyncio.to_thread(isolation, self.kind)
        async with core_slot():
            runs = [asyncio.create_task(self._run(kind, program)) for program in programs]
            try:
                await runs[0]
                await asyncio.wait(runs, timeout=LINGER_S)
            finally:
                for run in runs:
                    run.cancel()
                await asyncio.wait(runs)
            return [run.result() for run in runs if not run.cancelled()]

    async def _run(self, kind: str, program: Program) -> Outcome:
        on_disk = kind == "rlimits"
        with tempfile.TemporaryDirectory(prefix="slipstream-sandbox-") if on_disk else nullcontext(SCRATCH) as scratch:
            request = self._request(kind, program, scratch)
            process = await asyncio.create_subprocess_exec(
                *_command(request), stdin=PIPE, stdout=PIPE, stderr=PIPE, env={}, start_new_session=True,
                pass_fds=[program.channel.fileno()] if program.channel else [],
            )  # fmt: skip
            assert process.stdin and process.stdout and process.stderr
            if program.channel:
                program.channel.close()
            try:
                async with asyncio.timeout(self.seconds + GRACE_S):
                    process.stdin.write(ascii(request).encode() + b"\n")
                    report, errors = await asyncio.gather(process.stdout.read(), process.stderr.read())
            finally:
                process.stdin.close()  # ends the sandbox if it still runs
                await _wait_or_kill(process)
        if not report:
            reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxFailed(f"the sandbox {kind} ended without a report: {reason[:200]}")
        return Outcome(**ast.literal_eval(report.decode()))

    def _request(self, kind: str, program: Program, scratch: str) -> dict[str, Any]:
        """What `sandbox_init.py` reads, sizes in bytes."""
        memory, files = self.memory_mb << 20, self.files_mb << 20
        limits = {"AS": 4 * memory, "FSIZE": files, "NOFILE": 256, "CORE": 0, "NPROC": self.processes + 4}
        path = f"{Path(PYTHON).parent}:/usr/local/bin:/usr/bin:/bin"
        return {
            "kind": kind,
            "argv": [*program.argv],
            "files": {**program.files},
            "stdin": program.stdin,
            "channel": program.channel.fileno() if program.channel else -1,
            "scratch": scratch,
            "seconds": self.seconds,
            "memory": memory,
            "disk": files,
            "processes": self.processes,
            "output": self.output_kb << 10,
            "rlimits": {f"RLIMIT_{name}": most for name, most in limits.items()},
            "env": ENVIRONMENT | {"PATH": path, "HOME": scratch, "TMPDIR": scratch},
            "uid": (1 << 29) + secrets.randbits(28) if os.geteuid() == 0 else 0,
            "readable": readable_paths(),
        }


@functools.cache
def isolation(kind: str) -> str:
    """The kind of isolation that "auto" stands for, or `kind`, after a program has run in it. Raises `ConfigError`."""
    failures = []
    if kind not in ("auto", *STRONG, "rlimits"):
        raise ConfigError(f'sandbox = {kind!r}; it is "auto", "bwrap", "namespaces" or "rlimits"')
    for name in STRONG if kind == "auto" else (kind,):
        try:
            if name == "bwrap" and not shutil.which("bwrap"):
                raise ConfigError("bwrap is not installed")
            outcome = asyncio.run(Sandbox()._run(name, Program([PYTHON, "main.py"], {"main.py": ""})))
            if not outcome.problem:
                if name == "rlimits":
                    print(f'slipstream: warning: sandbox = "rlimits": {UNCONTAINED}', file=sys.stderr)
                return name
            raise ConfigError(f"{name}: {outcome.problem}: {outcome.stderr[-200:]}")
        except (ConfigError, SandboxFailed, OSError, TimeoutError) as error:
            failures.append(" ".join(str(error).split()))
    raise ConfigError(
        f"no sandbox works here: {'; '.join(failures)}. Install bubblewrap, permit user namespaces, or set sandbox = "
        f'"rlimits" inside a container of its own: there {UNCONTAINED}'
    )


async def _wait_or_kill(process: Process) -> None:
    """Wait for the end of a sandbox whose input was closed; kill it after `GRACE_S`."""
    try:
        async with asyncio.timeout(GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()


@functools.cache
def readable_paths() -> dict[str, str]:
    """Paths of the system and of this Python that code may read, each with its source."""
    prefixes = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}
    parts = [f"{prefix}/{part}" for prefix in prefixes for part in ("bin", "lib", "lib64", "pyvenv.cfg")]
    inside = [part for part in parts if not part.startswith(("/usr/", "/lib", "/bin"))]
    found = [Path(path) for path in (*BINDS, *sorted(inside)) if os.path.lexists(path)]
    return {str(path): str(path.parent.resolve() / path.name) for path in found}


def _command(request: Mapping[str, Any]) -> list[str]:
    """The command line of the sandbox's first process."""
    init = [PYTHON, "-I", "-S", "-c", INIT]
    if request["kind"] != "bwrap":
        return init
    argv = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--as-pid-1"]
    argv += [f"--unshare-{name}" for name in ("pid", "net", "ipc", "uts", "cgroup-try")]
    argv += ["--cap-add", "ALL"] if request["uid"] else ["--unshare-user"]  # root changes its user in `sandbox_init`
    parents = {str(parent) for path in request["readable"] for parent in Path(path).parents}
    own = ["--perms", "0777", "--size", str(request["disk"]), "--tmpfs"]
    argv += [*own, "/tmp"] if "/tmp" in parents else []
    argv += [word for parent in sorted(parents - {"/", "/tmp"}) for word in ("--dir", parent)]  # else closed to others
    for path, source in request["readable"].items():
        is_link = Path(path).is_symlink()
        argv += ["--symlink" if is_link else "--ro-bind", str(Path(path).readlink()) if is_link else source, path]
    argv += ["--dev", "/dev", "--proc", "/proc"]
    for path in (SCRATCH, "/dev/shm"):
        argv += [*own, path]
    argv += ["--symlink", SCRATCH, "/tmp"] if "/tmp" not in parents else []
    return [*argv, "--remount-ro", "/dev", "--remount-ro", "/", *init]


def _transcript(outcome: Outcome) -> str:
    """An outcome as text for the model."""
    parts = (outcome.stdout, outcome.stderr, f"[{outcome.report}]" if outcome.report else "")
    return "\n".join(part.rstrip() for part in parts if part.strip()) or "[no output]"

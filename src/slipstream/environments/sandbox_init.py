"""The first process of a sandbox: runs one program within limits, and reports how the program ended.

This file's text is passed to a bare interpreter, so it imports little, and the standard library alone. A request
comes as one line of standard input and a report leaves by standard output, as Python literals. To cancel the program,
the caller closes standard input. The program gets other streams, and can't read these through /proc. This process makes
the namespaces if `kind` is "namespaces"; bwrap has made them if it is "bwrap"; "rlimits" has none. In namespaces it is
process 1: its end kills the rest.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` and `socket` import `enum`, which takes 7 ms
import _socket
import ctypes
import errno
import fcntl
import os
import resource
import select
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
POLL_MS = 20  # between two looks at memory, processes and files
MAX_FILES = 4_000  # in a sandbox
NEW_USER, NEW_NAMESPACES = 0x10000000, 0x6E020000  # mount, cgroup, host name, IPC, process ids, network
BIND, READ_ONLY, NO_SUID, NO_DEV, NO_EXEC = 0x1000 | 0x4000, 1, 2, 4, 8  # mount flags; BIND is recursive
PRIVATE, DETACH = 0x4000 | 0x40000, 2
MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000
DEATH_SIGNAL, SET_DUMPABLE, DROP_BOUND, NO_NEW_PRIVILEGES, SUBREAPER = 1, 4, 24, 38, 36  # of prctl
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column of SYSCALLS
SYSCALLS = {  # refused; sockets through io_uring would bypass the filter, and shared memory outlives its process
    "socket": (41, 198), "ptrace": (101, 117), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "memfd_create": (319, 279), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
}  # fmt: skip
CLONE, CLONE3, SECCOMP, PIVOT_ROOT, CAPSET = (56, 220), (435, 435), (317, 277), (155, 41), (126, 91)
ALLOW, NOTIFY, KILL, FAIL = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
RECEIVE, RESPOND = 0xC0502100, 0xC0182101  # ioctls of a seccomp listener
HINTS = {  # the end of a failing program's errors, and the limit that it met
    "memory": ("MemoryError", "Cannot allocate memory", "bad_alloc"),
    "files": ("No space left", "File too large", "Too many open files"),
    "processes": ("Resource temporarily unavailable", "can't start new thread", "Cannot fork"),
}


def check_errno(result: int) -> int:
    """The result of a C function. Raises `OSError` if it is negative."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    encoded = [text and text.encode() for text in (source, target, kind, options)]
    check_errno(libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]))


def restrict(path: str, flags: int, recursive: bool = True) -> None:
    """Add flags to the mount at `path`."""
    attributes = struct.pack("4Q", flags, 0, 0, 0)
    check_errno(libc.syscall(MOUNT_SETATTR, -100, path.encode(), AT_RECURSIVE * recursive, attributes, len(attributes)))


def enter_namespaces(request: dict[str, Any]) -> None:
    """Become process 1 of new namespaces, with a root directory of `readable` paths and the scratch directory."""
    uid, gid = os.geteuid(), os.getegid()
    check_errno(libc.unshare(NEW_NAMESPACES | (NEW_USER if uid else 0)))
    if uid:  # root changes its user instead, see `drop_privileges`
        for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(DEATH_SIGNAL, _signal.SIGKILL)
    mount("none", "/", None, PRIVATE)
    mount("none", "/tmp", "tmpfs", NO_SUID | NO_DEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    check_errno(libc.syscall(PIVOT_ROOT[syscall_column()], b"/tmp", b"/tmp/old"))
    os.chdir("/")
    own = f"mode=777,size={request['disk']}"
    if any(path.startswith("/tmp/") for path in request["readable"]):  # else it is a link to the scratch directory
        os.mkdir("/tmp")
        mount("none", "/tmp", "tmpfs", NO_SUID | NO_DEV, own)
    for path, source in request["readable"].items():
        bind(path, source)
        if not os.path.islink(path):
            restrict(path, READ_ONLY | NO_SUID | NO_DEV)
    for name in ("null", "zero", "full", "random", "urandom"):
        bind(f"/dev/{name}", f"/dev/{name}")
    for path in ("/tmp", "/dev/shm"):
        if not os.path.exists(path):
            os.symlink(request["scratch"], path)
    for path, kind, flags, options in (
        ("/proc", "proc", NO_SUID | NO_DEV | NO_EXEC, None),
        (request["scratch"], "tmpfs", NO_SUID | NO_DEV, own),
    ):
        os.mkdir(path)
        mount("none", path, kind, flags, options)
    check_errno(libc.umount2(b"/old", DETACH))
    restrict("/", READ_ONLY, recursive=False)


def bind(path: str, source: str) -> None:
    """Make a source in the old root visible at a path: a link as a link, anything else as a mount."""
    source = "/old" + source
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        open(path, "w").close()
    mount(source, path, None, BIND)


def syscall_column() -> int:
    return ARCHITECTURES[os.uname().machine][1]


def drop_privileges(uid: int) -> None:
    """Give up all capabilities, and root for the user `uid`, who has no other processes and files."""
    if os.geteuid() == 0 and uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for capability in range(64):
        libc.prctl(DROP_BOUND, capability, 0, 0, 0)
    check_errno(libc.syscall(CAPSET[syscall_column()], struct.pack("Ii", 0x20080522, 0), bytes(24)))


def filter_syscalls() -> int:
    """Refuse `SYSCALLS`, and new user namespaces. Returns the descriptor that receives refused calls."""
    audit, index = ARCHITECTURES[os.uname().machine]
    load, equal, at_least, any_bit, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    code = [(load, 0, 0, 4), (equal, 1, 0, audit), (leave, 0, 0, KILL), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (leave, 0, 0, KILL)]  # system calls of the x32 ABI
    code += [(equal, 0, 1, CLONE3[index]), (leave, 0, 0, FAIL | errno.ENOSYS)]  # its flags can't be read: use clone
    code += [(equal, 0, 4, SYSCALLS["socket"][index]), (load, 0, 0, 16), (equal, 0, 1, _socket.AF_UNIX)]
    code += [(leave, 0, 0, FAIL | errno.EPERM), (leave, 0, 0, NOTIFY)]  # libc tries Unix sockets: no need to report it
    for numbers in SYSCALLS.values():
        code += [(equal, 0, 1, numbers[index]), (leave, 0, 0, NOTIFY)]
    code += [(equal, 0, 3, CLONE[index]), (load, 0, 0, 16), (any_bit, 0, 1, NEW_USER), (leave, 0, 0, NOTIFY)]
    code += [(leave, 0, 0, ALLOW)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = struct.pack("HP", len(code), ctypes.addressof(text))
    check_errno(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    return check_errno(libc.syscall(SECCOMP[index], 1, 8, program))


def start(request: dict[str, Any], streams: list[int]) -> tuple[int, int]:
    """Start the program on the descriptors `streams`, as 0, 1, ...

    Returns its process id and its seccomp listener, which is -1 if the program could not be started.
    """
    ours, theirs = _socket.socketpair()
    if pid := os.fork():
        theirs.close()
        rights = ours.recvmsg(1, _socket.CMSG_SPACE(4))[1]
        return pid, struct.unpack("i", rights[0][2])[0] if rights else -1
    try:
        os.chdir(request["scratch"])
        above = [fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, 100) for stream in (*streams, theirs.fileno())]
        for number, stream in enumerate(above[:-1]):
            os.dup2(stream, number)
        os.closerange(len(streams), 100)
        drop_privileges(request["uid"])
        for name, most in request["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (most, most))
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them
            _signal.signal(number, _signal.SIG_DFL)
        listener = struct.pack("i", filter_syscalls())
        _socket.socket(fileno=above[-1]).sendmsg([b"x"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, listener)])
        os.execve(request["argv"][0], request["argv"], request["env"])
    except BaseException as error:
        os.write(2, f"sandbox: {type(error).__name__}: {error}".encode())
    os._exit(127)


def process_statuses() -> dict[int, dict[str, str]]:
    """The fields of /proc/PID/status of each process, by id."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/status", errors="replace") as file:
                found[int(name)] = dict(line.split(":", 1) for line in file.read().splitlines())
        except OSError:
            continue  # it has ended
    return found


def descendants() -> dict[int, dict[str, str]]:
    """`statuses` of the processes below this one."""
    found, me = process_statuses(), os.getpid()

    def is_below(pid: int) -> bool:
        while pid in found and pid != me:
            pid = int(found[pid]["PPid"])
        return pid == me

    return {pid: status for pid, status in found.items() if pid != me and is_below(pid)}


class Supervisor:
    """Watches a program until it ends or exceeds a limit."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request, self.started = request, time.monotonic()
        self.limit = ""
        self.refused: list[str] = []
        self.status: int | None = None
        outputs = [os.pipe(), os.pipe()]
        stdin = os.memfd_create("stdin")
        os.write(stdin, request["stdin"].encode(errors="surrogatepass"))
        os.lseek(stdin, 0, os.SEEK_SET)
        streams = [stdin, outputs[0][1], outputs[1][1], *([request["channel"]] * (request["channel"] >= 0))]
        self.pid, self.listener = start(request, streams)
        for stream in streams:
            os.close(stream)
        self.output = {read: bytearray() for read, _ in outputs}
        self.poller = select.poll()
        for descriptor in (os.pidfd_open(self.pid), *self.output, *([self.listener] * (self.listener >= 0))):
            self.poller.register(descriptor, select.POLLIN)
        self.poller.register(0, 0)  # hangs up when Slipstream ends or cancels

    def run(self) -> dict[str, Any]:
        """Supervise the program to its end or a limit, and kill all processes. Returns the report.

        If the program failed within all limits, the end of its errors may name one (`HINTS`).
        """
        while self.status is None and not self.limit:
            self.step(POLL_MS)
            self.limit = self.limit or self.exceeded()
        if not self.limit and descendants():
            self.refused.append("a process after the program's end")
        self.kill()
        self.step(0)
        errors = [bytes(text).decode(errors="replace") for text in self.output.values()]
        if self.status and not self.limit:
            end = errors[1][-1000:]
            self.limit = next((name for name, hints in HINTS.items() if any(hint in end for hint in hints)), "")
        seconds = time.monotonic() - self.started
        report = {"status": self.status, "limit": self.limit, "refused": self.refused, "seconds": seconds}
        return report | {"stdout": errors[0], "stderr": errors[1]}

    def step(self, wait_ms: int) -> None:
        """Wait at most `wait_ms` for output, refused calls or a cancellation, handle them, and reap ended processes."""
        for descriptor, event in self.poller.poll(wait_ms):
            if descriptor == 0:
                self.limit = "cancelled"
            elif descriptor == self.listener:
                self.refuse(event)
            elif descriptor in self.output:
                self.read(descriptor)
        self.reap()

    def read(self, descriptor: int) -> None:
        """Read an output until it has no more for now, or has ended."""
        while text := os.read(descriptor, 65536):
            self.output[descriptor] += text
            if sum(map(len, self.output.values())) > self.request["output"]:
                self.limit = "output"
                del self.output[descriptor][self.request["output"] :]
                return
            if not select.select([descriptor], [], [], 0)[0]:
                return
        self.poller.unregister(descriptor)

    def refuse(self, event: int) -> None:
        """Answer a refused system call with "not permitted" and remember its name."""
        if not event & select.POLLIN:
            self.poller.unregister(self.listener)
            return
        try:
            call = bytearray(80)
            fcntl.ioctl(self.listener, RECEIVE, call)
            number = struct.unpack_from("i", call, 16)[0]
            name = next((name for name, numbers in SYSCALLS.items() if numbers[syscall_column()] == number), "clone")
            self.refused += [name] * (name not in self.refused)
            fcntl.ioctl(self.listener, RESPOND, bytearray(call[:8] + struct.pack("qiI", 0, -errno.EPERM, 0)))
        except OSError:
            pass  # the caller was killed

    def reap(self) -> bool:
        """Whether child processes are left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.pid:
                    self.status = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return False
        return True

    def exceeded(self) -> str:
        """The limit that the program exceeds, or ""."""
        if time.monotonic() - self.started > self.request["seconds"]:
            return "time"
        below = descendants().values()
        if sum(int(fields.get("Threads", 1)) for fields in below) > self.request["processes"]:
            return "processes"
        parts = [fields.get(name, "0 kB") for fields in below for name in ("RssAnon", "RssShmem")]
        if sum(int(part.split()[0]) for part in parts) * 1024 > self.request["memory"]:
            return "memory"
        return "files" if self.too_many_files() else ""

    def too_many_files(self) -> bool:
        scratch = self.request["scratch"]
        if os.getpid() == 1:
            space = os.statvfs(scratch)
            return not space.f_bavail or space.f_files - space.f_ffree > MAX_FILES
        count = size = 0
        for folder, folders, names in os.walk(scratch):
            count += len(folders) + len(names)
            for name in names if count < MAX_FILES else ():
                try:
                    size += os.lstat(f"{folder}/{name}").st_blocks * 512
                except OSError:
                    continue  # it was removed
        return size > self.request["disk"] or count > MAX_FILES

    def kill(self) -> None:
        """Kill everything that the program started."""
        while self.reap():
            for pid in [-1] if os.getpid() == 1 else descendants():
                try:
                    os.kill(pid, _signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.001)


def main() -> None:
    request = eval(sys.stdin.readline())
    report_to = os.dup(1)
    os.dup2(2, 1)
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    libc.prctl(SUBREAPER, 1)
    os.nice(10)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the first to be killed if the host is out of memory
    if request["kind"] == "namespaces":
        enter_namespaces(request)
    elif request["kind"] == "rlimits":
        own = [status for status in process_statuses().values() if status["Uid"].split()[0] == str(os.getuid())]
        request["rlimits"]["RLIMIT_NPROC"] += sum(int(status["Threads"]) for status in own)  # it counts those, too
        if request["uid"]:
            os.chown(request["scratch"], request["uid"], request["uid"])
    libc.prctl(SET_DUMPABLE, 0)  # so that /proc/1 is closed to the program
    for name, text in request["files"].items():
        with open(os.path.join(request["scratch"], name), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    report = Supervisor(request).run()
    if request["kind"] == "rlimits":  # Slipstream does the same, unless it has ended
        import shutil

        shutil.rmtree(request["scratch"], ignore_errors=True)
    with open(report_to, "w") as file:
        file.write(ascii(report))


if __name__ == "__main__":
    main()

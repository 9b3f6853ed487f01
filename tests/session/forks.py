"""Processes of tests that begin with all imports done: forked from one that has imported them.

A process costs a second of CPU before it does anything, and a run of the suite starts some seven
hundred. What is forked is a process like any other from there on: own pid, own name, own end, own
files. Commands on a terminal, tests of starting, and those with a launcher start as users start them.

Run as `python -m tests.session.forks DESCRIPTOR` it is the process that forks.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import trio

from tests.sources import ROOT

MODULES: Final = (
    *("trinamo.cli.main", "trinamo.cli.serve.roles", "trinamo.cli.up.cluster"),
    *("trinamo.transports.nats.island", "grpc", "rich.console", "rich.table"),
)
"""What roles and commands import, most of it when they need it."""
MESSAGE_BYTES_MAX: Final = 1 << 20
DESCRIPTORS_MAX: Final = 8
NAME_BYTES_MAX: Final = 2000
"""Room that a forked process writes its own command line to, where the kernel looks for it."""
PR_SET_PDEATHSIG: Final = 1
ARGUMENTS_PLACE: Final = 45
"""Of `arg_start`, among the words of `/proc/self/stat` behind the name; `arg_end` follows."""


class Forked:
    """A process that is no child of ours, but of the one that forks."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        # Open for as long as anybody has this: another task may be waiting for it to be readable.
        self._pidfd = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._pidfd)

    def poll(self) -> int | None:
        """Its return code as of `subprocess.Popen`; None while it runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            code, cpu_s = ask(_server(), {"ended": self.pid}).split()
            self.returncode = int(code)
            _cpu_s.append(float(cpu_s))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Command(Forked):
    """As much of a `subprocess.Popen` as tests ask for."""

    def wait(self, timeout_s: float | None = None) -> int:
        """Until it has ended; its return code. Raises as `subprocess.Popen` does if it takes longer."""
        if self.poll() is None and not select.select([self._pidfd], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0.0)
        code = self.poll()
        assert code is not None
        return code


class Member(Forked):
    """As much of a `trio.Process` as tests ask for."""

    def __init__(self, pid: int, stdout: int) -> None:
        super().__init__(pid)
        self.stdout = trio.lowlevel.FdStream(stdout)

    async def wait(self) -> int:
        """Until it has ended; its return code."""
        while self.poll() is None:
            await trio.lowlevel.wait_readable(self._pidfd)
        assert self.returncode is not None
        return self.returncode


def fork(arguments: Sequence[str], environ: Mapping[str, str], stderr: int) -> Member:
    """Run `python ARGUMENTS…`, the path of a script first; its standard input is empty."""
    ours, theirs = os.pipe()
    try:
        with Path(os.devnull).open("rb") as nothing:
            streams = (nothing.fileno(), theirs, stderr)
            pid = _fork(arguments, environ, streams, Path.cwd(), has_group=False)
    finally:
        os.close(theirs)
    return Member(pid, ours)


def fork_command(
    arguments: Sequence[str], environ: Mapping[str, str], streams: Sequence[int], directory: Path
) -> Command:
    """Run `trinamo ARGUMENTS…` in a process group of its own; `streams` are its first descriptors."""
    words = ["-m", "trinamo.cli", *arguments]
    return Command(_fork(words, environ, streams, directory, has_group=True))


def _fork(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    streams: Sequence[int],
    directory: Path,
    *,
    has_group: bool,
) -> int:
    numbers = range(len(streams))
    asked = request(arguments, environ, directory, numbers=numbers, has_group=has_group)
    return int(ask(_server(), asked, streams))


def request(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    directory: str | os.PathLike[str],
    *,
    numbers: Sequence[int],
    has_group: bool,
) -> dict[str, object]:
    """What asks for a process; `numbers` are those under which it finds the descriptors it is sent."""
    return {
        "arguments": list(arguments),
        "environ": dict(environ),
        "directory": os.fspath(directory),
        "numbers": list(numbers),
        "has_group": has_group,
    }


def ask(server: socket.socket, asked: Mapping[str, object], descriptors: Sequence[int] = ()) -> str:
    """Have a process forked, or ask how one has ended; the answer, as it was sent."""
    socket.send_fds(server, [json.dumps(asked).encode()], descriptors)
    answer = server.recv(MESSAGE_BYTES_MAX).decode()
    if not answer:
        raise RuntimeError("the process that forks has ended; its words are on standard error")
    return answer


_cpu_s: list[float] = []


def cpu_s() -> float:
    """What those that ended have cost, in CPU-seconds, with whatever they waited for."""
    return sum(_cpu_s)


@cache
def _server() -> socket.socket:
    """The end at which it is asked; it ends with us."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = theirs.fileno()
    command = [sys.executable, "-m", "tests.session.forks", str(number), " " * NAME_BYTES_MAX]
    environ = {**os.environ, "PYTHONWARNINGS": ""}
    process = subprocess.Popen(
        command,
        pass_fds=[number],
        env=environ,
        stdin=subprocess.DEVNULL,
        # Its children write elsewhere, and must not take a terminal of ours for theirs.
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# --- the process that forks ---------------------------------------------------------------------------


def serve(asking: socket.socket, *, is_adopted: bool = False) -> list[str]:
    """Fork whenever it is asked to; returns in each child, with its arguments, and not at the end.

    If they are adopted, a child's parent ends at once: somebody above waits for the child.
    """
    while True:
        data, descriptors, _, _ = socket.recv_fds(asking, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
        if not data:
            # Those who are left have lost whoever would end them.
            os._exit(0)
        asked = json.loads(data)
        if "ended" in asked:
            _, status, used = os.wait4(asked["ended"], 0)
            code, cpu_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
            asking.send(f"{code} {cpu_s}".encode())
            continue
        pid = _fork_for_adoption() if is_adopted else os.fork()
        if not pid:
            if not is_adopted:
                # If the tests are killed, so that this one ends, nobody else would end it.
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            _become(asked, descriptors)
            asking.close()
            return list(asked["arguments"])
        for descriptor in descriptors:
            os.close(descriptor)
        asking.send(str(pid).encode())


def _fork_for_adoption() -> int:
    """As `os.fork`, for a child that has another parent by the time it is known."""
    told, telling = os.pipe()
    between = os.fork()
    if not between:
        pid = os.fork()
        if not pid:
            os.close(told)
            os.close(telling)
            return 0
        os.write(telling, str(pid).encode())
        os._exit(0)
    os.close(telling)
    os.waitpid(between, 0)
    with os.fdopen(told) as file:
        return int(file.read())


def _become(asked: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """What a new process finds: signals, group, descriptors, environment, folder, name."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked["has_group"]:
        os.setpgid(0, 0)
    # First out of the way of the numbers that they get.
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, 1000) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(high, asked["numbers"], strict=True):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(asked["environ"])
    os.chdir(asked["directory"])
    rename([sys.executable, *asked["arguments"]])


def rename(command: Sequence[str]) -> None:
    """Show another command line to whoever looks at processes."""
    words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, words[ARGUMENTS_PLACE : ARGUMENTS_PLACE + 2])
    name = b"\0".join(each.encode() for each in command)
    ctypes.memmove(start, name[: end - start - 1].ljust(end - start, b"\0"), end - start)


def main() -> None:
    from tests.session import children
    from trinamo.runtime.engines.threads import limit_threads

    # Whoever interrupts the tests ends this one by going.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_threads(1)
    for each in MODULES:
        import_module(each)
    gc.collect()
    # What is shared stays so: the collector would write to every object of it.
    gc.freeze()
    arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    if children.starts_processes(arguments):
        arguments = children.supervise(arguments)
    if "-m" in arguments[:2]:
        sys.path[:1] = [] if arguments[0] == "-P" else [str(Path.cwd())]
        sys.argv = arguments[arguments.index("-m") + 1 :]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

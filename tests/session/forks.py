"""Processes of test clusters that begin with all imports done: forked from one that has imported them.

A process costs a second of CPU before it does anything, and a run of the suite starts some seven
hundred. What is forked is a process like any other from there on: own pid, own end, own files. Tests
of starting, and those with a launcher, start their processes as users do.

Run as `python -m tests.session.forks DESCRIPTOR` it is the process that forks.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final

import trio

from tests.sources import ROOT

MODULES: Final = ("trinamo.cli.serve.roles", "trinamo.transports.nats.client", "grpc")
"""What roles import, most of it when they need it."""
MESSAGE_BYTES_MAX: Final = 1 << 20


class Forked:
    """As much of a `trio.Process` as tests ask for."""

    def __init__(self, pid: int, stdout: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = trio.lowlevel.FdStream(stdout)
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its return code as of `subprocess.Popen`; None while it runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self.returncode = int(_ask({"ended": self.pid}))
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Until it has ended; its return code."""
        while self.poll() is None:
            await trio.lowlevel.wait_readable(self._pidfd)
        assert self.returncode is not None
        return self.returncode


def fork(arguments: Sequence[str], environ: Mapping[str, str], stderr: int) -> Forked:
    """Run `python ARGUMENTS…`, the path of a script first; its standard input is empty."""
    ours, theirs = os.pipe()
    try:
        asked = {
            "arguments": list(arguments),
            "environ": dict(environ),
            "directory": str(Path.cwd()),
        }
        pid = int(_ask(asked, [theirs, stderr]))
    finally:
        os.close(theirs)
    return Forked(pid, ours)


def _ask(asked: Mapping[str, object], descriptors: Sequence[int] = ()) -> str:
    server = _server()
    socket.send_fds(server, [json.dumps(asked).encode()], descriptors)
    answer = server.recv(MESSAGE_BYTES_MAX).decode()
    if not answer:
        raise RuntimeError("the process that forks has ended; its words are on standard error")
    return answer


@cache
def _server() -> socket.socket:
    """The end at which it is asked; it ends with us."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = theirs.fileno()
    command = [sys.executable, "-m", "tests.session.forks", str(number)]
    environ = {**os.environ, "PYTHONWARNINGS": ""}
    process = subprocess.Popen(
        command, pass_fds=[number], env=environ, stdin=subprocess.DEVNULL, cwd=ROOT
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# --- the process that forks ---------------------------------------------------------------------------


def serve(asking: socket.socket) -> list[str]:
    """Fork whenever it is asked to; returns in each child, with its arguments, and not at the end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(asking, MESSAGE_BYTES_MAX, 2)
        if not data:
            # Those who are left have lost whoever would end them.
            os._exit(0)
        asked = json.loads(data)
        if "ended" in asked:
            _, status = os.waitpid(asked["ended"], 0)
            asking.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            asking.close()
            for number, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(asked["environ"])
            os.chdir(asked["directory"])
            return list(asked["arguments"])
        for descriptor in descriptors:
            os.close(descriptor)
        asking.send(str(pid).encode())


if __name__ == "__main__":
    from trinamo.runtime.engines.threads import limit_threads

    # Whoever interrupts the tests ends this one by going.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_threads(1)
    for each in MODULES:
        import_module(each)
    gc.collect()
    # What is shared stays so: the collector would write to every object of it.
    gc.freeze()
    sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")

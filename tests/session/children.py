"""What a forked `trinamo up` starts, and `trinamo frontend --processes`: forked as well, as its children.

Such a process is no fork of its supervisor, which has threads and sockets by then, but of one that was
forked from that before it began. The kernel gives a process whose parent has ended to its nearest
ancestor that asked for them: so it becomes the supervisor's child, whom a signal and an exit code reach
as ever, and whose end is its own if the supervisor dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from tests.session import forks

OURS: Final = ["-P", "-m", "trinamo.cli"]
PR_SET_CHILD_SUBREAPER: Final = 36


def starts_processes(arguments: Sequence[str]) -> bool:
    return arguments[:2] == ["-m", "trinamo.cli"] and not {"up", "--processes"}.isdisjoint(
        arguments
    )


def supervise(arguments: list[str]) -> list[str]:
    """Let what this process starts from now on be forked; returns in each of them, too, with its own."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        Popen.asking = ours
        subprocess.Popen = Popen  # type: ignore[misc]
        return arguments
    ours.close()
    os.setpgid(0, 0)
    forks.rename([sys.executable, "-m", forks.__name__])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Path(os.devnull).open("r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    own = forks.serve(theirs, is_adopted=True)
    while os.getppid() != supervisor:
        time.sleep(0.001)
    return own


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """One that has a process of ours forked; all else starts as it does."""

    asking: ClassVar[socket.socket]

    def _execute_child(self, args: Any, *more: Any) -> None:
        command = [str(each) for each in args]
        if command[: 1 + len(OURS)] != [sys.executable, *OURS]:
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        # In the order of its parameters: executable, preexec_fn, close_fds, pass_fds, cwd, env, …
        passed, cwd, environ = more[3:6]
        pipes = more[9:15]
        streams = [
            given if given >= 0 else number
            for number, given in enumerate((pipes[0], pipes[3], pipes[5]))
        ]
        asked = forks.request(
            command[1:],
            os.environ if environ is None else environ,
            Path.cwd() if cwd is None else cwd,
            numbers=[0, 1, 2, *passed],
            has_group=more[-1] == 0,
        )
        self.pid = int(forks.ask(self.asking, asked, [*streams, *passed]))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

"""How a child tells its supervisor that it serves, or why it does not.

One JSON object a line on an inherited pipe: `{"ready": {…facts}}` once, or `{"error": {"code": …,
"message": …}}`. The pipe ends with the process. A child also ties its life to its supervisor's.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final

from trinamo.runtime.logs.text import one_line

LINE_BYTES_MAX: Final = 65_536
_VALUE_CHARACTERS_MAX: Final = 500
_PR_SET_PDEATHSIG: Final = 1


def announce(fd: int | None, kind: str, facts: Mapping[str, Any]) -> None:
    """Write one line to the supervisor; without a pipe, or with nobody reading, nothing."""
    if fd is None:
        return
    try:
        # One write below PIPE_BUF is atomic and, with two lines in a process's life, never waits.
        short = {
            key: one_line(value, characters_max=_VALUE_CHARACTERS_MAX)
            if isinstance(value, str)
            else value
            for key, value in facts.items()
        }
        os.write(fd, json.dumps({kind: short}).encode() + b"\n")
    except OSError:
        return


def parse_line(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """What `announce` wrote: the kind and its facts; None for anything else."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or len(value) != 1:
        return None
    kind, facts = next(iter(value.items()))
    return (kind, facts) if isinstance(facts, dict) else None


def bind_to_parent(pid: int) -> None:
    """Be killed when the parent, which must be `pid`, dies; exits now if it has died already.

    So even `kill -9` of the supervisor leaves no process behind. The kernel watches the parent's
    *thread* that started us, hence supervisors start children from the thread that runs trio.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died between the fork and the call: then there will be no signal.
    if os.getppid() != pid:
        sys.exit(1)

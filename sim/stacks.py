"""What every task of a run waits for, in words, for the reports of a run that got stuck."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING

from .host import DRIVER, incarnation_of

if TYPE_CHECKING:
    from trio.lowlevel import Task

__all__ = ["await_stacks", "host_of", "task_name"]

FRAMES_MAX = 24
TRIOS_OWN = ("<init>", "<TrioToken.run_sync_soon task>")
TRAPS = "_traps.py"
"""trio's innermost frames, the same in every stack."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def host_of(task: Task) -> str:
    """The host and incarnation a task belongs to, as rows name it."""
    return str(incarnation_of(task) or DRIVER)


def task_name(task: Task) -> str:
    """The task's name; an address in it, as in that of a callable without a name, is left out."""
    name: str = task.name
    return _ADDRESS.sub("", name) if " at 0x" in name else name


def await_stacks(tasks: Iterable[Task]) -> str:
    """One line for each task: its host, its name, and its await stack, innermost frame first."""
    lines = []
    for task in tasks:
        if task.name in TRIOS_OWN:
            continue
        frames = [
            f"{PurePath(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}"
            for frame, line in task.iter_await_frames()
            if not frame.f_code.co_filename.endswith(TRAPS)
        ]
        where = " < ".join(reversed(frames[-FRAMES_MAX:]))
        lines.append(f"  {host_of(task)} {task_name(task)}: {where}")
    return "\n".join(lines)

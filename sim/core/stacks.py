"""What rows and reports say of tasks: a name that is the same in every run, and an await stack."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ..isolation.guard import task_number
from .host import DRIVER, incarnation_of
from .trace import Fields

if TYPE_CHECKING:
    from types import FrameType

    from trio.lowlevel import Task


FRAMES_MAX = 24
AWAITED_MAX = 1000
LABELS_MAX = 10_000
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


class TaskLabels:
    """What rows say of a task: its host, and its number (from 0 in each run) and name as fields."""

    def __init__(self) -> None:
        self._labels: dict[int, tuple[str, Fields]] = {}
        self._base: int | None = None

    def of(self, task: Task) -> tuple[str, Fields]:
        """The host and the fields; they stay the same for the task's life, so they are kept."""
        number = task_number(task)
        label = self._labels.get(number)
        if label is None:
            if len(self._labels) >= LABELS_MAX:
                self._labels.clear()
            if self._base is None:
                self._base = number
            fields = (("task", number - self._base), ("name", task_name(task)))
            label = self._labels[number] = (host_of(task), fields)
        return label


def _await_frames(task: Task) -> Iterator[tuple[FrameType, int]]:
    """What a task is waiting in, outermost first: each frame and its line.

    As trio's `iter_await_frames`, which ends where an object's `__await__` hands out a coroutine's own
    iterator. That has no frame, but refers to its coroutine, and a library's frames lie behind it.
    """
    awaited: Any = task.coro
    for _ in range(AWAITED_MAX):
        kind = _kind_of(awaited)
        if not kind:
            awaited = next(filter(_kind_of, gc.get_referents(awaited)), None)
            kind = _kind_of(awaited)
            if not kind:
                return
        frame = getattr(awaited, f"{kind}_frame")
        if frame is not None:
            yield frame, frame.f_lineno
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _kind_of(awaited: Any) -> str:
    """How the attributes of a coroutine, generator or async generator begin; empty for anything else."""
    return next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")), "")


def await_stacks(tasks: Iterable[Task]) -> str:
    """One line for each task: its host, its name, and its await stack, innermost frame first."""
    lines = []
    for task in tasks:
        if task.name in TRIOS_OWN:
            continue
        frames = [
            f"{PurePath(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}"
            for frame, line in _await_frames(task)
            if not frame.f_code.co_filename.endswith(TRAPS)
        ]
        where = " < ".join(reversed(frames[-FRAMES_MAX:]))
        lines.append(f"  {host_of(task)} {task_name(task)}: {where}")
    return "\n".join(lines)

"""What rows and reports say of tasks: a name that is the same in every run, and an await stack."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING

import trio

from trinamo.runtime.process.tasks import await_frames

from ..isolation.guard import task_number
from .host import DRIVER, incarnation_of
from .trace import Fields

if TYPE_CHECKING:
    from types import FrameType

    from trio.lowlevel import Task


FRAMES_MAX = 24
TRIO = "trio"
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


def await_stacks(tasks: Iterable[Task]) -> str:
    """One line for each task: its host, its name, its await stack (innermost frame first), who it waits for.

    Holders of trio's locks and limiters are named, and the circle if they wait for each other.
    """
    lines: list[str] = []
    holders: dict[Task, list[Task]] = {}
    for task in tasks:
        if task.name in TRIOS_OWN:
            continue
        frames = list(await_frames(task.coro))
        places = [
            f"{_place(frame)} {frame.f_code.co_name}"
            for frame in frames
            if not frame.f_code.co_filename.endswith(TRAPS)
        ]
        what, holders[task] = _held(frames)
        held = "".join(
            f"; waits for the {what} that {_named(each)} holds" for each in holders[task]
        )
        where = " < ".join(reversed(places[-FRAMES_MAX:]))
        lines.append(f"  {host_of(task)} {task_name(task)}: {where}{held}")
    return "\n".join([*lines, *_circle(holders)])


def _place(frame: FrameType) -> str:
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _held(frames: list[FrameType]) -> tuple[str, list[Task]]:
    """The lock or limiter that these frames wait for, in a word, and the tasks that hold it."""
    for frame in frames:
        waited = frame.f_locals.get("self")
        if not frame.f_code.co_name.startswith("acquire"):
            continue
        if isinstance(waited, (trio.Lock, trio.StrictFIFOLock)):
            owner = waited.statistics().owner
            return "lock", [owner] if owner else []
        if isinstance(waited, trio.CapacityLimiter):
            borrowers = waited.statistics().borrowers
            found = [each for each in borrowers if isinstance(each, trio.lowlevel.Task)]
            # trio keeps them in a set, whose order differs from run to run.
            return "limiter", sorted(found, key=task_number)
    return "", []


def _named(holder: Task) -> str:
    """A holder: its host, its name, and the innermost line of it that is not trio's own."""
    own = [
        each
        for each in await_frames(holder.coro)
        if TRIO not in PurePath(each.f_code.co_filename).parts
    ]
    at = f", at {_place(own[-1])}," if own else ""
    return f"{host_of(holder)} {task_name(holder)}{at}"


def _circle(holders: dict[Task, list[Task]]) -> list[str]:
    """A line for the first circle of tasks that wait for each other; none if there is no such circle."""
    for first in holders:
        path = [first]
        while (following := holders.get(path[-1])) and following[0] not in path:
            path.append(following[0])
        if following:
            circle = [*path[path.index(following[0]) :], following[0]]
            said = " -> ".join(f"{host_of(each)} {task_name(each)}" for each in circle)
            return [f"  each waits for the next: {said}"]
    return []

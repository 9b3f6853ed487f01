"""The nursery tree of this process: each task, where it waits, and for how long. Names, no contents.

A hook on every step of every task would cost the hot path. So trio's own count of a task's steps is
looked at every `LOOK_INTERVAL_S`, and when somebody asks: "since" is a lower bound, as coarse as
that (docs/decisions/0053).
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import PurePath
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Final

import msgspec
import trio

from ..env import Clock

LOOK_INTERVAL_S: Final = 10.0
TASKS_MAX: Final = 4096
"""Tasks that one look goes through; of one nursery `SIBLINGS_MAX`."""
SIBLINGS_MAX: Final = 1024
_FRAMES_MAX: Final = 200
_NAME: Final = re.compile(r"[\w .<>-]{1,160}")
_PLUMBING: Final = ("trio.", "trio_asyncio.", "contextlib", "trinamo.runtime.nurseries")
"""Who waits for others: the place is in whoever called these."""
_ATTRIBUTES: Final = (
    (CoroutineType, "cr_frame", "cr_await"),
    (GeneratorType, "gi_frame", "gi_yieldfrom"),
    (AsyncGeneratorType, "ag_frame", "ag_await"),
)
_KINDS: Final = tuple(kind for kind, _, _ in _ATTRIBUTES)


class TaskView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One task, or several equal ones of a nursery."""

    name: str
    place: str = ""
    """The innermost line that is no plumbing, `file:line`."""
    function: str = ""
    """Whose line that is."""
    waits_in: str = ""
    """What it waits in there; empty if it runs."""
    since_s: float = 0.0
    """It has not run for at least so long, the longest of equal ones; 0: it has since the last look."""
    count: int = 1
    nurseries: list[NurseryView] = []


class NurseryView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One nursery of a task."""

    is_cancelled: bool = False
    tasks: list[TaskView] = []


class TasksView(msgspec.Struct, kw_only=True):
    """All tasks of one process."""

    pid: int
    tasks: int
    left_out: int
    """Of `tasks`, those beyond the bounds of a view."""
    root: TaskView


class TaskTree:
    """The tree of the process that it is made in; use it there, within trio."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: dict[int, tuple[int, float]] = {}
        """By trio's number of a task: its steps, and when it was first seen after so many."""
        self._left = 0

    async def follow(self) -> None:
        """Look from time to time, until cancelled."""
        while True:
            self._look()
            await trio.sleep(LOOK_INTERVAL_S)

    def view(self) -> TasksView:
        """The tree as it is now."""
        self._look()
        self._left, root = TASKS_MAX - 1, trio.lowlevel.current_root_task()
        assert root is not None
        now = self._clock.now()
        living = trio.lowlevel.current_statistics().tasks_living
        shown = self._task(root, now)[0]
        left_out = max(0, living - (TASKS_MAX - self._left))
        return TasksView(pid=os.getpid(), tasks=living, left_out=left_out, root=shown)

    def _look(self) -> None:
        now = self._clock.now()
        seen: dict[int, tuple[int, float]] = {}
        tasks: list[trio.lowlevel.Task] = [*filter(None, [trio.lowlevel.current_root_task()])]
        while tasks and len(seen) < TASKS_MAX:
            task = tasks.pop()
            # What trio counts for its statistics; there is no public word for it.
            number, steps = task._counter, task._schedule_points  # noqa: SLF001
            before = self._steps.get(number)
            seen[number] = before if before is not None and before[0] == steps else (steps, now)
            for nursery in task.child_nurseries:
                tasks += nursery.child_tasks
        self._steps = seen

    def _task(self, task: trio.lowlevel.Task, now: float) -> tuple[TaskView, Any]:
        """It, and what equal tasks have equal."""
        # Of a name that trio made of an object's `repr`, which may tell of requests, the
        # function's.
        is_told = _NAME.fullmatch(task.name)
        name = str(task.name if is_told else getattr(task.coro, "__qualname__", "?"))
        _, at = self._steps.get(task._counter, (0, now))  # noqa: SLF001
        view = TaskView(name=name.removeprefix("trinamo.")[:160], since_s=round(now - at, 3))
        _place(task, view)
        keys = []
        for nursery in task.child_nurseries:
            below = NurseryView(is_cancelled=nursery.cancel_scope.cancel_called)
            groups: dict[Any, TaskView] = {}
            children = sorted(nursery.child_tasks, key=lambda each: each._counter)  # noqa: SLF001
            for child in children[:SIBLINGS_MAX]:
                if not self._left:
                    break
                self._left -= 1
                one, key = self._task(child, now)
                if (first := groups.setdefault(key, one)) is not one:
                    first.count += 1
                    first.since_s = max(first.since_s, one.since_s)
            below.tasks = list(groups.values())
            view.nurseries.append(below)
            keys.append((below.is_cancelled, *((key, each.count) for key, each in groups.items())))
        return view, (view.name, view.place, view.waits_in, *keys)


def _place(task: trio.lowlevel.Task, view: TaskView) -> None:
    within: list[str] = []
    for frame in await_frames(task.coro):
        module = str(frame.f_globals.get("__name__", ""))
        function = frame.f_code.co_qualname
        if not f"{module}.".startswith(_PLUMBING):
            file = PurePath(frame.f_code.co_filename)
            depth = module.count(".") + (file.name == "__init__.py")
            # As far as the module's name says; where it is installed is nobody's business.
            shown = "/".join(file.parts[-depth:] if module.startswith("trinamo.") else [file.name])
            view.place, view.function = f"{shown}:{frame.f_lineno}", function
            within.clear()
        else:
            within.append(function)
    is_nursery = any(each.startswith("NurseryManager.") for each in within)
    view.waits_in = "its nursery" if is_nursery else within[0] if within else ""


def await_frames(awaited: object) -> Iterator[FrameType]:
    """The frames of a coroutine and of what it awaits, the innermost last."""
    for _ in range(_FRAMES_MAX):
        for kind, frame, deeper in _ATTRIBUTES:
            if isinstance(awaited, kind):
                found = getattr(awaited, frame)
                if found is not None:
                    yield found
                awaited = getattr(awaited, deeper)
                if awaited is None and found is not None and kind is GeneratorType:
                    # It drives another by hand, as engines are measured (`engines/own/stalls.py`).
                    awaited = found.f_locals.get("awaited")
                break
        else:
            # One step of an asynchronous generator does not say whose it is, but holds it.
            held = gc.get_referents(awaited)
            awaited = next((each for each in held if isinstance(each, _KINDS)), None)
        if awaited is None:
            return

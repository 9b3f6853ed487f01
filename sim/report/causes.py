"""Who made whom runnable: heard from trio while a run goes on, beside its trace, which stays as it is.

A step has one cause: another step, which set an event or spawned the task; the arrival of a segment, and
behind it the step that sent it; or its deadline. So a note on one host leads back, host by host, to
where it came from.

What this module does not do: draw (`diagram.js`).
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import trio
from typing_extensions import override

from ..core.choices import Choices
from ..core.machines import Machines
from ..core.stacks import host_of, task_name
from ..core.trace import Row
from .events import host_name

if TYPE_CHECKING:
    from types import FrameType

    from trio.lowlevel import Task

STEPS_MAX = 20_000
HOW_MAX = 100
EVENTS = Machines._take_events.__code__  # noqa: SLF001 -- the clock's own


class Step(NamedTuple):
    """One step of a task. `cause` is the number of another, `arrival` that of a segment's row; -1 for none.

    Of a step whose deadline came, the cause is the one before it of the same task.
    """

    time_s: float
    host: str
    task: str
    cause: int
    arrival: int
    is_due: bool
    row: int
    """How many rows there were before it."""


class Causes(trio.abc.Instrument):
    """The steps of the run that is made with these choices, each with what made it possible."""

    def __init__(self, choices: Choices) -> None:
        self.steps: list[Step] = []
        self._choices = choices
        self._made: dict[Task, tuple[int, int, bool]] = {}
        self._last: WeakKeyDictionary[Task, int] = WeakKeyDictionary()

    @override
    def task_scheduled(self, task: Task) -> None:
        world = self._choices.world
        if trio.lowlevel.in_trio_task():
            self._made[task] = len(self.steps) - 1, -1, False
        else:
            is_due = not _is_in_event()
            rows = [] if world is None or is_due else world.trace.rows
            has_arrived = rows and rows[-1].kind == "arrive" and rows[-1].time_s == _now_s()
            self._made[task] = -1, len(rows) - 1 if has_arrived else -1, is_due

    @override
    def before_task_step(self, task: Task) -> None:
        world = self._choices.world
        cause, arrival, is_due = self._made.pop(task, (-1, -1, False))
        rows = world.trace.count if world is not None else 0
        if is_due:
            cause = self._last.get(task, -1)
        self._last[task] = len(self.steps)
        step = Step(_now_s(), host_of(task), task_name(task), cause, arrival, is_due, rows)
        self.steps.append(step)


def _is_in_event() -> bool:
    """Whether an event of the clock's is happening; if not, and no task runs, trio wakes what is due."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    while frame is not None and frame.f_code is not EVENTS:
        frame = frame.f_back
    return frame is not None


def _now_s() -> float:
    """As rows have it."""
    return round(trio.current_time(), 9)


class Lineage:
    """The steps that led to some rows of a trace, and no others; at most `STEPS_MAX`."""

    def __init__(self, steps: Sequence[Step], rows: Sequence[Row]) -> None:
        self._steps, self._rows = steps, rows
        self._starts = [step.row for step in steps]
        self._sent = {(host_name(step.host), step.time_s): n for n, step in enumerate(steps)}
        self._places: dict[int, int] = {}
        self.drawn: list[tuple[float, str, str, int, str]] = []
        """When, on which host, which task; the place of its cause here, or -1, and what came between them."""

    def of_row(self, row: int) -> int:
        """The place in `drawn` of the step that added this row; -1 if an event did."""
        step = bisect_right(self._starts, row) - 1
        if step < 0 or row < 0 or self._steps[step].host != self._rows[row].host:
            return -1
        return self._place(step)

    def of_sending(self, host: str, sent_s: float) -> int:
        """The same for a step of a host, the last at that time."""
        return self._place(self._sent.get((host, round(sent_s, 9)), -1))

    def _place(self, step: int) -> int:
        path: list[tuple[int, str]] = []
        while step >= 0 and step not in self._places and len(self.drawn) + len(path) < STEPS_MAX:
            before, how = self._cause(step)
            path.append((step, how))
            step = before
        place = self._places.get(step, -1)
        for number, how in reversed(path):
            each = self._steps[number]
            self._places[number] = len(self.drawn)
            self.drawn.append((each.time_s, host_name(each.host), each.task, place, how))
            place = self._places[number]
        return place

    def _cause(self, step: int) -> tuple[int, str]:
        """The step that this one came from, and how; what a task does for itself in one moment is one step."""
        now = self._steps[step]
        while now.cause >= 0:
            before = self._steps[now.cause]
            if before[:3] != now[:3]:
                return now.cause, "its time had come" if now.is_due else ""
            now = before
        if now.arrival < 0 or now.arrival >= len(self._rows):
            return -1, ""
        row = dict(self._rows[now.arrival].fields)
        source = str(row.get("source", ""))
        what = row.get("label") or f"{row.get('segment', 'data')!s}, {row.get('size', '')!s} bytes"
        sent_s: Any = row.get("sent_s", -1.0)
        sender = self._sent.get((source, sent_s), -1)
        # A step that leads to itself would be a circle; one that comes later cannot be its cause.
        return (sender if sender < step else -1), f"{what!s} from {source}"[:HOW_MAX]

    def as_data(self, hosts: dict[str, int]) -> list[list[Any]]:
        """The steps as the script reads them; hosts that the page does not show have the number -1."""
        return [
            [round(time_s, 7), hosts.get(host, -1), task[:60], *more]
            for time_s, host, task, *more in self.drawn
        ]

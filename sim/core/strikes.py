"""What is tied to the n-th note of a kind, and the cancellation tied to the n-th yield of a task.

A call without delay comes at the note itself: at the end of the step that made it, before any other
task takes one, under every policy. (A step has no inside: a task that is killed at its note takes no
further step.) One with a delay is an event like any other.

What waited in vain is told. What this module does not do: know what a note means. Read next: `world.py`, which owns one of these.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial

import attrs
import trio
from typing_extensions import override

from .host import DRIVER, current_host_name

Call = Callable[..., object]


@attrs.define(eq=False)
class _Strike:
    """One call, the kind of note it waits for, which one, and how many there were before it did."""

    name: str
    kind: str
    nth: int
    seen_before: int
    delay_s: float
    call: Call
    args: tuple[object, ...]
    on: str | None
    """ "note": the call's first argument is the host that made the note."""


class Strikes(trio.abc.Instrument):
    """The calls of one world. `after` makes one an event, `on_error` is told what one raises.

    `counts` is of all notes by kind, and kept here.
    """

    def __init__(
        self,
        on_error: Callable[[BaseException], object],
        after: Callable[[float, Call], object],
        counts: Counter[str],
    ) -> None:
        self._on_error, self._after, self._counts = on_error, after, counts
        self._waiting: dict[tuple[str, int], list[_Strike]] = {}
        self._aimless: list[_Strike] = []
        """Those that were to strike the host that made their note, which the scenario made."""
        self._due: deque[Call] = deque()
        self._is_watching = False

    def add(
        self,
        name: str,
        kind: str,
        nth: int,
        call: Call,
        args: tuple[object, ...],
        *,
        delay_s: float,
        on: str | None,
    ) -> None:
        """Have `call(*args)`, which is called `name`, wait for the `nth` note of `kind` from now on.

        `ValueError` if `nth` < 1, or `on` is neither None nor "note".
        """
        if nth < 1:
            raise ValueError(f"notes are counted from 1, and nth is {nth}")
        if on not in (None, "note"):
            raise ValueError(f'a fault strikes on="note", or the hosts among its arguments: {on!r}')
        seen = self._counts[kind]
        strike = _Strike(name, kind, nth, seen, delay_s, call, args, on)
        self._waiting.setdefault((kind, seen + nth), []).append(strike)

    def count(self, kind: str) -> None:
        """A note of `kind` was made, in a step or in an event."""
        self._counts[kind] += 1
        for strike in self._waiting.pop((kind, self._counts[kind]), ()):
            args = strike.args
            if strike.on is not None:
                maker = current_host_name()
                if maker == DRIVER:
                    self._aimless.append(strike)
                    continue
                args = (maker, *args)
            call = partial(strike.call, *args)
            if strike.delay_s > 0:
                self._after(strike.delay_s, call)
            else:
                self._due.append(call)
        if self._due and not self._is_watching:
            self._is_watching = True
            trio.lowlevel.add_instrument(self)

    def missed(self) -> Iterator[str]:
        """A sentence about each call whose note never came."""
        for waiting in self._waiting.values():
            for strike in waiting:
                came = self._counts[strike.kind] - strike.seen_before
                yield (
                    f"{strike.name} never struck: it waited for note {strike.nth} of"
                    f" {strike.kind!r}, and {came} came"
                )
        for strike in self._aimless:
            yield (
                f"{strike.name} never struck: note {strike.nth} of {strike.kind!r} was made by the"
                " scenario, not on a host"
            )

    def strike(self) -> None:
        """Carry out what is due now; called after every event."""
        while self._due:
            try:
                self._due.popleft()()
            except BaseException as error:  # noqa: BLE001 -- must not unwind through trio's loop
                self._on_error(error)
        if self._is_watching:
            self._is_watching = False
            trio.lowlevel.remove_instrument(self)

    @override
    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        # Only installed while something is due, since trio pays for an instrument in every step.
        self.strike()


class Cancellation(trio.abc.Instrument):
    """Calls `cut` when this task blocks or yields the `nth` time from now, if it gets so far.

    `how_late()` is asked then: it comes at once (0), or when nothing could run for the n-th time since,
    unless the task goes on before. It stands in `active` as long as it may come.
    """

    def __init__(
        self,
        task: trio.lowlevel.Task,
        nth: int,
        how_late: Callable[[], int],
        cut: Call,
        active: list[Cancellation],
    ) -> None:
        self._task, self._yields_left, self._rests_left = task, nth, 0
        self._how_late, self._cut, self._active = how_late, cut, active
        active.append(self)
        trio.lowlevel.add_instrument(self)

    @override
    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is not self._task:
            return
        self._yields_left -= 1
        if self._yields_left < 0:
            # It went on before the cancellation came.
            self.task_exited(task)
        elif self._yields_left == 0:
            self._rests_left = self._how_late()
            if self._rests_left == 0:
                self._come()

    def world_rests(self) -> bool:
        """Nothing can run now; whether this was the moment."""
        if self._yields_left or self._rests_left == 0:
            return False
        self._rests_left -= 1
        if self._rests_left == 0:
            self._come()
            return True
        return False

    def _come(self) -> None:
        self.task_exited(self._task)
        self._cut()

    @override
    def task_exited(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._active.remove(self)
            trio.lowlevel.remove_instrument(self)

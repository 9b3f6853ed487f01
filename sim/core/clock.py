"""Virtual time as the event engine, and what each host's wall clock shows.

trio asks its clock how long to sleep exactly when no task can run. `EventClock` then takes the next
event off its heap (a delivery, a fault) or jumps to trio's next deadline, and answers 0: a run waits
for nothing. Events of one moment happen in the order in which they were asked for: all of them
before the next step, or, where single steps are interleaved, one by one among them (`happen`).

What this module does not do: decide when the run is over or has failed (`world.py` does, in the
`_on_…` methods). All hosts share one monotonic clock, because trio has one; wall clocks are skewed
and drift per host (`WallClock`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import attrs
import trio
from typing_extensions import override

WALL_EPOCH_S = 1_700_000_000.0
"""What the wall clock of a host without skew shows at the start, in Unix seconds."""


@attrs.define
class WallClock:
    """One machine's wall clock: off by `skew_s` at `since_s`, gaining `drift` seconds each second."""

    skew_s: float = 0.0
    drift: float = 0.0
    since_s: float = 0.0

    def at(self, time_s: float) -> float:
        """What it shows at virtual time `time_s`, in Unix seconds."""
        return WALL_EPOCH_S + time_s + self.off_by(time_s)

    def off_by(self, time_s: float) -> float:
        """How far it is off at virtual time `time_s`, in seconds."""
        return self.skew_s + (time_s - self.since_s) * self.drift


class EventClock(trio.abc.Clock):
    """trio's clock of one run.

    With `is_interleaved` one event happens at a time, and then whoever it woke may go on before the
    next, which is due at the same moment.
    """

    def __init__(self, *, is_interleaved: bool = False) -> None:
        self.events = 0
        """How many events have happened."""
        self._is_interleaved = is_interleaved
        self._time_s = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = itertools.count()

    @override
    def current_time(self) -> float:
        return self._time_s

    def at(self, time_s: float, call: Callable[..., object], *args: Any) -> None:
        """Call `call(*args)` at virtual time `time_s`, or next if that is over; no task runs then."""
        heapq.heappush(self._events, (time_s, next(self._sequence), call, args))

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """As `at`, in `delay_s` virtual seconds."""
        self.at(self.current_time() + delay_s, call, *args)

    @override
    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Nothing can run: make the next thing happen. Called by trio alone."""
        events = self._events
        target = deadline
        if events and events[0][0] < target:
            target = events[0][0]
        refused = self._on_idle(target)
        if refused is not None:
            return refused
        self._time_s = max(self._time_s, target)
        self._take_events()
        return 0

    def next_s(self, deadline: float) -> float:
        """When the next thing happens: an event, or trio's next `deadline`."""
        return min(deadline, self._events[0][0]) if self._events else deadline

    def happen(self) -> None:
        """Make the next event or deadline happen now, though tasks can run.

        An event happens here; a deadline is noticed by trio before the next step.
        """
        self._time_s = max(self._time_s, self.next_happening_s())
        self._take_events()

    def _take_events(self) -> None:
        events, now_s = self._events, self._time_s
        while events and events[0][0] <= now_s:
            _, _, call, args = heapq.heappop(events)
            self.events += 1
            try:
                call(*args)
            except BaseException as error:  # noqa: BLE001 -- must not unwind through trio's loop
                self._on_event_error(error)
            self._after_event()
            if self._is_interleaved:
                return

    def pending_events(self) -> list[str]:
        """The next few events in words: when, and which call."""
        return [
            f"{time_s:.6f} {getattr(call, '__qualname__', type(call).__name__)}"
            for time_s, _, call, _ in heapq.nsmallest(5, self._events)
            if time_s < math.inf
        ]

    @abstractmethod
    def next_happening_s(self) -> float:
        """When the next event or deadline may happen before the next step; infinite for none."""

    @abstractmethod
    def _on_idle(self, target_s: float) -> float | None:
        """Asked before time jumps to `target_s`; a number is answered to trio instead of a jump."""

    @abstractmethod
    def _after_event(self) -> None:
        """An event is over; no task has run since."""

    @abstractmethod
    def _on_event_error(self, error: BaseException) -> None:
        """An event raised."""

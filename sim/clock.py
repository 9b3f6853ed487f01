"""Virtual time as the event engine, and what each host's wall clock shows.

trio asks its clock how long to sleep exactly when no task can run. `EventClock` then takes the next
event off its heap (a delivery, a fault) or jumps to trio's next deadline, and answers 0: a run waits
for nothing. Events of one moment happen in the order in which they were asked for.

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

__all__ = ["WALL_EPOCH_S", "EventClock", "WallClock"]

WALL_EPOCH_S = 1_700_000_000.0
"""What the wall clock of a host without skew shows at the start, in Unix seconds."""


@attrs.define
class WallClock:
    """One machine's wall clock: off by `skew_s`, and gaining `drift` seconds each second."""

    skew_s: float = 0.0
    drift: float = 0.0

    def at(self, time_s: float) -> float:
        """What it shows at virtual time `time_s`, in Unix seconds."""
        return WALL_EPOCH_S + self.skew_s + time_s * (1.0 + self.drift)


class EventClock(trio.abc.Clock):
    """trio's clock of one run."""

    def __init__(self) -> None:
        self.events = 0
        """How many events have happened."""
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
        heapq.heappush(self._events, (self._time_s + delay_s, next(self._sequence), call, args))

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
        self._time_s = now_s = max(self._time_s, target)
        while events and events[0][0] <= now_s:
            _, _, call, args = heapq.heappop(events)
            self.events += 1
            try:
                call(*args)
            except BaseException as error:  # noqa: BLE001 -- must not unwind through trio's loop
                self._on_event_error(error)
        return 0

    def pending_events(self) -> list[str]:
        """The next few events in words: when, and which call."""
        return [
            f"{time_s:.6f} {getattr(call, '__qualname__', type(call).__name__)}"
            for time_s, _, call, _ in heapq.nsmallest(5, self._events)
            if time_s < math.inf
        ]

    @abstractmethod
    def _on_idle(self, target_s: float) -> float | None:
        """Asked before time jumps to `target_s`; a number is answered to trio instead of a jump."""

    @abstractmethod
    def _on_event_error(self, error: BaseException) -> None:
        """An event raised."""

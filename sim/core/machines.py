"""The machines of a world under one clock: virtual time as the event engine, hosts by name, rows that say who did what.

trio asks its clock how long to sleep exactly when no task can run. `Machines` then takes the next
event off its heap (a delivery, a fault) or jumps to trio's next deadline, and answers 0: a run waits
for nothing. Events of one moment happen in the order in which they were asked for: all of them
before the next step, or, where single steps are interleaved, one by one among them (`happen`).
All hosts share one monotonic clock, because trio has one; wall clocks are skewed and drift per host.

What this module does not do: run processes (`world.py`), decide when the run is over or has failed
(`world.py` does, in the `_on_…` methods).
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import trio
from typing_extensions import override

from ..disk.disk import Disk
from .host import CURRENT, WALL_EPOCH_S, Host, WallClock, current_label
from .trace import Trace

FAULTS = frozenset(
    {"kill", "power_off", "pause", "stop", "skew"}
    | {"cut", "reset", "finish", "thin", "answer_syn"}
    | {"fill", "fail_fsync", "slow_down"}
)
"""The faults of a world, its network and its disks: their methods are called so, and the rows they leave."""


class Machines(trio.abc.Clock):
    """trio's clock of one run, the hosts under it, and the trace of what happens on them.

    With `is_interleaved` one event happens at a time, and then whoever it woke may go on before the
    next, which is due at the same moment.
    """

    def __init__(self, trace: Trace, *, is_interleaved: bool) -> None:
        self.trace = trace
        self.events = 0
        """How many events have happened."""
        self._is_interleaved = is_interleaved
        self._time_s = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        self._hosts: dict[str, Host] = {}
        self.struck: Counter[str] = Counter()
        """How often each fault has struck; see `FAULTS`."""
        self.noted: Counter[str] = Counter()
        """How many notes of each kind there were."""
        self.noted_in_peace: Counter[str] = Counter()
        """Those before the first fault."""
        self.aimed: dict[str, str] = {}
        """The hosts that faults were aimed at by name, each with the first of those faults."""
        self.missed: list[str] = []
        """What a scenario is about and did not come to pass, in sentences; see `World.untested`."""
        self.fallen: tuple[str, BaseException] | None = None
        """The first host whose main function raised, and what."""
        self.never_struck: list[tuple[float, str, tuple[Any, ...]]] = []
        """Faults that were planned for a time after the end: when, which, with what arguments."""
        self.calm_at_s = 0.0
        """When the last planned fault that is known of will be over, in virtual seconds."""
        self.dials = self.answers = 0
        """How many connections processes asked for, and how many segments of data came back on them."""
        self.gates: dict[str, trio.Event] = {}
        """Of each barrier that was ever held, by its label: what lets those who wait there go on."""
        self.advisers: list[Callable[[], Iterable[str]]] = []
        """Asked after the run: sentences about what looks like a mistake in the scenario."""

    # --- time ----------------------------------------------------------------------------------

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
        target = self.next_s(deadline)
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

    # --- hosts ---------------------------------------------------------------------------------

    def host(self, name: str) -> Host:
        """The host called `name`; made, and down, if there is none yet."""
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = Host(name, self._disk_of(name))
        return host

    @abstractmethod
    def _disk_of(self, name: str) -> Disk:
        """A new host's disk, empty."""

    def aim(self, fault: str, name: str) -> Host:
        """The host called `name`, which is to be struck by `fault`."""
        self.aimed.setdefault(name, fault)
        return self.host(name)

    def planned_faults(self) -> list[tuple[float, str, tuple[Any, ...]]]:
        """The faults that are still to come: when, which, with what arguments."""
        return [
            (time_s, call.__name__, args)
            for time_s, _, call, args in sorted(self._events, key=lambda event: event[:2])
            if getattr(call, "__name__", "") in FAULTS and hasattr(call, "__self__")
        ]

    @property
    def host_names(self) -> list[str]:
        """All hosts that were ever booted, or asked for, in that order."""
        return list(self._hosts)

    def knows(self, name: str) -> bool:
        """Whether a host of this name was ever booted, or asked for."""
        return name in self._hosts

    def wall(self) -> float:
        """The running host's wall clock, in Unix seconds."""
        incarnation = CURRENT.get()
        if incarnation is None:
            return WALL_EPOCH_S + self._time_s
        return incarnation.host.wall.at(self._time_s)

    def skew(self, name: str, skew_s: float, drift: float = 0.0) -> None:
        """Set host `name`'s wall clock off by `skew_s` now, gaining `drift` seconds each second."""
        self.add_row("skew", host=name, skew_s=skew_s, drift=drift)
        self.host(name).wall = WallClock(skew_s, drift, self._time_s)

    def add_row(self, kind: str, /, **fields: Any) -> None:
        """Add a row to the trace, on the running task's host."""
        if kind in FAULTS and not self.trace.is_muted:
            if not self.struck:
                self.noted_in_peace = self.noted.copy()
            self.struck[kind] += 1
        self.trace.add(self._time_s, current_label(), kind, fields)

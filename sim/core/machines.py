"""The machines of a world: hosts by name, the wall clock of each, and rows that say who did what.

What this module does not do: run processes on them (`world.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import trio

from ..disk.disk import Disk
from .clock import WALL_EPOCH_S, EventClock, WallClock
from .host import CURRENT, Host, current_label
from .trace import Trace

FAULTS = frozenset(
    {"kill", "power_off", "pause", "stop", "skew"}
    | {"cut", "reset", "finish", "thin", "answer_syn"}
    | {"fill", "fail_fsync", "slow_down"}
)
"""The faults of a world, its network and its disks: their methods are called so, and the rows they leave."""


class Machines(EventClock):
    """Hosts under one clock, and the trace of what happens on them."""

    def __init__(self, trace: Trace, *, is_interleaved: bool) -> None:
        super().__init__(is_interleaved=is_interleaved)
        self.trace = trace
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

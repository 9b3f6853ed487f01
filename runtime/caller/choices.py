"""Where each instance of one endpoint stands among those that may be chosen, kept as it changes.

A request costs look-ups and bisections, however many instances there are; what becomes of an instance
costs as much. Everything is synchronous.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from heapq import heappop, heappush

from ..events.load import REPORT_AGE_MAX_S, BusyLimits
from ..protocol.discovery.candidates import Candidates, Group, Measure, Standing
from ..protocol.discovery.presence import Presence
from .record import InstanceRecord


class Choices:
    """Those of one endpoint's instances that may be chosen: all, or those of a set of ids.

    `find` says who has an id. To be told by `settle` whatever becomes of one, and by `renew` that
    its load has changed. A `frozenset` of ids is looked through when it is first asked for, and
    known by its identity for as long as somebody keeps it; any other is looked through each time.
    """

    def __init__(self, find: Callable[[str], InstanceRecord | None]) -> None:
        self._find = find
        self.load: Measure = self._load
        """The requests under way to a candidate, as far as is known."""
        self.records: dict[int, InstanceRecord] = {}
        """The candidates, by their numbers."""
        self._all = _Pool(self.records)
        self._pools: dict[int, tuple[weakref.ref[frozenset[str]], _Pool]] = {}
        """By the identity of a set of ids."""
        self._ends: list[tuple[float, int]] = []
        """When faults end, with the number of whom: a heap."""
        self._now = -math.inf
        """Of the last question. Whose fault has ended since is not well yet."""

    # --- what becomes of them ---

    def settle(self, record: InstanceRecord) -> None:
        """Something has become of it, or nothing."""
        standing = self._standing(record)
        if standing is record.standing:
            return
        record.standing = standing
        if standing is None:
            del self.records[record.number]
        else:
            self.records[record.number] = record
        for pool in self._with(record):
            pool.place(record.number, standing)

    def renew(self, record: InstanceRecord) -> None:
        """A request to it has begun or ended, or it has said how busy it is."""
        for pool in self._with(record):
            pool.renew(record.number)

    def _standing(self, record: InstanceRecord) -> Standing | None:
        if record.presence is Presence.LEFT or record.instance.draining or record.is_foreign:
            return None
        until = record.faulty_until
        if until <= self._now:
            return Standing.STALE if record.presence is Presence.STALE else Standing.WELL
        if until < math.inf and until != record.faulty_end:
            record.faulty_end = until
            heappush(self._ends, (until, record.number))
        return Standing.FAULTY if record.is_reached else Standing.OUT

    def _with(self, record: InstanceRecord) -> Iterator[_Pool]:
        yield self._all
        for known, pool in self._pools.values():
            ids = known()
            if ids is not None and record.instance.id in ids:
                yield pool

    # --- questions ---

    def forget(self, measure: Measure) -> None:
        """What all of them measure may have changed."""
        for pool in (self._all, *(pool for _, pool in self._pools.values())):
            pool.forget(measure)

    def _load(self, number: int) -> int:
        return self.records[number].load

    def asked(
        self, now: float, exclude: Collection[str] = (), among: Collection[str] | None = None
    ) -> tuple[Group, list[int]]:
        """Whom to choose from, and those of it that are excluded; see `Candidates.asked`."""
        pool = self._pool(now, among)
        if not exclude:
            return pool.asked()
        found = (self._find(each) for each in exclude)
        return pool.asked({each.number for each in found if each is not None})

    def has(self, now: float, standing: Standing, among: Collection[str] | None = None) -> bool:
        """Whether anybody stands so well."""
        return len(self._pool(now, among)[standing]) > 0

    def is_busy(self, now: float, limits: BusyLimits, among: Collection[str] | None = None) -> bool:
        """Whether somebody may be chosen, and each of those has lately reported that it is busy."""
        return self._pool(now, among).is_busy(now, limits)

    def _pool(self, now: float, among: Collection[str] | None) -> _Pool:
        self._now = now
        while self._ends and self._ends[0][0] <= now:
            record = self.records.get(heappop(self._ends)[1])
            if record is not None:
                self.settle(record)
        if among is None:
            return self._all
        known = self._pools.get(id(among))
        return self._open(among) if known is None else known[1]

    def _open(self, among: Collection[str]) -> _Pool:
        pool = _Pool(self.records)
        for record in self.records.values():
            if record.instance.id in among:
                pool.place(record.number, record.standing)
        if isinstance(among, frozenset):
            forget = partial(self._forget, id(among))
            self._pools[id(among)] = weakref.ref(among, forget), pool
        return pool

    def _forget(self, name: int, _: object) -> None:
        del self._pools[name]


class _Pool(Candidates):
    """Candidates, and whether all of them are busy.

    That is looked for from the last one on that was not; once all are, only those are looked at of
    whom something has come since, until the oldest report is out of date.
    """

    def __init__(self, records: Mapping[int, InstanceRecord]) -> None:
        super().__init__()
        self._records = records
        self._idle = 0
        self._busy: tuple[Group, BusyLimits] | None = None
        """Who was found busy, and by which limits."""
        self._busy_until = math.inf
        self._doubted: set[int] = set()
        """Of them or beside them, of whom something has come since."""

    def place(self, number: int, standing: Standing | None) -> None:
        super().place(number, standing)
        if self._busy is not None:
            self._doubted.add(number)

    def renew(self, number: int) -> None:
        super().renew(number)
        if self._busy is not None:
            self._doubted.add(number)

    def is_busy(self, now: float, limits: BusyLimits) -> bool:
        """See `Choices.is_busy`."""
        group, _ = self.asked()
        if self._busy != (group, limits) or now > self._busy_until:
            self._busy, self._busy_until = None, math.inf
        if self._busy is None:
            numbers = group.numbers
            begin = bisect_left(numbers, self._idle)
        else:
            numbers, begin = [each for each in self._doubted if each in group], 0
        for at in range(begin - len(numbers), begin):
            record = self._records[numbers[at]]
            if not record.is_busy(limits, now):
                self._idle, self._busy = numbers[at], None
                return False
            self._busy_until = min(self._busy_until, record.reported_at + REPORT_AGE_MAX_S)
        self._busy = group, limits
        self._doubted.clear()
        return len(group) > 0

"""What has happened to a cluster, found out by comparing what was seen with what is seen.

Sans-IO and synchronous. Each source tells what it sees of its subjects; a subject that came, went,
or whose state changed is an event. An outage is an event that lasts: it ends when the subject is
well again, or gone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Final

import attrs
import msgspec

from .facts import MINUTES_MAX, FrontendFacts, FrontendTotals, Minute

EVENTS_MAX: Final = 200
SUBJECTS_MAX: Final = 4096
TEXT_CHARACTERS_MAX: Final = 200


@attrs.frozen
class Seen:
    """One subject as it is seen now."""

    who: str
    """Its name for people."""
    state: str
    """Empty while it is well, else what is wrong with it."""
    about: str = ""
    """What it is: `worker`, `prefill worker`, `etcd`, …"""
    count: int = 0
    """Grows with each interruption, also one that was too short to be seen."""


class Event(msgspec.Struct, kw_only=True):
    """Something that has happened. Times are seconds since the Unix epoch."""

    number: int
    at: float
    kind: str
    """`joined`, `left`, `outage` or `interruption`."""
    who: str
    about: str
    text: str
    until: float | None = None
    """When an outage was over; None while it lasts."""


class Timeline:
    """The last `EVENTS_MAX` events of one cluster."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._subjects: deque[tuple[str, str]] = deque(maxlen=EVENTS_MAX)
        """Of each event its source, and the key of whom it is about."""
        self._known: dict[str, OrderedDict[str, Seen]] = {}
        self._open: dict[tuple[str, str], Event] = {}
        self._count = 0

    @property
    def events(self) -> list[Event]:
        """The oldest first."""
        return list(self._events)

    def observe(self, source: str, now: float, seen: Mapping[str, Seen]) -> None:
        """What `source` sees of all its subjects, by key, at `now`.

        The first look of a source makes no events but outages: what it finds was there before.
        """
        is_first = source not in self._known
        known = self._known.setdefault(source, OrderedDict())
        for key, each in list(seen.items())[:SUBJECTS_MAX]:
            before = known.get(key)
            known[key] = each
            if before is None:
                if not is_first:
                    self._add((source, key), now, "joined", each, "joined")
                self._change(source, key, now, "", each)
                continue
            if (each.who, each.about) != (before.who, before.about):
                # More is known of it than when it joined: what was told is told of the same one.
                for event, whose in zip(self._events, self._subjects, strict=True):
                    if whose == (source, key):
                        event.who = each.who[:TEXT_CHARACTERS_MAX]
                        event.about = each.about[:TEXT_CHARACTERS_MAX]
            if each.count > before.count and not (each.state or before.state):
                text = "was interrupted, and is back"
                self._add((source, key), now, "interruption", each, text, until=now)
            self._change(source, key, now, before.state, each)
        for key in [key for key in known if key not in seen]:
            gone = known.pop(key)
            self._close(source, key, now)
            self._add((source, key), now, "left", gone, "left")

    def _change(self, source: str, key: str, now: float, was: str, each: Seen) -> None:
        if each.state == was:
            return
        self._close(source, key, now)
        if each.state:
            subject = (source, key)
            self._open[subject] = self._add(subject, now, "outage", each, each.state)

    def _close(self, source: str, key: str, now: float) -> None:
        event = self._open.pop((source, key), None)
        if event is not None:
            event.until = now

    def _add(
        self,
        subject: tuple[str, str],
        now: float,
        kind: str,
        seen: Seen,
        text: str,
        *,
        until: float | None = None,
    ) -> Event:
        self._count += 1
        event = Event(
            number=self._count,
            at=now,
            kind=kind,
            who=seen.who[:TEXT_CHARACTERS_MAX],
            about=seen.about[:TEXT_CHARACTERS_MAX],
            text=text[:TEXT_CHARACTERS_MAX],
            until=until,
        )
        self._events.append(event)
        self._subjects.append(subject)
        return event


class Minutes:
    """What one frontend has counted in each of the last minutes, whether or not somebody looks."""

    def __init__(self) -> None:
        self.rows: deque[Minute] = deque(maxlen=MINUTES_MAX)
        self._before = FrontendTotals()

    def note(self, wall: float, facts: FrontendFacts) -> None:
        """Add what has been counted since it was told last; every few seconds."""
        now, was, minute = facts.totals, self._before, int(wall // 60) * 60
        if not self.rows or self.rows[-1][0] != minute:
            self.rows.append((minute, 0, 0, 0, 0))
        _, requests, failures, tokens, most = self.rows.pop()
        requests, failures = (
            requests + now.requests - was.requests,
            failures + now.failures - was.failures,
        )
        tokens, most = tokens + now.tokens - was.tokens, max(most, facts.in_flight)
        self.rows.append((minute, max(0, requests), max(0, failures), max(0, tokens), most))
        self._before = now

"""What has happened to a cluster, found out by comparing what was seen with what is seen.

Sans-IO and synchronous. Each source tells what it sees of its subjects; a subject that came, went, or
whose state changed is an event. An outage is an event that lasts: it ends when the subject is well
again, or gone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Final

import attrs
import msgspec

__all__ = ["Event", "Seen", "Timeline"]

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
                    self._add(now, "joined", each, "joined")
            elif each.count > before.count and not (each.state or before.state):
                self._add(now, "interruption", each, "was interrupted, and is back", until=now)
            self._change(source, key, now, before, each)
        for key in [key for key in known if key not in seen]:
            gone = known.pop(key)
            self._close(source, key, now)
            self._add(now, "left", gone, "left")

    def _change(self, source: str, key: str, now: float, before: Seen | None, each: Seen) -> None:
        was = "" if before is None else before.state
        if each.state == was:
            return
        self._close(source, key, now)
        if each.state:
            event = self._add(now, "outage", each, each.state)
            self._open[source, key] = event

    def _close(self, source: str, key: str, now: float) -> None:
        event = self._open.pop((source, key), None)
        if event is not None:
            event.until = now

    def _add(
        self, now: float, kind: str, seen: Seen, text: str, *, until: float | None = None
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
        return event

"""Log lines about the connection, at most one of a kind every few seconds.

A server that is away or a client that is slow produces the same error hundreds of times a second;
the log gets the first, and then how many followed.
"""

from __future__ import annotations

import logging

import trio

__all__ = ["Notices"]

logger = logging.getLogger("trinamo.nats")

INTERVAL_S = 5.0


class Notices:
    """Rate-limited warnings on the logger `trinamo.nats`, counted by kind."""

    def __init__(self, *, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._next: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def warn(self, kind: str, detail: object) -> None:
        """Log `kind: detail`, unless that kind was logged less than the interval ago."""
        now = trio.current_time()
        if now < self._next.get(kind, now):
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return
        self._next[kind] = now + self._interval_s
        count = self._held_back.pop(kind, 0)
        more = f" ({count} more since the last line)" if count else ""
        logger.warning("%s: %s%s", kind, detail, more)

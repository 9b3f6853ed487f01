"""Log lines about the same thing again and again: at most one of a kind every few seconds.

A peer that sends nonsense, or a server that is away, is worth a line, but not hundreds a second;
the log gets the first, and then how many followed.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

_INTERVAL_S: Final = 5.0
_KINDS_MAX: Final = 64


class LogNotices:
    """Rate-limited lines on one logger, counted by kind.

    A kind is a constant of the code: of more than 64 the oldest is forgotten.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def warn(self, kind: str, detail: object) -> None:
        """Log `kind: detail`, unless that kind was logged less than the interval ago."""
        self.log(logging.WARNING, kind, detail)

    def log(self, level: int, kind: str, detail: object) -> None:
        """The same at another level."""
        now = trio.current_time()
        if now < self._next.get(kind, now):
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return
        if kind not in self._next and len(self._next) >= _KINDS_MAX:
            oldest = next(iter(self._next))
            del self._next[oldest]
            self._held_back.pop(oldest, None)
        self._next[kind] = now + _INTERVAL_S
        count = self._held_back.pop(kind, 0)
        more = f" ({count} more since the last line)" if count else ""
        self._logger.log(level, "%s: %s%s", kind, detail, more)

"""Timeouts of one length for many waits, at the price of a dictionary entry each.

A wait with a trio deadline of its own costs as much as everything else that is done for it. What
is here stays cheap because all wait equally long, so that the oldest is due first, and one task
looks at that one alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Calls `expire`, which must not wait, with each `T` that has begun and not ended in time."""

    def __init__(self, timeout_s: float, expire: Callable[[T], None]) -> None:
        self.timeout_s = timeout_s
        self._expire = expire
        self._due: dict[T, float] = {}
        """By when, the oldest first."""

    def begin(self, waiting: T) -> None:
        """From now on it has `timeout_s`; nothing happens if it waits already."""
        self._due.setdefault(waiting, trio.current_time() + self.timeout_s)

    def end(self, waiting: T) -> None:
        """It has what it waited for; nothing happens if it does not wait."""
        self._due.pop(waiting, None)

    async def run(self) -> None:
        """Expire what is due, at its time, until cancelled."""
        while True:
            # What begins while this sleeps is not due before that.
            next_at = trio.current_time() + self.timeout_s
            while self._due:
                waiting, due = next(iter(self._due.items()))
                if due > trio.current_time():
                    next_at = due
                    break
                del self._due[waiting]
                self._expire(waiting)
            await trio.sleep_until(next_at)

"""The bounded queue between the step loop and the consumer of one answer.

The loop puts and never waits; the consumer takes and waits. The loop itself asks `is_full` before
it computes another token, so the bound holds without dropping anything; the one item that ends
the answer always has room.
"""

from __future__ import annotations

from collections import deque

import trio

from ...errors import TrinamoError
from ...protocol.openai.generate import Delta

__all__ = ["Mailbox"]


class Mailbox:
    """Holds up to `deltas_max` deltas, the last one of the answer not counted."""

    def __init__(self, deltas_max: int) -> None:
        self._deltas_max = deltas_max
        self._deltas: deque[Delta] = deque()
        self._error: TrinamoError | None = None
        self._arrival: trio.Event | None = None

    @property
    def is_full(self) -> bool:
        """No more deltas, or only the last."""
        return len(self._deltas) >= self._deltas_max

    @property
    def has_drained(self) -> bool:
        """At most half full: time to go on. Going on at the first take would flutter."""
        return len(self._deltas) <= self._deltas_max // 2

    def put(self, delta: Delta) -> None:
        """Queue a delta; there must be room for it."""
        assert not self.is_full or delta.finish_reason is not None, "the mailbox is full"
        self._deltas.append(delta)
        self._announce()

    def fail(self, error: TrinamoError) -> None:
        """End the answer with `error`, raised by `take` after all that is queued."""
        self._error = error
        self._announce()

    async def take(self) -> Delta:
        """Wait for the next delta and take it; a cancelled call takes nothing."""
        if self._deltas or self._error is not None:
            await trio.lowlevel.checkpoint()
        else:
            self._arrival = trio.Event()
            await self._arrival.wait()
        if self._deltas:
            return self._deltas.popleft()
        assert self._error is not None, "woken without a delta"
        raise self._error

    def _announce(self) -> None:
        if self._arrival is not None:
            self._arrival.set()
            self._arrival = None

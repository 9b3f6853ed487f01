"""What refused requests may cost, those of all peers together.

A request that is refused takes some 50 us of the event loop, and a peer that means harm sends one after
another over as many connections as it gets. So who is refused waits, as soon as there are too many,
before more is read of it; requests that are admitted do not.
"""

from __future__ import annotations

from typing import Final

import trio

_PER_S: Final = 1000
_BURST: Final = 2048
"""As many as one honest peer may have under way when its ticket is withdrawn, twice."""


class Refusals:
    """A bucket that refills; in debt, each refusal waits for its turn."""

    def __init__(self) -> None:
        self.count = 0
        """Requests that were refused."""
        self._left: float = _BURST
        self._at = trio.current_time()

    def spend(self) -> float:
        """Count one refusal; how many seconds to let its peer wait."""
        now = trio.current_time()
        self._left = min(_BURST, self._left + (now - self._at) * _PER_S) - 1
        self._at = now
        self.count += 1
        return max(0.0, -self._left / _PER_S)

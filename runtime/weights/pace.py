"""A bound of bytes per second for all who share it: first come, first served."""

from __future__ import annotations

from typing import Final

import trio

_BURST_S: Final = 0.1
"""What was not used is kept for so long, so that a late timer costs no bandwidth."""


class Pace:
    """Lets `bytes_per_s` pass, and a tenth of a second's worth at once after a pause."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def reserve(self, byte_count: int, now: float) -> float:
        """Take the next place; the time from which these bytes may pass. Never waits."""
        at = max(self._free_at, now - _BURST_S)
        self._free_at = at + byte_count / self._bytes_per_s
        return at

    async def take(self, byte_count: int) -> None:
        """Wait until these bytes may pass. Cancelled, their time is lost to the others."""
        await trio.sleep_until(self.reserve(byte_count, trio.current_time()))

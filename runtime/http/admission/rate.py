"""A bound on how often requests come: a token bucket, from which each request takes one."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

from ...env import Clock
from ..status import RateLimitExceededError

PARTIES_MAX: Final = 4096
"""So many are remembered."""


class RateLimit:
    """`burst` requests at once, and `rate_per_s` of them in the long run, of each party.

    A party that comes for the first time, or after `PARTIES_MAX` others, has its whole burst.
    """

    def __init__(self, clock: Clock, rate_per_s: float, burst: int | None) -> None:
        self._clock, self._rate_per_s = clock, rate_per_s
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What each had left, and when; who came last is last."""
        self.tune(rate_per_s, burst)

    def tune(self, rate_per_s: float, burst: int | None) -> None:
        """Other bounds from now on; `burst` None: what comes in a second, and one at least."""
        now = self._clock.now()
        for party in self._buckets:
            self._buckets[party] = self._left(party, now), now
        self._rate_per_s = rate_per_s
        self._burst = max(1, math.ceil(rate_per_s)) if burst is None else burst

    def _left(self, party: str, now: float) -> float:
        left, at = self._buckets.get(party, (self._burst, now))
        return min(self._burst, left + (now - at) * self._rate_per_s)

    def take(self, party: str) -> None:
        """One more request of `party` comes; raises `RateLimitExceededError` if it is one too many."""
        now = self._clock.now()
        left = self._left(party, now)
        self._buckets[party] = (left - 1 if left >= 1 else left, now)
        self._buckets.move_to_end(party)
        if len(self._buckets) > PARTIES_MAX:
            self._buckets.popitem(last=False)
        if left < 1:
            raise RateLimitExceededError(
                f"more than {self._rate_per_s:g} of your requests a second come here, and"
                f" {self._burst:g} at once; ask later",
                bound="rate_per_s",
                value=self._rate_per_s,
                retry_after_s=math.ceil((1 - left) / self._rate_per_s),
            )

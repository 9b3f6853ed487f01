"""A bound on how often requests come: a token bucket, from which each request takes one."""

from __future__ import annotations

import math

from ...env import Clock
from ..status import RateLimitExceededError


class RateLimit:
    """`burst` requests at once, and `rate_per_s` of them in the long run; full at the beginning."""

    def __init__(self, clock: Clock, rate_per_s: float, burst: int | None) -> None:
        self._clock = clock
        self._at = clock.now()
        self._rate_per_s = rate_per_s
        self._burst = self._tokens = _burst_of(rate_per_s, burst)

    def tune(self, rate_per_s: float, burst: int | None) -> None:
        """Other bounds from now on; `burst` None: what comes in a second, and one at least."""
        self._refill()
        self._rate_per_s = rate_per_s
        self._burst = _burst_of(rate_per_s, burst)
        self._tokens = min(self._tokens, self._burst)

    def take(self) -> None:
        """One more request comes now; raises `RateLimitExceededError` if that is one too many."""
        self._refill()
        if self._tokens < 1:
            raise RateLimitExceededError(
                f"more than {self._rate_per_s:g} requests a second come here, and {self._burst:g} at"
                " once; ask later",
                bound="rate_per_s",
                value=self._rate_per_s,
                retry_after_s=math.ceil((1 - self._tokens) / self._rate_per_s),
            )
        self._tokens -= 1

    def _refill(self) -> None:
        now = self._clock.now()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate_per_s)
        self._at = now


def _burst_of(rate_per_s: float, burst: int | None) -> float:
    return max(1, math.ceil(rate_per_s)) if burst is None else burst

"""The token bucket on a virtual clock."""

from __future__ import annotations

from contextlib import suppress

import attrs
import pytest
from hypothesis import given, strategies as st

from trinamo.runtime.http.admission.admission import RateLimit
from trinamo.runtime.http.status import RateLimitExceededError

# Powers of two, so that sums are exact and bounds need no tolerance.
steps = st.lists(st.integers(0, 64).map(lambda tick: tick / 16), min_size=1, max_size=60)
rates = st.sampled_from([0.125, 0.25, 0.5, 1.0, 2.0, 8.0])


@attrs.define
class FakeClock:
    """Both clocks, moved by hand."""

    time_s: float = 1000.0

    def now(self) -> float:
        return self.time_s

    def wall(self) -> float:
        return self.time_s


@given(steps=steps, rate_per_s=rates, burst=st.integers(1, 5))
def test_it_admits_what_the_bucket_holds_and_nothing_else(
    steps: list[float], rate_per_s: float, burst: int
) -> None:
    """In no window more than `burst` and `rate` times its length; never a refusal while there is a token."""
    clock = FakeClock()
    limit = RateLimit(clock, rate_per_s, burst)
    admitted: list[float] = []
    tokens, before_s = float(burst), clock.time_s
    for step_s in steps:
        clock.time_s += step_s
        tokens = min(burst, tokens + (clock.time_s - before_s) * rate_per_s)
        before_s = clock.time_s
        with suppress(RateLimitExceededError):
            limit.take("another, who takes nothing of it")
        if tokens >= 1:
            limit.take("a")
            tokens -= 1
            admitted.append(clock.time_s)
        else:
            with pytest.raises(RateLimitExceededError) as refused:
                limit.take("a")
            assert refused.value.retry_after_s * rate_per_s > 0
            assert tokens + refused.value.retry_after_s * rate_per_s >= 1
    for first, start_s in enumerate(admitted):
        for last, end_s in enumerate(admitted[first:], first):
            assert last - first + 1 <= burst + rate_per_s * (end_s - start_s)


@given(rate_per_s=rates, burst=st.integers(1, 5), others=st.lists(st.integers(1, 8), max_size=5))
def test_other_bounds_give_no_tokens(rate_per_s: float, burst: int, others: list[int]) -> None:
    """Who has used up the bucket gets no more by a change of its bounds."""
    limit = RateLimit(FakeClock(), rate_per_s, burst)
    for _ in range(burst):
        limit.take("a")
    for other in others:
        limit.tune(rate_per_s * other, other)
        with pytest.raises(RateLimitExceededError):
            limit.take("a")

"""The lag of the event loop: none while nothing blocks it, and as long as what does."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from trinamo.runtime.env import RealEnv
from trinamo.runtime.metrics.metrics import Metrics, lag_measured


async def test_what_blocks_the_loop_is_seen_once_as_long_as_it_blocks(
    autojump_clock: MockClock,
) -> None:
    metrics = Metrics(RealEnv())
    async with lag_measured(metrics):
        await trio.sleep(1.05)
        assert metrics.value("event_loop_lag_seconds_count") == 10
        assert metrics.value("event_loop_lag_seconds_bucket", le="0.0005") == 10
        # Due in 50 ms: the loop sees nothing for 450.
        autojump_clock.jump(0.45)
        await trio.sleep(0.06)
        assert metrics.value("event_loop_lag_seconds_count") == 11
        assert metrics.value("event_loop_lag_seconds_bucket", le="0.25") == 10
        assert metrics.value("event_loop_lag_seconds_bucket", le="0.5") == 11

"""How late the event loop is: how long whatever is ready to run waits for what runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from ..nurseries import open_nursery
from .metrics import Metrics
from .tallies import Histogram, Histograms

INTERVAL_S: Final = 0.1
_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


@asynccontextmanager
async def lag_measured(metrics: Metrics) -> AsyncIterator[None]:
    """Count the lag in `metrics` while inside, ten times a second.

    For processes whose time is real: a simulated loop is never late.
    """
    lags = Histograms("trinamo_event_loop_lag_seconds", "How late a timer's task runs", _BUCKETS_S)
    metrics.registry.register(lags)
    async with open_nursery() as nursery:
        nursery.start_soon(_measure, lags.tally())
        yield
        nursery.cancel_scope.cancel()


async def _measure(lag: Histogram) -> None:
    due = trio.current_time() + INTERVAL_S
    while True:
        await trio.sleep_until(due)
        now = trio.current_time()
        lag.observe(now - due)
        # From now on, not from when it was due: one long lag is one observation.
        due = now + INTERVAL_S

"""What `/metrics` says of the process itself: memory, processor time, descriptors, build, lag.

The `process_*` series are those that every Prometheus client library shows, read from `/proc` when
they are asked for. Of several frontends on one port each has its own page, so each shows its own. The
lag is how long whatever is ready to run waits for what runs.
"""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Final

import trio
from prometheus_client.process_collector import ProcessCollector

from ..nurseries import open_nursery
from .metrics import Metrics
from .tallies import Histogram

INTERVAL_S: Final = 0.1
_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


def show_process(metrics: Metrics, role: str) -> None:
    """Add them to the exposition of `metrics`; once per process, and not in a simulation."""
    ProcessCollector(registry=metrics)
    build = metrics.counts(
        "build_info", "1; what runs here", "version", "python", "role", may_fall=True
    )
    build.tally(version("trinamo"), platform.python_version(), role).value = 1


@asynccontextmanager
async def lag_measured(metrics: Metrics) -> AsyncIterator[None]:
    """Count the event loop's lag in `metrics` while inside, ten times a second.

    For processes whose time is real: a simulated loop is never late.
    """
    lags = metrics.histograms("event_loop_lag_seconds", "How late a timer's task runs", _BUCKETS_S)
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

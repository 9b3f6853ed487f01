"""What `/metrics` shows of the work queues a process uses.

The counts are `Queues`' own, and depth and age are what it last read: nothing is asked when it is
scraped. While the broker is away the last numbers stay, and `…_statistics_age_seconds` says how old
they are. Names of queues are the application's, and at most `SHOWN_MAX` of them make series.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ..env import Clock
from ..queues.queues import Queues
from .metrics import Metrics

_QUEUE: Final = "trinamo_queue"


class _QueueCollector:
    def __init__(self, queues: Queues, clock: Clock) -> None:
        self._queues = queues
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        if not self._queues.tallies:
            return
        yield from self._broker_series()
        yield from self._own_series()

    def _broker_series(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily(
            f"{_QUEUE}_jobs", "Jobs in the queue, as last read", labels=["queue", "state"]
        )
        oldest = GaugeMetricFamily(
            f"{_QUEUE}_oldest_age_seconds",
            "How long ago the oldest job neither done nor dead was put, as last read",
            labels=["queue"],
        )
        read = GaugeMetricFamily(
            f"{_QUEUE}_statistics_age_seconds",
            "How long ago the broker was last asked with success",
            labels=["queue"],
        )
        now = self._clock.now()
        for name, tally in self._queues.tallies.items():
            found = tally.statistics
            if found is None:
                continue
            for state, count in (
                ("ready", found.ready),
                ("leased", found.leased),
                ("dead", found.dead),
            ):
                jobs.add_metric([name, state], count)
            oldest.add_metric([name], found.oldest_age_s)
            read.add_metric([name], now - tally.read_at)
        yield from (jobs, oldest, read)

    def _own_series(self) -> Iterator[Metric]:
        operations = CounterMetricFamily(
            f"{_QUEUE}_operations",
            "What this process asked of the queue, by answer",
            labels=["queue", "operation", "result"],
        )
        outcomes = CounterMetricFamily(
            f"{_QUEUE}_outcomes",
            "What became of the jobs that consumers of this process took",
            labels=["queue", "outcome"],
        )
        working = GaugeMetricFamily(
            f"{_QUEUE}_working", "Jobs that this process works on", labels=["queue"]
        )
        for name, tally in self._queues.tallies.items():
            for (operation, result), count in tally.operations.items():
                operations.add_metric([name, operation, result], count)
            for outcome, count in tally.outcomes.items():
                outcomes.add_metric([name, outcome.value], count)
            working.add_metric([name], tally.working)
        yield from (operations, outcomes, working)


def show_queues(metrics: Metrics, queues: Queues, clock: Clock) -> None:
    """Add the series of `queues` to the exposition of `metrics`; once per process."""
    metrics.registry.register(_QueueCollector(queues, clock))

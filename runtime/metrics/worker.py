"""What a worker counts about the requests it serves.

What changes with every request or item is counted in plain numbers, which a scrape reads: a counter of
prometheus-client would be the dearest thing done for an item. Its other children are kept per endpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..env import Env
from ..errors import TrinamoError
from .metrics import CANCELLED, DURATION_BUCKETS_S, Metrics

__all__ = ["EndpointTally", "WorkerMetrics", "WorkerRecord"]


@attrs.define(eq=False)
class EndpointTally:
    """The requests of one endpoint, so far and now."""

    requests: Counter
    duration: Histogram
    items: int = 0
    """Count an item here when it is sent: who asks in the middle of a long answer sees it grow."""
    in_flight: int = 0
    streams: int = 0
    outcomes: dict[str, Counter] = attrs.Factory(dict)
    """How requests ended: the children of `requests`."""


class _Counts(Collector):
    def __init__(self) -> None:
        self.tallies: dict[str, EndpointTally] = {}

    def collect(self) -> Iterator[Metric]:
        items = CounterMetricFamily(
            "trinamo_worker_items", "Items yielded by handlers", labels=("endpoint",)
        )
        in_flight = GaugeMetricFamily(
            "trinamo_worker_requests_in_flight", "Requests being served", labels=("endpoint",)
        )
        for endpoint, tally in self.tallies.items():
            items.add_metric((endpoint,), tally.items)
            in_flight.add_metric((endpoint,), tally.in_flight)
        streams = sum(tally.streams for tally in self.tallies.values())
        yield from (
            items,
            in_flight,
            GaugeMetricFamily("trinamo_worker_streams", "Open response streams", streams),
        )


class WorkerMetrics(Metrics):
    """What a worker counts about the requests it serves. `endpoint` is the endpoint's path."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._requests = self._counter(
            "worker_requests", "Requests that ended", "endpoint", "outcome"
        )
        self._duration = self._histogram(
            "worker_request_duration_seconds", "Acceptance to end", DURATION_BUCKETS_S, "endpoint"
        )
        self._counts = _Counts()
        self.registry.register(self._counts)
        self._cancellations = self._counter(
            "worker_cancellations", "Requests stopped or killed", "endpoint", "reason"
        )

    def begin(self, endpoint: str, *, is_stream: bool) -> WorkerRecord:
        """A request was accepted; set the record's `outcome`, then `end` it."""
        tally = self._counts.tallies.get(endpoint)
        if tally is None:
            tally = EndpointTally(self._requests, self._duration.labels(endpoint))
            self._counts.tallies[endpoint] = tally
        tally.in_flight += 1
        tally.streams += is_stream
        return WorkerRecord(self, endpoint, tally, is_stream=is_stream)

    def refused(self, endpoint: str, outcome: str) -> None:
        """A request got a NACK; `outcome` is its status."""
        self._requests.labels(endpoint, outcome).inc()

    def cancelled(self, endpoint: str, reason: str) -> None:
        """A request was stopped or killed, for `reason`."""
        self._cancellations.labels(endpoint, reason).inc()


class WorkerRecord:
    """One request of a worker."""

    __slots__ = (
        "_is_stream",
        "_metrics",
        "_started_at",
        "detail",
        "duration_s",
        "endpoint",
        "outcome",
        "tally",
    )

    def __init__(
        self, metrics: WorkerMetrics, endpoint: str, tally: EndpointTally, *, is_stream: bool
    ) -> None:
        self._metrics = metrics
        self.endpoint = endpoint
        self.tally = tally
        self._is_stream = is_stream
        self._started_at = metrics.now()
        self.duration_s = 0.0
        """From its acceptance to its end."""
        self.outcome = CANCELLED
        self.detail = ""
        """What went wrong, for the log."""

    def failed(self, error: TrinamoError) -> None:
        """It ends with `error`."""
        self.outcome, self.detail = error.code, error.message

    def cancelled(self, reason: str) -> None:
        """The request was stopped or killed, for `reason`."""
        self._metrics.cancelled(self.endpoint, reason)

    def end(self) -> None:
        """It has ended: count it. Once."""
        self.duration_s = self._metrics.now() - self._started_at
        tally = self.tally
        tally.in_flight -= 1
        tally.streams -= self._is_stream
        tally.duration.observe(self.duration_s)
        counter = tally.outcomes.get(self.outcome)
        if counter is None:
            counter = tally.requests.labels(self.endpoint, self.outcome)
            tally.outcomes[self.outcome] = counter
        counter.inc()

"""What a worker counts about the requests it serves.

Items are counted in plain numbers, one by one as they are sent: a counter of prometheus-client would
be the dearest thing done for an item.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ..env import Env
from ..errors import TrinamoError
from .metrics import CANCELLED, DURATION_BUCKETS_S, Metrics

__all__ = ["ItemTally", "WorkerMetrics", "WorkerRecord"]


@attrs.define
class ItemTally:
    """The items of one endpoint, so far."""

    items: int = 0


class _Items(Collector):
    def __init__(self) -> None:
        self._tallies: dict[str, ItemTally] = {}

    def tally(self, endpoint: str) -> ItemTally:
        return self._tallies.setdefault(endpoint, ItemTally())

    def collect(self) -> Iterator[Metric]:
        found = CounterMetricFamily(
            "trinamo_worker_items", "Items yielded by handlers", labels=("endpoint",)
        )
        for endpoint, tally in self._tallies.items():
            found.add_metric((endpoint,), tally.items)
        yield found


class WorkerMetrics(Metrics):
    """What a worker counts about the requests it serves. `endpoint` is the endpoint's path."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._requests = self._counter(
            "worker_requests", "Requests that ended", "endpoint", "outcome"
        )
        self._in_flight = self._gauge(
            "worker_requests_in_flight", "Requests being served", "endpoint"
        )
        self._duration = self._histogram(
            "worker_request_duration_seconds", "Acceptance to end", DURATION_BUCKETS_S, "endpoint"
        )
        self._items = _Items()
        self.registry.register(self._items)
        self._streams = self._gauge("worker_streams", "Open response streams")
        self._cancellations = self._counter(
            "worker_cancellations", "Requests stopped or killed", "endpoint", "reason"
        )

    @contextmanager
    def request(self, endpoint: str) -> Iterator[WorkerRecord]:
        """Count one request while inside; set `outcome` before leaving."""
        record = WorkerRecord(self, endpoint, self._items.tally(endpoint), self._clock.now())
        in_flight = self._in_flight.labels(endpoint)
        in_flight.inc()
        try:
            yield record
        finally:
            in_flight.dec()
            self._duration.labels(endpoint).observe(record.duration_s)
            self._requests.labels(endpoint, record.outcome).inc()

    def refused(self, endpoint: str, outcome: str) -> None:
        """A request got a NACK; `outcome` is its status."""
        self._requests.labels(endpoint, outcome).inc()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count one response stream while inside."""
        self._streams.inc()
        try:
            yield
        finally:
            self._streams.dec()

    def cancelled(self, endpoint: str, reason: str) -> None:
        """A request was stopped or killed, for `reason`."""
        self._cancellations.labels(endpoint, reason).inc()


@attrs.define
class WorkerRecord:
    """One request of a worker."""

    metrics: WorkerMetrics
    endpoint: str
    tally: ItemTally
    """Count an item there when it is sent: who asks in the middle of a long answer sees it grow."""
    started_at: float
    outcome: str = CANCELLED
    detail: str = ""
    """What went wrong, for the log."""

    @property
    def duration_s(self) -> float:
        """Since it was accepted."""
        return self.metrics.now() - self.started_at

    def failed(self, error: TrinamoError) -> None:
        """It ended with `error`."""
        self.outcome, self.detail = error.code, error.message

    def cancelled(self, reason: str) -> None:
        """The request was stopped or killed, for `reason`."""
        self.metrics.cancelled(self.endpoint, reason)

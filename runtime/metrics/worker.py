"""What a worker counts about the requests it serves.

In plain numbers (`tallies.py`): a counter of prometheus-client would be the dearest thing done for an
item.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ..env import Env
from ..errors import TrinamoError
from ..traces.trace import Leg, Trace
from .metrics import CANCELLED, DURATION_BUCKETS_S, Metrics
from .tallies import Count, Histogram


@attrs.define(eq=False)
class EndpointTally:
    """The requests of one endpoint, so far and now."""

    in_flight: Count
    duration: Histogram
    items: int = 0
    """Count an item here when it is sent: who asks in the middle of a long answer sees it grow."""


class _Items(Collector):
    def __init__(self) -> None:
        self.tallies: dict[str, EndpointTally] = {}

    def collect(self) -> Iterator[Metric]:
        found = CounterMetricFamily(
            "trinamo_worker_items", "Items yielded by handlers", labels=("endpoint",)
        )
        for endpoint, tally in self.tallies.items():
            found.add_metric((endpoint,), tally.items)
        yield found


class WorkerMetrics(Metrics):
    """What a worker counts about the requests it serves. `endpoint` is the endpoint's path."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._requests = self.counts(
            "worker_requests", "Requests that ended", "endpoint", "outcome"
        )
        self._in_flight = self.counts(
            "worker_requests_in_flight", "Requests being served", "endpoint", may_fall=True
        )
        self._duration = self.histograms(
            "worker_request_duration_seconds", "Acceptance to end", DURATION_BUCKETS_S, "endpoint"
        )
        self._items = _Items()
        self.registry.register(self._items)
        self.streams = self.counts("worker_streams", "Open response streams", may_fall=True).tally()
        self._cancellations = self.counts(
            "worker_cancellations", "Requests stopped or killed", "endpoint", "reason"
        )

    def begin(self, endpoint: str, trace: Trace, *, is_stream: bool) -> WorkerRecord:
        """A request was accepted; set the record's `outcome`, then `end` it."""
        tally = self._items.tallies.get(endpoint)
        if tally is None:
            tally = EndpointTally(self._in_flight.tally(endpoint), self._duration.tally(endpoint))
            self._items.tallies[endpoint] = tally
        tally.in_flight.value += 1
        self.streams.value += is_stream
        leg = trace.begin("worker", endpoint=endpoint)
        return WorkerRecord(self, endpoint, tally, leg, is_stream=is_stream)

    def ended(self, endpoint: str, outcome: str) -> None:
        """A request is over."""
        self._requests.tally(endpoint, outcome).value += 1

    def refused(self, endpoint: str, outcome: str) -> None:
        """A request got a NACK; `outcome` is its status."""
        self._requests.tally(endpoint, outcome).value += 1

    def cancelled(self, endpoint: str, reason: str) -> None:
        """A request was stopped or killed, for `reason`."""
        self._cancellations.tally(endpoint, reason).value += 1


class WorkerRecord:
    """One request of a worker."""

    __slots__ = (
        "_is_stream",
        "_metrics",
        "_started_at",
        "detail",
        "duration_s",
        "endpoint",
        "leg",
        "outcome",
        "tally",
    )

    def __init__(
        self,
        metrics: WorkerMetrics,
        endpoint: str,
        tally: EndpointTally,
        leg: Leg,
        *,
        is_stream: bool,
    ) -> None:
        self._metrics = metrics
        self.endpoint = endpoint
        self.tally = tally
        self.leg = leg
        """Of its trace."""
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
        self.leg.finish(self.outcome)
        tally = self.tally
        tally.in_flight.value -= 1
        self._metrics.streams.value -= self._is_stream
        tally.duration.observe(self.duration_s)
        self._metrics.ended(self.endpoint, self.outcome)

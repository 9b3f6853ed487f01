"""What a worker counts about the requests it serves."""

from __future__ import annotations

import attrs

from ..env import Env
from ..errors import TrinamoError
from ..metrics.metrics import CANCELLED, DURATION_BUCKETS_S, Metrics
from ..metrics.tallies import Count, Histogram
from ..traces.trace import Leg, RequestTrace


@attrs.frozen
class EndpointTally:
    """The requests of one endpoint, so far and now."""

    in_flight: Count
    duration: Histogram
    items: Count
    """Count an item here when it is sent: who asks in the middle of a long answer sees it grow."""


class WorkerMetrics(Metrics):
    """What a worker counts about the requests it serves. `endpoint` is the endpoint's path."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.requests = self.counts("worker_requests", "Requests that ended", "endpoint", "outcome")
        self._in_flight = self.counts(
            "worker_requests_in_flight", "Requests being served", "endpoint", may_fall=True
        )
        self._duration = self.histograms(
            "worker_request_duration_seconds", "Acceptance to end", DURATION_BUCKETS_S, "endpoint"
        )
        self._items = self.counts("worker_items", "Items yielded by handlers", "endpoint")
        self.streams = self.count("worker_streams", "Open response streams", may_fall=True)
        self.cancellations = self.counts(
            "worker_cancellations", "Requests stopped or killed", "endpoint", "reason"
        )
        self._tallies: dict[str, EndpointTally] = {}

    def begin(self, endpoint: str, trace: RequestTrace, *, is_stream: bool) -> WorkerRecord:
        """A request was accepted; set the record's `outcome`, then `end` it."""
        tally = self._tallies.get(endpoint)
        if tally is None:
            tally = self._tallies[endpoint] = EndpointTally(
                self._in_flight.tally(endpoint),
                self._duration.tally(endpoint),
                self._items.tally(endpoint),
            )
        tally.in_flight.value += 1
        self.streams.value += is_stream
        leg = trace.begin("worker", endpoint=endpoint)
        return WorkerRecord(self, endpoint, tally, leg, is_stream=is_stream)

    def refused(self, endpoint: str, outcome: str) -> None:
        """A request got a NACK; `outcome` is its status."""
        self.requests.tally(endpoint, outcome).value += 1


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
        self._metrics.cancellations.tally(self.endpoint, reason).value += 1

    def end(self) -> None:
        """It has ended: count it. Once."""
        self.duration_s = self._metrics.now() - self._started_at
        self.leg.finish(self.outcome)
        tally = self.tally
        tally.in_flight.value -= 1
        self._metrics.streams.value -= self._is_stream
        tally.duration.observe(self.duration_s)
        self._metrics.requests.tally(self.endpoint, self.outcome).value += 1

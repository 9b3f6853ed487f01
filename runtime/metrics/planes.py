"""What `/metrics` shows of the control, event and request planes: read from them when it is scraped.

The planes count for themselves (`planes/statistics.py`); nothing is counted twice, and a plane
that does not count has no series.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ..planes import (
    ControlPlane,
    ControlStatistics,
    CountsControl,
    CountsEvents,
    EventPlane,
    EventStatistics,
    RequestServer,
)
from .metrics import Metrics

_CONTROL: Final = "trinamo_control_plane"
_EVENT: Final = "trinamo_event_plane"


class _PlaneCollector:
    def __init__(
        self, control: ControlPlane, events: EventPlane, servers: Sequence[RequestServer]
    ) -> None:
        self._control = control
        self._events = events
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        if isinstance(self._control, CountsControl):
            yield from _control_series(self._control.statistics())
        if isinstance(self._events, CountsEvents):
            yield from _event_series(self._events.statistics())
        malformed = CounterMetricFamily(
            "trinamo_request_plane_malformed_frames",
            "What arrived and was no request",
            labels=["transport"],
        )
        for server in self._servers:
            malformed.add_metric([server.transport], server.malformed_count)
        yield malformed


def _control_series(counts: ControlStatistics) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        f"{_CONTROL}_connected",
        "1 if the store's last sign was an answer, else 0",
        float(counts.is_connected),
    )
    yield GaugeMetricFamily(
        f"{_CONTROL}_silence_seconds", "Since the store's last answer", counts.silence_s
    )
    yield GaugeMetricFamily(f"{_CONTROL}_watches", "Watches open", counts.watches)
    yield CounterMetricFamily(
        f"{_CONTROL}_stream_losses", "Streams that ended unasked", counts.stream_losses
    )
    yield CounterMetricFamily(
        f"{_CONTROL}_resyncs", "Watches that had to read everything again", counts.resyncs
    )


def _event_series(counts: EventStatistics) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        f"{_EVENT}_connected", "1 if there is a connection, else 0", float(counts.is_connected)
    )
    yield CounterMetricFamily(f"{_EVENT}_connections", "Connections made", counts.connections)
    yield GaugeMetricFamily(
        f"{_EVENT}_waiting_messages", "Messages that wait to be sent", counts.waiting_messages
    )
    dropped = CounterMetricFamily(
        f"{_EVENT}_dropped_messages", "Messages dropped at a bound", labels=["direction"]
    )
    dropped.add_metric(["out"], counts.dropped_outgoing)
    dropped.add_metric(["in"], counts.dropped_incoming)
    yield dropped


def show_planes(
    metrics: Metrics,
    control: ControlPlane,
    events: EventPlane,
    servers: Sequence[RequestServer] = (),
) -> None:
    """Add the planes' series to the exposition of `metrics`; once per process."""
    metrics.registry.register(_PlaneCollector(control, events, servers))

"""What `/metrics` shows of the control, event and request planes: read from them when it is scraped.

The planes count for themselves (`planes/control.py`, `planes/events.py`), and know nothing of this page; a plane
that does not count has no series.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import attrs

from ..planes import ControlPlane, CountsControl, CountsEvents, EventPlane, RequestServer
from .metrics import Metrics
from .tallies import Row


def show_planes(
    metrics: Metrics,
    control: ControlPlane,
    events: EventPlane,
    servers: Sequence[RequestServer] = (),
) -> None:
    """Add the planes' series to the exposition of `metrics`; once per process."""
    if isinstance(control, CountsControl):

        def control_rows(_: object) -> Iterator[Row]:
            told = control.statistics()
            renamed = {"connected": told.is_connected, "silence_seconds": told.silence_s}
            yield (), attrs.asdict(told) | renamed

        metrics.readings(
            "control_plane_",
            (),
            control_rows,
            gauges={
                "connected": "1 if the store's last sign was an answer, else 0",
                "silence_seconds": "Since the store's last answer",
                "watches": "Watches open",
            },
            counters={
                "stream_losses": "Streams that ended unasked",
                "resyncs": "Watches that had to read everything again",
            },
        )
    if isinstance(events, CountsEvents):
        _show_events(metrics, events)
    metrics.readings(
        "request_plane_",
        ("transport",),
        lambda _: [
            ((each.transport,), {"malformed_frames": each.malformed_count}) for each in servers
        ],
        counters={"malformed_frames": "What arrived and was no request"},
    )


@runtime_checkable
class CountsUnsigned(Protocol):
    """What drops the words of those who are no members of the cluster, and counts them."""

    unsigned_count: int


def show_unsigned(metrics: Metrics, *planes: object) -> None:
    """Add what was dropped as no member had signed it: one series for both planes, of those that look."""
    counting = [each for each in planes if isinstance(each, CountsUnsigned)]
    if not counting:
        return
    metrics.readings(
        "",
        (),
        lambda _: [((), {"unsigned_dropped": sum(each.unsigned_count for each in counting)})],
        counters={
            "unsigned_dropped": "Entries in discovery and events that no member of the cluster signed"
        },
    )


def _show_events(metrics: Metrics, events: CountsEvents) -> None:
    def rows(_: object) -> Iterator[Row]:
        told = events.statistics()
        renamed = {"connected": told.is_connected, "refused_messages": told.refused_incoming}
        yield (), attrs.asdict(told) | renamed

    def dropped(_: object) -> Iterator[Row]:
        told = events.statistics()
        yield ("out",), {"dropped_messages": told.dropped_outgoing}
        yield ("in",), {"dropped_messages": told.dropped_incoming}

    metrics.readings(
        "event_plane_",
        (),
        rows,
        gauges={
            "connected": "1 if there is a connection, else 0",
            "waiting_messages": "Messages that wait to be sent",
        },
        counters={
            "connections": "Connections made",
            "refused_messages": "Messages, but for events, that no member had sealed so, or that came again",
        },
    )
    metrics.readings(
        "event_plane_",
        ("direction",),
        dropped,
        counters={"dropped_messages": "Messages dropped at a bound"},
    )

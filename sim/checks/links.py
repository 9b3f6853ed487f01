"""I5 and I12 of links, the connections that many streams share: what waits on them, and how long they stay.

A link may stay for `idle_s` after its last stream, and no longer; its worker closes it. Whatever
waits in it is bounded: what the socket has not taken, for all streams together, and what a stream
has no credit for, each by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import trio

if TYPE_CHECKING:
    from trinamo.runtime.config.tcp import TcpConfig
    from trinamo.transports.tcp.streams.multiplexed.link import Link

    from ..cluster.roles import Process


CLOSING_S: Final = 1.0
"""What an end of a link may take to look whether it is idle, and to close it."""


def _links(process: Process) -> Iterator[Link]:
    home, calls = process.transports.home, process.transports.calls
    if home is not None:
        yield from home._links  # noqa: SLF001 -- looks inside
    if calls is not None:
        for held in calls.links._links.values():  # noqa: SLF001 -- looks inside
            if held.link is not None:
                yield held.link


def overdue(process: Process, tcp: TcpConfig) -> int:
    """Links without a stream that should be closed by now."""
    bound_s = tcp.idle_s + tcp.linger_s + CLOSING_S
    now_s = trio.current_time()
    return sum(
        not link.lanes and now_s > link._idle_since + bound_s  # noqa: SLF001 -- looks inside
        for link in _links(process)
    )


def overflows(process: Process, tcp: TcpConfig) -> Iterator[str]:
    """What is above its bound now; one item may always be."""
    for link in _links(process):
        queued = link._mux.queued_bytes  # noqa: SLF001 -- looks inside
        if queued > tcp.queue_bytes_max + tcp.buffer_bytes:
            yield f"{process.name} has {queued} bytes to send on a link"
        for lane in link.lanes.values():
            waiting = _backlog_bytes(lane)
            if waiting > tcp.window_bytes + tcp.buffer_bytes:
                yield f"{process.name} has {waiting} bytes without credit on a stream"


def _backlog_bytes(lane: Any) -> int:
    return sum(len(each) for each in lane._backlog or () if isinstance(each, bytes))  # noqa: SLF001

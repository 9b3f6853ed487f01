"""Mistakes where many share: streams a connection, slow clients the memory of a frontend."""

from __future__ import annotations

import math
from typing import Any

import trio

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.control import Control, Kill
from trinamo.runtime.protocol.streams.multiplex import Demultiplexer, Multiplexer, StreamIds
from trinamo.transports.http.output import Output
from trinamo.transports.sockets.wire import send_all
from trinamo.transports.tcp.requests.plane import WorkerLink
from trinamo.transports.tcp.streams import linked
from trinamo.transports.tcp.streams.link import Link, LinkLane

from .planting import NOTHING, Patch, bug, instead_of, stands

# --- credit -----------------------------------------------------------------------------------------


@bug
def one_full_stops_all() -> list[Patch]:
    """While one stream of a link waits for credit, none of the others has room."""
    send = Link.send_item

    def has_room(self: Any) -> bool:
        return all(lane._credit.left_bytes > 0 for lane in self.lanes.values())  # noqa: SLF001

    def send_item(self: Any, stream: int, item: bytes) -> bool:
        return send(self, stream, item) and has_room(self)

    return [(Link, "has_room", property(has_room)), (Link, "send_item", send_item)]


@instead_of(LinkLane, "give")
def credit_given_twice(give: Any, self: Any, count: int) -> None:
    """What a consumer has taken is given back in two frames."""
    give(self, count)
    give(self, count)


# What a consumer has taken is not given back.
stands("credit_never_given", (LinkLane, "give", NOTHING))


@instead_of(LinkLane, "put")
def credit_unlimited(_: Any, self: Any, item: bytes) -> Any:
    """A stream without credit sends all the same."""
    return self.is_open and self._link.send_item(self.stream, item)


# --- ids --------------------------------------------------------------------------------------------


@instead_of(StreamIds, "check")
def late_frames_are_faults(_: Any, self: Any, stream: int) -> None:
    """A frame for a stream that is no more ends the link."""
    raise RemoteProtocolError(f"a frame for stream {stream} of {self.newest}")


@instead_of(StreamIds, "give")
def ids_given_again(_: Any, self: Any) -> Any:
    """A worker gives the id of a stream that is over to the next one."""
    self.newest = min(self.newest + 1, 2)
    return self.newest


# A worker speaks on a stream of its caller's link that it has not opened, so nothing was accepted.
stands("streams_unopened", (linked, "encode_opening", lambda *_: b""))


@instead_of(Link, "__init__")
def ids_outlive_their_link(
    start: Any, self: Any, stream: Any, options: Any, opened: Any = None, **more: Any
) -> None:
    """A caller goes by the ids of the link that was lost, whose worker begins anew on the next."""
    start(self, stream, options, opened, **more)
    if opened is not None:
        self.ids = vars(opened.__self__).setdefault("_ids_before", self.ids)
        self._demux._ids = self.ids  # noqa: SLF001 -- what is replaced


# --- batches ----------------------------------------------------------------------------------------


@instead_of(Link, "_send")
async def rest_of_a_send_lost(_: Any, self: Any, data: bytes) -> None:
    """What the socket did not take of a batch is not sent."""
    self._wire.send(data)


@instead_of(Link, "_send")
async def rest_of_a_send_repeated(_: Any, self: Any, data: bytes) -> None:
    """Of a batch that the socket took in parts, everything is sent again."""
    if self._wire.send(data) < len(data):
        await send_all(self._wire, data)


@instead_of(Multiplexer, "_end_batch")
def batches_cut_short(end: Any, self: Any) -> None:
    """A batch takes two items; those behind them are forgotten."""
    self._pairs, self._items = self._pairs[:4], self._items[:2]
    self._batch_bytes = sum(map(len, self._items))
    end(self)


@instead_of(Demultiplexer, "_keep")
def parts_lost(keep: Any, self: Any, stream: int, data: bytes) -> Any:
    """Of a long item the first part and the last are kept."""
    return stream in self._parted or keep(self, stream, data)


# --- links for others ---------------------------------------------------------------------------------


@bug
def links_in_use_are_shed() -> list[Patch]:
    """A link makes room for another whether or not requests are under way on it."""

    def is_idle(self: Any) -> bool:
        return self.link is not None

    return [(WorkerLink, "is_idle", property(is_idle))]


# --- ends -------------------------------------------------------------------------------------------


@instead_of(LinkLane, "say")
def kill_lost_at_the_close(say: Any, self: Any, event: Control) -> None:
    """A stream that is closed forgets what was to be said last, such as Kill."""
    if not isinstance(event, Kill):
        say(self, event)


@instead_of(Link, "_lost")
def link_loses_one_stream(lost: Any, self: Any, *why: Any) -> None:
    """A link that is lost tells the oldest of its streams, and no other."""
    for stream in list(self.lanes)[1:]:
        del self.lanes[stream]
    lost(self, *why)


# A worker opens streams on a link that it is about to close for being idle.
stands(
    "closing_links_take_streams", (Link, "takes_streams", property(lambda self: not self.is_closed))
)


@instead_of(Link, "_watch")
async def idle_links_stay(*_: Any) -> None:
    """Nobody looks whether a link is idle, or its peer takes nothing."""
    await trio.sleep_forever()


# --- clients that do not read ------------------------------------------------------------------------


@instead_of(Output, "__init__")
def slow_clients_are_kept(start: Any, *args: Any, **options: Any) -> None:
    """An HTTP client that reads nothing is waited for."""
    start(*args, **{**options, "write_timeout_s": math.inf})


@instead_of(Output, "send")
def backlog_has_no_bound(send: Any, self: Any, data: bytes) -> bool:
    """Whatever an HTTP client does not read is kept for it."""
    send(self, data)
    return True

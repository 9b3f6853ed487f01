"""Mistakes where many share: streams a connection, slow clients the memory of a frontend; see `bugs.py`."""

from __future__ import annotations

import math
from typing import Any

import trio

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.control import Control, Kill
from trinamo.runtime.protocol.streams.multiplex import Demultiplexer, Multiplexer, StreamIds
from trinamo.transports.http.output import Output
from trinamo.transports.tcp.streams.multiplexed.lane import LinkLane
from trinamo.transports.tcp.streams.multiplexed.link import Link

from .planting import Patch, bug

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


@bug
def credit_given_twice() -> list[Patch]:
    """What a consumer has taken is given back in two frames."""
    give = LinkLane.give

    def generous(self: Any, count: int) -> None:
        give(self, count)
        give(self, count)

    return [(LinkLane, "give", generous)]


@bug
def credit_never_given() -> list[Patch]:
    """What a consumer has taken is not given back."""
    return [(LinkLane, "give", lambda *_: None)]


@bug
def credit_unlimited() -> list[Patch]:
    """A stream without credit sends all the same."""

    def put(self: Any, item: bytes) -> bool:
        return self.is_open and self._link.send_item(self.stream, item)  # type: ignore[no-any-return]

    return [(LinkLane, "put", put)]


# --- ids --------------------------------------------------------------------------------------------


@bug
def late_frames_are_faults() -> list[Patch]:
    """A frame for a stream that is no more ends the link."""

    def check(self: Any, stream: int) -> None:
        raise RemoteProtocolError(f"a frame for stream {stream} of {self.newest}")

    return [(StreamIds, "check", check)]


@bug
def ids_given_again() -> list[Patch]:
    """A worker gives the id of a stream that is over to the next one."""

    def give(self: Any) -> int:
        self.newest = min(self.newest + 1, 2)
        return self.newest  # type: ignore[no-any-return]

    return [(StreamIds, "give", give)]


@bug
def ids_outlive_their_link() -> list[Patch]:
    """A caller goes by the ids of the link that was lost, whose worker begins anew on the next."""
    start = Link.__init__

    def resuming(self: Any, stream: Any, options: Any, opened: Any = None) -> None:
        start(self, stream, options, opened)
        if opened is not None:
            self.ids = vars(opened.__self__).setdefault("_ids_before", self.ids)
            self._demux._ids = self.ids  # noqa: SLF001 -- what is replaced

    return [(Link, "__init__", resuming)]


# --- batches ----------------------------------------------------------------------------------------


@bug
def rest_of_a_send_lost() -> list[Patch]:
    """What the socket did not take of a batch is not sent."""

    async def careless(self: Any, data: bytes) -> None:
        await self._stream.socket.send(data)

    return [(Link, "_send", careless)]


@bug
def rest_of_a_send_repeated() -> list[Patch]:
    """Of a batch that the socket took in parts, everything is sent again."""

    async def careless(self: Any, data: bytes) -> None:
        if await self._stream.socket.send(data) < len(data):
            await self._stream.send_all(data)

    return [(Link, "_send", careless)]


@bug
def batches_cut_short() -> list[Patch]:
    """A batch takes two items; those behind them are forgotten."""
    end = Multiplexer._end_batch  # noqa: SLF001 -- what is replaced

    def cut(self: Any) -> None:
        self._pairs, self._items = self._pairs[:4], self._items[:2]
        self._batch_bytes = sum(map(len, self._items))
        end(self)

    return [(Multiplexer, "_end_batch", cut)]


@bug
def parts_lost() -> list[Patch]:
    """Of a long item the first part and the last are kept."""
    keep = Demultiplexer._keep  # noqa: SLF001 -- what is replaced

    def keep_first(self: Any, stream: int, data: bytes) -> bool:
        return stream in self._parted or keep(self, stream, data)

    return [(Demultiplexer, "_keep", keep_first)]


# --- ends -------------------------------------------------------------------------------------------


@bug
def kill_lost_at_the_close() -> list[Patch]:
    """A stream that is closed forgets what was to be said last, such as Kill."""
    say = LinkLane.say

    def mute(self: Any, event: Control) -> None:
        if not isinstance(event, Kill):
            say(self, event)

    return [(LinkLane, "say", mute)]


@bug
def link_loses_one_stream() -> list[Patch]:
    """A link that is lost tells the oldest of its streams, and no other."""
    lost = Link._lost  # noqa: SLF001 -- what is replaced

    def partial(self: Any, *why: Any) -> None:
        for stream in list(self.lanes)[1:]:
            del self.lanes[stream]
        lost(self, *why)

    return [(Link, "_lost", partial)]


@bug
def closing_links_take_streams() -> list[Patch]:
    """A worker opens streams on a link that it is about to close for being idle."""
    return [(Link, "takes_streams", property(lambda self: not self.is_closed))]


@bug
def idle_links_stay() -> list[Patch]:
    """Nobody looks whether a link is idle, or its peer takes nothing."""

    async def watch(_: object) -> None:
        await trio.sleep_forever()

    return [(Link, "_watch", watch)]


# --- clients that do not read ------------------------------------------------------------------------


@bug
def slow_clients_are_kept() -> list[Patch]:
    """An HTTP client that reads nothing is waited for."""
    start = Output.__init__

    def patient(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **{**options, "write_timeout_s": math.inf})

    return [(Output, "__init__", patient)]


@bug
def backlog_has_no_bound() -> list[Patch]:
    """Whatever an HTTP client does not read is kept for it."""
    send = Output.send

    def keep(self: Any, data: bytes) -> bool:
        send(self, data)
        return True

    return [(Output, "send", keep)]

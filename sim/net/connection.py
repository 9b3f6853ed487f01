"""What the two kernels do with one TCP connection: segments, windows, FIN, RST, silence.

An `Endpoint` is the kernel's half of a socket; it lives on when its process is paused or killed.
Bytes travel in segments, first in first out per direction. What cannot pass a cut link waits and
is sent again when the link heals, except RST, which TCP does not repeat.

Kept from real TCP: data before an error is still read; an error is reported once, then EOF and
EPIPE; closing with unread data, or with SO_LINGER 0, sends RST instead of FIN; data that reaches a
closed socket is answered with RST; a sender may have `window_bytes` on the way or unread at the
peer; unacknowledged data and idle connections on a cut link time out as TCP_USER_TIMEOUT and
SO_KEEPALIVE say. Left out: congestion control, Nagle, urgent data, half-duplex TIME_WAIT.

What this module does not do: set up connections (`handshake.py`), be a trio socket (`sockets.py`).
"""

from __future__ import annotations

import enum
import errno
import math
import os
import socket as stdlib
import struct
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import trio

from ..core.host import current_label
from ..core.trace import Fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core.host import Host
    from .links import Link, Wires


Port = int | str
"""A number, or the path of a Unix socket."""
Address = tuple[str, Port]

LOSS_WAIT_S_MAX = 60.0
"""After so long a wait the next repetition gets through."""
HEADER_BYTES = 54
"""Ethernet, IPv4 and TCP, without options."""
RETRIES_S = 924.6
"""How long Linux repeats unacknowledged data by default (tcp_retries2 = 15)."""


def os_error(number: int) -> OSError:
    """The `OSError` (of the right subclass) that the kernel's `number` becomes."""
    return OSError(number, os.strerror(number))


class SegmentKind(enum.Enum):
    """What a segment says."""

    ACK = "ack"
    """The last of a handshake; those of data are not sent one by one."""
    DATA = "data"
    CREDIT = "credit"
    """The reader took bytes: the sender may send as many more."""
    FIN = "fin"
    RST = "rst"

    @property
    def is_bare(self) -> bool:
        """Whether it says nothing to a process: no row, no jitter, and its loss is no matter."""
        return self in (SegmentKind.ACK, SegmentKind.CREDIT)


class Segment(NamedTuple):
    """What travels one way at once; `size` is the bytes of `data`, or those credited."""

    kind: SegmentKind
    data: bytes
    size: int
    number: int
    sent_s: float
    """Virtual seconds when the sender let go of it."""

    @property
    def fields(self) -> Fields:
        """What a row of the trace holds of it: its bytes by a checksum."""
        return (
            ("segment", self.kind.value),
            ("number", self.number),
            ("size", self.size),
            ("sent_s", self.sent_s),
            ("crc", crc32(self.data)),
        )


class SocketOptions(dict[tuple[int, int], "int | bytes"]):
    """What was set on one socket, by level and name, and what has an effect here, as Linux reads it."""

    def _number(self, level: int, name: int, default: int) -> int:
        value = self.get((level, name), default)
        return value if isinstance(value, int) else default

    @property
    def is_kept_alive(self) -> bool:
        """Whether an idle connection is probed."""
        return bool(self._number(stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, 0))

    @property
    def idle_s(self) -> float:
        """From the last word of the peer until the first probe."""
        return self._number(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPIDLE, 7200)

    @property
    def silence_s(self) -> float:
        """From the last word of the peer until an idle connection that is probed ends.

        As Linux does: the first probe goes out after `idle_s`; the connection ends at a later
        probe's time, once `count` are unanswered or, if it is set, the user timeout is over.
        """
        interval_s = self._number(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPINTVL, 75)
        count = self._number(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPCNT, 9)
        if user_s := self._user_s:
            count = max(1, math.ceil((user_s - self.idle_s) / max(1, interval_s)))
        return self.idle_s + interval_s * count

    @property
    def unacknowledged_s(self) -> float:
        """How long data may stay unacknowledged."""
        return self._user_s or RETRIES_S

    @property
    def _user_s(self) -> float:
        return self._number(stdlib.IPPROTO_TCP, stdlib.TCP_USER_TIMEOUT, 0) / 1000

    @property
    def lingers_zero(self) -> bool:
        """Whether closing resets the connection."""
        value = self.get((stdlib.SOL_SOCKET, stdlib.SO_LINGER))
        if not isinstance(value, bytes) or len(value) != 8:
            return False
        is_on, seconds = struct.unpack("ii", value)
        return bool(is_on) and seconds == 0


class Connection(NamedTuple):
    """Both halves of one established connection."""

    id: int
    client: Endpoint
    server: Endpoint

    @property
    def is_over(self) -> bool:
        """Whether neither half has anything more to say."""
        return self.client.is_over and self.server.is_over


class Endpoint:
    """One half of a connection, as its kernel keeps it."""

    def __init__(self, wires: Wires, host: Host, local: Address | None) -> None:
        self.host = host
        self.local = local
        self.remote: Address | None = None
        self.id = 0
        self.options = SocketOptions()
        self.is_open = True
        """Whether the process still holds the socket."""
        self.is_forgotten = False
        """Whether the kernel has dropped the connection, after a reset or a timeout."""
        self.has_sent_fin = False
        self.has_eof = False
        self.error = 0
        self.buffer = bytearray()
        self.on_established: Callable[[Endpoint], None] | None = None
        """Called on the server's half when the client's last ACK has come."""
        self.readers, self.writers = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()
        self._wires, self._world = wires, wires.world
        self._peer: Endpoint | None = None
        self._flight: deque[Segment] = deque()
        self._sent_count = 0
        self._attempt = 0
        self._last_arrival_s = 0.0
        self._outstanding_bytes = 0
        self._uncredited_bytes = 0
        self.is_swallowed = False
        """Whether what is sent from here is acknowledged on the way, and goes no further."""
        self._cuts = 0
        """How often this link was cut; tells one silence from the next."""

    def __repr__(self) -> str:
        return f"<Endpoint {self.id} of {self.host.name} {self.local} -> {self.remote}>"

    def pair(self, peer: Endpoint, connection_id: int, remote: Address) -> None:
        """Make `peer` the other half; bytes may be written from now on."""
        self._peer, self.id, self.remote = peer, connection_id, remote
        self._last_arrival_s = self._world.current_time()

    def acknowledge(self) -> None:
        """Send the last ACK of the handshake, before anything else."""
        self._transmit(SegmentKind.ACK)

    def hold_until(self, time_s: float) -> None:
        """Nothing sent from here arrives before `time_s`: it is behind something already sent."""
        self._last_arrival_s = max(self._last_arrival_s, time_s)

    @property
    def peer(self) -> Endpoint:
        """The other half; `OSError` ENOTCONN if there is none."""
        if self._peer is None:
            raise os_error(errno.ENOTCONN)
        return self._peer

    @property
    def is_connected(self) -> bool:
        """Whether the handshake was done; stays true after the connection broke."""
        return self._peer is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing can happen to this half any more, so that it may be dropped."""
        has_closed = not self.is_open and self.has_sent_fin and self.has_eof
        return not self._flight and (self.is_forgotten or has_closed)

    @property
    def has_ended(self) -> bool:
        """Whether the kernel says that there is no connection: it broke, or both have ended it."""
        return self.is_forgotten or (self.has_sent_fin and self.has_eof and self.peer.has_sent_fin)

    # --- the process's side: synchronous, never waits ----------------------------------------

    @property
    def room_bytes(self) -> int:
        """How many more bytes `write` takes."""
        return max(0, self._wires.window_bytes - self._outstanding_bytes)

    @property
    def is_writable(self) -> bool:
        """Whether `write` would say something else than: wait."""
        return self.room_bytes > 0 or self.error != 0 or self.is_forgotten or self.has_sent_fin

    @property
    def is_readable(self) -> bool:
        """Whether `read` would say something else than: wait."""
        return bool(self.buffer) or self.error != 0 or self.has_eof or self.is_forgotten

    def write(self, data: bytes) -> int:
        """Send what there is room for; the count. Raises the connection's error, or EPIPE."""
        self._raise_error()
        if self.is_forgotten or self.has_sent_fin:
            raise os_error(errno.EPIPE)
        taken = data[: self.room_bytes]
        if taken:
            self._outstanding_bytes += len(taken)
            self._transmit(SegmentKind.DATA, taken)
            if not self.link_is_whole:
                self._watch_silence()
        return len(taken)

    def read(self, count: int) -> bytes:
        """Take up to `count` buffered bytes; empty at EOF. Raises the connection's error."""
        if self.buffer:
            taken = bytes(self.buffer[:count])
            del self.buffer[:count]
            self._uncredited_bytes += len(taken)
            # One credit for many small reads. No stall: who has no room left has a whole window out.
            is_much = self._uncredited_bytes * 4 >= self._wires.window_bytes
            # Once its timeouts run, the peer must know at once what has arrived.
            is_watched = self._cuts > 0 or self._world.power_was_cut
            if is_much or (is_watched and not self.buffer):
                self._transmit(SegmentKind.CREDIT, b"", self.take_uncredited())
            return taken
        if not self.has_eof:
            self._raise_error()
        return b""

    def take_uncredited(self) -> int:
        """How many bytes were read that the peer was not told of; it is told now."""
        count, self._uncredited_bytes = self._uncredited_bytes, 0
        return count

    def _raise_error(self) -> None:
        if self.error:
            number, self.error, self.has_eof = self.error, 0, True
            raise os_error(number)

    def shut_down(self) -> None:
        """Send FIN: no more will be written."""
        if not self.has_sent_fin and not self.is_forgotten:
            self.has_sent_fin = True
            self._transmit(SegmentKind.FIN)

    def close(self) -> None:
        """The process lets go, by `close` or by dying."""
        if not self.is_open:
            return
        self.is_open = False
        if self._peer is not None and not self.is_forgotten:
            if self.buffer or self.options.lingers_zero:
                self.abort()
            else:
                self.shut_down()
        self._wake()

    def abort(self) -> None:
        """Send RST and forget the connection."""
        self._transmit(SegmentKind.RST)
        self.is_forgotten = True
        self._wake()

    def refuse(self) -> None:
        """No process ever held it: reset it."""
        self.is_open = False
        self.abort()

    def _wake(self) -> None:
        self.readers.unpark_all()
        self.writers.unpark_all()

    # --- the wire ----------------------------------------------------------------------------

    def _transmit(self, kind: SegmentKind, data: bytes = b"", size: int = 0) -> None:
        if self.is_forgotten or self._peer is None:
            return
        passes = self._passes
        if kind is SegmentKind.DATA and self.is_swallowed:
            return
        self._sent_count += 1
        segment = Segment(
            kind, data, size or len(data), self._sent_count, round(self._world.current_time(), 9)
        )
        if kind is SegmentKind.RST and not passes:
            self._add_row("lost", segment)
            return
        self._flight.append(segment)
        if passes:
            self._launch(segment)
        else:
            self._add_row("held", segment)

    def _launch(self, segment: Segment) -> None:
        link, links = self._link, self._wires.links
        is_bare = segment.kind.is_bare
        wire_bytes = len(segment.data) + HEADER_BYTES
        delay_s = links.delay_s(link, size=wire_bytes, has_jitter=not is_bare)
        if segment.kind is SegmentKind.FIN:
            delay_s += link.fin_delay_s
        repeat_s = self._wires.retransmit_s
        # TCP repeats what was lost, each time after twice the wait: loss is felt as delay.
        while not is_bare and repeat_s < LOSS_WAIT_S_MAX and links.loses(link):
            delay_s += repeat_s
            repeat_s *= 2
        arrival_s = max(self._last_arrival_s, self._world.current_time() + delay_s)
        self._last_arrival_s = arrival_s
        # An absolute time: a difference added up again may be a rounding error earlier, and
        # overtake the segment before it.
        self._world.at(arrival_s, self._arrive, segment, self._attempt)

    def _arrive(self, segment: Segment, attempt: int) -> None:
        if attempt != self._attempt:
            return
        if not self._passes:
            if segment.kind is SegmentKind.RST:
                self._flight.remove(segment)
                self._add_row("lost", segment)
            return
        first = self._flight.popleft()
        assert first is segment, "segments of one direction arrive in order"
        if not segment.kind.is_bare:
            self._add_row("arrive", segment)
        self.peer._receive(segment)  # noqa: SLF001 -- the other half of the same connection

    def _add_row(self, kind: str, segment: Segment) -> None:
        ends: Fields = (("connection", self.id), ("source", self.host.name))
        fields = (*ends, *segment.fields, *self._wires.labels(segment.data))
        self._world.trace.add_plain(self._world.current_time(), current_label(), kind, fields)

    def _receive(self, segment: Segment) -> None:
        kind = segment.kind
        if kind is SegmentKind.RST:
            # Linux tells a process that already has the peer's FIN about its own writes instead.
            self.fail(errno.EPIPE if self.has_eof else errno.ECONNRESET)
        elif self.is_forgotten:
            if kind is not SegmentKind.CREDIT:
                self._answer_reset()
        elif kind is SegmentKind.CREDIT:
            self._outstanding_bytes -= segment.size
            self.writers.unpark_all()
        elif kind is SegmentKind.FIN:
            self.has_eof = True
            self.readers.unpark_all()
        elif kind is SegmentKind.ACK:
            assert self.on_established is not None
            self.on_established(self)
        elif self.is_open:
            self.buffer += segment.data
            if self.on_established is None:
                self._world.answers += 1
            self.readers.unpark_all()
        else:
            self._answer_reset()

    def _answer_reset(self) -> None:
        # A kernel that has forgotten the connection still answers what reaches it.
        self.is_forgotten = False
        self.abort()

    def heal(self) -> None:
        """The link is back: send again whatever did not arrive, after the retransmission time."""
        self._attempt += 1
        self._last_arrival_s = self._world.current_time() + self._wires.retransmit_s
        for segment in self._flight:
            self._launch(segment)

    def fail(self, number: int) -> None:
        """The connection breaks with error `number`; nothing is sent. Buffered data stays."""
        if self.is_forgotten:
            return
        self.is_forgotten = True
        if self.is_open:
            self.error = number
        self._wake()

    def end(self) -> None:
        """The connection ends as by a FIN from the peer that takes no more either."""
        if not self.is_forgotten:
            self.is_forgotten = self.has_eof = True
            self._wake()

    def lose_power(self) -> None:
        """The machine is off: nothing of this half is left, and nobody is told."""
        self.vanish()
        if self._peer is not None:
            # Only a server that waits for it would have it sent again.
            flight = self._peer._flight  # noqa: SLF001 -- its other half
            if flight and flight[0].kind is SegmentKind.ACK:
                flight.popleft()
        self.is_open, self.is_forgotten = False, True
        self.buffer.clear()

    def vanish(self) -> None:
        """Drop what is on the way from here, as a middlebox does that resets a connection."""
        self._attempt += 1
        self._flight.clear()

    # --- silence -----------------------------------------------------------------------------

    @property
    def link_is_whole(self) -> bool:
        """Whether segments pass both ways, so that acknowledgements come back."""
        return self._passes and self.peer._passes  # noqa: SLF001 -- its other half

    @cached_property
    def _link(self) -> Link:
        """From here to the peer; a network never replaces one."""
        return self._wires.links.link(self.host.name, self.peer.host.name)

    @property
    def _passes(self) -> bool:
        if self._link.is_cut or not self._world.power_was_cut:
            return not self._link.is_cut
        return self._wires.links.passes(self.host.name, self.peer.host.name)

    def link_was_cut(self) -> None:
        """The link is no longer whole: timeouts start to run."""
        # What was read before was acknowledged before, though no credit was sent for it yet.
        self._outstanding_bytes -= self.peer.take_uncredited()
        # Counted here, not for the whole network: a cut elsewhere must not end these timeouts.
        self._cuts += 1
        self._watch_silence()
        if self.options.is_kept_alive:
            self._world.after(self.options.silence_s, self._time_out_if_silent, self._cuts)

    def probe(self) -> None:
        """The peer may know this connection no more: a keep-alive probe finds out, if there is one."""
        if self.peer.is_forgotten and self.options.is_kept_alive and not self.is_forgotten:
            self._world.after(self.options.idle_s, self._probe_arrives)

    def _probe_arrives(self) -> None:
        if self.peer.is_forgotten and self.link_is_whole:
            self.fail(errno.ECONNRESET)

    def _watch_silence(self) -> None:
        if self._outstanding_bytes:
            wait_s = self.options.unacknowledged_s
            self._world.after(wait_s, self._time_out_if_unacknowledged, self._cuts)

    def _time_out_if_unacknowledged(self, cuts: int) -> None:
        if self._outstanding_bytes:
            self._time_out_if_silent(cuts)

    def _time_out_if_silent(self, cuts: int) -> None:
        # A later cut means that the link was whole in between, or is watched anew.
        is_same_silence = cuts == self._cuts and not self.link_is_whole
        if is_same_silence and not self.is_forgotten:
            self._world.add_row("timeout", connection=self.id, source=self.host.name)
            # What is still unacknowledged goes with the connection, and is not sent after a heal.
            self.vanish()
            self.fail(errno.ETIMEDOUT)

"""One connection of HTTP/2: the `h2` library reads and writes frames, this file bounds what they do.

`h2` keeps no bounds of its own on answers that a client grants no window for, and counts no frames.
Here one task reads and one writes. Whoever answers changes the state without waiting, and the
writer sends what came together, in turns of one frame for each stream. A connection has at most
`STREAMS_MAX` requests, those included that their client has given up and that have not ended yet.
What this file does not do: TLS and the choice of the protocol (`../driver.py`), and what is
answered (likewise).
"""

from __future__ import annotations

import logging
import math
import re
import struct
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import trio

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.deadlines import Deadlines
from trinamo.runtime.http.exchanges import Headers
from trinamo.runtime.sinks import Changes
from trinamo.transports.sockets.wire import Wire, abort

from ..carried import CarriedExchange, CarriedHead
from ..connections import LINGER_MAX_S, LINGER_S, Phase
from ..output import WiredConnection
from ..refusals import HEADERS_MAX, TOO_MANY

STREAMS_PER_CONNECTION: Final = 10_000
"""After so many a connection ends, so that a neighbour that was started later gets its part."""
CONNECTION_WINDOW_BYTES: Final = 1 << 18
READ_BYTES: Final = 1 << 12
"""Some hundred frames at most, so that one client's frames do not hold up the others."""
WRITE_BYTES: Final = 1 << 16
"""What a client must take within `write_timeout_s`: the measure of progress, as in HTTP/1."""
CONTROL_BYTES_MAX: Final = 1 << 16
"""Unsent answers to frames, from which on no more frames are read."""
HEADER_TABLE_BYTES_MAX: Final = 1 << 12
GONE_GRACE_S: Final = 1.0
GOAWAY_PAUSE_S: Final = 0.1
"""Between the last answer and GOAWAY: httpx gives up an answer that it reads together with that."""
_PREFACE_BYTES: Final = 24
_VALUE: Final = re.compile(r"b['\"]")
"""How what `h2` quotes of a head begins, which may be a key."""

log = logging.getLogger("trinamo.http")

# --- how much work a client may cause that asks for nothing ---

# Frames that make a server work without an answer at their end (streams opened and reset at once, a
# flood of PING, SETTINGS, PRIORITY, empty DATA, half heads) are each within the protocol, and
# together an attack (CVE-2019-9511 to 9518, 2023-44487, 2024-27316, 2025-8671). So each frame costs
# something, time pays it back, and so does what an honest client has to send: an answer it took to
# its end, a piece of an answer, for which it may grant new room.
BUDGET: Final = 2_000.0
REFILL_PER_S: Final = 200.0
HEAD_BYTES: Final = 9
SMALL_DATA_BYTES: Final = 64
DATA, HEADERS, RESET, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 6, 8, 9
RESET_COSTS: Final = 10
_COSTS: Final = {HEADERS: 1, RESET: RESET_COSTS, PING: 2, WINDOW_UPDATE: 1, CONTINUATION: 10}
_OTHERS_COST: Final = 5
FIELD_COST: Final = 0.2
"""What a field of a head costs to read, whether its request is taken or not."""
ANSWER_REPAYS: Final = 11
"""A head, and a reset that crosses the answer's end."""
PIECE_REPAYS: Final = 2
"""New room for the stream, and for the connection."""


class FrameBudget:
    """Of one connection. `now` is any clock in seconds that does not go back."""

    def __init__(self, now: float) -> None:
        self._left = BUDGET
        self._at = now
        self._head = bytearray()
        self._body_left = 0

    @property
    def is_spent(self) -> bool:
        return self._left < 0

    def count(self, data: bytes, now: float) -> None:
        """Count the frames that begin in `data`, the next bytes after the preface."""
        self._left = min(BUDGET, self._left + (now - self._at) * REFILL_PER_S)
        self._at = now
        at = 0
        while at < len(data):
            skipped = min(self._body_left, len(data) - at)
            self._body_left -= skipped
            at += skipped
            taken = data[at : at + HEAD_BYTES - len(self._head)]
            self._head += taken
            at += len(taken)
            if len(self._head) == HEAD_BYTES:
                self._body_left = int.from_bytes(self._head[:3], "big")
                kind = self._head[3]
                if kind != DATA:
                    self._left -= _COSTS.get(kind, _OTHERS_COST)
                elif self._body_left < SMALL_DATA_BYTES:
                    self._left -= 1
                self._head.clear()

    def spend(self, cost: float) -> None:
        self._left -= cost

    def repay(self, amount: float) -> None:
        self._left = min(BUDGET, self._left + amount)


class Http2Connection(WiredConnection):
    def __init__(self, wire: Wire, config: HttpConfig, *call: Any) -> None:
        super().__init__(wire, config, *call)
        self._budget = FrameBudget(trio.current_time())
        self._h2 = open_h2(
            config.header_bytes_max, lambda fields: self._budget.spend(FIELD_COST * fields)
        )
        self._preface_left = _PREFACE_BYTES
        self._streams: dict[int, CarriedExchange] = {}
        """Requests that are being answered, also if their client is gone."""
        self._ready: dict[int, CarriedExchange] = {}
        """Those that may have something to send, in the order of their turns."""
        self._stalls = Deadlines(config.write_timeout_s, self.reset)
        """Those whose client takes nothing."""
        self._lingering: dict[int, trio.CancelScope] = {}
        """Those whose answer has been sent, and whose body still comes."""
        self._taken = 0
        self._control = bytearray()
        self._is_retiring = False
        self._is_leaving = False
        """No further stream is taken, by our word or the client's."""
        self._is_over = False
        self._last_word = h2.errors.ErrorCodes.NO_ERROR, ""
        """Why it ends, for the client."""
        self._written = trio.Event()
        self._changed = Changes()
        self._idle = trio.CancelScope()

    @property
    def phase(self) -> Phase:
        if not self._streams:
            return Phase.ARRIVING if self._lingering else Phase.IDLE
        is_answering = any(each.is_body_complete for each in self._streams.values())
        return Phase.ANSWERING if is_answering else Phase.ARRIVING

    async def serve(self) -> None:
        """Read until the client ends it, breaks a rule, or is idle for too long."""
        async with self.output.open() as nursery:
            nursery.start_soon(self._write)
            nursery.start_soon(self._stalls.run)
            self._h2.initiate_connection()
            # Beyond one stream's window: bodies that nobody reads yet do not hold up the others.
            self._h2.increment_flow_control_window(CONNECTION_WINDOW_BYTES)
            self._collect()
            while not self._idle.cancelled_caught or self._streams:
                self._idle = trio.CancelScope()
                self._watch_idle()
                with self._idle:
                    await self._read()
                    break
                # A request that had come by then is taken.
            for stream in self._streams.values():
                stream.leave()
            # With `http.on_disconnect: stop` they are given time.
            await self._wait_for(lambda: not self._streams)
            with trio.move_on_after(GONE_GRACE_S):
                await trio.sleep(GOAWAY_PAUSE_S)
                self._control += encode_goaway(self._h2.highest_inbound_stream_id, *self._last_word)
                self._is_over = True
                self._changed.notify()
                await self._written.wait()
            # What it says last is to be read, not to be lost in a reset.
            self.output.end()
            with trio.move_on_after(LINGER_S):
                while await self._receive():
                    pass
            nursery.cancel_scope.cancel()

    def retire(self) -> None:
        """See `HttpConnection`. It ends when its last stream has: some clients give up all of them at a GOAWAY."""
        self._is_retiring = True

    def close_when_idle(self) -> None:
        """Take no more requests; the connection ends after the last answer.

        If it is idle, what has arrived and was not read yet is answered first.
        """
        if self.phase is Phase.IDLE:
            self.retire()
            self._idle.deadline = trio.current_time()
        else:
            self._is_leaving = True
            self._watch_idle()

    def abort(self) -> None:
        abort(self.socket)
        self.output.drop()
        self._idle.cancel()

    # --- reading -------------------------------------------------------------------------------

    async def _read(self) -> None:
        while data := await self._receive():
            for start in range(0, len(data), READ_BYTES):
                if not self._take(data[start : start + READ_BYTES]):
                    return
                await self._wait_for(lambda: len(self._control) < CONTROL_BYTES_MAX)

    async def _receive(self) -> bytes:
        try:
            return await self._wire.receive(READ_BYTES)
        except (OSError, trio.ClosedResourceError):
            return b""

    def _take(self, data: bytes) -> bool:
        """Whether more may come."""
        preface = min(self._preface_left, len(data))
        self._preface_left -= preface
        self._budget.count(data[preface:], trio.current_time())
        if self._budget.is_spent:
            self._end_because(
                h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, "too many frames that ask for nothing"
            )
            return False
        try:
            for event in self._h2.receive_data(data):
                self._handle(event)
        except h2.exceptions.ProtocolError as error:
            self._end_because(error.error_code, _VALUE.split(str(error), 1)[0].rstrip(" :.{("))
            return False
        self._collect()
        return True

    def _end_because(self, code: h2.errors.ErrorCodes, reason: str) -> None:
        log.warning("a connection of HTTP/2 is ended: %s", reason)
        last = self._h2.highest_inbound_stream_id
        # What `h2` has said of it has no reason.
        self._control += self._h2.data_to_send().removesuffix(encode_goaway(last, code))
        self._last_word = code, reason

    def _handle(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                self._open(event)
            case h2.events.DataReceived() | h2.events.StreamEnded():
                self._take_body(event)
            case h2.events.StreamReset():
                if not event.remote_reset:
                    # The client made us reset it, which is as dear as its own.
                    self._budget.spend(RESET_COSTS)
                if stream := self._streams.get(event.stream_id):
                    self._forget(stream)
            case h2.events.WindowUpdated(stream_id=stream_id) if stream_id:
                self._take_turns([stream_id])
            case h2.events.WindowUpdated():
                self._take_turns(self._streams)
            case h2.events.RemoteSettingsChanged():
                # A client may ask for any size, and what we say is the same size again and again.
                table = self._h2.encoder.header_table_size
                self._h2.encoder.header_table_size = min(table, HEADER_TABLE_BYTES_MAX)
                self._take_turns(self._streams)
            case h2.events.ConnectionTerminated():
                self._is_leaving = True
                self._watch_idle()
            case _:
                pass

    def _take_body(self, event: h2.events.DataReceived | h2.events.StreamEnded) -> None:
        stream_id = event.stream_id or 0
        stream = self._streams.get(stream_id)
        if isinstance(event, h2.events.StreamEnded):
            if stream is not None:
                stream.end_input()
                self._on_phase(self)
            elif lingering := self._lingering.get(stream_id):
                lingering.cancel()
            return
        size = event.flow_controlled_length or 0
        if stream is None or stream.is_gone or stream.is_finished:
            if lingering := self._lingering.get(stream_id):
                lingering.deadline = trio.current_time() + LINGER_S
            self.grant(stream_id, size)
        elif size:
            stream.put(bytes(event.data or b""), size)

    def _take_turns(self, stream_ids: Iterable[int]) -> None:
        """The client has granted room to these streams, or to the connection."""
        for stream_id in stream_ids:
            stream = self._streams.get(stream_id)
            if stream is not None and stream.outgoing and not stream.is_gone:
                self._ready[stream_id] = stream

    def _open(self, event: h2.events.RequestReceived) -> None:
        stream_id = event.stream_id or 0
        if self._is_leaving or len(self._streams) >= STREAMS_MAX:
            self._reset(stream_id, h2.errors.ErrorCodes.REFUSED_STREAM)
            return
        head = _read_head([(bytes(n), bytes(v)) for n, v in event.headers or ()])
        if head is None:
            self._reset(stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
            return
        stream = CarriedExchange(
            stream_id,
            head,
            self,
            partial(self._backlogs.hold, self._party),
            backlog_bytes_max=self._config.backlog_bytes_max,
        )
        if event.stream_ended is not None:
            stream.end_input()
        self._streams[stream_id] = stream
        self._watch_idle()
        self._taken += 1
        self._on_phase(self)
        assert self.output.nursery is not None
        self.output.nursery.start_soon(self._run, stream)

    async def _run(self, stream: CarriedExchange) -> None:
        try:
            await self._answer(stream, self.socket)
            if stream.is_finished:
                await stream.sent()
        finally:
            stream.release()
            if stream.is_sent:
                self._budget.repay(ANSWER_REPAYS)
            elif not stream.is_gone:
                self._reset(stream.stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)
            self._forget(stream)
            del self._streams[stream.stream_id]
            self._collect()
        if stream.is_sent and not stream.is_body_complete:
            # The answer did not need the rest of the body. Some clients look for an answer only
            # when they have sent all of it, so it is taken for a while (RFC 9113, section 8.1).
            with trio.move_on_after(LINGER_S) as self._lingering[stream.stream_id]:
                self._on_phase(self)
                await trio.sleep(LINGER_MAX_S)
            del self._lingering[stream.stream_id]
            self._reset(stream.stream_id, h2.errors.ErrorCodes.NO_ERROR)
        self._on_phase(self)
        self._watch_idle()

    def _watch_idle(self) -> None:
        """Without a stream, wait for a bounded time; not at all, if none may come."""
        waits = self._config.keep_alive_s
        taken_max = 1 if self._is_retiring else STREAMS_PER_CONNECTION
        if self.phase is not Phase.IDLE:
            waits = math.inf
        elif self._is_leaving or self._taken >= taken_max:
            waits = 0.0
        self._idle.deadline = trio.current_time() + waits

    # --- what streams ask: see `Carrier` ----------------------------------------------------------

    def send_head(self, stream_id: int, status: int, headers: Headers) -> None:
        fields = [(b":status", b"%d" % status), *headers]
        self._tell(lambda: self._h2.send_headers(stream_id, fields))

    def send_body(self, stream: CarriedExchange) -> None:
        if not stream.is_gone:
            self._ready[stream.stream_id] = stream
            self._stalls.begin(stream)
            self._changed.notify()

    def grant(self, stream_id: int, size: int) -> None:
        if size:
            self._tell(lambda: self._h2.acknowledge_received_data(size, stream_id))

    def reset(self, stream: CarriedExchange) -> None:
        self._budget.spend(RESET_COSTS)
        self._reset(stream.stream_id, h2.errors.ErrorCodes.CANCEL)
        self._forget(stream)

    def _forget(self, stream: CarriedExchange) -> None:
        self._ready.pop(stream.stream_id, None)
        self._stalls.end(stream)
        stream.leave()

    def _reset(self, stream_id: int, code: h2.errors.ErrorCodes) -> None:
        self._tell(lambda: self._h2.reset_stream(stream_id, code))

    def _tell(self, step: Callable[[], None]) -> None:
        try:
            step()
        except h2.exceptions.ProtocolError:
            # The stream or the connection is over: whoever has something to say is told elsewhere.
            return
        self._collect()

    # --- writing -----------------------------------------------------------------------------

    async def _write(self) -> None:
        try:
            # Once it is broken, `abort` has ended the reader.
            while not self.output.is_broken:
                ended = self._fill()
                if self._control:
                    data, self._control = bytes(self._control), bytearray()
                    self.output.send(data)
                    await self.output.wait_flushed()
                    if not self.output.is_broken:
                        for stream in ended:
                            stream.was_sent()
                    self._changed.notify()
                    await trio.lowlevel.checkpoint()
                elif self._is_over:
                    return
                else:
                    await self._wait_for(
                        lambda: bool(self._control or self._ready or self._is_over)
                    )
        finally:
            self._written.set()

    def _fill(self) -> list[CarriedExchange]:
        """Take what streams may send, a frame of each in turn; those whose last frame it was."""
        ended = []
        while self._ready and len(self._control) < WRITE_BYTES:
            stream_id, stream = next(iter(self._ready.items()))
            del self._ready[stream_id]
            try:
                is_last = self._send_frame(stream)
            except h2.exceptions.ProtocolError:
                self._forget(stream)
                continue
            self._control += self._h2.data_to_send()
            if is_last:
                ended.append(stream)
        return ended

    def _send_frame(self, stream: CarriedExchange) -> bool:
        size = min(
            len(stream.outgoing),
            self._h2.local_flow_control_window(stream.stream_id),
            self._h2.max_outbound_frame_size,
        )
        if size > 0:
            written = stream.taken_bytes // WRITE_BYTES
            data = stream.take_off(size)
            is_last = stream.is_finished and not stream.outgoing
            self._h2.send_data(stream.stream_id, data, end_stream=is_last)
            self._budget.repay(PIECE_REPAYS)
            if stream.outgoing:
                self._ready[stream.stream_id] = stream
            if not stream.outgoing or stream.taken_bytes // WRITE_BYTES > written:
                self._stalls.end(stream)
                if stream.outgoing:
                    self._stalls.begin(stream)
            return is_last
        if stream.is_finished and not stream.outgoing:
            self._stalls.end(stream)
            self._h2.end_stream(stream.stream_id)
            return True
        # It has its turn again when the client grants room.
        return False

    def _collect(self) -> None:
        self._control += self._h2.data_to_send()
        self._changed.notify()

    async def _wait_for(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._changed.wait()


def _read_head(fields: Headers) -> CarriedHead | None:
    """The head that `fields` are; None for one that HTTP/1 could not say."""
    pseudo = {name: value for name, value in fields if name.startswith(b":")}
    headers = [(name, value) for name, value in fields if not name.startswith(b":")]
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    authority = pseudo.get(b":authority")
    if authority is not None:
        headers = [(b"host", authority), *((n, v) for n, v in headers if n != b"host")]
    if not target.startswith((b"/", b"*")) or not (target + method).isascii():
        return None
    return CarriedHead(method, target, headers, "2")


STREAMS_MAX: Final = 128
REASON_BYTES_MAX: Final = 256
_PSEUDO_FIELDS: Final = 3
"""What HTTP/1 says in its first line."""
_GOAWAY: Final = 7


class _Connection(h2.connection.H2Connection):
    # What is remembered of each stream that has ended; by itself it would be 65,536.
    MAX_CLOSED_STREAMS = 1024


def encode_goaway(last_stream_id: int, code: h2.errors.ErrorCodes, reason: str = "") -> bytes:
    """GOAWAY; `h2` says it without a reason."""
    text = reason.encode()[:REASON_BYTES_MAX]
    return struct.pack(">I5xII", (8 + len(text)) << 8 | _GOAWAY, last_stream_id, code) + text


def open_h2(header_bytes_max: int, count: Callable[[int], None]) -> h2.connection.H2Connection:
    """A server's connection with the bounds it tells its client.

    `count` is told of the fields of each block, whatever stream it is for.
    """
    settings = h2.settings.SettingCodes
    opened = _Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    opened.local_settings = h2.settings.Settings(
        client=False,
        initial_values={
            settings.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
            settings.MAX_HEADER_LIST_SIZE: header_bytes_max,
        },
    )
    # Until the client has confirmed the settings `h2` would take twice the default.
    opened.decoder.max_header_list_size = header_bytes_max
    decode = opened.decoder.decode

    def decode_counted(data: bytes, raw: bool = False) -> Iterable[Any]:  # noqa: FBT001, FBT002 -- hpack's
        fields = list(decode(data, raw=raw))
        count(len(fields))
        if len(fields) > HEADERS_MAX + _PSEUDO_FIELDS:
            raise h2.exceptions.DenialOfServiceError(TOO_MANY.reason)
        return fields

    opened.decoder.decode = decode_counted  # type: ignore[method-assign]
    return opened

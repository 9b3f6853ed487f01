"""One accepted connection: a task that reads, and from the first request on one that answers.

The reader cuts what arrives into heads and bodies. It goes on behind a request in flight, up to
`READ_AHEAD_BYTES_MAX`, so that it sees a FIN or RST; a client that pipelines more is cut off after
`write_timeout_s` in which it was given nothing. The other task answers one request after the other.
A third lives only while something waits to be sent that the socket has no room for.

A client that closes its sending side may have left, or only have no more to send, as `nc -N`: both are a FIN. So one
whose whole request has come, and whose answer has not begun, is sent an interim response, which clients read over.
The kernel of a client that has left answers it with a reset. A GET costs little, and is just answered. After the
answer has begun, and over TLS, nothing can be sent in between: there a FIN is taken for leaving.

What this file does not do: what is answered (`../driver.py`), and who may connect (`../server.py`).
"""

from __future__ import annotations

import http
import math
import socket
from collections.abc import Callable
from typing import Any, Final

import trio

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.errors import LocalProtocolError
from trinamo.runtime.http.exchanges import HttpExchange
from trinamo.runtime.sinks import Changes, Sleeper
from trinamo.transports.sockets.wire import Wire, abort

from ..connections import LINGER_MAX_S, LINGER_S, Phase
from ..output import WiredConnection
from ..refusals import HeadFault
from .heads import BodyReader, FaultError, HeadReader, RequestHead

READ_BYTES: Final = 1 << 16
CHUNKS_READ_BYTES: Final = 1 << 14
"""Where there may be chunks, which cost work each: after about a millisecond of it others have a turn."""
READ_AHEAD_BYTES_MAX: Final = 1 << 16
REQUESTS_MAX: Final = 100_000
"""On one connection; it ends after the last one."""
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
PROCESSING: Final = b"HTTP/1.1 102 Processing\r\n\r\n"
_RESET_LOOK_S: Final = 0.01
_RESET_LOOK_MAX_S: Final = 1.0
"""How often a client that was probed is looked at: at first, and in the end."""
LAST_CHUNK: Final = b"0\r\n\r\n"

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}


class Http1Connection(WiredConnection):
    """`serve` it once; the rest is for the server, and may be called at any time."""

    def __init__(self, wire: Wire, config: HttpConfig, *call: Any) -> None:
        super().__init__(wire, config, *call)
        self.is_retiring = self.is_closing = False
        self._heads = HeadReader(config.header_bytes_max)
        self._buffer = bytearray()
        self._exchange: Http1Exchange | None = None
        self._request_count = self._sends_seen = 0
        self._reads = True
        self._is_probed = False
        """The client has closed its sending side, and was sent what tells whether it is there."""
        self._drops = False
        """What arrives is read only to be dropped."""
        self._drops_until = 0.0
        self._deadline = math.inf
        """For the reader: of a head, of a stall, of a client that lingers."""
        self._scope = trio.CancelScope()
        self._idle = Sleeper()
        """The task that answers, between two requests."""
        self.changed = Changes()
        """The reader may go on, or `serve` may end: something was taken, answered or given up."""

    @property
    def phase(self) -> Phase:
        if self._exchange is None:
            return Phase.ARRIVING if self._drops else Phase.IDLE
        return Phase.ANSWERING if self._exchange.is_body_complete else Phase.ARRIVING

    async def serve(self) -> None:
        """Answer what comes until one side ends it. The caller closes the socket."""
        async with self.output.open() as nursery:
            self._set_deadline(self._config.keep_alive_s)
            await self._read()
            pause_s = _RESET_LOOK_S
            while self._exchange is not None:
                with trio.move_on_after(pause_s if self._is_probed else math.inf):
                    await self.changed.wait()
                pause_s = min(2 * pause_s, _RESET_LOOK_MAX_S)
                self._look_for_reset()
            if self._wire.seal is not None:
                # Without a word of the end a peer takes it for a cut.
                self.output.end()
            await self.output.wait_flushed()
            nursery.cancel_scope.cancel()

    def retire(self) -> None:
        """See `HttpConnection`. An answer whose head is out has not said so: the next one will."""
        self.is_retiring = True

    def close_when_idle(self) -> None:
        self.is_closing = True
        if self.phase is Phase.IDLE:
            # Not cancelled: trio lets a reader that waits see first what has arrived. A client that has sent
            # its request already would get no answer, and does not know whether to send it again.
            self._set_deadline(0)

    def abort(self) -> None:
        self._stop_reading()
        abort(self.socket)
        self.output.drop()
        if self._exchange is not None:
            self._exchange.leave()

    # --- the reader ------------------------------------------------------------------------------

    async def _read(self) -> None:
        while self._reads:
            with trio.CancelScope(deadline=self._deadline) as self._scope:
                await self._read_on()
            if trio.current_time() < self._deadline:
                continue
            if self._exchange is not None and not self._drops:
                if self.output.sends != self._sends_seen:
                    # Were it gone, a write would have failed.
                    self._deadline = math.inf
                    continue
                self.abort()
            self._reads = False

    async def _read_on(self) -> None:
        while self._reads:
            exchange = self._exchange
            ahead = 0 if exchange is None else len(self._buffer) + len(exchange.body)
            if ahead >= READ_AHEAD_BYTES_MAX and not self._drops:
                # The client is ahead: no more is read until something is taken or answered.
                self._set_deadline(self._config.write_timeout_s)
                self._sends_seen = self.output.sends
                await self.changed.wait()
                if self._exchange is not None:
                    self._deadline = math.inf
                continue
            is_plain = exchange is not None and exchange.head.length
            try:
                data = await self._wire.receive(READ_BYTES if is_plain else CHUNKS_READ_BYTES)
            except (OSError, trio.ClosedResourceError):
                self._hung_up(is_broken=True)
                return
            if not data:
                self._hung_up(is_broken=False)
                return
            if self._drops:
                self._set_deadline(min(LINGER_S, self._drops_until - trio.current_time()))
                continue
            self._buffer += data
            if self._exchange is None:
                self._advance()
            elif not self._exchange.is_body_complete:
                self._take_body(self._exchange)

    def _hung_up(self, *, is_broken: bool) -> None:
        """Nothing more comes: who is not answered yet has left."""
        self._reads = False
        exchange = self._exchange
        if exchange is None or exchange.is_finished:
            return
        if exchange.is_body_complete and not (exchange.has_begun or is_broken):
            if exchange.method == b"GET":
                return
            if exchange.is_1_1 and self._wire.seal is None:
                self._is_probed = True
                self.output.send(PROCESSING)
                return
        self._left(exchange)

    def _look_for_reset(self) -> None:
        exchange = self._exchange
        if not self._is_probed or exchange is None or exchange.is_gone or exchange.is_finished:
            return
        if self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._left(exchange)

    def _left(self, exchange: Http1Exchange) -> None:
        exchange.leave()
        self.output.drop()
        self.socket.close()

    def _advance(self) -> None:
        try:
            head = self._heads.read(self._buffer)
            if head is None:
                return
            exchange = Http1Exchange(self, head)
            exchange.take(self._buffer)
        except FaultError as error:
            self._refuse(error.fault)
            return
        self._request_count += 1
        self.is_closing |= self._request_count >= REQUESTS_MAX
        self._deadline = math.inf
        self._exchange = exchange
        self._on_phase(self)
        if self._request_count == 1:
            assert self.output.nursery is not None
            self.output.nursery.start_soon(self._run)
        else:
            self._idle.wake()

    def _take_body(self, exchange: Http1Exchange) -> None:
        try:
            exchange.take(self._buffer)
        except FaultError as error:
            if exchange.has_begun:
                self.abort()
            else:
                self._refuse(error.fault, exchange.method, exchange.path)
                exchange.leave()
            return
        if exchange.is_body_complete:
            self._on_phase(self)

    def _refuse(self, fault: HeadFault, *request: bytes) -> None:
        self.output.send(self._refusals.fault(fault, *request))
        self._linger()

    # --- the end ---------------------------------------------------------------------------------

    def _linger(self) -> None:
        self._drops = True
        self._buffer.clear()
        self.output.end()
        self._drops_until = trio.current_time() + LINGER_MAX_S
        self._set_deadline(LINGER_S)
        self.changed.notify()

    def _stop_reading(self) -> None:
        self._reads = False
        self._scope.cancel()

    def _set_deadline(self, seconds: float) -> None:
        """The scope's own is only brought forward: it wakes too early rather than be set each time."""
        self._deadline = trio.current_time() + seconds
        if self._deadline < self._scope.deadline:  # noqa: PLR1730 -- to set it costs 20 times that
            self._scope.deadline = self._deadline

    # --- the answers -----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            exchange = self._exchange
            if exchange is None:
                await self._idle.sleep()
                continue
            await self._answer(exchange, self.socket)
            await self.output.wait_flushed()
            self._end(exchange)
            if self._exchange is not None:
                await trio.lowlevel.checkpoint()

    def _end(self, exchange: Http1Exchange) -> None:
        """Behind an answer: wait for the next request, begin it, or end."""
        self._exchange = None
        exchange.release()
        self.output.on_room(None)
        if not self._reads or self._drops:
            pass
        elif not exchange.is_finished:
            self.abort()
        elif not (exchange.is_last or self.is_closing):
            self._set_deadline(self._config.keep_alive_s)
            if self._buffer:
                self._advance()
        elif exchange.is_body_complete and not self._buffer:
            self._stop_reading()
        else:
            self._linger()
        self._on_phase(self)
        self.changed.notify()


class Http1Exchange(HttpExchange):
    """One request and its answer: an `HttpExchange`. What is written while `is_gone` is dropped."""

    def __init__(self, owner: Http1Connection, head: RequestHead) -> None:
        super().__init__(head, owner.address)
        self.is_last = head.is_last
        self._owner, self._output = owner, owner.output
        self._reader = BodyReader(head)
        self.is_body_complete = self._reader.is_complete
        self.is_1_1 = head.is_1_1
        self._is_chunked = False

    def take(self, buffer: bytearray) -> None:
        """Take from `buffer` what belongs to the body. Raises `FaultError`."""
        self._reader.read(buffer, self.body)
        self.is_body_complete = self._reader.is_complete
        self._changed.notify()

    def _taken(self) -> None:
        self._owner.changed.notify()

    def _ask_on(self) -> None:
        self._output.send(CONTINUE)

    # --- the answer ----------------------------------------------------------------------------

    def write(self, data: bytes) -> bool:
        head = b"" if self.has_begun else self._make_head(None)
        out = head + self._frame(data)
        return self.is_gone or not out or self._output.send(out)

    def finish(self, data: bytes = b"") -> None:
        if self.is_finished:
            raise LocalProtocolError("an answer ends once")
        head = b"" if self.has_begun else self._make_head(len(data))
        out = head + self._frame(data, is_last=True)
        if self._is_chunked:
            out += LAST_CHUNK
        self.is_finished = True
        if out and not self.is_gone:
            self._output.send(out)
        self._changed.notify()

    def on_room(self, listener: Callable[[], None]) -> None:
        self._output.on_room(listener)

    async def sent(self) -> None:
        await self._output.wait_flushed()

    async def wait_room(self) -> None:
        await self._output.wait_room()

    def _frame(self, data: bytes, *, is_last: bool = False) -> bytes:
        data = self._check(data, is_last=is_last)
        if data and self._is_chunked:
            return b"%x\r\n%b\r\n" % (len(data), data)
        return data

    def _make_head(self, length: int | None) -> bytes:
        headers, length = self._open(length)
        line = _STATUS_LINES.get(self.status) or b"HTTP/1.1 %d \r\n" % self.status
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
            raise LocalProtocolError("a header of an answer has a line end in it")
        more = b"date: %b\r\n" % self._owner.dates.value()
        self._is_chunked = length is None and self.is_1_1 and not self._is_mute
        if length is not None:
            more += b"content-length: %d\r\n" % length
        elif not self._is_mute or self.method == b"HEAD":
            if self.is_1_1:
                more += b"transfer-encoding: chunked\r\n"
            else:
                self.is_last = True
        # A client that keeps its connections would send its next request into the close.
        owner = self._owner
        self.is_last |= owner.is_retiring or owner.is_closing or not self.is_body_complete
        if self.is_last:
            more += b"connection: close\r\n"
        elif not self.is_1_1:
            more += b"connection: keep-alive\r\n"
        self.has_begun = True
        return b"%b%b%b\r\n" % (line, lines, more)

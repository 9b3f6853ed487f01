"""The worker's end of the tcp request plane: envelopes in, typed answers out.

One connection per caller process, pipelined: answers carry the request's id and may come in any
order. A caller that goes away cancels its unary requests; streams have connections of their own.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from trinamo.runtime.errors import EngineError, RemoteProtocolError, TrinamoError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import RequestService
from trinamo.runtime.protocol.codec import Frame, FrameDecoder, encode_frame
from trinamo.runtime.protocol.request import (
    Ack,
    AckStatus,
    Answer,
    Envelope,
    RequestKind,
    decode_cancel,
    decode_envelope,
    encode_answer,
    failure,
)

from .accepting import accept_connections
from .outbox import Outbox
from .sockets import TcpOptions, open_listener, tune

__all__ = ["TcpRequestServer", "open_request_server"]

_log = logging.getLogger("trinamo.tcp")
_UNARY_MAX: Final = 1024
"""Unary requests of one connection that may run at once; more are answered `overloaded`."""


class TcpRequestServer:
    """A `RequestServer` over TCP."""

    transport = "tcp"

    def __init__(self, options: TcpOptions, listener: trio.SocketListener, address: str) -> None:
        self.options = options
        self.address = address
        """`host:port` as advertised to callers."""
        self._listener = listener
        self.malformed_count = 0
        """Connections ended because their bytes were no requests."""

    async def serve(
        self,
        service: RequestService,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept callers until cancelled."""

        async def serve_one(stream: trio.SocketStream) -> None:
            tune(stream, self.options)
            await _Conversation(self, service, stream).run()

        async with open_nursery() as nursery:
            task_status.started()
            await accept_connections(
                self._listener, serve_one, nursery, connections_max=self.options.connections_max
            )


class _Conversation:
    """One caller's connection."""

    def __init__(
        self, server: TcpRequestServer, service: RequestService, stream: trio.SocketStream
    ) -> None:
        self._server = server
        self._service = service
        self._stream = stream
        self._outbox = Outbox(server.options.queue_bytes_max)
        self._unary: dict[str, trio.CancelScope] = {}
        self._sent = trio.Event()

    async def run(self) -> None:
        try:
            async with open_nursery() as nursery:
                nursery.start_soon(self._write, nursery.cancel_scope)
                await self._read(nursery)
                nursery.cancel_scope.cancel()
        finally:
            for request_id in tuple(self._unary):
                self._service.cancel(request_id)

    async def _write(self, scope: trio.CancelScope) -> None:
        try:
            await self._outbox.run(self._stream)
            await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            scope.cancel()
        finally:
            self._sent.set()

    async def _read(self, nursery: trio.Nursery) -> None:
        options = self._server.options
        decoder = FrameDecoder(
            header_bytes_max=options.header_bytes_max, data_bytes_max=options.data_bytes_max
        )
        try:
            while True:
                data = await self._stream.receive_some(options.buffer_bytes)
                if not data:
                    return
                for frame in decoder.feed(bytes(data)):
                    self._take(frame, nursery)
                decoder.check()
                # A caller that pipelines without reading its answers must not fill our memory.
                if self._outbox.queued_bytes >= options.queue_bytes_max:
                    await self._outbox.drain()
        except RemoteProtocolError as error:
            await self._turn_away(error)
        except trio.BrokenResourceError:
            pass

    async def _turn_away(self, error: RemoteProtocolError) -> None:
        """Tell the peer what was wrong, then hang up: after a bad frame nothing can be trusted."""
        self._server.malformed_count += 1
        _log.warning("request plane: %s", error)
        self._answer(Ack(id="", status=AckStatus.INVALID, message=error.message))
        self._outbox.close()
        with trio.move_on_after(self._server.options.linger_s):
            try:
                await self._sent.wait()
                while await self._stream.receive_some(self._server.options.buffer_bytes):
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

    def _take(self, frame: Frame, nursery: trio.Nursery) -> None:
        header, payload = frame
        if not header:
            if payload:
                raise RemoteProtocolError("a payload without an envelope")
            return
        cancelled = decode_cancel(header)
        if cancelled is not None:
            self._service.cancel(cancelled)
            scope = self._unary.get(cancelled)
            if scope is not None:
                scope.cancel()
            return
        envelope = decode_envelope(header)
        if envelope.kind is not RequestKind.UNARY:
            self._answer(self._service.admit(envelope, payload))
        elif envelope.id in self._unary:
            raise RemoteProtocolError(f"request id {envelope.id} is in use on this connection")
        elif len(self._unary) >= _UNARY_MAX:
            self._answer(
                Ack(id=envelope.id, status=AckStatus.OVERLOADED, message=f"{_UNARY_MAX} in flight")
            )
        else:
            self._unary[envelope.id] = trio.CancelScope()
            nursery.start_soon(self._answer_unary, envelope, payload)

    def _answer(self, answer: Ack | Answer, data: bytes = b"") -> None:
        if self._outbox.is_closed:
            # The caller was turned away while this request ran; it hears of that, not of this.
            return
        self._outbox.put_nowait(encode_frame(encode_answer(answer), data))

    async def _answer_unary(self, envelope: Envelope, payload: bytes) -> None:
        with self._unary[envelope.id]:
            try:
                result = await self._service.answer(envelope, payload)
            except TrinamoError as error:
                self._answer(failure(envelope.id, error))
            else:
                self._answer_result(envelope.id, result)
        del self._unary[envelope.id]

    def _answer_result(self, request_id: str, result: bytes) -> None:
        bytes_max = self._server.options.data_bytes_max
        if len(result) > bytes_max:
            # Sent all the same, it would end the connection and every other request on it.
            error = EngineError(f"a result of {len(result)} bytes; at most {bytes_max} are sent")
            self._answer(failure(request_id, error))
        else:
            self._answer(Ack(id=request_id, status=AckStatus.ACCEPTED), result)


@asynccontextmanager
async def open_request_server(options: TcpOptions) -> AsyncIterator[TcpRequestServer]:
    """Bind the request plane's port; `serve` starts answering.

    Raises `ConfigError` if the address cannot be bound.
    """
    listener, address = await open_listener(options)
    async with listener:
        yield TcpRequestServer(options, listener, address)

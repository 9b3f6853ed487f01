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

from trinamo.runtime.env import Env
from trinamo.runtime.errors import EngineError, RemoteProtocolError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import RequestService
from trinamo.runtime.protocol.streams.codec import Frame, FrameDecoder, encode_frame
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    Answer,
    encode_answer,
    failure,
    readable_id,
)
from trinamo.runtime.worker.requests import RequestTable

from ..accepting import Gate
from ..greeting import welcome
from ..sockets import TcpOptions, open_listener
from ..streams.outbox import Outbox
from ..unfinished import FREE_BYTES

_log = logging.getLogger("trinamo.tcp")
_UNARY_MAX: Final = 1024
"""Unary requests of one connection that may run at once; more are answered `overloaded`."""


class TcpRequestServer:
    """A `RequestServer` over TCP."""

    transport = "tcp"

    def __init__(
        self,
        options: TcpOptions,
        env: Env,
        listener: trio.SocketListener,
        address: str,
        instance_id: str,
    ) -> None:
        self.options = options
        self.address = address
        """`host:port` as advertised to callers."""
        self.instance_id = instance_id
        """Who callers are told they have reached."""
        self._env = env
        self._listener = listener
        self.malformed_count = 0
        """Frames that were no requests, and connections ended because their bytes were no frames."""

    async def serve(
        self,
        service: RequestService,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept callers until cancelled."""

        async def greet(stream: trio.SocketStream) -> None:
            await welcome(stream, self.options, self._env, Purpose.REQUESTS, self.instance_id)

        async def serve_one(stream: trio.SocketStream, _: None) -> None:
            await _Conversation(self, service, stream).run()

        gate = Gate(self.options, greet, serve_one)
        async with open_nursery() as nursery:
            task_status.started()
            await gate.accept(self._listener, nursery)


class _Conversation:
    """One caller's connection."""

    def __init__(
        self, server: TcpRequestServer, service: RequestService, stream: trio.SocketStream
    ) -> None:
        self._server = server
        self._service = service
        self._stream = stream
        self._outbox = Outbox(server.options.queue_bytes_max)
        self._sent = trio.Event()

    async def run(self) -> None:
        async with open_nursery() as nursery:
            requests = RequestTable(
                self._service,
                nursery,
                unary_max=_UNARY_MAX,
                keeps_order=True,
                reserve=self._reserve,
                give_back=self._give_back,
            )
            nursery.start_soon(self._write, nursery.cancel_scope)
            try:
                await self._read(requests)
            finally:
                requests.cancel_all()
            nursery.cancel_scope.cancel()

    def _reserve(self, payload_bytes: int) -> bool:
        """Small payloads are bounded in number, and do not count."""
        payloads = self._server.options.payloads
        return payloads.take_nowait(max(0, payload_bytes - FREE_BYTES))

    def _give_back(self, payload_bytes: int) -> None:
        self._server.options.payloads.give_back(self, max(0, payload_bytes - FREE_BYTES))

    async def _write(self, scope: trio.CancelScope) -> None:
        try:
            await self._outbox.run(self._stream)
            await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            scope.cancel()
        finally:
            self._sent.set()

    async def _read(self, requests: RequestTable) -> None:
        options = self._server.options
        decoder = FrameDecoder(
            header_bytes_max=options.header_bytes_max, data_bytes_max=options.data_bytes_max
        )
        unfinished = options.unfinished(decoder)
        try:
            while data := await unfinished.receive(self._stream.socket):
                for frame in decoder.feed(data):
                    self._take(frame, requests)
                decoder.check()
                # A caller that pipelines without reading its answers must not fill our memory.
                if self._outbox.queued_bytes >= options.queue_bytes_max:
                    await self._outbox.drain()
        except RemoteProtocolError as error:
            unfinished.close()
            await self._turn_away(error)
        except (OSError, trio.ClosedResourceError):
            pass
        finally:
            unfinished.close()

    async def _turn_away(self, error: RemoteProtocolError) -> None:
        """Tell the peer what was wrong, then hang up: after a bad frame nothing can be trusted."""
        self._server.malformed_count += 1
        _log.warning("request plane: %s", error)
        self._answer(Answer(id="", status=AckStatus.INVALID, message=error.message))
        self._outbox.close()
        with trio.move_on_after(self._server.options.linger_s):
            try:
                await self._sent.wait()
                while await self._stream.receive_some(self._server.options.buffer_bytes):
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

    def _take(self, frame: Frame, requests: RequestTable) -> None:
        header, payload = frame
        if not header and not payload:
            return
        try:
            answer = requests.take(header, payload, self._reply)
        except RemoteProtocolError as error:
            # The framing is intact: other requests of the same caller have nothing to do with it.
            self._server.malformed_count += 1
            _log.info("request plane: %s", error)
            told = readable_id(header)
            answer = Answer(id=told, status=AckStatus.INVALID, message=error.message)
        if answer is not None:
            self._answer(answer)

    async def _reply(self, answer: Answer, result: bytes) -> None:
        bytes_max = self._server.options.data_bytes_max
        if len(result) > bytes_max:
            # Sent all the same, it would end the connection and every other request on it.
            error = EngineError(f"a result of {len(result)} bytes; at most {bytes_max} are sent")
            answer, result = failure(answer.id, error), b""
        self._answer(answer, result)

    def _answer(self, answer: Answer, result: bytes = b"") -> None:
        if self._outbox.is_closed:
            # The caller was turned away while this request ran; it hears of that, not of this.
            return
        self._outbox.put_nowait(encode_frame(encode_answer(answer), result))


@asynccontextmanager
async def open_request_server(
    options: TcpOptions, env: Env, *, instance_id: str
) -> AsyncIterator[TcpRequestServer]:
    """Bind the request plane's port; `serve` starts answering, as `instance_id`.

    Raises `ConfigError` if the address cannot be bound.
    """
    listener, address = await open_listener(options)
    async with listener:
        yield TcpRequestServer(options, env, listener, address, instance_id)

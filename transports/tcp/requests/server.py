"""The worker's end of the tcp request plane: envelopes in, streams and typed answers out.

One link per caller process: answers carry the request's id and may come in any order; the answer to a
streaming request is a stream that the worker opens on the same link. A caller that goes away ends all of
its requests.
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
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    RequestAnswer,
    encode_answer,
    failure,
    readable_id,
)
from trinamo.runtime.worker.requests import RequestTable
from trinamo.transports.sockets.wire import Wire

from ..accepting import Gate
from ..greeting import welcome
from ..sockets import TcpOptions, open_listener
from ..streams.link import Link
from ..streams.linked import AnsweringLink
from ..unfinished import FREE_BYTES

_log = logging.getLogger("trinamo.tcp")
_UNARY_MAX: Final = 1024
"""Unary requests of one link that may run at once; more are answered `overloaded`."""


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
        self._callers: dict[_Caller, None] = {}
        self.malformed_count = 0
        """Messages that were no requests, and links ended because their bytes were no frames."""

    @property
    def stream_count(self) -> int:
        """Streams that are open on the links of all callers; zero at quiescence."""
        return sum(len(caller.link.lanes) for caller in self._callers)

    async def serve(
        self,
        service: RequestService,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async def serve_one(wire: Wire) -> None:
            async with open_nursery() as nursery:
                caller = _Caller(self, service, wire, nursery)
                self._callers[caller] = None
                try:
                    await caller.run()
                finally:
                    del self._callers[caller]
                nursery.cancel_scope.cancel()

        options, env = self.options, self._env
        gate = Gate(
            options,
            lambda wire: welcome(wire, options, env, Purpose.REQUESTS, self.instance_id),
            serve_one,
        )
        async with open_nursery() as nursery:
            task_status.started()
            await gate.accept(self._listener, nursery)


class _Caller:
    """One caller's link, and its unary requests that run."""

    def __init__(
        self,
        server: TcpRequestServer,
        service: RequestService,
        wire: Wire,
        nursery: trio.Nursery,
    ) -> None:
        self._server = server
        self.link = Link(wire, server.options, taken=self._take)
        fleet = server.options.fleet
        self._requests = RequestTable(
            service,
            nursery,
            unary_max=_UNARY_MAX,
            keeps_order=True,
            reserve=self._reserve,
            give_back=self._give_back,
            answering=AnsweringLink(self.link, server.options),
            by_worker=fleet is None or fleet.is_worker(wire.peer),
        )

    async def run(self) -> None:
        try:
            await self.link.run()
        finally:
            self._requests.cancel_all()
        if self.link.fault is not None:
            self._server.malformed_count += 1

    def _reserve(self, payload_bytes: int) -> bool:
        """Small payloads are bounded in number, and do not count."""
        payloads = self._server.options.payloads
        return payloads.take_nowait(max(0, payload_bytes - FREE_BYTES))

    def _give_back(self, payload_bytes: int) -> None:
        self._server.options.payloads.give_back(self, max(0, payload_bytes - FREE_BYTES))

    def _take(self, header: bytes, payload: bytes) -> None:
        try:
            answer = self._requests.take(header, payload, self._reply)
        except RemoteProtocolError as error:
            # The framing is intact: other requests of the same caller have nothing to do with it.
            self._server.malformed_count += 1
            _log.info("request plane: %s", error)
            answer = RequestAnswer(
                id=readable_id(header), status=AckStatus.INVALID, message=error.message
            )
        if answer is not None:
            self.link.send_message(encode_answer(answer), b"")

    async def _reply(self, answer: RequestAnswer, result: bytes) -> None:
        bytes_max = self._server.options.data_bytes_max
        if len(result) > bytes_max:
            # Sent all the same, it would end the link and everything else on it.
            error = EngineError(f"a result of {len(result)} bytes; at most {bytes_max} are sent")
            answer, result = failure(answer.id, error), b""
        self.link.send_message(encode_answer(answer), result)


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

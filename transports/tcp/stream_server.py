"""The caller's side of the data plane: where workers call home.

`TcpStreamServer` listens on one port for the whole process. A subject is registered before the
envelope that names it is sent, and taken once. Each accepted connection is one task in the
server's nursery; `response_connection.py` and `request_connection.py` say what it does.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from trinamo.runtime.context import Context
from trinamo.runtime.env import Env
from trinamo.runtime.errors import OverloadedError, RemoteProtocolError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.codec import Frame, FrameDecoder
from trinamo.runtime.protocol.control import Handshake, Refused, encode_control, parse_frame
from trinamo.runtime.protocol.request import ConnectionInfo, StreamType

from .accepting import accept_connections
from .request_connection import InputRegistration
from .response_connection import ResponseRegistration
from .sockets import TcpOptions, open_listener, tune

__all__ = ["TcpStreamServer", "open_stream_server"]

_log = logging.getLogger("trinamo.tcp")
_SUBJECT_BITS: Final = 128


class TcpStreamServer:
    """A `ResponsePlane` over TCP: one connection per stream, dialled by the worker."""

    def __init__(self, options: TcpOptions, env: Env, nursery: trio.Nursery, address: str) -> None:
        self.options = options
        self.env = env
        self.address = address
        """`host:port` as advertised to workers."""
        self._nursery = nursery
        self._registrations: dict[str, ResponseRegistration | InputRegistration] = {}
        self.refused_count = 0
        """Connections turned away: unknown or taken subject, bad or late handshake."""

    @property
    def registered_count(self) -> int:
        """Subjects held open now; zero at quiescence."""
        return len(self._registrations)

    def register(self, context: Context) -> ResponseRegistration:
        """Open an unguessable subject for one response; use it as a context manager.

        Raises `OverloadedError` at `subjects_max` open ones.
        """
        registration = ResponseRegistration(self, self._connection(StreamType.RESPONSE), context)
        self._registrations[registration.connection.subject] = registration
        return registration

    def register_input(self, context: Context) -> InputRegistration:
        """Open an unguessable subject for one request stream, caller to worker."""
        registration = InputRegistration(self, self._connection(StreamType.REQUEST), context)
        self._registrations[registration.connection.subject] = registration
        return registration

    def _connection(self, stream_type: StreamType) -> ConnectionInfo:
        if len(self._registrations) >= self.options.subjects_max:
            raise OverloadedError(
                f"{len(self._registrations)} streams are open, which is the bound",
                bound="subjects_max",
                value=len(self._registrations),
            )
        subject = f"{self.env.rng.getrandbits(_SUBJECT_BITS):032x}"
        return ConnectionInfo(self.address, subject, stream_type)

    def forget(self, subject: str) -> None:
        """Remove a subject; a worker that calls for it from now on is refused."""
        self._registrations.pop(subject, None)

    def spawn(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Run an async function in the server's nursery, which outlives any one request."""
        self._nursery.start_soon(flush)

    async def serve(self, stream: trio.SocketStream) -> None:
        """One accepted connection, from handshake to close. Never raises on peer input."""
        tune(stream, self.options)
        decoder = FrameDecoder(
            header_bytes_max=self.options.header_bytes_max,
            data_bytes_max=self.options.data_bytes_max,
        )
        try:
            with trio.move_on_after(self.options.handshake_timeout_s) as waiting:
                handshake, frames = await self._read_handshake(stream, decoder)
            if waiting.cancelled_caught:
                self._count_refusal("no handshake came in time")
                return
            registration = self._take(handshake)
        except RemoteProtocolError as error:
            await self._refuse(stream, Refused("bad_handshake", error.message))
        except _RefusalError as refusal:
            await self._refuse(stream, refusal.event)
        except trio.BrokenResourceError:
            self._count_refusal("the connection broke before its handshake")
        else:
            await registration.run(stream, decoder, handshake, frames)

    async def _read_handshake(
        self, stream: trio.SocketStream, decoder: FrameDecoder
    ) -> tuple[Handshake, list[Frame]]:
        while True:
            data = await stream.receive_some(self.options.buffer_bytes)
            if not data:
                raise RemoteProtocolError("the connection ended before its handshake")
            frames = decoder.feed(bytes(data))
            while frames:
                event = parse_frame(frames.pop(0))
                if event is None:
                    continue
                if not isinstance(event, Handshake):
                    raise RemoteProtocolError(f"{type(event).__name__} before the handshake")
                return event, frames
            decoder.check()

    def _take(self, handshake: Handshake) -> ResponseRegistration | InputRegistration:
        registration = self._registrations.get(handshake.subject)
        if registration is None:
            raise _RefusalError(Refused("unknown_subject", "no such subject is registered here"))
        if registration.connection.stream_type is not handshake.stream_type:
            raise _RefusalError(
                Refused("bad_handshake", f"this subject is no {handshake.stream_type} stream")
            )
        if registration.is_taken:
            raise _RefusalError(Refused("taken_subject", "another connection answers already"))
        registration.is_taken = True
        return registration

    async def _refuse(self, stream: trio.SocketStream, refusal: Refused) -> None:
        self._count_refusal(refusal.message)
        try:
            with trio.move_on_after(self.options.linger_s):
                await stream.send_all(encode_control(refusal))
                await stream.send_eof()
                # Closing with unread bytes would reset the connection and lose the refusal.
                while await stream.receive_some(self.options.buffer_bytes):
                    pass
        except trio.BrokenResourceError:
            pass

    def _count_refusal(self, why: str) -> None:
        self.refused_count += 1
        _log.info("refused a call home: %s", why)


class _RefusalError(Exception):
    def __init__(self, event: Refused) -> None:
        super().__init__(event.message)
        self.event = event


@asynccontextmanager
async def open_stream_server(options: TcpOptions, env: Env) -> AsyncIterator[TcpStreamServer]:
    """Listen for workers' calls; leaving closes the port and every stream.

    Raises `ConfigError` if the address cannot be bound.
    """
    listener, address = await open_listener(options)
    async with listener, open_nursery() as nursery:
        server = TcpStreamServer(options, env, nursery, address)
        async with open_nursery() as accepting:
            accepting.start_soon(_accept, listener, server, nursery, options.connections_max)
            try:
                yield server
            finally:
                accepting.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


async def _accept(
    listener: trio.SocketListener,
    server: TcpStreamServer,
    nursery: trio.Nursery,
    connections_max: int,
) -> None:
    await accept_connections(listener, server.serve, nursery, connections_max=connections_max)

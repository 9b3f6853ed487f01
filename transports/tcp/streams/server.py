"""The caller's side of the data plane: where workers call home.

`TcpStreamServer` listens on one port for the whole process. A subject is registered before the
envelope that names it is sent, and taken once. Each accepted connection is one task in the
server's nursery; `response_connection.py` and `request_connection.py` say what it does.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hmac import compare_digest
from typing import Final

import attrs
import trio

from trinamo.runtime.context import Context
from trinamo.runtime.env import Env
from trinamo.runtime.errors import OverloadedError, RemoteProtocolError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.codec import PREFIX_BYTES, FrameDecoder, decode_first_frame
from trinamo.runtime.protocol.streams.control import Handshake, Refused, encode_control, parse_frame
from trinamo.runtime.protocol.streams.membership import GREETING_BYTES_MAX, call_home_proof
from trinamo.runtime.protocol.streams.request import ConnectionInfo, StreamType

from ..accepting import Gate
from ..sockets import TcpOptions, open_listener
from .request_connection import InputRegistration
from .response_connection import ResponseRegistration
from .subject import OpenSubject

__all__ = ["TcpStreamServer", "open_stream_server"]

_log = logging.getLogger("trinamo.tcp")
_SUBJECT_BITS: Final = 128
_HANDSHAKE_BYTES_MAX: Final = GREETING_BYTES_MAX - PREFIX_BYTES


class TcpStreamServer:
    """A `ResponsePlane` over TCP: one connection per stream, dialled by the worker."""

    def __init__(self, options: TcpOptions, env: Env, nursery: trio.Nursery, address: str) -> None:
        self.options = options
        self.env = env
        self.address = address
        """`host:port` as advertised to workers."""
        self._nursery = nursery
        self._registrations: dict[str, OpenSubject] = {}
        self.gate = Gate(options, self._greet, self._serve)
        self._turned_away_count = 0

    @property
    def refused_count(self) -> int:
        """Connections turned away: bad or late handshake, unknown or taken subject."""
        return self._turned_away_count + self.gate.refused_count

    @property
    def registered_count(self) -> int:
        """Subjects held open now; zero at quiescence."""
        return len(self._registrations)

    def register(self, context: Context) -> ResponseRegistration:
        """Open an unguessable subject for one response; use it as a context manager.

        Raises `OverloadedError` at `subjects_max` open ones.
        """
        connection = self._connection(StreamType.RESPONSE)
        found = self._registrations[connection.subject] = ResponseRegistration(
            connection, context, self.options, self._forget, self._nursery
        )
        return found

    def register_input(self, context: Context) -> InputRegistration:
        """Open an unguessable subject for one request stream, caller to worker."""
        connection = self._connection(StreamType.REQUEST)
        found = self._registrations[connection.subject] = InputRegistration(
            connection, context, self.options, self._forget
        )
        return found

    def _connection(self, stream_type: StreamType) -> ConnectionInfo:
        if len(self._registrations) >= self.options.subjects_max:
            raise OverloadedError(
                f"{len(self._registrations)} streams are open, which is the bound",
                bound="subjects_max",
                value=len(self._registrations),
            )
        subject = f"{self.env.rng.getrandbits(_SUBJECT_BITS):032x}"
        return ConnectionInfo(self.address, subject, stream_type)

    def _forget(self, subject: str) -> None:
        """From now on a worker that calls for it is refused."""
        self._registrations.pop(subject, None)

    async def _greet(self, stream: trio.SocketStream) -> _Called:
        """The handshake of a process that knows the secret; others are told nothing."""
        data = b""
        while (frame := decode_first_frame(data, header_bytes_max=_HANDSHAKE_BYTES_MAX)) is None:
            more = await stream.receive_some(GREETING_BYTES_MAX - len(data))
            if not more:
                raise RemoteProtocolError("the connection ended before its handshake")
            data += more
        header, rest = frame
        handshake = parse_frame((header, b""))
        if not isinstance(handshake, Handshake):
            raise RemoteProtocolError(f"{type(handshake).__name__} before the handshake")
        due = call_home_proof(self.options.secret, handshake.subject, handshake.stream_type)
        if not compare_digest(handshake.proof.encode(), due.encode()):
            raise RemoteProtocolError("its proof is wrong; security.secret_file differs")
        return _Called(handshake, rest)

    async def _serve(self, stream: trio.SocketStream, called: _Called) -> None:
        """One connection that was greeted, to its close. Never raises on peer input."""
        # On a request stream the worker has greeted, and says nothing more.
        sends_data = called.handshake.stream_type is StreamType.RESPONSE
        decoder = FrameDecoder(
            header_bytes_max=self.options.header_bytes_max,
            data_bytes_max=self.options.data_bytes_max if sends_data else 0,
        )
        try:
            registration = self._take(called.handshake)
        except _RefusalError as refusal:
            await self._refuse(stream, refusal.event)
        else:
            try:
                frames = decoder.feed(called.rest)
            except RemoteProtocolError:
                frames = []  # The decoder stays broken, and the stream finds it so.
            await registration.run(stream, decoder, called.handshake, frames)

    def _take(self, handshake: Handshake) -> OpenSubject:
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
        self._turned_away_count += 1
        _log.info("refused a call home: %s", refusal.message)
        try:
            with trio.move_on_after(self.options.linger_s):
                await stream.send_all(encode_control(refusal))
                await stream.send_eof()
                # Closing with unread bytes would reset the connection and lose the refusal.
                while await stream.receive_some(self.options.buffer_bytes):
                    pass
        except trio.BrokenResourceError:
            pass


@attrs.frozen
class _Called:
    """A call home that was greeted: its handshake, and what came behind it."""

    handshake: Handshake
    rest: bytes


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
            accepting.start_soon(server.gate.accept, listener, nursery)
            try:
                yield server
            finally:
                accepting.cancel_scope.cancel()
        nursery.cancel_scope.cancel()

"""The caller's side of the data plane: where workers call home.

`TcpStreamServer` listens on one port for the whole process. A subject is registered before the
envelope that names it is sent, and taken once. Each accepted connection is one task in the
server's nursery: a link, on which a worker opens streams (`link.py`), or the connection
of one stream (`dedicated/caller.py`). The first byte tells which.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hmac import compare_digest
from typing import Final

import attrs
import trio

from trinamo.runtime.context import Context, Reason
from trinamo.runtime.env import Env
from trinamo.runtime.errors import OverloadedError, RemoteProtocolError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.codec import PREFIX_BYTES, decode_first_frame
from trinamo.runtime.protocol.streams.control import Handshake, Refused, encode_control, parse_frame
from trinamo.runtime.protocol.streams.link_frames import Opening, encode_event
from trinamo.runtime.protocol.streams.membership import (
    GREETING_BYTES_MAX,
    HELLO_BEGINS,
    Purpose,
    call_home_proof,
)
from trinamo.runtime.protocol.streams.request import Carrier, ConnectionInfo, StreamType

from ..accepting import Gate
from ..greeting import welcome
from ..sockets import TcpOptions, open_listener
from .dedicated.caller import serve_input, serve_response
from .input_registration import InputRegistration
from .link import Link
from .response_registration import ResponseRegistration
from .subject import OpenSubject

_log = logging.getLogger("trinamo.tcp")
_SUBJECT_BITS: Final = 128
_LEFT_MAX: Final = 4096
_HANDSHAKE_BYTES_MAX: Final = GREETING_BYTES_MAX - PREFIX_BYTES


class TcpStreamServer:
    """A `ResponsePlane` over TCP: streams come on links or on connections of their own.

    What the envelope asks for is `data_plane.tcp.streams`; a worker is served on either.
    """

    def __init__(self, options: TcpOptions, env: Env, nursery: trio.Nursery, address: str) -> None:
        self.options = options
        self.env = env
        self.address = address
        """`host:port` as advertised to workers."""
        self._nursery = nursery
        self._registrations: dict[str, ResponseRegistration | InputRegistration] = {}
        self._left: dict[str, Reason] = {}
        """Why the last subjects were closed that no worker had called for: the oldest first."""
        self._links: dict[Link, None] = {}
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

    @property
    def link_count(self) -> int:
        """Links that stand now."""
        return len(self._links)

    @property
    def stream_count(self) -> int:
        """Streams that are open on them; zero at quiescence."""
        return sum(len(link.lanes) for link in self._links)

    def register(self, context: Context) -> ResponseRegistration:
        """Open an unguessable subject for one response; use it as a context manager.

        Raises `OverloadedError` at `subjects_max` open ones.
        """
        connection = self._connection(StreamType.RESPONSE)
        window_bytes = connection.window_bytes or self.options.queue_bytes_max
        found = ResponseRegistration(connection, context, self._forget, window_bytes)
        self._registrations[connection.subject] = found
        return found

    def register_input(self, context: Context) -> InputRegistration:
        """Open an unguessable subject for one request stream, caller to worker."""
        connection = self._connection(StreamType.REQUEST)
        found = InputRegistration(connection, context, self._forget)
        self._registrations[connection.subject] = found
        return found

    def _connection(self, stream_type: StreamType) -> ConnectionInfo:
        if len(self._registrations) >= self.options.subjects_max:
            raise OverloadedError(
                f"{len(self._registrations)} streams are open, which is the bound",
                bound="subjects_max",
                value=len(self._registrations),
            )
        subject = f"{self.env.rng.getrandbits(_SUBJECT_BITS):032x}"
        carrier = Carrier(self.options.streams)
        window_bytes = self.options.window_bytes if carrier is Carrier.MULTIPLEXED else 0
        return ConnectionInfo(self.address, subject, stream_type, carrier, window_bytes)

    def _forget(self, registration: OpenSubject) -> None:
        """From now on a worker that calls for it is refused, and told why."""
        subject = registration.connection.subject
        if self._registrations.pop(subject, None) is None or registration.is_taken:
            return
        if len(self._left) == _LEFT_MAX:
            del self._left[next(iter(self._left))]
        self._left[subject] = registration.why_left()

    async def _greet(self, stream: trio.SocketStream) -> _Called | None:
        """The handshake of a process that knows the secret, or None for a link, which has greeted.

        Others are told nothing.
        """
        data = bytes(await stream.receive_some(GREETING_BYTES_MAX))
        if data.startswith(HELLO_BEGINS):
            await welcome(stream, self.options, self.env, Purpose.STREAMS, "", data)
            return None
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

    async def _serve(self, stream: trio.SocketStream, called: _Called | None) -> None:
        """One connection that was greeted, to its close. Never raises on peer input."""
        if called is None:
            await self.serve(Link(stream, self.options, self.open))
            return
        handshake, rest, options = called.handshake, called.rest, self.options
        try:
            registration = self._take(handshake)
        except _RefusalError as refusal:
            self._count_refusal(refusal.event)
            await self._refuse(stream, refusal.event)
            return
        if isinstance(registration, ResponseRegistration):
            await serve_response(registration, stream, options, self._nursery, handshake, rest)
        else:
            await serve_input(registration, stream, options, handshake, rest)

    async def serve(self, link: Link) -> None:
        """A link on which our streams are opened, to its end. Never raises on peer input."""
        self._links[link] = None
        try:
            await link.run()
        finally:
            del self._links[link]

    def open(self, link: Link, stream: int, opening: Opening) -> None:
        """A worker opens a stream: what it says goes to who waits for it."""
        try:
            registration = self._take(opening.handshake)
        except _RefusalError as refusal:
            self._count_refusal(refusal.event)
            link.send_frame(encode_event(stream, refusal.event))
        else:
            lane = link.add(stream, opening.window_bytes)
            lane.driver = registration
            registration.called(lane, opening.handshake)

    def _take(self, handshake: Handshake) -> ResponseRegistration | InputRegistration:
        registration = self._registrations.get(handshake.subject)
        if registration is None:
            reason = self._left.pop(handshake.subject, Reason.CONSUMER_DROPPED)
            message = "no such subject is registered here"
            raise _RefusalError(Refused("unknown_subject", message, reason))
        if registration.connection.stream_type is not handshake.stream_type:
            message = f"this subject is no {handshake.stream_type} stream"
            raise _RefusalError(Refused("bad_handshake", message))
        if registration.is_taken:
            raise _RefusalError(Refused("taken_subject", "another connection answers already"))
        registration.is_taken = True
        return registration

    def _count_refusal(self, refusal: Refused) -> None:
        self._turned_away_count += 1
        _log.info("refused a call home: %s", refusal.message)

    async def _refuse(self, stream: trio.SocketStream, refusal: Refused) -> None:
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

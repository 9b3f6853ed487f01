"""The caller's side of the data plane: where workers open the streams of their answers.

A subject is registered before the envelope that names it is sent, and taken once. Streams come on links
(`link.py`): those that our request plane has dialled, and those accepted here, on the one port that
`TcpStreamServer` listens on, from workers that call home: one for all, or for each stream its own.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from trinamo.runtime.context import Context, Reason
from trinamo.runtime.env import Env
from trinamo.runtime.errors import OverloadedError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.control import Handshake, Refused
from trinamo.runtime.protocol.streams.link_frames import Opening, encode_event
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.streams.request import Carrier, ConnectionInfo, StreamType

from ..accepting import Gate
from ..greeting import welcome
from ..sockets import TcpOptions, open_listener
from .link import Link
from .registrations import InputRegistration, OpenSubject, ResponseRegistration

_log = logging.getLogger("trinamo.tcp")
_SUBJECT_BITS: Final = 128
_LEFT_MAX: Final = 4096


class TcpStreamServer:
    """A `ResponsePlane` over TCP: the streams of workers' links.

    What the envelope asks for is `data_plane.tcp.streams`: one link for all streams, or one for each.
    """

    def __init__(self, options: TcpOptions, env: Env, address: str) -> None:
        self.options = options
        self.env = env
        self.address = address
        """`host:port` as advertised to workers."""
        self._registrations: dict[str, ResponseRegistration | InputRegistration] = {}
        self._left: dict[str, Reason] = {}
        """Why the last subjects were closed that no worker had called for: the oldest first."""
        self.links: dict[Link, None] = {}
        """Those that stand."""
        # Whoever does not know the secret is told nothing.
        self.gate = Gate(
            options,
            lambda wire: welcome(wire, options, env, Purpose.STREAMS, ""),
            lambda wire: self.serve(Link(wire, options, self.open)),
        )
        self._turned_away_count = 0

    @property
    def refused_count(self) -> int:
        """Who was turned away: connections that did not greet, streams of an unknown or taken subject."""
        return self._turned_away_count + self.gate.refused_count

    @property
    def registered_count(self) -> int:
        """Subjects held open now; zero at quiescence."""
        return len(self._registrations)

    @property
    def stream_count(self) -> int:
        """Streams that are open on them; zero at quiescence."""
        return sum(len(link.lanes) for link in self.links)

    def register(self, context: Context) -> ResponseRegistration:
        """Open an unguessable subject for one response, to be closed.

        Raises `OverloadedError` at `subjects_max` open ones.
        """
        connection = self._connection(StreamType.RESPONSE)
        found = ResponseRegistration(connection, context, self._forget)
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
        options = self.options
        carrier = Carrier(options.streams)
        return ConnectionInfo(self.address, subject, stream_type, carrier, options.window_bytes)

    def _forget(self, registration: OpenSubject) -> None:
        """From now on a worker that calls for it is refused, and told why."""
        subject = registration.connection.subject
        if self._registrations.pop(subject, None) is None or registration.is_taken:
            return
        if len(self._left) == _LEFT_MAX:
            del self._left[next(iter(self._left))]
        self._left[subject] = registration.why_left()

    async def serve(self, link: Link) -> None:
        """A link on which our streams are opened, to its end. Never raises on peer input."""
        self.links[link] = None
        try:
            await link.run()
        finally:
            del self.links[link]

    def open(self, link: Link, stream: int, opening: Opening) -> None:
        """A worker opens a stream: what it says goes to who waits for it."""
        found = self._take(opening.handshake)
        if isinstance(found, Refused):
            self._refuse(link, stream, found)
            return
        lane = link.add(stream, opening.window_bytes)
        lane.driver = found
        found.called(lane, opening.handshake)

    def _take(self, handshake: Handshake) -> ResponseRegistration | InputRegistration | Refused:
        registration = self._registrations.get(handshake.subject)
        if registration is None:
            reason = self._left.pop(handshake.subject, Reason.CONSUMER_DROPPED)
            return Refused("unknown_subject", "no such subject is registered here", reason)
        if registration.connection.stream_type is not handshake.stream_type:
            return Refused("bad_handshake", f"this subject is no {handshake.stream_type} stream")
        if registration.is_taken:
            return Refused("taken_subject", "another stream answers already")
        registration.is_taken = True
        return registration

    def _refuse(self, link: Link, stream: int, refusal: Refused) -> None:
        self._turned_away_count += 1
        _log.info("refused a stream: %s", refusal.message)
        link.send_frame(encode_event(stream, refusal))


@asynccontextmanager
async def open_stream_server(options: TcpOptions, env: Env) -> AsyncIterator[TcpStreamServer]:
    """Listen for workers' calls; leaving closes the port and every stream.

    Raises `ConfigError` if the address cannot be bound.
    """
    listener, address = await open_listener(options)
    async with listener, open_nursery() as nursery:
        server = TcpStreamServer(options, env, address)
        async with open_nursery() as accepting:
            accepting.start_soon(server.gate.accept, listener, nursery)
            try:
                yield server
            finally:
                accepting.cancel_scope.cancel()
        nursery.cancel_scope.cancel()

"""What the server knows of an accepted connection, whoever speaks HTTP on it."""

from __future__ import annotations

import enum
from typing import Protocol, TypeVar

import trio


class Phase(enum.Enum):
    """What a connection does, as far as it matters for who may be cut off."""

    SHAKING = "shaking"
    """TLS is not agreed on yet."""
    IDLE = "idle"
    """No request has come, at most a part of its head; or the last one was answered."""
    ARRIVING = "arriving"
    """A request's body has not come to its end."""
    ANSWERING = "answering"


class ServedConnection(Protocol):
    """One accepted connection. Compared and hashed by identity."""

    @property
    def socket(self) -> trio.socket.SocketType:
        """Closed by the server once the driver is done."""
        ...

    @property
    def phase(self) -> Phase:
        """What it does now."""
        ...

    def abort(self) -> None:
        """Close with RST, now, dropping what is unsent; wakes a send that is blocked."""
        ...


ConnectionT = TypeVar("ConnectionT", bound=ServedConnection)


class Driver(Protocol[ConnectionT]):
    """Speaks HTTP on accepted connections, for as long as a server lives.

    It is given a function to call whenever a connection may have come to another phase.
    """

    def open(self, stream: trio.SocketStream) -> ConnectionT:
        """A connection that takes the socket over from `stream`."""
        ...

    async def drive(self, connection: ConnectionT) -> None:
        """Serve one connection to its end. May raise what a broken connection raises."""
        ...

    async def close_idle(self) -> None:
        """Close what is idle, now, and every other connection after its answer."""
        ...

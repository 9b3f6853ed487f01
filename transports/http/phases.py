"""What the server knows of an accepted connection, whoever speaks HTTP on it."""

from __future__ import annotations

import enum
from typing import Protocol

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


class Connection(Protocol):
    """One accepted connection, which says whenever it may have come to another phase.

    Compared and hashed by identity.
    """

    @property
    def socket(self) -> trio.socket.SocketType:
        """Closed by the server once `serve` is over."""
        ...

    @property
    def phase(self) -> Phase:
        """What it does now."""
        ...

    async def serve(self) -> None:
        """Serve it to its end; called once. May raise what a broken connection raises."""
        ...

    def close_when_idle(self) -> None:
        """Answer what is in flight, and nothing else; at once, if there is nothing."""
        ...

    def abort(self) -> None:
        """Close with RST, now, dropping what is unsent; wakes a send that is blocked."""
        ...

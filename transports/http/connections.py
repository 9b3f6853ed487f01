"""The open connections of one server, what each does, and which of them makes room for a new one.

Decided synchronously; the server (`server.py`) tells what each connection does and closes those
that are taken. What this file does not do: read or write (`driver.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final, Protocol

import trio

LINGER_S: Final = 2.0
"""How long after its last byte a client that still sends is read, though its answer has been sent: a close
or a reset would take the answer from it. Some look for one only when they have sent all."""
LINGER_MAX_S: Final = 30.0
"""No client is read longer than this behind its answer (as by nginx's `lingering_time`)."""


class Phase(enum.Enum):
    """What a connection does, as far as it matters for who may be cut off."""

    SHAKING = "shaking"
    """TLS is not agreed on yet."""
    IDLE = "idle"
    """No request has come, at most a part of its head; or the last one was answered."""
    ARRIVING = "arriving"
    """A request's body has not come to its end, though it may have been answered."""
    ANSWERING = "answering"


class HttpConnection(Protocol):
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

    def retire(self) -> None:
        """End with the next answer, which says so: what stands idle stays until then."""
        ...

    def close_when_idle(self) -> None:
        """Answer what is in flight or has arrived, and nothing else; end at once, if there is nothing."""
        ...

    def abort(self) -> None:
        """Close with RST, now, dropping what is unsent; wakes a send that is blocked."""
        ...


_WAITING: Final = (Phase.SHAKING, Phase.IDLE, Phase.ARRIVING)


class ConnectionTable:
    """At most `connections_max` connections, in the order in which each came to its phase.

    At the bound a new connection takes the place of one that waits: of those that shake hands,
    those that are idle, half a head included, and those whose body is arriving, the largest crowd
    gives the one that has been in it longest. So whoever opens connections, and leaves them idle or
    sends half of something, keeps nobody out but himself: not even a client whose request has not
    been read yet, which a crowd of half bodies would push out if idle ones always went first. A
    connection whose request is being answered is never taken.
    """

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        self._phases: dict[HttpConnection, Phase] = {}
        self._members: dict[Phase, dict[HttpConnection, None]] = {phase: {} for phase in Phase}

    def __len__(self) -> int:
        return len(self._phases)

    def __iter__(self) -> Iterator[HttpConnection]:
        return iter(self._phases)

    @property
    def is_full(self) -> bool:
        return len(self._phases) >= self._connections_max

    def take(self) -> HttpConnection | None:
        """Remove and return the connection to close for a new one; None if all are being answered."""
        crowd = max((self._members[phase] for phase in _WAITING), key=len)
        for connection in crowd:
            self.remove(connection)
            return connection
        return None

    def add(self, connection: HttpConnection) -> None:
        phase = self._phases[connection] = connection.phase
        self._members[phase][connection] = None

    def update(self, connection: HttpConnection) -> None:
        """The connection may have come to another phase. One that was taken stays away."""
        before, phase = self._phases.get(connection), connection.phase
        if before is None or before is phase:
            return
        del self._members[before][connection]
        self._phases[connection] = phase
        self._members[phase][connection] = None

    def remove(self, connection: HttpConnection) -> None:
        """The connection is closed; nothing if it was taken."""
        phase = self._phases.pop(connection, None)
        if phase is not None:
            del self._members[phase][connection]

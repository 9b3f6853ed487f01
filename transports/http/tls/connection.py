"""A connection that is in TLS: its handshake, and what is in clear behind it.

What this file does not do: HTTP, of which the client chooses a version in the handshake (`../driver.py`).
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Final

import trio

from trinamo.runtime.protocol.openai.http_head import HeadFault
from trinamo.transports.sockets.tls import SealedWire, TlsSession, shake_hands
from trinamo.transports.sockets.wire import Wire, abort

from ..connections import Connection, Phase

NO_TLS: Final = HeadFault(400, "this port speaks TLS, and you do not; use a URL with https://")


class SecureConnection:
    """Shakes hands, and is then what `speak` makes of the agreed protocol and the wire in clear.

    A client that is not done after `timeout_s` is let go. `refuse` makes the answer to one that
    speaks plain HTTP.
    """

    def __init__(
        self,
        wire: Wire,
        session: TlsSession,
        *,
        timeout_s: float,
        refuse: Callable[[HeadFault], bytes],
        speak: Callable[[str, Wire], Connection],
        on_phase: Callable[[Connection], None],
    ) -> None:
        self.socket = wire.socket
        self._wire, self._session, self._timeout_s = wire, session, timeout_s
        self._refuse, self._speak, self._on_phase = refuse, speak, on_phase
        self._connection: Connection | None = None
        self._is_closing = False

    @property
    def phase(self) -> Phase:
        """See `Connection`."""
        return Phase.SHAKING if self._connection is None else self._connection.phase

    async def serve(self) -> None:
        """See `Connection`."""
        try:
            with trio.move_on_after(self._timeout_s) as scope:
                await shake_hands(self._wire, self._session)
        except ssl.SSLError as error:
            # A client that forgot the s of https can read why.
            is_plain = error.reason == "HTTP_REQUEST"
            self._wire.send(self._refuse(NO_TLS) if is_plain else self._session.pending())
            return
        if scope.cancelled_caught:
            return
        wire = SealedWire(self._wire, self._session)
        self._connection = self._speak(self._session.protocol, wire)
        self._on_phase(self)
        if self._is_closing:
            self._connection.close_when_idle()
        await self._connection.serve()

    def close_when_idle(self) -> None:
        """See `Connection`."""
        self._is_closing = True
        if self._connection is not None:
            self._connection.close_when_idle()

    def abort(self) -> None:
        """See `Connection`."""
        if self._connection is None:
            abort(self.socket)
        else:
            self._connection.abort()

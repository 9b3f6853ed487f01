"""Who speaks HTTP on a connection, in TLS or in clear, and who answers.

That is a handler, which is given the exchange, or an ASGI application.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

import attrs
import trio

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.config.keys import LOOPBACK_NAMES, address_of, is_loopback
from trinamo.runtime.http.exchanges import Handler, HttpExchange
from trinamo.runtime.http.shares import Budget
from trinamo.runtime.http.status import answer_error
from trinamo.runtime.http.transport import AsgiApp
from trinamo.transports.sockets.wire import (
    SealedWire,
    TlsSession,
    Wire,
    abort,
    open_wire,
    shake_hands,
)

from .asgi import AsgiCall
from .certificates import Certificates
from .connections import HttpConnection, Phase
from .http1.connection import Http1Connection
from .refusals import HOST_ANSWER, HeadFault, Refusals

if TYPE_CHECKING:
    from .hypercorn import Hypercorn

HOSTS_KNOWN_MAX: Final = 256
NO_TLS: Final = HeadFault(400, "this port speaks TLS, and you do not; use a URL with https://")

log = logging.getLogger("trinamo.http")


class NativeDriver:
    """Opens connections. `handlers` are found by method and path, exactly; the rest is `app`'s."""

    def __init__(
        self,
        app: AsgiApp,
        handlers: Mapping[tuple[bytes, bytes], Handler],
        config: HttpConfig,
        hosts: HostPolicy,
        refusals: Refusals,
        on_phase: Callable[[HttpConnection], None],
        certificates: Certificates | None = None,
    ) -> None:
        self._app, self._handlers = app, handlers
        self._config, self._on_phase = config, on_phase
        # What the policy says costs more than all else that is done for a head.
        self._allows = lru_cache(HOSTS_KNOWN_MAX)(hosts.allows)
        self._refusals, self._certificates = refusals, certificates
        self._backlogs = Budget("http.backlogs_bytes_max", config.backlogs_bytes_max)
        self._hypercorn: Hypercorn | None = None
        if config.server == "hypercorn":
            # Most processes never need it, and it would cost each of them some megabytes.
            from .hypercorn import Hypercorn  # noqa: PLC0415

            self._hypercorn = Hypercorn(config, refusals.dates, self._answer)

    def open(self, stream: trio.SocketStream) -> HttpConnection:
        if self._hypercorn is not None:
            return self._hypercorn.open(stream)
        wire = open_wire(stream)
        if self._certificates is None:
            return self._speak("http/1.1", wire, self._on_phase)
        return SecureConnection(
            wire,
            TlsSession(self._certificates.context),
            timeout_s=self._config.tls.handshake_timeout_s,
            refuse=self._refusals.fault,
            speak=self._speak,
            on_phase=self._on_phase,
        )

    def _speak(
        self, protocol: str, wire: Wire, on_phase: Callable[[HttpConnection], None]
    ) -> HttpConnection:
        call = wire, self._config, self._refusals, self._answer, on_phase, self._backlogs
        if protocol != "h2":
            return Http1Connection(*call)
        # Most processes never need it, and it would cost each of them some megabytes.
        from .http2.connection import Http2Connection  # noqa: PLC0415

        return Http2Connection(*call)

    async def _answer(self, exchange: HttpExchange, socket: trio.socket.SocketType) -> None:
        """Answer one request, whatever the application does. Raises nothing but its cancellation."""
        try:
            if not self._allows(exchange.head.host):
                head = exchange.head
                more = self._refusals.tell(HOST_ANSWER, head.method, head.path, head.headers)
                exchange.respond(HOST_ANSWER.status, HOST_ANSWER.to_body(), more)
                return
            path = unquote_to_bytes(exchange.path) if b"%" in exchange.path else exchange.path
            handler = self._handlers.get((exchange.method, path))
            if handler is not None:
                await handler(exchange)
            else:
                call = AsgiCall(exchange, self._config.scheme, socket)
                await self._app(call.scope, call.receive, call.send)
            exchange.check_finished()
        except* Exception as errors:
            log.exception("a request failed", exc_info=errors)
            if not (exchange.has_begun or exchange.is_gone):
                answer = answer_error(errors)
                exchange.respond(answer.status, answer.to_body(), answer.headers)


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
        speak: Callable[[str, Wire, Callable[[HttpConnection], None]], HttpConnection],
        on_phase: Callable[[HttpConnection], None],
    ) -> None:
        self.socket = wire.socket
        self._wire, self._session, self._timeout_s = wire, session, timeout_s
        self._refuse, self._speak, self._on_phase = refuse, speak, on_phase
        self._connection: HttpConnection | None = None
        self._is_retiring = self._is_closing = False

    @property
    def phase(self) -> Phase:
        return Phase.SHAKING if self._connection is None else self._connection.phase

    async def serve(self) -> None:
        try:
            with trio.move_on_after(self._timeout_s) as scope:
                await shake_hands(self._wire, self._session)
        except ssl.SSLError as error:
            # A client that forgot the s of https can read why.
            is_plain = error.reason == "HTTP_REQUEST"
            self._wire.send(self._refuse(NO_TLS) if is_plain else self._session.pending())
            return
        if scope.cancelled_caught or self._is_closing:
            return
        wire, protocol = SealedWire(self._wire, self._session), self._session.protocol
        self._connection = self._speak(protocol, wire, lambda _: self._on_phase(self))
        self._on_phase(self)
        if self._is_retiring:
            self._connection.retire()
        try:
            await self._connection.serve()
        finally:
            self._connection = None

    def retire(self) -> None:
        self._is_retiring = True
        if self._connection is not None:
            self._connection.retire()

    def close_when_idle(self) -> None:
        self._is_closing = True
        if self._connection is not None:
            self._connection.close_when_idle()

    def abort(self) -> None:
        if self._connection is None:
            abort(self.socket)
        else:
            self._connection.abort()


ANY: Final = "*"


@attrs.frozen
class HostPolicy:
    """Which names clients may call this server by, besides addresses and loopback names; None: any.

    A page in somebody's browser can give its own name the address of a server that the browser
    reaches (DNS rebinding) and then read its answers; the Host header still carries the page's
    name, so a name that is not ours is refused. Addresses are always allowed: nobody's name
    resolves to one.
    """

    names: frozenset[str] | None

    @classmethod
    def make(cls, bound: str, hosts: Sequence[str] | None) -> HostPolicy:
        """The policy of a server that binds `bound`, with the names that an operator gave.

        Without any, a server on loopback allows no other name, and one that faces a network allows
        all: which names lead to it, only its operator knows.
        """
        if ANY in (hosts or ()) or (hosts is None and not is_loopback(bound)):
            return cls(None)
        return cls(frozenset(_normal(name) for name in (bound, *(hosts or ()))))

    def allows(self, header: bytes | None) -> bool:
        """Whether a request with this Host header is for us. HTTP/1.0 need not have one."""
        if self.names is None or header is None:
            return True
        name = header.decode("latin-1").strip()
        before, colon, port = name.rpartition(":")
        if colon and (not port or port.isdecimal()) and not name.endswith("]"):
            name = before
        if address_of(name.removeprefix("[").removesuffix("]")) is not None:
            return True
        name = _normal(name)
        return name in LOOPBACK_NAMES or name in self.names


def _normal(name: str) -> str:
    return name.lower().removesuffix(".")

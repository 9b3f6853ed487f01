"""One port's front: accept for ever, ask everybody for proof first, and keep no room for strangers.

Connections that have not greeted are few, and one more takes the place of the oldest of the address
that has most of them, so no number of silent ones locks anybody out. Descriptors may run out:
upstream's accept loop spun hot on EMFILE; this one lets a stranger go, backs off from 5 ms to 1 s,
and logs at most every 5 s.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import trio

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.logs.notices import LogNotices
from trinamo.transports.sockets.wire import Wire, open_wire, peer_of

from .sockets import TcpOptions, tune

_log = logging.getLogger("trinamo.tcp")
_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PASSING: Final = {
    errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOPROTOOPT, errno.ENONET, errno.EOPNOTSUPP,
}  # fmt: skip
"""What `accept` raises for a connection that is gone already: accept(2) says to go on."""
_BACKOFF_MIN_S: Final = 0.005
_BACKOFF_MAX_S: Final = 1.0


@attrs.define(eq=False)
class _Stranger:
    """A connection that has not greeted."""

    origin: str
    scope: trio.CancelScope
    gave_way: bool = False


class Gate:
    """Whom a port lets in: `greet(wire)` proves it, `serve` does the rest with what that returns.

    `greet` may take `handshake_timeout_s`; it raises `RemoteProtocolError` or
    `OSError` for a peer that is to be told nothing. At most `ungreeted_max` are in
    it at once. `serve` must not raise; at most `connections_max` are in it at once, and more members
    wait among those who are not in.
    """

    def __init__(
        self,
        options: TcpOptions,
        greet: Callable[[Wire], Awaitable[Wire]],
        serve: Callable[[Wire], Awaitable[None]],
    ) -> None:
        self._options = options
        self._greet, self._serve = greet, serve
        self._places = trio.Semaphore(options.connections_max)
        self._strangers: dict[_Stranger, None] = {}
        self._origins: Counter[str] = Counter()
        self.refused_count = 0
        """Connections that ended without a greeting: wrong, late, or pushed out by others."""
        self._notices = LogNotices(_log)

    @property
    def ungreeted_count(self) -> int:
        """Connections open now that have not greeted."""
        return len(self._strangers)

    async def accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        """Accept connections until cancelled; each is a task of `nursery`, and closed at its end."""
        backoff_s = _BACKOFF_MIN_S
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _EXHAUSTED | _PASSING:
                    raise
                self._notices.log(logging.ERROR, "cannot accept a connection", error.strerror)
                self._make_room()
                await trio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
            else:
                backoff_s = _BACKOFF_MIN_S
                if self.ungreeted_count >= self._options.ungreeted_max:
                    self._make_room()
                origin = peer_of(stream.socket)
                origin = origin_of(origin) if origin else "nowhere"
                stranger = _Stranger(origin, trio.CancelScope())
                self._strangers[stranger] = None
                self._origins[stranger.origin] += 1
                nursery.start_soon(self._receive, stream, stranger)

    async def _receive(self, stream: trio.SocketStream, stranger: _Stranger) -> None:
        tune(stream, self._options)
        wire = open_wire(stream)
        try:
            proven = await self._prove(wire, stranger)
            self._forget(stranger)
            if proven is not None:
                try:
                    await self._serve(proven)
                finally:
                    self._places.release()
        finally:
            self._forget(stranger)
            wire.socket.close()

    async def _prove(self, wire: Wire, stranger: _Stranger) -> Wire | None:
        """What `greet` returned, and a place taken for it; None for who stays a stranger."""
        stranger.scope.deadline = trio.current_time() + self._options.handshake_timeout_s
        why = ""
        with stranger.scope:
            try:
                greeted = await self._greet(wire)
                await self._places.acquire()
                return greeted
            except RemoteProtocolError as error:
                why = error.message
            except OSError:
                why = "the connection broke"
        late = "others needed its place" if stranger.gave_way else "it did not greet in time"
        # A stranger must not write our log.
        self.refused_count += 1
        self._notices.warn(
            "closed an ungreeted connection", f"from {stranger.origin}: {why or late}"
        )
        return None

    def _make_room(self) -> None:
        """Let the oldest connection go of an address that has the most of those that wait."""
        most = max(self._origins.values(), default=0)
        for stranger in self._strangers:
            if self._origins[stranger.origin] == most:
                stranger.gave_way = True
                stranger.scope.cancel()
                self._forget(stranger)
                return

    def _forget(self, stranger: _Stranger) -> None:
        if stranger in self._strangers:
            del self._strangers[stranger]
            self._origins[stranger.origin] -= 1
            if not self._origins[stranger.origin]:
                del self._origins[stranger.origin]


def origin_of(host: str) -> str:
    """Whose connection it is, as far as limits go.

    Its address, or, of IPv6, the network that it may choose its address in.
    """
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))

"""A connection of our own server in memory: what arrives in which pieces, and what fits, a test says."""

from __future__ import annotations

import contextlib
import errno
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import trio
import trio.testing

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.http.bodies import Bodies, Body
from trinamo.runtime.http.exchanges import Handler, HttpExchange
from trinamo.transports.http.connections import HttpConnection
from trinamo.transports.http.driver import HostPolicy, NativeDriver
from trinamo.transports.http.refusals import Refusals

HOST = b"host: localhost\r\n"
GET = b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n"
LAST = b"GET /last HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"


class MemorySocket:
    """Offers what a simulated socket offers, as far as a server asks for it."""

    error = 0

    def __init__(self) -> None:
        self.sent = bytearray()
        self.room = 1 << 40
        self.has_ended = self.is_closed = self.is_broken = self._is_awaited = False
        self._arrived: deque[bytes] = deque()
        self._lot = trio.lowlevel.ParkingLot()

    def arrive(self, data: bytes) -> None:
        """`data` is one read; empty is FIN."""
        self._arrived.append(data)
        self._lot.unpark_all()

    def make_room(self, size: int) -> None:
        self.room += size
        self._lot.unpark_all()

    def break_off(self) -> None:
        """RST: reads and writes fail."""
        self.is_broken = True
        self._lot.unpark_all()

    def _check(self) -> None:
        if self.is_broken:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        if self.is_closed:
            raise OSError(errno.EBADF, "closed")

    def send_nowait(self, data: bytes) -> int:
        self._check()
        taken = min(len(data), self.room)
        self.room -= taken
        self.sent += data[:taken]
        return taken

    async def recv_arrived(self, bytes_max: int) -> bytes:
        while not self._arrived:
            self._check()
            await self._lot.park()
            if self.is_closed:
                raise trio.ClosedResourceError
        self._check()
        data = self._arrived.popleft()
        if len(data) > bytes_max:
            self._arrived.appendleft(data[bytes_max:])
        return data[:bytes_max]

    async def wait_writable(self) -> None:
        self._check()
        assert not self._is_awaited, "two tasks wait for room, which a kernel's socket refuses"
        self._is_awaited = True
        try:
            await self._wait_room()
        finally:
            self._is_awaited = False

    async def _wait_room(self) -> None:
        while not self.room:
            await self._lot.park()
            if self.is_closed:
                raise trio.ClosedResourceError
            self._check()

    def shutdown(self, _: int) -> None:
        self._check()
        self.has_ended = True

    def setsockopt(self, *_: object) -> None: ...

    def getsockopt(self, *_: object) -> int:
        """The error that is pending."""
        return self.error

    def getpeername(self) -> tuple[str, int]:
        return "192.0.2.1", 4711

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8787

    def close(self) -> None:
        self.is_closed = True
        self._lot.unpark_all()


class FixedClock:
    def now(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1_700_000_000.0


DATE = b"date: Tue, 14 Nov 2023 22:13:20 GMT\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what was asked: method, target, body."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    answer = b"%b %b %b" % (scope["method"].encode(), scope["raw_path"], body)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": answer})


async def echo_handler(exchange: HttpExchange) -> None:
    """As `echo`, without ASGI."""
    with Body(Bodies(1 << 30)) as counted:
        body = bytes(await exchange.read_body(counted, bytes_max=1 << 20, timeout_s=5))
    text = (b"content-type", b"text/plain")
    exchange.respond(200, b"%b %b %b" % (exchange.method, exchange.path, body), [text])


@attrs.define(eq=False)
class Served:
    """One connection."""

    socket: MemorySocket
    connection: HttpConnection
    is_over: bool = False
    phases: list[str] = attrs.field(factory=list)

    @property
    def sent(self) -> bytes:
        return bytes(self.socket.sent)

    async def say(self, *pieces: bytes) -> bytes:
        """Let pieces arrive, each once the last one was dealt with; all that was sent by then."""
        for piece in pieces:
            self.socket.arrive(piece)
            await settle()
        return self.sent

    async def end(self) -> bytes:
        """FIN; all that was sent."""
        return await self.say(b"")


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


@contextlib.asynccontextmanager
async def serving(
    app: Any = echo,
    handlers: Mapping[tuple[bytes, bytes], Handler] | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """A connection that is being served."""
    phases: list[str] = []
    config = HttpConfig(**settings)
    driver = NativeDriver(
        app,
        handlers or {},
        config,
        HostPolicy.make(config.host, config.hosts),
        Refusals(FixedClock(), random.Random(0)),
        lambda connection: phases.append(connection.phase.value),
    )
    socket = MemorySocket()
    stream: Any = SimpleNamespace(socket=socket)
    served = Served(socket, driver.open(stream), phases=phases)

    async def drive() -> None:
        await served.connection.serve()
        served.is_over = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drive)
        await settle()
        yield served
        nursery.cancel_scope.cancel()


class Held:
    """A handler that answers when a test says so."""

    def __init__(self) -> None:
        self.exchange: Any = None
        self.may_end = trio.Event()
        self.gone = self.rooms = self.ended = 0

    async def __call__(self, exchange: HttpExchange) -> None:
        self.exchange = exchange
        exchange.on_gone(self._left)
        exchange.on_room(self._has_room)
        await self.may_end.wait()
        self.ended += 1

    def _left(self) -> None:
        self.gone += 1
        self.may_end.set()

    def _has_room(self) -> None:
        self.rooms += 1


def holding(held: Held, **settings: Any) -> Any:
    return serving(handlers={(b"GET", b"/a"): held, (b"POST", b"/a"): held}, **settings)

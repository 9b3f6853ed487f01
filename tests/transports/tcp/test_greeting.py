"""Two ends greet over a socket, sealed and in clear: who is let in, and what the other is told."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio

from tests.transports.tcp.ends import eventually, options
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConnectError, ImpostorError, RemoteProtocolError
from trinamo.runtime.protocol.streams import membership
from trinamo.runtime.protocol.streams.membership import HELLO_BYTES, Purpose
from trinamo.runtime.protocol.versions import SPOKEN, Version
from trinamo.transports.security.identity import Identity
from trinamo.transports.sockets.wire import open_wire, send_all
from trinamo.transports.tcp.greeting import dial_member, welcome
from trinamo.transports.tcp.sockets import TcpOptions, split_address

SECRET, ANOTHER = bytes(range(32)), bytes(32)
NAME = "7f"
HandOn = Callable[[bytes, int], bytes]
"""What somebody between makes of some bytes, so many having come before."""


@asynccontextmanager
async def listening(
    using: TcpOptions, name: str = NAME, purpose: Purpose = Purpose.REQUESTS
) -> AsyncIterator[tuple[str, list[str]]]:
    """A port that welcomes whoever comes, and says what it hears; why it turned others away."""
    refused: list[str] = []

    async def serve(stream: trio.SocketStream) -> None:
        wire = open_wire(stream)
        try:
            wire = await welcome(wire, using, RealEnv(), purpose, name)
            while data := await wire.receive(100):
                await send_all(wire, data if wire.seal is None else wire.seal(data))
        except (RemoteProtocolError, OSError) as error:
            refused.append(str(error))
        finally:
            wire.socket.close()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}", refused
        nursery.cancel_scope.cancel()


async def greeted_by(address: str, using: TcpOptions) -> tuple[str, bytes]:
    with trio.fail_after(120):
        wire, name = await dial_member(address, using, RealEnv(), Purpose.REQUESTS)
        try:
            await send_all(wire, b"hear" if wire.seal is None else wire.seal(b"hear"))
            return name, await wire.receive(100)
        finally:
            wire.socket.close()


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["clear", "sealed"])
async def test_the_name_arrives_and_what_follows_does(secret: bytes) -> None:
    async with listening(options(secret=secret)) as (address, _):
        assert await greeted_by(address, options(secret=secret)) == (NAME, b"hear")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(SECRET, ANOTHER), (SECRET, b""), (b"", SECRET)],
    ids=["another", "none-there", "none-here"],
)
async def test_another_secret_or_none_is_told_as_that(ours: bytes, theirs: bytes) -> None:
    async with listening(options(secret=theirs)) as (address, refused):
        with pytest.raises(ConnectError, match=r"security\.secret_file is another"):
            await greeted_by(address, options(secret=ours))
        await eventually(lambda: refused)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    list(itertools.pairwise([(SECRET, b""), (SECRET, ANOTHER), (ANOTHER, SECRET), (ANOTHER, b"")])),
    ids=["second-added", "exchanged", "first-removed"],
)
async def test_neighbouring_steps_of_a_change_of_secrets_speak(
    ours: tuple[bytes, bytes], theirs: tuple[bytes, bytes]
) -> None:
    """Either dials the other, since one is restarted before the other."""
    for dials, listens in ((ours, theirs), (theirs, ours)):
        using = options(secret=listens[0], second_secret=listens[1])
        async with listening(using) as (address, _):
            dialled = options(secret=dials[0], second_secret=dials[1])
            assert await greeted_by(address, dialled) == (NAME, b"hear")


async def test_a_second_secret_lets_nobody_else_in() -> None:
    using = options(secret=SECRET, second_secret=ANOTHER)
    async with listening(using) as (address, refused):
        with pytest.raises(ConnectError, match=r"security\.secret_file is another"):
            await greeted_by(address, options(secret=b"a third secret of thirty two bytes"))
        await eventually(lambda: refused)


async def test_who_says_another_name_than_its_certificate_is_an_impostor() -> None:
    using = options(secret=SECRET)
    theirs = Identity(SECRET, Purpose.REQUESTS.uri("another"), RealEnv())
    using.identities[SECRET, b"", Purpose.REQUESTS.uri(NAME)] = theirs
    async with listening(using) as (address, _):
        with pytest.raises(ImpostorError, match=r"'7f', but its certificate says .*/another"):
            await greeted_by(address, options(secret=SECRET))


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["clear", "sealed"])
async def test_a_port_for_something_else_lets_nobody_in(secret: bytes) -> None:
    async with listening(options(secret=secret), purpose=Purpose.STREAMS) as (address, refused):
        with pytest.raises(ConnectError, match="closed the connection before it was greeted"):
            await greeted_by(address, options(secret=secret))
        await eventually(lambda: refused)
        assert "another port than that of streams" in refused[0]


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["clear", "sealed"])
async def test_both_ends_say_that_their_versions_differ(
    secret: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = membership.encode_hello(Purpose.REQUESTS, sealed=bool(secret), version=Version(9, 1))
    monkeypatch.setattr("trinamo.transports.tcp.greeting.encode_hello", lambda *_, **__: hello)
    async with listening(options(secret=secret)) as (address, refused):
        # Both are of this process here, so it is the listener that is told.
        with suppress(ConnectError):
            await greeted_by(address, options(secret=secret))
        await eventually(lambda: refused)
        assert f"it speaks protocol 9.1, and this process {SPOKEN[-1]}" in refused[0]


@asynccontextmanager
async def between(address: str, hand_on: HandOn) -> AsyncIterator[str]:
    """Somebody who hands on what a dialler says as `hand_on` makes it, and all that it hears."""

    async def serve(dialler: trio.SocketStream) -> None:
        listener = await trio.open_tcp_stream(*split_address(address))

        async def say() -> None:
            count = 0
            with suppress(trio.BrokenResourceError):
                async for data in dialler:
                    await listener.send_all(hand_on(bytes(data), count))
                    count += len(data)

        async with dialler, listener, trio.open_nursery() as nursery:
            nursery.start_soon(say)
            with suppress(trio.BrokenResourceError):
                async for data in listener:
                    await dialler.send_all(data)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


def flipping(place: int) -> HandOn:
    def hand_on(data: bytes, count: int) -> bytes:
        if not count <= place < count + len(data):
            return data
        spoilt = bytearray(data)
        spoilt[place - count] ^= 1
        return bytes(spoilt)

    return hand_on


@pytest.mark.parametrize("place", [11, 12, HELLO_BYTES - 1, HELLO_BYTES + 5, 300, 600])
async def test_a_bit_that_somebody_between_changes_ends_the_connection(place: int) -> None:
    """Of the version, of whether TLS follows, of the handshake: nobody is greeted."""
    using = options(secret=SECRET)
    async with listening(using) as (address, _), between(address, flipping(place)) as middle:
        with pytest.raises(ConnectError):
            await greeted_by(middle, options(secret=SECRET, connect_timeout_s=1.0))

"""The simulated TCP against the real one: the same script on both must observe the same.

Each script gets both ends of a connection on 127.0.0.1 and returns what it saw. In real life it
waits a little for the loopback; a difference here is wishful thinking in `connection.py`.
"""

from __future__ import annotations

import errno
import socket as stdlib
import struct
from collections.abc import Awaitable, Callable

import pytest
import trio

from trinamo.sim import Network, SeedChoices, World

SocketType = trio.socket.SocketType
Script = Callable[[SocketType, SocketType], Awaitable[list[object]]]


async def _settle() -> None:
    await trio.sleep(0.1)


async def _observe(act: Callable[[], Awaitable[object]]) -> object:
    try:
        with trio.fail_after(1):
            return await act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except trio.TooSlowError:
        return "waits"


async def orderly_end(a: SocketType, b: SocketType) -> list[object]:
    await a.send(b"bye")
    a.close()
    return [await b.recv(10), await b.recv(10), await b.recv(10)]


async def half_close(a: SocketType, b: SocketType) -> list[object]:
    a.shutdown(stdlib.SHUT_WR)
    await b.send(b"still")
    seen = [await b.recv(10), await a.recv(10)]
    return [*seen, await _observe(lambda: a.send(b"x"))]


async def close_with_unread_data(a: SocketType, b: SocketType) -> list[object]:
    await a.send(b"never read")
    await _settle()
    b.close()
    await _settle()
    return [await _observe(lambda: a.recv(10)), await _observe(lambda: a.recv(10))]


async def buffered_data_outlives_a_reset(a: SocketType, b: SocketType) -> list[object]:
    await a.send(b"early")
    await _settle()
    await b.send(b"unread")
    await _settle()
    a.close()
    await _settle()
    return [await _observe(lambda: b.recv(10)), await _observe(lambda: b.recv(10))]


async def write_to_a_closed_peer(a: SocketType, b: SocketType) -> list[object]:
    b.close()
    await _settle()
    first = await _observe(lambda: a.send(b"x"))
    await _settle()
    return [first, await _observe(lambda: a.send(b"y")), await _observe(lambda: a.send(b"z"))]


async def zero_linger_resets(a: SocketType, b: SocketType) -> list[object]:
    a.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_LINGER, struct.pack("ii", 1, 0))
    a.close()
    await _settle()
    return [await _observe(lambda: b.recv(10)), await _observe(lambda: b.send(b"x"))]


async def an_idle_read_waits(a: SocketType, b: SocketType) -> list[object]:
    seen = [await _observe(lambda: b.recv(10)), a.is_readable(), b.is_readable()]
    await a.send(b"x")
    await _settle()
    return [*seen, b.is_readable(), await _observe(lambda: b.recv(10))]


async def a_reader_that_does_not_read_stops_the_writer(
    a: SocketType, b: SocketType
) -> list[object]:
    stream = trio.SocketStream(a)
    with trio.move_on_after(0.2) as scope:
        await stream.send_all(bytes(64 * 1024 * 1024))
    return [scope.cancelled_caught, len(await b.recv(1000))]


async def closing_wakes_the_reader(a: SocketType, b: SocketType) -> list[object]:
    seen: list[object] = []

    async def read() -> None:
        try:
            await a.recv(1)
        except trio.ClosedResourceError:
            seen.append("closed")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await _settle()
        a.close()
    return [*seen, await _observe(lambda: a.recv(1)), a.fileno(), await b.recv(1)]


async def a_cancelled_read_loses_nothing(a: SocketType, b: SocketType) -> list[object]:
    with trio.CancelScope() as scope:
        scope.cancel()
        await b.recv(10)
    await a.send(b"kept")
    await _settle()
    with trio.CancelScope() as scope:
        scope.cancel()
        await b.recv(10)
    return [await b.recv(10)]


async def gathered_writes_and_reads_into_buffers(a: SocketType, b: SocketType) -> list[object]:
    count = await a.sendmsg([b"one", b"two"])
    buffer = bytearray(10)
    return [count, await b.recv_into(buffer), bytes(buffer)]


async def nobody_listens(a: SocketType, b: SocketType) -> list[object]:
    port = a.getpeername()[1]
    with trio.socket.socket() as another:
        refused = await _observe(lambda: another.connect(("127.0.0.1", port)))
        return [refused, await _observe(lambda: another.send(b"x")), b.getpeername()[0]]


async def a_connection_that_is_over_has_no_peer(a: SocketType, b: SocketType) -> list[object]:
    async def name_of_peer() -> object:
        return a.getpeername()[0]

    a.shutdown(stdlib.SHUT_WR)
    await _settle()
    seen = [await _observe(name_of_peer)]
    b.shutdown(stdlib.SHUT_WR)
    await _settle()
    return [*seen, await _observe(name_of_peer)]


async def a_connection_that_was_reset_has_no_peer(a: SocketType, b: SocketType) -> list[object]:
    async def name_of_peer() -> object:
        return a.getpeername()[0]

    b.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_LINGER, struct.pack("ii", 1, 0))
    b.close()
    await _settle()
    return [await _observe(name_of_peer)]


async def ports_that_are_taken(a: SocketType, b: SocketType) -> list[object]:
    seen: list[object] = []
    with trio.socket.socket() as one, trio.socket.socket() as other:
        await one.bind(("127.0.0.1", 0))
        taken = one.getsockname()
        seen += [await _observe(lambda: one.bind(taken)), await _observe(lambda: other.bind(taken))]
        for each in (one, other):
            each.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_REUSEADDR, 1)
        seen.append(await _observe(lambda: other.bind(taken)))
        one.listen()
        with trio.socket.socket() as late:
            late.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_REUSEADDR, 1)
            seen.append(await _observe(lambda: late.bind(("0.0.0.0", taken[1]))))
    return seen


async def options_of_a_listener_are_inherited(a: SocketType, b: SocketType) -> list[object]:
    with trio.socket.socket() as listener, trio.socket.socket() as client:
        listener.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, struct.pack("i", 1))
        listener.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPIDLE, 7)
        await listener.bind(("0.0.0.0", 0))
        listener.listen()
        # Linux takes no address at all for its own.
        await client.connect(("0.0.0.0", listener.getsockname()[1]))
        accepted, _ = await listener.accept()
        with accepted:
            return [
                accepted.getsockopt(stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE),
                accepted.getsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPIDLE),
                client.getpeername()[0],
            ]


SCRIPTS: list[Script] = [
    a_connection_that_is_over_has_no_peer,
    a_connection_that_was_reset_has_no_peer,
    ports_that_are_taken,
    options_of_a_listener_are_inherited,
    orderly_end,
    half_close,
    close_with_unread_data,
    buffered_data_outlives_a_reset,
    write_to_a_closed_peer,
    zero_linger_resets,
    an_idle_read_waits,
    a_reader_that_does_not_read_stops_the_writer,
    closing_wakes_the_reader,
    a_cancelled_read_loses_nothing,
    gathered_writes_and_reads_into_buffers,
    nobody_listens,
]


async def _play(script: Script) -> list[object]:
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with trio.socket.socket() as client:
            await client.connect(listener.getsockname())
            server, address = await listener.accept()
            assert address == client.getsockname()
            listener.close()
            with server:
                return await script(client, server)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_simulated_socket_behaves_like_the_kernels(script: Script) -> None:
    simulated: list[object] = []
    world = World(SeedChoices(1))
    Network(world, tear_one_in=0)

    async def main() -> None:
        simulated.extend(await _play(script))

    world.run(main)
    assert simulated == trio.run(_play, script)

"""A connection over a real socket: what is sent at once, what waits, and in which order."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from trinamo.runtime.http.server.hypercorn_server.connection import Connection
from trinamo.runtime.http.server.hypercorn_server.driver import _SendLock
from trinamo.runtime.http.server.sockets import configure_socket

PIECE = bytes(range(256)) * 256


@contextlib.asynccontextmanager
async def open_connection(
    *, write_timeout_s: float = 30.0, is_attended: bool = True
) -> AsyncIterator[tuple[Connection, trio.SocketStream]]:
    """A connection and its client."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, trio.open_nursery() as nursery:
        client = await trio.testing.open_stream_to_socket_listener(listener)
        connection = Connection(await listener.accept(), write_timeout_s=write_timeout_s)
        if is_attended:
            connection.start(nursery)
        try:
            yield connection, client
        finally:
            connection.abort()
            await client.aclose()
            nursery.cancel_scope.cancel()


async def receive(client: trio.SocketStream, size: int) -> bytes:
    received = bytearray()
    with trio.fail_after(10):
        while len(received) < size:
            data = await client.receive_some()
            assert data, "the connection ended early"
            received += data
    return bytes(received)


async def test_what_the_socket_has_room_for_is_sent_without_a_checkpoint() -> None:
    async with open_connection() as (connection, client):
        with trio.testing.assert_no_checkpoints():
            await connection.send_all(b"now ")
            await connection.send_all(b"and here")
        assert await receive(client, 12) == b"now and here"


async def test_a_peer_that_does_not_read_ends_a_shielded_send(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_connection(write_timeout_s=7) as (connection, _):
        start = trio.current_time()
        with trio.CancelScope(shield=True), pytest.raises(trio.ClosedResourceError):
            await connection.send_all(PIECE * 100)
        assert trio.current_time() == start + 7


async def test_a_free_lock_is_taken_at_once_and_never_by_the_cancelled() -> None:
    lock = _SendLock()
    others = 0

    async def count() -> None:
        nonlocal others
        others += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        async with lock:
            assert others == 0
    with trio.CancelScope() as scope:
        scope.cancel()
        async with lock:
            pytest.fail("it was cancelled")
    assert scope.cancelled_caught


async def test_a_lock_has_one_owner_at_a_time_in_the_order_of_asking() -> None:
    lock, order = _SendLock(), list[str]()

    async def hold(name: str) -> None:
        async with lock:
            order.append(f"{name} in")
            await trio.testing.wait_all_tasks_blocked()
            order.append(f"{name} out")

    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(hold, name)
            await trio.lowlevel.checkpoint()
    assert order == ["a in", "a out", "b in", "b out", "c in", "c out"]


async def test_what_the_kernel_ends_and_what_we_end_take_equally_long() -> None:
    """A reader that stops is cut off after `write_timeout_s`, however short `peer_timeout_s` is.

    TCP_USER_TIMEOUT ends a peer that acknowledges and takes nothing, as well as one that is gone.
    """
    async with open_connection() as (connection, _):
        configure_socket(connection.socket, peer_timeout_s=8, write_timeout_s=30)
        tcp = socket.IPPROTO_TCP
        assert connection.socket.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 30_000
        assert connection.socket.getsockopt(tcp, socket.TCP_KEEPIDLE) == 2


async def test_a_peer_that_was_cut_off_is_known(autojump_clock: trio.testing.MockClock) -> None:
    """hypercorn swallows the error of a write, so the connection must remember it."""
    async with open_connection(write_timeout_s=7) as (connection, _):
        await connection.send_all(PIECE)
        assert not connection.is_cut
        with pytest.raises(trio.ClosedResourceError):
            await connection.send_all(PIECE * 1000)
        assert connection.is_cut


async def test_nothing_is_sent_after_the_end_nor_is_it_a_bug_to_try() -> None:
    """hypercorn ends its side when the peer has, in one task, while an answer begins in another."""
    async with open_connection() as (connection, client):
        await connection.send_eof()
        with pytest.raises(trio.ClosedResourceError):
            await connection.send_all(b"late")
        assert connection.is_cut
        with trio.fail_after(5):
            assert await client.receive_some() == b""


async def test_an_end_does_not_come_between_the_parts_of_a_send() -> None:
    async with open_connection() as (connection, client), trio.open_nursery() as nursery:
        nursery.start_soon(connection.send_all, PIECE * 100)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await connection.send_eof()
        assert await receive(client, len(PIECE) * 100) == PIECE * 100

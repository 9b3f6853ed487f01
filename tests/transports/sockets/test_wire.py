"""What sending costs a writer: it gives way when the socket makes it wait, and only then."""

from __future__ import annotations

import socket as stdlib_socket
import struct
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager

import pytest
import trio
import trio.testing

from tests.transports.tcp.ends import PATIENCE_S
from trinamo.sim import Network, SeedChoices, World
from trinamo.transports.sockets.wire import Wire, open_wire, send_all

LARGE = bytes(range(256)) * (1 << 16)
"""More than the kernel takes for a peer that does not read."""


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Wire, trio.SocketStream]]:
    """Both ends of a TCP connection, of which we send on the first."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(PATIENCE_S):
        async with listener:
            dialled = await trio.open_tcp_stream(*listener.socket.getsockname())
            async with await listener.accept() as accepted:
                wire = open_wire(dialled)
                with closing(wire.socket):
                    yield wire, accepted


async def take(stream: trio.SocketStream, count: int) -> bytes:
    taken = b""
    while len(taken) < count:
        piece = await stream.receive_some(count - len(taken))
        assert piece, "ended early"
        taken += piece
    return taken


class Steps(trio.abc.Instrument):
    """Counts how often the loop resumes one task."""

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.count = 0
        self._task = task

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is self._task


@contextmanager
def steps_of(task: trio.lowlevel.Task) -> Iterator[Steps]:
    steps = Steps(task)
    trio.lowlevel.add_instrument(steps)
    try:
        yield steps
    finally:
        trio.lowlevel.remove_instrument(steps)


async def gives_way(work: Awaitable[object]) -> bool:
    """Whether the loop had to resume this task before `work` was done."""
    with steps_of(trio.lowlevel.current_task()) as steps:
        await work
    return steps.count > 0


async def test_a_send_that_the_kernel_takes_at_once_does_not_give_way() -> None:
    async with pair() as (ours, theirs):
        assert await gives_way(ours.socket.send(b"a"))
        assert not await gives_way(send_all(ours, b"b"))
        assert await take(theirs, 2) == b"ab"


def test_simulated_sockets_are_served_alike() -> None:
    world = World(SeedChoices(1), virtual_s_max=60, ambient="raise")
    Network(world, jitter_s=0, short_one_in=2)
    found: list[object] = []

    async def serve(stream: trio.SocketStream) -> None:
        found.append(await take(stream, 1000))

    async def client() -> None:
        stream = await trio.open_tcp_stream("b", 7000)
        found.append(await gives_way(send_all(open_wire(stream), bytes(1000))))
        await trio.sleep(1)

    async def main() -> None:
        world.boot("b", trio.serve_tcp, serve, 7000)
        await trio.sleep(0.1)
        await world.boot("a", client).ended.wait()

    world.run(main)
    assert found == [False, bytes(1000)]


async def test_a_send_without_room_gives_way_and_everything_arrives() -> None:
    received: list[bytes] = []
    async with pair() as (ours, theirs), trio.open_nursery() as nursery:

        @nursery.start_soon
        async def receive() -> None:
            received.append(await take(theirs, len(LARGE)))

        await send_all(ours, LARGE)
    assert received == [LARGE]


@pytest.mark.parametrize("when", ["before", "while it waits"])
async def test_a_send_can_be_cancelled(when: str) -> None:
    async with pair() as (ours, _):
        with trio.CancelScope() as scope:
            if when == "before":
                scope.cancel()
            else:
                scope.deadline = trio.current_time() + 0.01
            await send_all(ours, LARGE)
        assert scope.cancelled_caught


async def test_a_peer_that_is_gone_breaks_the_send() -> None:
    async with pair() as (ours, theirs):
        theirs.setsockopt(
            stdlib_socket.SOL_SOCKET, stdlib_socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        theirs.socket.close()
        with pytest.raises(OSError):  # noqa: PT011 -- which of them the kernel says depends
            await send_all(ours, LARGE)

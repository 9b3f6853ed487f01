"""An accepted socket: what it says once it is closed under whoever comes to wait for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from trinamo.transports.sockets.wire import Wire, abort, open_wire


@pytest.fixture
async def wires() -> AsyncIterator[list[Wire]]:
    """Two accepted connections."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]
    peers = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(2)]
    accepted = [open_wire(await listener.accept()) for _ in peers]
    yield accepted
    for end in (*peers, listener):
        await end.aclose()
    for wire in accepted:
        wire.socket.close()


async def test_a_wait_that_begins_after_the_close_ends_at_once(wires: list[Wire]) -> None:
    """Whoever was woken, and aborted before its turn, comes back to wait: each for its own socket."""
    for wire in wires:
        abort(wire.socket)
    for wire in wires:
        with trio.fail_after(120), pytest.raises(trio.ClosedResourceError):
            await wire.receive(1)
        with trio.fail_after(120), pytest.raises(trio.ClosedResourceError):
            await wire.wait_room()


async def test_a_close_ends_a_wait_under_way(wires: list[Wire]) -> None:
    wire = wires[0]
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def wait() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await wire.receive(1)

        await trio.testing.wait_all_tasks_blocked()
        abort(wire.socket)

"""The accept loop when descriptors run out, on a mock clock, with a listener that fails to order."""

from __future__ import annotations

import errno
import itertools
import logging
from typing import cast

import pytest
import trio
import trio.testing

from trinamo.transports.tcp.accepting import accept_connections


class FailingListener:
    """A listener whose next `accept`s raise `failures`, then give one connection, then wait."""

    def __init__(self, *failures: int) -> None:
        self._failures = list(failures)
        self.accepted_at: list[float] = []
        self.given = False

    async def accept(self) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        self.accepted_at.append(trio.current_time())
        if self._failures:
            raise OSError(self._failures.pop(0), "no more descriptors")
        if self.given:
            await trio.sleep_forever()
        self.given = True
        return trio.SocketStream(trio.socket.socket())


def as_listener(listener: FailingListener) -> trio.SocketListener:
    return cast("trio.SocketListener", listener)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_accept_backs_off_from_5_ms_to_1_s_recovers_and_logs_seldom(
    number: int, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    listener, served = FailingListener(*[number] * 14), trio.Event()

    async def serve(_: trio.SocketStream) -> None:
        await trio.lowlevel.checkpoint()
        served.set()

    with caplog.at_level(logging.ERROR):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def accepting() -> None:
                await accept_connections(as_listener(listener), serve, nursery, connections_max=1)

            await served.wait()
            nursery.cancel_scope.cancel()
    times = listener.accepted_at
    waits = [round(b - a, 6) for a, b in itertools.pairwise(times[:15])]
    assert waits[:4] == [0.005, 0.01, 0.02, 0.04]
    assert waits[-1] == 1.0
    assert max(waits) == 1.0
    assert len(caplog.records) == 2


async def test_another_error_of_accept_is_a_bug_and_is_raised() -> None:
    async def serve(_: trio.SocketStream) -> None:
        raise AssertionError("nothing was accepted")

    async with trio.open_nursery() as nursery:
        with pytest.raises(OSError, match="no more descriptors"):
            await accept_connections(
                as_listener(FailingListener(errno.EBADF)), serve, nursery, connections_max=1
            )


async def test_at_the_bound_connections_wait_in_the_backlog() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    serving, release = 0, trio.Event()

    async def serve(_: trio.SocketStream) -> None:
        nonlocal serving
        serving += 1
        await release.wait()

    async with listener, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def accepting() -> None:
            await accept_connections(listener, serve, nursery, connections_max=2)

        address = listener.socket.getsockname()
        streams = [await trio.open_tcp_stream(*address) for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert serving == 2
        release.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert serving == 3
        for stream in streams:
            await stream.aclose()
        nursery.cancel_scope.cancel()

"""One port's front: descriptors that run out, places that run out, strangers that say nothing."""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest
import trio
import trio.testing

from tests.transports.tcp.ends import PATIENCE_S, eventually, options
from trinamo.runtime.errors import RemoteProtocolError
from trinamo.transports.sockets.wire import Wire
from trinamo.transports.tcp.accepting import Gate, origin_of


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


async def let_in(wire: Wire) -> Wire:
    """Everybody is a member."""
    return wire


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_accept_backs_off_from_5_ms_to_1_s_recovers_and_logs_seldom(
    number: int, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    listener, served = FailingListener(*[number] * 14), trio.Event()

    async def serve(_: Wire) -> None:
        await trio.lowlevel.checkpoint()
        served.set()

    with caplog.at_level(logging.ERROR):
        async with trio.open_nursery() as nursery:
            gate = Gate(options(), let_in, serve)
            nursery.start_soon(gate.accept, as_listener(listener), nursery)
            await served.wait()
            nursery.cancel_scope.cancel()
    times = listener.accepted_at
    waits = [round(b - a, 6) for a, b in itertools.pairwise(times[:15])]
    assert waits[:4] == [0.005, 0.01, 0.02, 0.04]
    assert waits[-1] == 1.0
    assert max(waits) == 1.0
    assert len(caplog.records) == 2


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EHOSTUNREACH])
async def test_a_connection_that_is_gone_before_it_is_accepted_ends_nothing(
    number: int, autojump_clock: trio.testing.MockClock
) -> None:
    served = trio.Event()

    async def serve(_: Wire) -> None:
        await trio.lowlevel.checkpoint()
        served.set()

    async with trio.open_nursery() as nursery:
        gate = Gate(options(), let_in, serve)
        nursery.start_soon(gate.accept, as_listener(FailingListener(number)), nursery)
        await served.wait()
        nursery.cancel_scope.cancel()


async def test_another_error_of_accept_is_a_bug_and_is_raised() -> None:
    async def serve(_: Wire) -> None:
        raise AssertionError("nothing was accepted")

    async with trio.open_nursery() as nursery:
        with pytest.raises(OSError, match="no more descriptors"):
            await Gate(options(), let_in, serve).accept(
                as_listener(FailingListener(errno.EBADF)), nursery
            )


class Port:
    """A gate on loopback whose members stay until `release`."""

    def __init__(self, listener: trio.SocketListener, **changes: int) -> None:
        self.listener = listener
        self.gate = Gate(options(**changes), self._hear_a_word, self._serve)
        self._words: dict[Wire, bytes] = {}
        self.members: list[bytes] = []
        self.release = trio.Event()

    async def _hear_a_word(self, wire: Wire) -> Wire:
        """Whoever says something is a member, but for `no`."""
        self._words[wire] = word = await wire.receive(16)
        if word == b"no":
            raise RemoteProtocolError("no member")
        return wire

    async def _serve(self, member: Wire) -> None:
        self.members.append(self._words[member])
        await self.release.wait()

    async def connect(self, host: str = "127.0.0.1", *, word: bytes = b"") -> trio.SocketStream:
        socket = trio.socket.socket()
        # All of 127.0.0.0/8 is loopback: an address of its own for every peer that wants one.
        await socket.bind((host, 0))
        await socket.connect(self.listener.socket.getsockname())
        stream = trio.SocketStream(socket)
        if word:
            await stream.send_all(word)
        return stream


@asynccontextmanager
async def port(**changes: int) -> AsyncIterator[Port]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(PATIENCE_S):
        async with listener, trio.open_nursery() as nursery:
            found = Port(listener, **changes)
            nursery.start_soon(found.gate.accept, listener, nursery)
            yield found
            nursery.cancel_scope.cancel()


async def wait_closed(stream: trio.SocketStream) -> None:
    with trio.fail_after(PATIENCE_S), suppress(trio.BrokenResourceError):
        assert not await stream.receive_some(1)


def is_open(stream: trio.SocketStream) -> bool:
    """Whether no end has arrived so far, nor anything else."""
    with suppress(BlockingIOError):
        stream.socket._sock.recv(1)  # type: ignore[attr-defined]
        return False
    return True


async def test_more_members_than_the_bound_wait_for_a_place() -> None:
    async with port(connections_max=2) as door:
        streams = [await door.connect(word=b"hi") for _ in range(3)]
        await eventually(lambda: (len(door.members), door.gate.ungreeted_count) == (2, 1))
        door.release.set()
        await eventually(lambda: (len(door.members), door.gate.ungreeted_count) == (3, 0))
        for stream in streams:
            await stream.aclose()


async def test_silent_connections_keep_no_member_out_and_the_oldest_gives_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Attack rows 7, 8 and 10: as many as one likes, and who greets is let in at once."""
    async with port(ungreeted_max=8, connections_max=4) as door:
        silent = [await door.connect() for _ in range(100)]
        await eventually(lambda: door.gate.refused_count == 92)
        assert door.gate.ungreeted_count == 8
        member = await door.connect("127.0.0.2", word=b"hi")
        await eventually(lambda: door.members == [b"hi"])
        await wait_closed(silent[0])
        assert is_open(silent[-1])
        for stream in [*silent, member]:
            await stream.aclose()
    # One line at the bound, not one each.
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == 1
    assert "others needed its place" in lines[0]


async def test_the_address_that_has_most_gives_way_first() -> None:
    async with port(ungreeted_max=8) as door:
        slow = await door.connect("127.0.0.2")
        await eventually(lambda: door.gate.ungreeted_count == 1)
        silent = [await door.connect("127.0.0.3") for _ in range(50)]
        await eventually(lambda: door.gate.refused_count == 43)
        # It came before all of them, and is still waited for.
        await slow.send_all(b"hi")
        await eventually(lambda: door.members == [b"hi"])
        for stream in [*silent, slow]:
            await stream.aclose()


async def test_who_does_not_greet_in_time_or_is_no_member_is_told_nothing() -> None:
    async with port(handshake_timeout_s=0.05) as door:  # type: ignore[arg-type]
        for word in (b"", b"no"):
            stream = await door.connect(word=word)
            assert await stream.receive_some(1) == b""
            await stream.aclose()
        assert (door.members, door.gate.refused_count) == ([], 2)


async def test_descriptors_that_run_out_cost_a_stranger_its_connection() -> None:
    class Exhausted(FailingListener):
        def __init__(self, inner: trio.SocketListener) -> None:
            super().__init__()
            self.inner, self.is_full = inner, False

        async def accept(self) -> trio.SocketStream:
            if self.is_full:
                self.is_full = False
                raise OSError(errno.EMFILE, "too many open files")
            return await self.inner.accept()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(PATIENCE_S):
        async with listener, trio.open_nursery() as nursery:
            failing = Exhausted(listener)
            found = Port(listener)
            nursery.start_soon(found.gate.accept, as_listener(failing), nursery)
            streams = [await found.connect()]
            await eventually(lambda: found.gate.ungreeted_count == 1)
            # The accept under way takes one more; the next one fails.
            failing.is_full = True
            streams.append(await found.connect())
            await eventually(lambda: found.gate.refused_count == 1)
            await wait_closed(streams[0])
            for stream in streams:
                await stream.aclose()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::2:ffff:1:2", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_ipv6_peer_counts_by_the_network_it_may_choose_its_address_in(
    host: str, origin: str
) -> None:
    assert origin_of(host) == origin

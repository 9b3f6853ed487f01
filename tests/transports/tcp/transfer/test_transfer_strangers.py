"""What strangers say to the transfer port: nonsense ends one stream, and everything is bounded."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from tests.transports.tcp.ends import welcomed
from tests.transports.tcp.transfer.pairs import (
    ALL,
    BLOCKS,
    READ,
    SIZE,
    WRITE,
    answer_of,
    frame,
    greeted,
    open_pair,
)
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    OverloadedError,
    RemoteProtocolError,
    StaleMemoryError,
)
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.transfer.description import (
    BLOCKS_MAX,
    encode_description,
)
from trinamo.runtime.protocol.transfer.settlement import InquiryResult
from trinamo.runtime.protocol.transfer.stream import (
    PREFIX,
    Confirmed,
    Finished,
    Hello,
    Inquiry,
    Notify,
    Ping,
    Read,
    Slice,
    Sums,
    TransferFailed,
    Welcome,
    Write,
    encode_message,
    pack_blocks,
)
from trinamo.transports.tcp.sockets import TcpOptions
from trinamo.transports.tcp.transfer import link, target
from trinamo.transports.tcp.transfer.plane import (
    TransferOptions,
    open_transfer_plane,
)
from trinamo.transports.tcp.transfer.target import RefusalBucket


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    with trio.fail_after(120):
        yield


def encode_raw(message: list[Any], data: bytes) -> bytes:
    header = msgspec.msgpack.encode(message)
    return PREFIX.pack(len(header), len(data)) + header + data


BAD_FRAMES: dict[str, Callable[[], bytes]] = {
    "no message": lambda: b"\0\0\0\4\0\0\0\0\xc1\xc1\xc1\xc1",
    "no header": lambda: bytes(8),
    "a huge header": lambda: b"\xff\xff\xff\xff\0\0\0\0",
    "a huge data part": lambda: encode_message(Ping(1), 2**32 - 1),
    "an answer": lambda: frame(Finished(1)),
    "a second hello": lambda: frame(Hello(2, "b", [])),
    "half a block number": lambda: frame(Read(1, 1, 1, SIZE, 0), b"\1\0\0"),
    "sums without a slice": lambda: (
        frame(Write(1, 1, 1, SIZE, 0, None), pack_blocks([1])) + frame(Sums(1, b"x"))
    ),
    "a slice too many": lambda: (
        frame(Write(1, 1, 1, SIZE, 0, None), pack_blocks([1])) + frame(Slice(1, 0, 2), bytes(10))
    ),
    "a slice of the wrong length": lambda: (
        frame(Write(1, 1, 1, SIZE, 0, None), pack_blocks([1])) + frame(Slice(1, 0, 1), bytes(10))
    ),
    "a slice from the middle": lambda: (
        frame(Write(1, 1, 1, SIZE, 0, None), pack_blocks([1, 2]))
        + encode_message(Slice(1, 1, 1), SIZE)
    ),
    # Once, whoever had a ticket could name a process and an address there to copy from.
    "a copy of any memory": lambda: encode_raw(
        [16, 1, 1, 1, SIZE, 0, 4096, False, None], pack_blocks([1, 0])
    ),
    "a number in use": lambda: frame(Write(1, 1, 1, SIZE, 0, None), pack_blocks([1])) * 2,
}


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_nonsense_ends_one_stream_and_nothing_else(name: str) -> None:
    async with open_pair() as pair:
        before = bytes(pair.there)
        stream = await greeted(pair.theirs)
        await stream.send_all(BAD_FRAMES[name]())
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some(4096):
                pass
        await stream.aclose()
        assert pair.theirs.mover.malformed_count == 1
        assert pair.there == before
        await pair.start(READ).wait()


@pytest.mark.parametrize("seed", range(10))
async def test_random_bytes_end_one_stream_and_nothing_else(seed: int) -> None:
    async with open_pair() as pair:
        stream = await greeted(pair.theirs)
        with trio.move_on_after(5):
            try:
                await stream.send_all(random.Random(seed).randbytes(3000))
                await stream.send_eof()
                while await stream.receive_some(4096):
                    pass
            except trio.BrokenResourceError:
                pass
        await stream.aclose()
        await pair.start(WRITE).wait()
        assert pair.here == pair.there


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frame(Ping(1)),
        frame(Inquiry(1, "f" * 16, 7)),
        frame(Hello(2, "f" * 16, ["crc32"])),
        b"",
    ],
)
async def test_a_stranger_that_does_not_greet_is_told_nothing(first: bytes) -> None:
    options = TransferOptions(tcp=TcpOptions(handshake_timeout_s=0.05))
    async with open_transfer_plane(options) as plane:
        host, port = plane.mover.address.split(":")
        stream = await trio.open_tcp_stream(host, int(port))
        if first:
            await stream.send_all(first)
        with suppress(trio.BrokenResourceError):
            assert await stream.receive_some(10) == b""
        await stream.aclose()


async def test_a_peer_with_another_secret_is_a_stranger() -> None:
    """Attack row 8: an incarnation, a welcome or an answer is for members."""
    theirs = TransferOptions(tcp=TcpOptions(secret=b"0123456789abcdef" * 2))
    ours = TransferOptions(tcp=TcpOptions(secret=b"fedcba9876543210" * 2))
    async with open_transfer_plane(ours) as here, open_transfer_plane(theirs) as there:
        owned = await there.register(bytearray(SIZE), block_bytes=SIZE)
        with pytest.raises(ConnectError, match="secret_file"):
            await here.connect(owned.describe())
        found = await here.mover.inquire(there.mover.address, there.incarnation, 7, timeout_s=60)
        assert found.result is InquiryResult.BROKEN


async def test_a_slice_that_comes_slowly_is_answered_while_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its writer hears nothing for as long as the slice takes, and closes the stream as a silent one."""
    monkeypatch.setattr(link, "_SIGN_S", 0.0)
    async with open_pair() as pair, await greeted(pair.theirs) as stream:
        there = pair.owned.description
        asked = Write(1, there.region, there.generation, SIZE, 0, None)
        await stream.send_all(frame(asked, pack_blocks(range(8))))
        await stream.send_all(encode_message(Slice(1, 0, 8), 8 * SIZE) + bytes(5 * SIZE))
        assert await answer_of(stream) == Confirmed(1, 0)


async def test_an_owner_that_talks_nonsense_fails_the_transfer_only() -> None:
    async def answer(accepted: trio.SocketStream) -> None:
        async with await welcomed(accepted, Purpose.TRANSFERS, "e" * 16) as stream:
            await stream.receive_some(4096)
            await stream.send_all(encode_message(Welcome("crc32")))
            await stream.receive_some(4096)
            await stream.send_all(frame(Slice(1, 5, 1), bytes(SIZE)))
            await trio.sleep_forever()

    async with open_pair() as pair, trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, answer, 0)
        port = listeners[0].socket.getsockname()[1]
        described = msgspec.structs.replace(
            pair.owned.description, incarnation="e" * 16, address=b"127.0.0.1:%d" % port
        )
        liar = await pair.ours.connect(encode_description(described))
        transfer = pair.ours.start(READ, pair.local, ALL, liar, ALL, deadline_s=5)
        with pytest.raises((RemoteProtocolError, DisconnectedError)):
            await transfer.wait()
        await pair.start(READ).wait()
        nursery.cancel_scope.cancel()


async def test_an_incarnation_that_is_not_there_any_more_is_stale() -> None:
    async with open_pair() as pair:
        described = msgspec.structs.replace(pair.owned.description, incarnation="e" * 16)
        with pytest.raises(StaleMemoryError):
            await pair.ours.connect(encode_description(described))


@pytest.mark.parametrize("address", [b"", b"\xff", b"nowhere", b"127.0.0.1:1", b"127.0.0.1:99999"])
async def test_an_address_that_is_none_is_a_typed_error(address: bytes) -> None:
    async with open_pair() as pair:
        described = msgspec.structs.replace(
            pair.owned.description, incarnation="e" * 16, address=address
        )
        with pytest.raises((ConnectError, RemoteProtocolError)):
            await pair.ours.connect(encode_description(described))


@pytest.mark.parametrize("ticket", [0, 1, 6, 2**62])
async def test_a_greeted_stranger_cannot_say_that_a_grant_is_complete(ticket: int) -> None:
    """However often it says so, whoever was given the ticket is still heard afterwards."""
    async with open_pair(needs_ticket=True) as pair:
        heard: list[bytes] = []
        pair.owned.grant(5, ALL, heard.append)
        stream = await greeted(pair.theirs)
        region = pair.owned.description.region
        for number in range(1, 4):
            await stream.send_all(frame(Notify(number, region, ticket, b"all is done")))
            assert isinstance(await answer_of(stream), TransferFailed)
        await stream.aclose()
        assert not heard
        await pair.start(WRITE, ticket=5, notify=b"truly").wait()
        assert heard == [b"truly"]


async def test_peers_that_cannot_be_reached_leave_nothing() -> None:
    """Neither those that refuse, nor those that nobody waits for any more."""
    async with open_pair() as pair, trio.open_nursery() as nursery:
        before = dict(pair.ours.mover._peers)
        silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
        addresses = [b"127.0.0.1:1", b"127.0.0.1:%d" % silent[0].socket.getsockname()[1]]

        async def connect(number: int, address: bytes) -> None:
            described = msgspec.structs.replace(
                pair.owned.description, incarnation=f"{number:016x}", address=address
            )
            with suppress(ConnectError), trio.move_on_after(0.05):
                await pair.ours.connect(encode_description(described))

        async with trio.open_nursery() as several:
            for number in range(50):
                several.start_soon(connect, number, addresses[number % 2])
        await silent[0].aclose()
        for peer in list(pair.ours.mover._peers.values()):
            if peer.incarnation not in before:
                with pytest.raises(ConnectError):
                    await peer.reach()
        assert pair.ours.mover._peers == before
        nursery.cancel_scope.cancel()


async def test_announced_lists_cost_what_has_come_of_them() -> None:
    """A stranger's promise is not allocated."""
    async with open_pair() as pair:
        streams = [await greeted(pair.theirs) for _ in range(40)]
        tracemalloc.start()
        try:
            for stream in streams:
                await stream.send_all(encode_message(Read(1, 1, 1, SIZE, 0), 4 * BLOCKS_MAX))
            await pair.ours.probe(pair.remote)
            await trio.testing.wait_all_tasks_blocked(0.01)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        for stream in streams:
            await stream.aclose()
        assert peak < 2 * BLOCKS_MAX, "forty lists of 512 KiB were announced, none was sent"


async def test_a_flood_of_refused_requests_leaves_the_others_their_turn() -> None:
    async with open_pair(needs_ticket=True) as pair, trio.open_nursery() as nursery:
        pair.owned.grant(5, ALL)
        stream = await greeted(pair.theirs)
        flood = b"".join(
            frame(Read(number, 1, 1, SIZE, 4), pack_blocks(ALL)) for number in range(1, 2300)
        )

        async def swallow() -> None:
            with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
                while await stream.receive_some(1 << 16):
                    pass

        nursery.start_soon(swallow)
        with trio.move_on_after(5):
            await stream.send_all(flood)
        assert (await pair.start(WRITE, ticket=5).wait()).block_count == BLOCKS
        assert pair.here == pair.there
        await stream.aclose()


async def test_refusals_wait_for_their_turn_when_there_are_too_many(
    autojump_clock: trio.testing.MockClock,
) -> None:
    refusals = RefusalBucket()
    waits = [refusals.spend() for _ in range(5000)]
    free = waits.index(next(wait for wait in waits if wait))
    assert free == 2048
    assert waits[free:] == sorted(waits[free:])
    assert waits[-1] == pytest.approx((5000 - free) / 1000)
    await trio.sleep(60)
    assert refusals.spend() == 0
    assert refusals.count == 5001


async def test_the_blocks_of_one_peer_that_are_under_way_have_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target, "_BLOCKS_MAX", BLOCKS + 1)
    async with open_pair() as pair:
        refused = 0
        for transfer in [pair.start(WRITE), pair.start(WRITE)]:
            try:
                await transfer.wait()
            except OverloadedError:
                refused += 1
        assert refused == 1
        await pair.start(READ).wait()


async def test_who_asks_for_another_life_is_not_told_who_lives() -> None:
    async with open_pair() as pair:
        described = msgspec.structs.replace(pair.owned.description, incarnation="e" * 16)
        with pytest.raises(StaleMemoryError) as caught:
            await pair.ours.connect(encode_description(described))
        assert pair.theirs.incarnation not in str(caught.value)

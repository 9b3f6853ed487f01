"""The tcp transfer plane against peers that talk nonsense, lie, damage bytes or withdraw blocks."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
import trio.testing

from tests.transports.tcp.transfer.pairs import (
    ALL,
    BLOCKS,
    OVER_STREAM,
    READ,
    SIZE,
    open_pair,
    until,
)
from trinamo.runtime.errors import (
    CorruptedError,
    DisconnectedError,
    RefusedError,
    StaleMemoryError,
    TransportError,
)
from trinamo.runtime.protocol.transfer.description import (
    Direction,
)
from trinamo.transports.sockets.wire import Wire
from trinamo.transports.tcp.transfer import link
from trinamo.transports.tcp.transfer.initiator import TcpRemote
from trinamo.transports.tcp.transfer.link import TransferLink
from trinamo.transports.tcp.transfer.memory import TcpRegion
from trinamo.transports.tcp.transfer.plane import (
    TransferOptions,
    open_transfer_plane,
)


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    with trio.fail_after(120):
        yield


@pytest.mark.parametrize("direction", Direction)
async def test_many_small_slices_are_sent_while_the_others_are_read(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were all put into memory first, without a pause for anybody else."""
    put, queued = TransferLink._put, [0]

    def watched(self: TransferLink, frame: bytes) -> None:
        put(self, frame)
        queued[0] = max(queued[0], self._queued_bytes)

    monkeypatch.setattr(TransferLink, "_put", watched)
    async with open_pair(TransferOptions(slice_bytes=256)) as pair:
        local = await pair.ours.register(pair.here, block_bytes=256)
        owned = await pair.theirs.register(pair.there, block_bytes=256)
        remote = await pair.ours.connect(owned.describe())
        blocks = list(range(0, 4000, 2))
        started = pair.ours.start(direction, local, blocks, remote, blocks, deadline_s=15)
        await started.wait()
    ends = (pair.here, pair.there)
    assert all(ends[0][n * 256 :][:256] == ends[1][n * 256 :][:256] for n in blocks)
    assert 0 < queued[0] < 200_000


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("how", ["revoke", "renew", "deregister"])
async def test_blocks_withdrawn_in_the_middle_are_not_touched_any_more(
    direction: Direction, how: str
) -> None:
    options = TransferOptions(slice_bytes=SIZE)
    async with open_pair(options, needs_ticket=True) as pair:
        pair.owned.grant(5, ALL)
        transfer = pair.start(direction, ticket=5)
        for _ in range(40):
            await trio.lowlevel.checkpoint()
        assert not transfer.is_settled
        if how == "revoke":
            pair.owned.revoke(5)
        elif how == "renew":
            pair.owned.renew()
        else:
            await pair.theirs.deregister(pair.owned)
        # The owner uses its memory for something else at once.
        pair.there[:] = bytes(len(pair.there))
        with pytest.raises(StaleMemoryError):
            await transfer.wait()
        await pair.ours.probe(pair.remote)
        assert not any(pair.there)
        confirmed = transfer.confirmed_count
        if direction is READ:
            source = random.Random(2).randbytes(BLOCKS * SIZE)
            assert pair.here[: confirmed * SIZE] == source[: confirmed * SIZE]


@pytest.mark.parametrize("direction", Direction)
async def test_deregistering_ours_ends_the_transfer_and_keeps_the_stream(
    direction: Direction,
) -> None:
    async with open_pair() as pair:
        transfer = pair.start(direction)
        await until(transfer, 4)
        await pair.ours.deregister(pair.local)
        pair.here[:] = bytes(len(pair.here))
        with pytest.raises(StaleMemoryError):
            await transfer.wait()
        await pair.ours.probe(pair.remote)
        assert not any(pair.here)
        pair.here.append(0)  # Nothing holds the buffer any more.


@pytest.mark.parametrize("direction", Direction)
async def test_a_small_block_takes_one_message_each_way(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block, its sum and the word that it is done go together: a peer is woken up once."""
    sent: list[int] = []
    from trinamo.transports.sockets.wire import send_all

    async def counting(wire: Wire, data: bytes) -> None:
        sent.append(len(data))
        await send_all(wire, data)

    async with open_transfer_plane(OVER_STREAM) as a, open_transfer_plane(OVER_STREAM) as b:
        memory, peer = bytearray(range(256)) * 16, bytearray(4096)
        local = await a.register(memory, block_bytes=4096)
        owned = await b.register(peer, block_bytes=4096)
        remote = await a.connect(owned.describe())
        monkeypatch.setattr(link, "send_all", counting)
        report = await a.start(direction, local, [0], remote, [0], deadline_s=10).wait()
    assert report.is_verified
    assert memory == peer
    assert len(sent) == 2
    assert sum(sent) < 4096 + 256


@pytest.mark.parametrize("checksum", ["auto", "crc32"])
@pytest.mark.parametrize("direction", Direction)
async def test_a_source_that_changes_while_it_is_sent_is_found(
    direction: Direction, checksum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum is taken after its bytes have gone, so what was sent is not what is vouched for."""
    async with open_pair(TransferOptions(checksum=checksum), needs_ticket=True) as pair:
        heard: list[bytes] = []
        pair.owned.grant(5, ALL, heard.append)
        source = pair.owned if direction is READ else pair.local
        assert isinstance(source, TcpRegion)
        memory = pair.there if direction is READ else pair.here
        from trinamo.transports.tcp.transfer.memory import BlockFlow

        original = BlockFlow.advance
        sent = 0

        def damaging(flow: BlockFlow, count: int) -> None:
            nonlocal sent
            if flow.region is source:
                if sent < 21 * SIZE <= sent + count:
                    memory[20 * SIZE + 77] ^= 4
                sent += count
            original(flow, count)

        monkeypatch.setattr(BlockFlow, "advance", damaging)
        transfer = pair.start(direction, ticket=5, notify=b"never")
        with pytest.raises(CorruptedError):
            await transfer.wait()
        assert transfer.confirmed_count <= 20
        await pair.ours.probe(pair.remote)
        assert not heard


async def test_ends_without_a_checksum_in_common_do_not_talk() -> None:
    plain = TransferOptions(checksum="none")
    async with open_transfer_plane(OVER_STREAM) as a, open_transfer_plane(plain) as b:
        region = await b.register(bytearray(SIZE), block_bytes=SIZE)
        with pytest.raises(RefusedError, match="no checksum in common"):
            await a.connect(region.describe())


async def test_crc32_is_spoken_where_one_end_has_nothing_better() -> None:
    crc = TransferOptions(checksum="crc32")
    async with open_pair(OVER_STREAM, crc) as pair:
        assert (await pair.start(READ).wait()).is_verified


async def test_blocks_larger_than_a_stretch_are_summed_whole() -> None:
    memory, source = bytearray(6 << 20), random.Random(5).randbytes(6 << 20)
    async with open_transfer_plane(OVER_STREAM) as a, open_transfer_plane(OVER_STREAM) as b:
        local = await a.register(memory, block_bytes=3 << 20)
        owned = await b.register(bytearray(source), block_bytes=3 << 20)
        remote = await a.connect(owned.describe())
        await a.start(READ, local, [1, 0], remote, [0, 1], deadline_s=10).wait()
    assert memory == source[3 << 20 :] + source[: 3 << 20]


async def test_a_stream_that_breaks_is_dialled_again() -> None:
    async with open_pair() as pair:
        assert isinstance(pair.remote, TcpRemote)
        peer = pair.remote.peer
        link = await peer.reach()
        transfer = pair.start(READ)
        await until(transfer, 4)
        link._wire.socket.shutdown(trio.socket.SHUT_RDWR)
        with pytest.raises(DisconnectedError):
            await transfer.wait()
        assert transfer.confirmed_count < BLOCKS
        await pair.start(READ).wait()
        assert pair.here == pair.there


async def test_closing_the_plane_ends_its_transfers() -> None:
    async with open_transfer_plane(OVER_STREAM) as theirs:
        there = await theirs.register(bytearray(BLOCKS * SIZE), block_bytes=SIZE)
        async with open_transfer_plane(OVER_STREAM) as ours:
            here = await ours.register(bytearray(BLOCKS * SIZE), block_bytes=SIZE)
            remote = await ours.connect(there.describe())
            transfer = ours.start(READ, here, ALL, remote, ALL, deadline_s=9)
        assert transfer.is_settled
        with pytest.raises((TransportError, Exception)):
            await transfer.wait()

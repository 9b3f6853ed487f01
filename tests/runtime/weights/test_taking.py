"""A file is taken from whoever lends it: whole and right, wherever it had to be looked for."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from tests.runtime.weights.lending import CHUNK, MODEL, SPACE, Holder, card_of, listed, open_world
from trinamo.runtime.context import Context
from trinamo.runtime.errors import (
    ConfigError,
    CorruptedError,
    OverloadedError,
    RemoteProtocolError,
    StaleMemoryError,
    TrinamoError,
    UnavailableError,
)
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.runtime.weights.messages import (
    Ask,
    HolderOpened,
    Item,
    LentChunk,
    Manifest,
    Want,
    weights_key,
)
from trinamo.runtime.weights.taker import MissingFile, find_offers
from trinamo.transports.memory.transfer import TransferFaults

CHUNKS = 7


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.gguf"
    path.write_bytes(random.Random(1).randbytes(CHUNK * (CHUNKS - 1) + 17))
    return path


def content(path: Path) -> bytes:
    return path.read_bytes()


def digest(path: Path) -> str:
    return hashlib.sha256(content(path)).hexdigest()


def is_at_rest(holder: Holder) -> bool:
    return not holder.lender.describe()["lent"]


def asking(*wants: Want) -> trio.MemoryReceiveChannel[Want]:
    """The input of a taker that says all this and no more."""
    sending, receiving = trio.open_memory_channel[Want](len(wants))
    for want in wants:
        sending.send_nowait(want)
    sending.close()
    return receiving


async def read_all(items: AsyncIterator[Item]) -> list[Item]:
    return [item async for item in items]


async def test_a_file_is_taken_whole_and_what_was_lent_is_taken_back(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    target = tmp_path / "here" / "model.gguf"
    async with open_world() as world:
        holder = await world.add(source)
        await world.take(target, digest(source))
        assert content(target) == content(source)
        assert listed(target.parent) == ["model.gguf"]
        assert is_at_rest(holder)
        assert world.taken_bytes == len(content(source))


async def test_after_a_break_another_holder_goes_on_where_the_first_has_stopped(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    target = tmp_path / "model.gguf"
    async with open_world() as world:
        first = await world.add(source)
        await world.add(source)
        first.items_left = 4  # The list, and three chunks.
        await world.take(target, digest(source))
        assert content(target) == content(source)
        assert world.asked[:2] == ["1", "2"]
        assert world.taken_bytes == len(content(source))


async def test_a_file_that_is_complete_is_kept_however_its_holder_ends(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """It is the only one, and dies behind the last chunk."""
    async with open_world() as world:
        holder = await world.add(source)
        holder.items_left = 1 + CHUNKS
        target = tmp_path / "model.gguf"
        await world.take(target, digest(source))
        assert content(target) == content(source)
        assert world.asked == [holder.id]


async def test_a_holder_of_a_damaged_file_is_left_for_good(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    damaged = tmp_path / "damaged.gguf"
    data = bytearray(content(source))
    data[CHUNK * 3] ^= 1
    damaged.write_bytes(data)
    target = tmp_path / "model.gguf"
    async with open_world() as world:
        await world.add(damaged, as_of=source)
        with pytest.raises(CorruptedError, match="chunk 3"):
            await world.take(target, digest(source))
        assert not target.exists()
        await world.add(source)
        await world.take(target, digest(source))
        assert content(target) == content(source)
        assert world.taken_bytes == len(content(source))


async def test_a_holder_whose_list_is_of_another_file_is_found_out_at_the_end(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(random.Random(2).randbytes(CHUNK * 2))
    target = tmp_path / "model.gguf"
    async with open_world() as world:
        liar = await world.add(other)
        manifest = next(iter(liar.lender._files.values()))
        liar.lender._files = {digest(source): manifest}
        await world.control.put(weights_key(digest(source), liar.id), card_of(CHUNK * 2))
        with pytest.raises(CorruptedError, match="the whole file is not"):
            await world.take(target, digest(source))
        assert not target.exists()
        await world.add(source)
        await world.take(target, digest(source))
        assert content(target) == content(source)


async def test_bytes_that_change_on_the_way_are_not_kept(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    target = tmp_path / "model.gguf"
    async with open_world() as world:
        await world.add(source)
        with pytest.raises(CorruptedError):
            await world.take(target, digest(source), TransferFaults(corrupts=0))
        assert not target.exists()


async def test_a_full_holder_refuses_and_is_waited_for(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_world(peers_max=1, patience_s=1) as world, trio.open_nursery() as nursery:
        holder = await world.add(source)
        slow = tmp_path / "slow.gguf"
        nursery.start_soon(world.take, slow, digest(source), TransferFaults(block_s=3))
        await trio.sleep(1)
        assert holder.lender.describe()["lent"][0]["count"] == CHUNKS
        with pytest.raises(OverloadedError):
            await anext(holder.lender.lend(Ask(sha256=digest(source)), Context("x"), asking()))
        await world.take(tmp_path / "model.gguf", digest(source))
        assert content(slow) == content(source)
        assert trio.current_time() > 3 * CHUNKS


async def test_nobody_who_offers_it_is_an_error_after_a_while(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_world(patience_s=20) as world:
        with pytest.raises(UnavailableError, match="nobody has them"):
            await world.take(tmp_path / "model.gguf", digest(source))
        assert trio.current_time() >= 20


async def test_a_file_that_is_too_large_is_not_begun(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_world(file_bytes_max=CHUNK) as world:
        await world.add(source)
        with pytest.raises(ConfigError, match="file_bytes_max"):
            await world.take(tmp_path / "model.gguf", digest(source))


async def test_two_files_of_one_name_are_told_of_unless_one_is_pinned(
    source: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"x" * CHUNK)
    async with open_world() as world:
        await world.add(source)
        await world.add(other)
        for junk in (b"", b"{}", b'{"model":"m","byte_count":-1}'):
            await world.control.put(f"weights/{'0' * 64}/feed", junk)
        with pytest.raises(ConfigError, match="model_sha256"):
            await find_offers(world.control, MissingFile(MODEL, SPACE))
        (found,) = await find_offers(world.control, MissingFile("any", SPACE, digest(other)))
        assert (found.instance_id, found.sha256) == ("2", digest(other))
        for wanted in (
            MissingFile("another", SPACE),
            MissingFile(MODEL, "elsewhere", digest(other)),
        ):
            assert await find_offers(world.control, wanted) == []


@pytest.mark.parametrize(
    "wants",
    [
        [Want(CHUNKS, 0)],
        [Want(0, 0), Want(0, 0)],
        [Want(0, 0), Want(1, 0), Want(2, 0)],
        [Want(1, 2)],
    ],
    ids=["beyond the end", "twice", "too many at once", "one that is done"],
)
async def test_a_taker_that_asks_for_what_it_may_not_is_refused(
    source: Path, wants: list[Want]
) -> None:
    async with open_world() as world:
        holder = await world.add(source)
        items = holder.lender.lend(Ask(sha256=digest(source)), Context("x"), asking(*wants))
        await anext(items)
        with pytest.raises(RemoteProtocolError):
            await read_all(items)
        assert is_at_rest(holder)
        await world.take(source.with_name("model.gguf"), digest(source))


async def test_what_was_lent_cannot_be_read_once_the_exchange_is_over(source: Path) -> None:
    """Nor what another peer holds, with the ticket of this one."""
    async with open_world() as world, world.taker() as taker:
        holder = await world.add(source)
        ask = Ask(sha256=digest(source))
        items = holder.lender.lend(ask, Context("x"), asking(Want(0, 0)))
        opened, lent = await anext(items), await anext(items)
        assert isinstance(opened, HolderOpened)
        assert isinstance(lent, LentChunk)
        manifest = Manifest.of(digest(source), opened)
        peer = await taker.router.connect(opened.memory)
        async with taker._memory_of(manifest) as (memory, window):
            read = partial(
                taker.router.move,
                *(Direction.READ, memory, [0], peer),
                deadline_s=5,
                ticket=lent.ticket,
            )
            await read([lent.block])
            assert manifest.is_right(0, window[:CHUNK])
            with pytest.raises(TrinamoError):
                await read([lent.block ^ 1])
            await items.aclose()
            with pytest.raises(StaleMemoryError):
                await read([lent.block])


async def test_a_holder_that_lends_another_chunk_is_not_read(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    def confused(item: Item) -> Item:
        return item if isinstance(item, HolderOpened) else msgspec.structs.replace(item, chunk=5)

    async with open_world() as world:
        (await world.add(source)).says = confused
        with pytest.raises(CorruptedError, match="another chunk than was wanted"):
            await world.take(tmp_path / "model.gguf", digest(source))
        assert world.taken_bytes == 0


async def test_what_a_holder_lends_in_a_second_is_bounded_over_all_peers(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_world(bytes_per_second_max=CHUNK) as world:
        await world.add(source)
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(world.take, tmp_path / f"{number}.gguf", digest(source))
        assert trio.current_time() - began_at >= 2 * (CHUNKS - 1) - 1


async def test_a_full_holder_that_leaves_is_not_waited_for(
    source: Path, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_world(peers_max=1, patience_s=5) as world, trio.open_nursery() as nursery:
        holder = await world.add(source)
        slow = tmp_path / "slow.gguf"
        nursery.start_soon(world.take, slow, digest(source), TransferFaults(block_s=30))
        await trio.sleep(1)

        async def leave() -> None:
            await trio.sleep(3)
            await world.control.delete(weights_key(digest(source), holder.id))

        nursery.start_soon(leave)
        with trio.fail_after(120), pytest.raises(UnavailableError, match="as many peers as may"):
            await world.take(tmp_path / "model.gguf", digest(source))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("ticket", [-1, 0, 1 << 63])
def test_a_number_that_no_ticket_has_is_refused_before_a_backend_packs_it(ticket: int) -> None:
    told = msgspec.msgpack.encode(LentChunk(chunk=0, block=0, ticket=ticket))
    with pytest.raises(msgspec.ValidationError, match="ticket"):
        msgspec.msgpack.decode(told, type=LentChunk)

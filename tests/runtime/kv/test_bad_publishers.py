"""Publishers of KV events that go back, claim one id, or speak nonsense; and the bounds of the index."""

from __future__ import annotations

import logging

import msgspec
import pytest
import trio
import trio.testing

from tests.runtime.kv.indexing import TOPIC, A, B, C, D, cluster, hashes
from trinamo.runtime.events.source import EventSource
from trinamo.runtime.protocol.events.sequence import SequencedEvent, encode_event
from trinamo.runtime.protocol.kv.events import BlockSet, Cleared, Removed, Stored, encode_batch

# --- bad publishers --------------------------------------------------------------------------


async def test_numbers_that_go_back_are_counted_and_mended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.follow("a")
        for digest in (A, B, C):
            source.tell([Stored((digest,))])
            await trio.sleep(0.01)
        await made.say("a", 1, 2, encode_batch([Stored((D,))]))
        await trio.sleep(1)
        assert made.held("a") == {A, B, C}
        assert made.index.statistics()["backwards"] == 1


async def test_of_two_that_claim_one_id_the_older_is_counted_and_not_heard(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as made:
        source = await made.follow("a", incarnation=5)
        source.tell([Stored((A,))])
        await trio.sleep(0.1)
        for number in range(1, 30):
            await made.say("a", 4, number, encode_batch([Stored((D,))]))
            await trio.sleep(0.3)
        assert made.held("a") == {A}
        assert made.index.statistics()["outdated"] == 29
        lines = [record.getMessage() for record in caplog.records]
        # Nine seconds: two lines, not 29.
        assert len(lines) == 2
        assert "an earlier incarnation speaks: a at 4/" in lines[0]


async def test_of_two_that_claim_one_id_the_newer_is_followed_until_it_is_silent(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A restart looks like that. If it was none, the one that still lives comes back."""
    async with cluster() as made:
        source = await made.follow("a", incarnation=5)
        source.tell([Stored((A,))])
        await trio.sleep(0.1)
        await made.say("a", 1 << 60, 1, encode_batch([Stored((D,))]))
        await trio.sleep(0.1)
        assert made.held("a") == {D}
        await trio.sleep(60)
        assert made.held("a") == {A}
        source.tell([Stored((B,))])
        await trio.sleep(1)
        assert made.held("a") == {A, B}


async def test_a_newer_one_that_says_nothing_of_use_hides_the_instance_for_a_while_only(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.follow("a", incarnation=5)
        source.tell([Stored((A,))])
        await trio.sleep(0.1)
        await made.say("a", 6, 77, encode_batch([Stored((D,))]))
        await trio.sleep(0.1)
        assert made.overlap(A) == made.overlap(D) == {}
        await trio.sleep(20)
        assert made.held("a") == {A}
        assert made.index.statistics()["outdated"] > 0


async def test_garbage_is_counted_hides_nobody_else_and_is_mended(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as made:
        made.index.join("a")
        made.index.join("b")
        source, other = await made.source("a"), await made.source("b")
        source.tell([Stored((A,))])
        other.tell([Stored((B,))])
        await trio.sleep(0.1)
        with caplog.at_level(logging.WARNING, "trinamo.events"):
            # Garbage as the next event of a, as a message, in b's name on a's subject, and huge.
            await made.say("a", 1, 2, b"\xc1garbage")
            for _ in range(100):
                await made.plane.publish(f"{TOPIC}.event.a", b"\xc1nonsense")
            stranger = encode_event(SequencedEvent("b", 1, 2, encode_batch([Cleared()])))
            await made.plane.publish(f"{TOPIC}.event.a", stranger)
            await made.say("b", 1, 2, b"x" * 100_000)
            await trio.sleep(0.01)
        assert made.index.statistics()["malformed"] == 103
        # One line for all of it.
        assert len(caplog.records) == 1
        await trio.sleep(3)
        assert made.held("a") == {A}
        assert made.held("b") == {B}
        source.tell([Removed((A,))])
        await trio.sleep(1)
        assert made.held("a") == set()


async def test_an_event_of_a_kind_that_we_do_not_know_leads_to_a_snapshot(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """As from a worker of a later version: what it did we cannot tell, what it holds we can."""
    async with cluster() as made:
        made.index.join("a")
        held = BlockSet()
        source = EventSource(
            made.plane, TOPIC, publisher="a", incarnation=1, snapshot=held.encode_part
        )
        await made.nursery.start(source.run)
        held.apply(Stored((A,)))
        await source.publish(encode_batch([Stored((A,))]))
        held.apply(Stored((B,)))
        await source.publish(msgspec.msgpack.encode([["moved", B]]))
        await trio.sleep(0.5)
        assert made.held("a") == {A, B}
        assert made.index.statistics()["malformed"] == 1


async def test_a_publisher_whose_snapshot_is_garbage_has_no_blocks_and_is_asked_rarely(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        made.index.join("a")
        asked = 0

        async def answer() -> None:
            nonlocal asked
            async with made.plane.subscribe(f"{TOPIC}.snapshot.a") as requests:
                async for request in requests:
                    asked += 1
                    await made.plane.publish(request.reply, b"\x91" * 5000)

        made.nursery.start_soon(answer)
        await trio.sleep(0.1)
        await made.say("a", 1, 7, encode_batch([Stored((A,))]))
        await trio.sleep(60)
        assert made.held("a") == set()
        assert made.index.statistics()["lost"] == 1
        assert 20 < asked < 40
        assert made.index.statistics()["malformed"] == asked
        made.index.leave("a")
        await trio.sleep(5)
        assert asked < 41


async def test_requests_that_are_none_are_counted_and_the_source_lives_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.source("a")
        await made.plane.publish(f"{TOPIC}.snapshot.a", b"", reply="inbox")
        await made.plane.publish(f"{TOPIC}.snapshot.a", b"\x92\x05\x02", reply="inbox")
        await made.plane.publish(f"{TOPIC}.snapshot.a", b"\x92\x00\xcd\xff\xff", reply="inbox")
        made.index.join("a")
        source.tell([Stored((A,))])
        await trio.sleep(2)
        assert source.statistics()["malformed"] == 3
        assert made.held("a") == {A}


# --- bounds ----------------------------------------------------------------------------------


async def test_blocks_beyond_the_bounds_are_refused_and_the_rest_is_true(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster(instance_blocks_max=3, blocks_max=5) as made:
        made.index.join("a")
        made.index.join("b")
        other, source = await made.source("a"), await made.source("b")
        other.tell([Stored((A, B, C, D))])
        await trio.sleep(0.1)
        source.tell([Stored((A, B, C, D))])
        await trio.sleep(0.1)
        assert made.overlap(A, B, C, D) == {"a": 3, "b": 2}
        statistics = made.index.statistics()
        assert (statistics["blocks"], statistics["refused_blocks"]) == (5, 3)
        made.index.leave("a")
        source.tell([Cleared(), Stored((A, B, C))])
        await trio.sleep(0.1)
        assert made.overlap(A, B, C, D) == {"b": 3}
        assert made.index.statistics()["blocks"] == 3


async def test_instances_beyond_the_bound_are_followed_as_soon_as_another_leaves(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster(instances_max=1) as made:
        for name in ("a", "b"):
            made.index.join(name)
            (await made.source(name)).tell([Stored((A,))])
            await trio.sleep(0.1)
        assert made.overlap(A) == {"a": 1}
        assert made.index.statistics()["ignored"] == 1
        made.index.leave("a")
        await trio.sleep(3)
        assert made.overlap(A) == {"b": 1}


async def test_a_snapshot_larger_than_a_message_comes_in_parts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        made.broker.message_bytes_max = 4096
        source = await made.source("a")
        source.tell([Stored(hashes(*range(1000)))])
        await trio.sleep(0.1)
        source.tell([Removed(hashes(*range(100)))])
        await trio.sleep(0.1)
        made.index.join("a")
        await trio.sleep(3)
        assert made.held("a") == set(hashes(*range(100, 1000)))
        # The first answer says how many parts, then each of them.
        assert source.statistics()["snapshots"] > 4


async def test_a_snapshot_of_more_parts_than_are_allowed_is_refused_and_counted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        made.broker.message_bytes_max = 256
        source = await made.source("a")
        source.tell([Stored(hashes(*range(1500)))])
        made.index.join("a")
        await trio.sleep(5)
        assert made.held("a") == set()
        statistics = made.index.statistics()
        assert statistics["lost"] == 1
        assert statistics["malformed"] > 0

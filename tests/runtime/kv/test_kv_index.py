"""KV events from a worker to a router's index: what is told, what is missed, and bad publishers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import open_exact_engine
from trinamo.runtime.engines.loop.host import open_engine_host
from trinamo.runtime.engines.mocker.engine import MockerEngine, MockerOptions, costed_hop
from trinamo.runtime.events.sequenced import EventSource
from trinamo.runtime.kv.events import KvEventSource
from trinamo.runtime.kv.index import KvIndex
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.events.sequence import SequencedEvent, encode_event
from trinamo.runtime.protocol.kv.blocks import BlockTable
from trinamo.runtime.protocol.kv.events import (
    HASH_BYTES,
    Cleared,
    Removed,
    Stored,
    block_hashes,
    encode_batch,
)
from trinamo.runtime.protocol.openai.generate import GenerateRequest
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane

ENDPOINT = EndpointName("ns", "engine", "generate")
TOPIC = "trinamo.kv.ns.engine.generate"


def hashes(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(HASH_BYTES, "big") for number in numbers)


A, B, C, D = hashes(1, 2, 3, 4)


class Cluster:
    """One broker, an index on it, and sources."""

    def __init__(self, nursery: trio.Nursery, **bounds: int) -> None:
        self.nursery = nursery
        self.broker = MemoryBroker()
        self.plane = MemoryEventPlane(self.broker)
        self.index = KvIndex(self.plane, ENDPOINT, **bounds)

    async def source(
        self, instance_id: str, *, incarnation: int = 1, scope: trio.CancelScope | None = None
    ) -> KvEventSource:
        source = KvEventSource(
            MemoryEventPlane(self.broker, buffered_max=2),
            ENDPOINT,
            instance_id=instance_id,
            incarnation=incarnation,
            outbox_blocks_max=2000,
        )

        async def run(*, task_status: trio.TaskStatus[None]) -> None:
            with scope or trio.CancelScope():
                await source.run(task_status=task_status)

        await self.nursery.start(run)
        return source

    async def follow(self, instance_id: str, *, incarnation: int = 1) -> KvEventSource:
        """A source that the index knows."""
        self.index.join(instance_id)
        return await self.source(instance_id, incarnation=incarnation)

    async def say(self, instance_id: str, incarnation: int, sequence: int, body: bytes) -> None:
        """A message that no source of ours sends."""
        event = SequencedEvent(instance_id, incarnation, sequence, body)
        await self.plane.publish(f"{TOPIC}.event.{instance_id}", encode_event(event))

    def held(self, instance_id: str) -> set[bytes]:
        return set(self.index.blocks(instance_id))


@asynccontextmanager
async def cluster(**bounds: int) -> AsyncIterator[Cluster]:
    async with trio.open_nursery() as nursery:
        made = Cluster(nursery, **bounds)
        await nursery.start(made.index.run)
        yield made
        nursery.cancel_scope.cancel()


async def test_the_overlap_is_the_leading_blocks_that_each_instance_holds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        for name in ("a", "b", "c"):
            made.index.join(name)
        first, second = await made.source("a"), await made.source("b")
        await made.source("c")
        first.tell([Stored(b"", (A, B, C))])
        second.tell([Stored(b"", (A,)), Stored(b"", (D,))])
        await trio.sleep(0.1)
        assert made.index.overlap((A, B, C, D)) == {"a": 3, "b": 1}
        assert made.index.overlap((D,)) == {"b": 1}
        assert made.index.overlap(()) == {}
        first.tell([Removed((A,))])
        second.tell([Cleared()])
        await trio.sleep(0.1)
        assert made.index.overlap((A, B, C)) == {}
        assert made.held("a") == {B, C}
        assert made.index.statistics().events == 5


async def test_an_engine_s_blocks_are_in_the_index_step_by_step(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """From the mocker's cache to the router, evictions included, and found by token ids."""
    model = MockerEngine(
        MockerOptions(num_gpu_blocks=12, block_size=4, max_num_seqs=4), context_tokens_max=40
    )
    async with cluster() as made, open_engine_host(model, hop=costed_hop(model)) as engine:
        source = await made.follow("a")

        async def generate(prompt: str) -> None:
            request = GenerateRequest(model="mocker", prompt=prompt, max_tokens=8)
            async with aclosing(engine.generate(request, Context(prompt))) as deltas:
                async for _ in deltas:
                    pass

        await generate("not told yet, but held")
        assert engine.listen_blocks(source.tell)
        held = set(model.blocks.held())
        for prompt in ("the same start", "the same begin", "something else altogether"):
            held |= set(model.blocks.held())
            await generate(prompt)
            await trio.sleep(0.1)
            told = [Stored(each, (digest,)) for digest, each in made.index.blocks("a").items()]
            assert sorted(told, key=repr) == sorted(model.blocks.held(), key=repr)
        assert len(held | set(model.blocks.held())) > len(model.blocks.held()), "none was evicted"
        last = block_hashes([256, *b"something else altogether"], 4)
        assert made.index.overlap(last) == {"a": len(last)}
        # All of it by events: no snapshot but the empty one that the first event stands for.
        assert made.index.statistics().snapshots == 1


async def test_an_engine_without_a_cache_of_blocks_says_so() -> None:
    async with open_exact_engine(context_tokens_max=64, block_count=8) as engine:
        assert not engine.listen_blocks(lambda _: None)


async def test_what_was_missed_hides_the_instance_until_its_snapshot_is_there(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.follow("a")
        source.tell([Stored(b"", (A, B))])
        await trio.sleep(0.1)
        made.broker.drop_next(1)
        source.tell([Removed((B,))])
        await trio.sleep(0.1)
        # Nothing has come since, so nothing is known to be missing.
        assert made.index.overlap((A, B)) == {"a": 2}
        # The event, the request that it leads to: the answer does not come.
        made.broker.delay_s = 0.5
        source.tell([Stored(A, (C,))])
        await trio.sleep(0.6)
        assert made.index.overlap((A, B)) == {}
        assert made.index.statistics().lost == 1
        await trio.sleep(2)
        assert made.index.overlap((A, C)) == {"a": 2}
        statistics = made.index.statistics()
        assert (statistics.lost, statistics.gaps) == (0, 1)


async def test_the_outbox_is_bounded_and_what_is_beyond_is_one_gap(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.follow("a")
        source.tell([Stored(b"", (A,))])
        await trio.sleep(0.1)
        for start in range(10, 4010, 1000):
            source.tell([Stored(b"", hashes(*range(start, start + 1000)))])
            assert source.statistics().waiting_blocks <= 2000
        await trio.sleep(3)
        assert source.statistics().dropped == 1
        assert len(made.held("a")) == source.statistics().blocks == 4001
        assert made.index.statistics().gaps == 1


async def test_a_broker_that_was_away_costs_a_snapshot_and_no_block(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.follow("a")
        made.broker.stop()
        for number in range(50):
            source.tell([Stored(b"", hashes(number))])
            await trio.sleep(0.01)
        assert source.statistics().dropped > 40
        made.broker.start()
        await trio.sleep(5)
        assert len(made.held("a")) == 50


async def test_an_instance_that_left_is_forgotten_and_its_late_events_are_counted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.source("a")
        source.tell([Stored(b"", (A,))])
        await trio.sleep(0.5)
        assert made.index.statistics().unknown == 1
        assert made.index.overlap((A,)) == {}
        made.index.join("a")
        # Its next beat tells that we know nothing of it.
        await trio.sleep(2)
        assert made.index.overlap((A,)) == {"a": 1}
        made.index.leave("a")
        source.tell([Stored(A, (B,))])
        await trio.sleep(0.1)
        assert made.index.overlap((A,)) == {}
        statistics = made.index.statistics()
        assert (statistics.instances, statistics.blocks, statistics.unknown) == (0, 0, 2)


async def test_a_process_that_begins_anew_is_followed_from_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        made.index.join("a")
        scope = trio.CancelScope()
        old = await made.source("a", scope=scope)
        old.tell([Stored(b"", (A, B))])
        await trio.sleep(0.1)
        scope.cancel()
        new = await made.source("a", incarnation=2)
        new.tell([Stored(b"", (C,))])
        await trio.sleep(0.1)
        assert made.held("a") == {C}
        assert made.index.statistics().restarts == 1


# --- bad publishers --------------------------------------------------------------------------


async def test_numbers_that_go_back_are_counted_and_mended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.follow("a")
        for digest in (A, B, C):
            source.tell([Stored(b"", (digest,))])
            await trio.sleep(0.01)
        await made.say("a", 1, 2, encode_batch([Stored(b"", (D,))]))
        await trio.sleep(1)
        assert made.held("a") == {A, B, C}
        assert made.index.statistics().backwards == 1


async def test_of_two_that_claim_one_id_the_older_is_counted_and_not_heard(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as made:
        source = await made.follow("a", incarnation=5)
        source.tell([Stored(b"", (A,))])
        await trio.sleep(0.1)
        for number in range(1, 30):
            await made.say("a", 4, number, encode_batch([Stored(b"", (D,))]))
            await trio.sleep(0.3)
        assert made.held("a") == {A}
        assert made.index.statistics().outdated == 29
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
        source.tell([Stored(b"", (A,))])
        await trio.sleep(0.1)
        await made.say("a", 1 << 60, 1, encode_batch([Stored(b"", (D,))]))
        await trio.sleep(0.1)
        assert made.held("a") == {D}
        await trio.sleep(60)
        assert made.held("a") == {A}
        source.tell([Stored(A, (B,))])
        await trio.sleep(1)
        assert made.held("a") == {A, B}


async def test_a_newer_one_that_says_nothing_of_use_hides_the_instance_for_a_while_only(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.follow("a", incarnation=5)
        source.tell([Stored(b"", (A,))])
        await trio.sleep(0.1)
        await made.say("a", 6, 77, encode_batch([Stored(b"", (D,))]))
        await trio.sleep(0.1)
        assert made.index.overlap((A,)) == made.index.overlap((D,)) == {}
        await trio.sleep(20)
        assert made.held("a") == {A}
        assert made.index.statistics().outdated > 0


async def test_garbage_is_counted_hides_nobody_else_and_is_mended(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as made:
        made.index.join("a")
        made.index.join("b")
        source, other = await made.source("a"), await made.source("b")
        source.tell([Stored(b"", (A,))])
        other.tell([Stored(b"", (B,))])
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
        assert made.index.statistics().malformed == 103
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
        table = BlockTable()
        source = EventSource(
            made.plane, TOPIC, publisher="a", incarnation=1, snapshot=table.encode_part
        )
        await made.nursery.start(source.run)
        table.apply(Stored(b"", (A,)))
        await source.publish(encode_batch([Stored(b"", (A,))]))
        table.apply(Stored(A, (B,)))
        await source.publish(msgspec.msgpack.encode([["moved", B]]))
        await trio.sleep(0.5)
        assert made.held("a") == {A, B}
        assert made.index.statistics().malformed == 1


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
        await made.say("a", 1, 7, encode_batch([Stored(b"", (A,))]))
        await trio.sleep(60)
        assert made.held("a") == set()
        assert made.index.statistics().lost == 1
        assert 20 < asked < 40
        assert made.index.statistics().malformed == asked
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
        source.tell([Stored(b"", (A,))])
        await trio.sleep(2)
        assert source.statistics().malformed == 3
        assert made.held("a") == {A}


# --- bounds ----------------------------------------------------------------------------------


async def test_blocks_beyond_the_bounds_are_refused_and_the_rest_is_true(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster(instance_blocks_max=3, blocks_max=5) as made:
        made.index.join("a")
        made.index.join("b")
        other, source = await made.source("a"), await made.source("b")
        other.tell([Stored(b"", (A, B, C, D))])
        await trio.sleep(0.1)
        source.tell([Stored(b"", (A, B, C, D))])
        await trio.sleep(0.1)
        assert made.index.overlap((A, B, C, D)) == {"a": 3, "b": 2}
        statistics = made.index.statistics()
        assert (statistics.blocks, statistics.refused_blocks) == (5, 3)
        made.index.leave("a")
        source.tell([Cleared(), Stored(b"", (A, B, C))])
        await trio.sleep(0.1)
        assert made.index.overlap((A, B, C, D)) == {"b": 3}
        assert made.index.statistics().blocks == 3


async def test_instances_beyond_the_bound_are_followed_as_soon_as_another_leaves(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster(instances_max=1) as made:
        for name in ("a", "b"):
            made.index.join(name)
            (await made.source(name)).tell([Stored(b"", (A,))])
            await trio.sleep(0.1)
        assert made.index.overlap((A,)) == {"a": 1}
        assert made.index.statistics().ignored == 1
        made.index.leave("a")
        await trio.sleep(3)
        assert made.index.overlap((A,)) == {"b": 1}


async def test_a_snapshot_larger_than_a_message_comes_in_parts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        made.broker.message_bytes_max = 4096
        source = await made.source("a")
        source.tell([Stored(b"", hashes(*range(1000)))])
        await trio.sleep(0.1)
        source.tell([Removed(hashes(*range(100)))])
        await trio.sleep(0.1)
        made.index.join("a")
        await trio.sleep(3)
        assert made.held("a") == set(hashes(*range(100, 1000)))
        # The first answer says how many parts, then each of them.
        assert source.statistics().snapshots > 4


async def test_a_snapshot_of_more_parts_than_are_allowed_is_refused_and_counted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        made.broker.message_bytes_max = 256
        source = await made.source("a")
        source.tell([Stored(b"", hashes(*range(1500)))])
        made.index.join("a")
        await trio.sleep(5)
        assert made.held("a") == set()
        statistics = made.index.statistics()
        assert statistics.lost == 1
        assert statistics.malformed > 0

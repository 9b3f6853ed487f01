"""KV events from a worker to a router's index: what is told, what is missed, and bad publishers."""

from __future__ import annotations

from contextlib import aclosing

import trio
import trio.testing

from tests.runtime.kv.indexing import A, B, C, D, cluster, hashes
from tests.runtime.kv.naming import OWN, block_hashes
from trinamo.runtime.context import Context
from trinamo.runtime.engines.loop.host import open_engine_host
from trinamo.runtime.engines.mocker.engine import (
    MockerEngine,
    MockerOptions,
    costed_hop,
    open_mocker_engine,
)
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.protocol.kv.events import Cleared, Removed, Stored
from trinamo.runtime.protocol.kv.names import block_keys
from trinamo.runtime.protocol.openai.generate import GenerateRequest


def stored(pool: BlockPool) -> set[bytes]:
    return {name for event in pool.stored() for name in event.block_hashes}


async def test_the_overlap_is_the_leading_blocks_that_each_instance_holds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        for name in ("a", "b", "c"):
            made.index.join(name)
        first, second = await made.source("a"), await made.source("b")
        await made.source("c")
        first.tell([Stored((A, B, C))])
        second.tell([Stored((A,)), Stored((D,))])
        await trio.sleep(0.1)
        assert made.overlap(A, B, C) == {"a": 3, "b": 1}
        assert made.overlap(D) == {"b": 1}
        assert made.overlap() == {}
        first.tell([Removed((C,))])
        second.tell([Cleared()])
        await trio.sleep(0.1)
        assert made.overlap(A, B, C) == {"a": 2}
        assert made.held("a") == {A, B}
        assert made.index.statistics()["events"] == 5


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

        assert engine.kv is not None
        pool = engine.kv.pool
        await generate("not told yet, but held")
        assert engine.listen_blocks(source.tell, OWN)
        held = stored(pool)
        for prompt in ("the same start", "the same begin", "something else altogether"):
            held |= stored(pool)
            await generate(prompt)
            await trio.sleep(0.1)
            assert made.index.blocks("a") == set(block_keys(stored(pool)))
        assert held - stored(pool), "none was evicted"
        last = block_hashes([256, *b"something else altogether"], 4)
        assert made.overlap(*last) == {"a": len(last)}
        # All of it by events: no snapshot but the empty one that the first event stands for.
        assert made.index.statistics()["snapshots"] == 1


async def test_an_engine_without_a_cache_of_blocks_says_so() -> None:
    options = MockerOptions(enable_prefix_caching=False)
    async with open_mocker_engine(options) as engine:
        assert not engine.listen_blocks(lambda _: None, OWN)


async def test_what_was_missed_hides_the_instance_until_its_snapshot_is_there(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.follow("a")
        source.tell([Stored((A, B))])
        await trio.sleep(0.1)
        made.broker.drop_next(1)
        source.tell([Removed((B,))])
        await trio.sleep(0.1)
        # Nothing has come since, so nothing is known to be missing.
        assert made.overlap(A, B) == {"a": 2}
        # The event, the request that it leads to: the answer does not come.
        made.broker.delay_s = 0.5
        source.tell([Stored((C,))])
        await trio.sleep(0.6)
        assert made.overlap(A, B) == {}
        assert made.index.statistics()["lost"] == 1
        await trio.sleep(2)
        assert made.overlap(A, C) == {"a": 2}
        statistics = made.index.statistics()
        assert (statistics["lost"], statistics["gaps"]) == (0, 1)


async def test_the_outbox_is_bounded_and_what_is_beyond_is_one_gap(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.follow("a")
        source.tell([Stored((A,))])
        await trio.sleep(0.1)
        for start in range(10, 4010, 1000):
            source.tell([Stored(hashes(*range(start, start + 1000)))])
            assert source.statistics()["waiting_blocks"] <= 2000
        await trio.sleep(3)
        assert source.statistics()["dropped"] == 1
        assert len(made.held("a")) == source.statistics()["blocks"] == 4001
        assert made.index.statistics()["gaps"] == 1


async def test_a_broker_that_was_away_costs_a_snapshot_and_no_block(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.follow("a")
        made.broker.stop()
        for number in range(50):
            source.tell([Stored(hashes(number))])
            await trio.sleep(0.01)
        assert source.statistics()["dropped"] > 40
        made.broker.start()
        await trio.sleep(5)
        assert len(made.held("a")) == 50


async def test_an_instance_that_left_is_forgotten_and_its_late_events_are_counted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        source = await made.source("a")
        source.tell([Stored((A,))])
        await trio.sleep(0.5)
        assert made.index.statistics()["unknown"] == 1
        assert made.overlap(A) == {}
        made.index.join("a")
        # Its next beat tells that we know nothing of it.
        await trio.sleep(2)
        assert made.overlap(A) == {"a": 1}
        made.index.leave("a")
        source.tell([Stored((B,))])
        await trio.sleep(0.1)
        assert made.overlap(A) == {}
        statistics = made.index.statistics()
        assert (statistics["instances"], statistics["blocks"], statistics["unknown"]) == (0, 0, 2)


async def test_a_process_that_begins_anew_is_followed_from_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster() as made:
        made.index.join("a")
        scope = trio.CancelScope()
        old = await made.source("a", scope=scope)
        old.tell([Stored((A, B))])
        await trio.sleep(0.1)
        scope.cancel()
        new = await made.source("a", incarnation=2)
        new.tell([Stored((C,))])
        await trio.sleep(0.1)
        assert made.held("a") == {C}
        assert made.index.statistics()["restarts"] == 1

"""No more of a decode worker's pool than its share is at the mercy of prefill workers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

import attrs
import trio

from tests.runtime.disaggregation.serving import alone, make_engine, prompt, tokens
from tests.runtime.disaggregation.test_engine import over
from tests.runtime.engines.loop.hosting import Gathering
from trinamo.runtime.context import Context
from trinamo.runtime.disaggregation.engine import Lending
from trinamo.runtime.engines.handoff import Prompt, Reservation
from trinamo.runtime.engines.loop.host import open_engine_host
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.protocol.disaggregation.decision import PrefillReason


@attrs.frozen
class Reserved:
    prompt: Prompt
    block_ids: list[int]


def reserved(pool: BlockPool, prompt: Prompt, blocks: int) -> Reservation:
    taken = pool.take(blocks)
    assert taken is not None
    return cast("Reservation", Reserved(prompt, taken))


def test_what_is_promised_lent_or_in_quarantine_is_counted_once() -> None:
    pool, asked = BlockPool(20), Prompt(token_ids=range(15), cached_tokens=4)
    lending = Lending(pool, block_tokens=4, share=0.5)
    with ExitStack() as first:
        lend = first.enter_context(lending.promise(asked))
        assert lending.room == 10 - 3
        with lending.promise(asked):
            assert lending.room == 10 - 6
        place = reserved(pool, asked, 4)
        skip, blocks = lend(place) or (0, [])
        assert (skip, blocks) == (1, list(place.block_ids[1:]))
        assert (lending.room, pool.in_flight_count) == (7, 3)
        # A transfer of one of them hangs.
        pool.lease(blocks[:1])
        pool.quarantine(blocks[:1])
        assert lending.room == 7
    assert (lending.room, pool.in_flight_count, pool.quarantined_count) == (9, 0, 1)


def test_a_prompt_that_has_lost_its_prefix_meanwhile_is_not_lent_more_than_there_is() -> None:
    pool, asked = BlockPool(20), Prompt(token_ids=range(40), cached_tokens=32)
    lending = Lending(pool, block_tokens=4, share=0.3)
    with lending.promise(asked) as lend:
        again = attrs.evolve(asked, cached_tokens=0)
        assert lend(reserved(pool, again, 10)) is None
        assert pool.in_flight_count == 0
    assert lending.room == 6


async def test_a_prompt_beyond_the_share_is_computed_here() -> None:
    request = prompt(100)
    async with open_engine_host(make_engine()) as host:
        # Of 512 blocks 25 are to come, and 20 may.
        engine, metrics = over(host, share=20 / 512)
        sink = Gathering()
        with trio.fail_after(120):
            await engine.forward(request, Context("r"), sink)
    assert tokens(sink.deltas) == await alone(request)
    assert metrics.counts == {PrefillReason.POOL_LENT: 1}

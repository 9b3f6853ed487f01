"""What an engine lends to a peer comes back: when it is done, left, or over; and never too early."""

from __future__ import annotations

from contextlib import nullcontext

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.runtime.kv.transfer.engines import (
    Village,
    block,
    cache,
    eventually,
    is_unfenced,
    open_pair,
    transfers_of,
)
from tests.runtime.one_process import OneProcess, open_process
from trinamo.runtime.errors import (
    RemoteProtocolError,
    RequestError,
    StaleMemoryError,
    UnavailableError,
)
from trinamo.runtime.kv.transfer.settlement import Grant
from trinamo.runtime.protocol.transfer.settlement import decode_peer


async def test_a_grant_is_completed_by_nobody_but_whom_it_was_given_to() -> None:
    """A peer with a grant of its own says that it is done: the others' go on."""
    async with (
        open_pair(OneProcess()) as pair,
        pair.there.grant([6]) as ours,
        pair.there.grant([7]) as other,
    ):
        read = pair.here.read
        await read(pair.there.engine_id, [0], [7], ticket=other.ticket, notify=b"mine")
        assert await other.completed() == b"mine"
        for ticket in (0, other.ticket, ours.ticket + 1):
            with pytest.raises((StaleMemoryError, RequestError)):
                await read(pair.there.engine_id, [0], [6], ticket=ticket, notify=b"forged")
        with trio.move_on_after(0.01) as scope:
            await ours.completed()
        assert scope.cancelled_caught
        assert pair.owned.pool.in_flight_count == 1
        await read(pair.there.engine_id, [0], [6], ticket=ours.ticket, notify=b"true")
        assert await ours.completed() == await ours.completed() == b"true"
        assert pair.owned.pool.in_flight_count == 0


async def test_a_grant_that_is_left_is_never_completed() -> None:
    async def wait(grant: Grant) -> None:
        with pytest.raises(StaleMemoryError, match="before the peer was done"):
            await grant.completed()

    async with (
        open_pair(OneProcess()) as pair,
        trio.open_nursery() as nursery,
        pair.there.grant([6]) as grant,
    ):
        nursery.start_soon(wait, grant)
        await trio.testing.wait_all_tasks_blocked()


async def test_leaving_a_grant_ends_it_however_it_is_left() -> None:
    async with open_pair(OneProcess()) as pair:
        with trio.CancelScope() as scope:
            async with pair.there.grant([6]):
                assert pair.owned.pool.in_flight_count == 1
                scope.cancel()
                await trio.sleep_forever()
        assert pair.owned.pool.in_flight_count == 0
        tickets: list[int] = []

        async def stumble() -> None:
            async with pair.there.grant([6]) as grant:
                tickets.append(grant.ticket)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await stumble()
        assert pair.owned.pool.in_flight_count == 0
        with pytest.raises(StaleMemoryError):
            await pair.here.read(pair.there.engine_id, [0], [6], ticket=tickets[0])


async def test_a_grant_ends_by_itself_when_its_time_to_live_is_over(
    autojump_clock: MockClock,
) -> None:
    village = Village()
    async with (
        village.live("decode", cache(1)) as (here, _),
        village.live("prefill", cache(2)) as (there, _),
        there.grant([3], ttl_s=20) as grant,
    ):
        await trio.sleep(19)
        await here.read("prefill", [0], [3], ticket=grant.ticket)
        with pytest.raises(StaleMemoryError, match="before the peer was done"):
            await grant.completed()
        assert there.kv.pool.in_flight_count == 0
        with pytest.raises(StaleMemoryError):
            await here.read("prefill", [0], [3], ticket=grant.ticket)


async def test_a_peer_that_may_read_cannot_write() -> None:
    async with open_pair(OneProcess()) as pair, pair.there.grant([6]) as grant:
        before = block(pair.owned, 6)
        with pytest.raises(StaleMemoryError, match="for reading"):
            await pair.here.write(pair.there.engine_id, [0], [6], ticket=grant.ticket)
        assert block(pair.owned, 6) == before


async def test_a_reader_without_a_fence_costs_no_question(autojump_clock: MockClock) -> None:
    """What it reads of blocks that are used again it throws away."""
    village = Village()
    async with village.live("prefill", cache(2)) as (there, plane):
        is_unfenced(there, plane.backend)
        async with there.grant([3]):
            assert there.kv.pool.in_flight_count == 1
        assert there.kv.pool.in_flight_count == there.kv.pool.quarantined_count == 0


async def test_blocks_that_a_peer_never_lets_go_of_are_quarantined_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transports = OneProcess()
    async with open_pair(transports, shutdown__transfer_timeout_s=0.05) as pair:
        is_unfenced(pair.there)
        writer = pair.here.descriptor()
        async with pair.there.grant([1, 2], writer, may_write=True) as grant:
            pair.here.leases.tickets.enter(grant.ticket)
        await pair.owner.shutdown()
        assert "drain transfers did not finish within 0.05 s" in caplog.text
        owned, metrics = pair.owned, pair.owner.metrics
    assert owned.pool.quarantined_count == 2
    assert metrics.get_sample_value("trinamo_quarantined_blocks") == 2


async def test_a_writer_that_is_gone_gives_back_what_it_was_granted() -> None:
    transports = OneProcess()
    async with open_process(transports, serving=True, kv=cache(1)) as owner:
        there = transfers_of(owner)
        is_unfenced(there)
        async with open_process(transports, serving=True, kv=cache(2)) as reader:
            # Nor is its connection kept.
            await there.connect(transfers_of(reader).engine_id)
            writer = transfers_of(reader).descriptor()
            gone = there.grant([2], writer, may_write=True)
            await gone.__aenter__()
            async with there.grant([1], writer, may_write=True) as settled:
                pass
            await settled.wait_settled()
        await gone.__aexit__(None, None, None)
        # The task that keeps the blocks hears of it in the next turn.
        await eventually(lambda: not there.kv.pool.in_flight_count)
        assert there.kv.pool.quarantined_count == 0
        metric = "trinamo_transfer_inquiries_total"
        counted = [
            owner.metrics.get_sample_value(metric, {"status": each}) or 0
            for each in ("settled", "gone")
        ]
        assert counted[0] >= 1
        assert counted[1] >= 1


async def test_a_peer_that_is_proven_dead_is_not_transferred_with_any_more() -> None:
    async with open_pair(OneProcess()) as pair:
        data = pair.here.descriptor()
        assert data is not None
        peer = await pair.there.connect(pair.here.engine_id)
        told = decode_peer(data)
        await pair.there.evict(msgspec.structs.replace(told, incarnation="00"))
        assert peer.usable == ["tcp"], "another incarnation of it"
        await pair.there.evict(told)
        assert peer.usable == []
        assert pair.there.statistics().peers == 0


@pytest.mark.parametrize("is_fenced", [True, False])
async def test_a_writer_that_has_died_since_it_asked_is_refused(is_fenced: bool) -> None:
    """Where nobody fences: elsewhere its death costs nothing."""
    transports = OneProcess()
    async with open_process(transports, serving=True, kv=cache(1)) as owner:
        there = transfers_of(owner)
        if not is_fenced:
            is_unfenced(there)
        async with open_process(transports, serving=True, kv=cache(2)) as reader:
            unmet = transfers_of(reader).descriptor()
        async with open_process(transports, serving=True, kv=cache(2)) as reader:
            met = transfers_of(reader).descriptor()
            async with there.grant([1], met, may_write=True):
                pass
        for writer in (unmet, None):
            refused = nullcontext() if is_fenced else pytest.raises(UnavailableError)
            with refused:
                async with there.grant([1], writer, may_write=True):
                    pass
        async with there.grant([1], met, may_write=True):
            pass  # It was met before it died.


async def test_a_descriptor_that_is_none_grants_nothing() -> None:
    async with open_pair(OneProcess()) as pair:
        with pytest.raises(RemoteProtocolError):
            async with pair.there.grant([1], b"not a descriptor"):
                raise AssertionError("it was granted")
        assert pair.owned.pool.in_flight_count == 0


async def test_where_nobody_could_be_asked_there_is_no_descriptor() -> None:
    async with Village().live("decode", cache(1)) as (here, _):
        assert here.descriptor() is None

"""Whatever fails on the way, a move that is reported as done has moved every block, and no other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings, strategies as st

from trinamo.runtime.config.planes import TransferConfig
from trinamo.runtime.errors import (
    ConnectError,
    CorruptedError,
    DeadlineError,
    DisconnectedError,
    StalledError,
    TransferError,
    TrinamoError,
)
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.transfer.leases import open_block_leases
from trinamo.runtime.kv.transfer.metrics import TransferMetrics
from trinamo.runtime.kv.transfer.router import TransferRouter, open_transfer_router
from trinamo.runtime.metrics.tallies import Registry
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.memory.transfer import (
    TransferFabric,
    TransferFaults,
    open_memory_transfer_plane,
)

BLOCKS, SIZE = 12, 8


@st.composite
def faults(draw: st.DrawFn) -> TransferFaults:
    where = st.none() | st.integers(0, BLOCKS)
    return TransferFaults(
        is_unreachable=draw(st.sampled_from([False, False, False, True])),
        breaks_after=draw(where),
        stalls_after=draw(where),
        corrupts=draw(where),
        lands_late=draw(st.booleans()),
        block_s=draw(st.sampled_from([0.0, 0.1, 1.0])),
    )


@attrs.frozen
class Case:
    direction: Direction
    here: list[int]
    there: list[int]
    first: TransferFaults
    second: TransferFaults
    cancel_after_s: float | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(0, BLOCKS))
    return Case(
        direction=draw(st.sampled_from(Direction)),
        here=draw(st.permutations(range(BLOCKS)))[:count],
        there=draw(st.permutations(range(BLOCKS)))[:count],
        first=draw(faults()),
        second=draw(faults()),
        cancel_after_s=draw(st.none() | st.floats(0, 15)),
    )


def is_whole(faults: TransferFaults, count: int) -> bool:
    """Whether a backend with these faults can move so many blocks."""
    places = (faults.breaks_after, faults.stalls_after, faults.corrupts)
    return not faults.is_unreachable and all(at is None or at >= count for at in places)


def must_be_done(case: Case) -> bool:
    """A backend that works moves everything, also after one that failed and has let go of the blocks."""
    if case.cancel_after_s is not None:
        return False
    count = len(case.here)
    return is_whole(case.first, count) or (
        is_whole(case.second, count) and not case.first.lands_late
    )


def excuses(faults: TransferFaults) -> Iterator[type[TrinamoError]]:
    """The errors that these faults may end in, and no others."""
    if faults.is_unreachable:
        yield ConnectError
    if faults.breaks_after is not None:
        yield DisconnectedError
    if faults.stalls_after is not None:
        yield from (DeadlineError, StalledError)
    if faults.corrupts is not None:
        yield CorruptedError
    if faults.lands_late:
        yield TransferError


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_a_move_is_whole_or_an_error_and_no_block_is_lost_or_reused(case: Case) -> None:
    """I9: free + used + in flight + quarantined is the pool; reported as done means equal bytes."""
    trio.run(run, case, clock=trio.testing.MockClock(autojump_threshold=0))


async def run(case: Case) -> None:
    fabric, pool = TransferFabric(), BlockPool(BLOCKS)
    metrics = TransferMetrics(Registry())
    here = bytearray(random.Random(1).randbytes(BLOCKS * SIZE))
    there = bytearray(random.Random(2).randbytes(BLOCKS * SIZE))
    async with (
        open_memory_transfer_plane(fabric, backend="first") as first,
        open_memory_transfer_plane(fabric, backend="second") as second,
        open_memory_transfer_plane(fabric, backend="first") as first_there,
        open_memory_transfer_plane(fabric, backend="second") as second_there,
        open_block_leases(pool, drain_s=3, rng=random.Random(1)) as leases,
        open_transfer_router(
            [first, second],
            metrics=metrics,
            leases=leases,
            section=TransferConfig(attempt_timeout_s=6, settle_timeout_s=2),
        ) as router,
        open_transfer_router([first_there, second_there], metrics=metrics) as other,
    ):
        local = await router.register(here, block_bytes=SIZE)
        owned = await other.register(there, block_bytes=SIZE)
        peer = await router.connect(owned.describe())
        first.mover.faults, second.mover.faults = case.first, case.second
        pool.take(BLOCKS)
        before = bytes(here), bytes(there)
        is_done, failed = False, None
        with trio.move_on_after(
            float("inf") if case.cancel_after_s is None else case.cancel_after_s
        ):
            try:
                await router.move(case.direction, local, case.here, peer, case.there, deadline_s=20)
                is_done = True
            except TrinamoError as error:
                failed = error
        assert is_done or not must_be_done(case), (
            f"a backend worked, and the move failed: {failed!r}"
        )
        allowed = {type(None), *excuses(case.first), *excuses(case.second)}
        assert type(failed) in allowed, repr(failed)
        check_counts(pool)
        if is_done:
            # Settled before it is reported, so nothing may change the target any more.
            await trio.sleep(100)
            check_bytes(case, before, here, there)
        pool.give_back(range(BLOCKS))
        check_counts(pool)
        await leases.drain()
        assert pool.in_flight_count == 0
        check_counts(pool)
        after, quarantined = bytes(here), pool.quarantined_count
        await trio.sleep(100)
        if not quarantined:
            assert bytes(here) == after, "bytes landed in blocks that are free again"
        assert quarantined <= len(case.here)
        # Every transfer has settled by now, however late, and no block is lost.
        assert pool.free_count == BLOCKS


def check_counts(pool: BlockPool) -> None:
    counts: list[Any] = [pool.free_count, pool.used_count]
    counts += [pool.in_flight_count, pool.quarantined_count]
    assert min(counts) >= 0
    assert sum(counts) == BLOCKS


def check_bytes(case: Case, before: tuple[bytes, bytes], here: bytearray, there: bytearray) -> None:
    is_read = case.direction is Direction.READ
    expected = bytearray(before[0] if is_read else before[1])
    source = before[1] if is_read else before[0]
    pairs = zip(case.here, case.there, strict=True)
    for a, b in pairs:
        target, origin = (a, b) if is_read else (b, a)
        expected[target * SIZE : (target + 1) * SIZE] = source[origin * SIZE : (origin + 1) * SIZE]
    assert (here if is_read else there) == expected
    assert (there if is_read else here) == (before[1] if is_read else before[0])


def test_a_router_that_moves_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any) -> None:
        raise ConnectError("not today")

    monkeypatch.setattr(TransferRouter, "_attempt", fails)
    case = Case(Direction.READ, [0, 1], [2, 3], TransferFaults(), TransferFaults(), None)
    with pytest.raises(AssertionError, match="a backend worked"):
        trio.run(run, case, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_wrong_kind_of_error_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any) -> None:
        raise CorruptedError("of another fault")

    monkeypatch.setattr(TransferRouter, "_attempt", fails)
    broken = TransferFaults(breaks_after=0)
    case = Case(Direction.READ, [0, 1], [2, 3], broken, broken, None)
    with pytest.raises(AssertionError, match="of another fault"):
        trio.run(run, case, clock=trio.testing.MockClock(autojump_threshold=0))

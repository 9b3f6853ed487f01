"""Many waits of one length: each expires at its time, once, and those that end do not."""

from __future__ import annotations

import math

import trio
from trio.testing import MockClock

from trinamo.runtime.deadlines import Deadlines


async def test_what_has_begun_expires_at_its_time_and_what_has_ended_does_not(
    autojump_clock: MockClock,
) -> None:
    expired: list[tuple[str, float]] = []

    def expire(waiting: str) -> None:
        expired.append((waiting, trio.current_time()))

    deadlines = Deadlines(5.0, expire)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deadlines.run)
        await trio.sleep(1)
        deadlines.begin("a")
        deadlines.begin("b")
        await trio.sleep(3)
        deadlines.begin("c")
        deadlines.end("b")
        deadlines.end("unknown")
        await trio.sleep(20)
        deadlines.begin("d")
        await trio.sleep(4.9)
        deadlines.end("d")
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    assert expired == [("a", 6.0), ("c", 9.0)]


async def test_one_that_expires_may_begin_anew(autojump_clock: MockClock) -> None:
    times: list[float] = []

    def again(waiting: str) -> None:
        times.append(trio.current_time())
        deadlines.begin(waiting)

    deadlines = Deadlines(2.0, again)
    deadlines.begin("a")
    with trio.move_on_after(7):
        await deadlines.run()
    assert times == [2.0, 4.0, 6.0]


async def test_an_infinite_timeout_never_expires(autojump_clock: MockClock) -> None:
    expired: list[str] = []
    deadlines = Deadlines(math.inf, expired.append)
    deadlines.begin("a")
    with trio.move_on_after(1e6):
        await deadlines.run()
    assert not expired

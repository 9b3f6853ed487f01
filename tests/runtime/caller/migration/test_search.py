"""Whom a request goes to next, and how long it waits where nobody is there."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.runtime.caller.requests import NAME, SeededEnv, entry, instance
from trinamo.runtime.caller.router import WAITING_MAX, Router
from trinamo.runtime.caller.search import LOOK_INTERVAL_S, Asked, Patience, Search
from trinamo.runtime.context import Context
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    OverloadedError,
    UnavailableError,
    UpstreamError,
)
from trinamo.runtime.planes import Put, Snapshot
from trinamo.transports.memory.control import MemoryControlPlane


def router(*ids: str) -> Router:
    made = Router(MemoryControlPlane(), NAME, SeededEnv(), inhibit_s=5, wait_s=10)
    made.apply(Snapshot(1, [entry(instance(each)) for each in ids]))
    return made


def search(
    made: Router,
    *,
    context: Context | None = None,
    attempts_max: int = 3,
    payload_bytes: int = 0,
    **asked: Any,
) -> Search:
    of = Asked(None, bytes(payload_bytes), **{"patience": Patience(), **asked})
    return Search(made, context or Context("r"), of, attempts_max)


async def comes(made: Router, instance_id: str, after_s: float) -> None:
    await trio.sleep(after_s)
    made.apply(Put(entry(instance(instance_id))))


async def test_a_replay_waits_for_another_and_never_asks_the_dead_one(
    autojump_clock: MockClock,
) -> None:
    """The dead one is in discovery until its lease ends; the new one is asked the moment it joins."""
    made = router("1")
    made.fail(instance("1"), DisconnectedError("gone"), Context("r"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(comes, made, "2", 1.5)
        found = await search(made, patience=Patience(["1"], waits_for_room=True)).choose()
    assert found.id == "2"
    assert trio.current_time() == pytest.approx(1.5)
    assert made.seeking_count == 0


async def test_one_that_was_lost_is_asked_again_once_it_is_well(autojump_clock: MockClock) -> None:
    made = router("1")
    seeking = search(made)
    seeking.fail(await seeking.choose(), ConnectError("refused"))
    assert (await seeking.choose()).id == "1"
    assert 5 <= trio.current_time() <= 5 + 2 * LOOK_INTERVAL_S


@pytest.mark.parametrize("comes_one", [True, False])
async def test_when_all_have_died_at_once_the_next_that_joins_is_waited_for(
    autojump_clock: MockClock, comes_one: bool
) -> None:
    """They are listed until their leases end; who was not reached was no attempt."""
    made = router("1", "2", "3", "4", "5")
    seeking, tried = search(made, attempts_max=3), []

    async def seek() -> str:
        while True:
            found = await seeking.choose()
            if found.id == "9":
                return found.id
            tried.append(found.id)
            seeking.fail(found, ConnectError("refused"))

    async with trio.open_nursery() as nursery:
        if comes_one:
            nursery.start_soon(comes, made, "9", 1.5)
            assert await seek() == "9"
            assert sorted(tried) == ["1", "2", "3", "4", "5"]
        else:
            with pytest.raises((UnavailableError, ConnectError)):
                await seek()
            assert 10 <= trio.current_time() <= 10 + 2 * LOOK_INTERVAL_S


async def test_in_the_end_nobody_is_there(autojump_clock: MockClock) -> None:
    """It is one error whatever came before, and it says what that was."""
    made = router("1")
    seeking = search(made, attempts_max=5)
    for _ in range(2):
        seeking.fail(await seeking.choose(), DisconnectedError("its link broke"))
    with pytest.raises(UnavailableError, match=r"none came in 10 s.*its link broke") as raised:
        await seeking.choose()
    assert trio.current_time() == pytest.approx(10)
    assert not raised.value.definite
    with pytest.raises(UnavailableError, match="does not have a live instance"):
        await search(router()).choose()


async def test_the_one_that_is_asked_for_by_name_is_asked_once() -> None:
    seeking = search(router("1", "2"), instance_id="2")
    found = await seeking.choose()
    assert found.id == "2"
    with pytest.raises(DisconnectedError):
        seeking.fail(found, DisconnectedError("its link broke"))


async def test_nobody_is_asked_after_two_that_fell_silent_over_a_request() -> None:
    context = Context("r")
    seeking = search(router("1", "2", "3", "4"), context=context, attempts_max=4)
    silent = DisconnectedError("it said nothing")
    context.silence_count = 1
    seeking.fail(await seeking.choose(), silent)
    context.silence_count = 2
    second = await seeking.choose()
    with pytest.raises(DisconnectedError):
        seeking.fail(second, silent)


@pytest.mark.parametrize("error", [OverloadedError("full"), UpstreamError("500")])
async def test_who_was_there_and_said_no_is_not_waited_for(
    autojump_clock: MockClock, error: Any
) -> None:
    seeking = search(router("1"))
    seeking.fail(await seeking.choose(), error)
    with pytest.raises(type(error)):
        await seeking.choose()
    assert trio.current_time() == 0


@pytest.mark.parametrize(
    "last",
    [UnavailableError("draining"), DisconnectedError("its link broke"), ConnectError("refused")],
)
async def test_who_is_full_says_why_nobody_took_it_whoever_was_asked_last(last: Any) -> None:
    """Such a request waits at the front door for a place; any other error is its client's."""
    seeking = search(router("1", "2", "3", "4"), attempts_max=3)
    for _ in range(2):
        seeking.fail(await seeking.choose(), OverloadedError("full"))
    third = await seeking.choose()
    with pytest.raises(OverloadedError, match="full"):
        seeking.fail(third, last)


async def test_a_replay_waits_for_room_and_a_new_request_does_so_elsewhere(
    autojump_clock: MockClock,
) -> None:
    """The client of a replay has a part of its answer: it cannot be told to come later."""
    seeking = search(router("1", "2"), attempts_max=1, patience=Patience(waits_for_room=True))
    for _ in range(4):
        seeking.fail(await seeking.choose(), OverloadedError("full"))
    assert LOOK_INTERVAL_S <= trio.current_time() <= 3 * LOOK_INTERVAL_S

    async def ask_again_and_again() -> None:
        while trio.current_time() < 100:
            seeking.fail(await seeking.choose(), OverloadedError("full"))

    with pytest.raises(OverloadedError):
        await ask_again_and_again()
    assert trio.current_time() == pytest.approx(10, abs=LOOK_INTERVAL_S)


async def test_a_request_that_is_stopped_waits_no_longer(autojump_clock: MockClock) -> None:
    context = Context("r")
    async with trio.open_nursery() as nursery:

        async def stop() -> None:
            await trio.sleep(1)
            context.stop()

        nursery.start_soon(stop)
        with pytest.raises(UnavailableError):
            await search(router(), context=context).choose()
    assert trio.current_time() <= 1 + LOOK_INTERVAL_S


@pytest.mark.check
async def test_so_many_wait_and_no_more(autojump_clock: MockClock) -> None:
    made = router()
    for size in ((1,) * (WAITING_MAX + 1), (40 << 20,) * 2):
        ends: list[str] = []

        async def wait(payload_bytes: int, ends: list[str] = ends) -> None:
            try:
                await search(made, payload_bytes=payload_bytes).choose()
            except (OverloadedError, UnavailableError) as error:
                ends.append(error.code)

        async with trio.open_nursery() as nursery:
            for each in size:
                nursery.start_soon(wait, each)
        assert (ends.count("overloaded"), ends.count("unavailable")) == (1, len(size) - 1)
    assert made.seeking_count == 0


async def test_without_patience_and_with_a_name_nobody_waits(autojump_clock: MockClock) -> None:
    for made in (search(router(), patience=None), search(router(), instance_id="9")):
        with pytest.raises(UnavailableError):
            await made.choose()
    assert trio.current_time() == 0

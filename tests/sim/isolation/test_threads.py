"""Worker threads in a world: at once, answered at a drawn time, and never beside the loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import anyio.to_thread
import pytest
import trio

from trinamo.sim import Choices, Escape, LabelledChoices, Network, SeedChoices, World

with warnings.catch_warnings():
    # On Python 3.12 and 3.13 it subclasses asyncio's deprecated child watchers when it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    import trio_asyncio


def _run(main: Callable[[], Awaitable[None]], choices: Choices | None = None) -> World:
    world = World(choices or LabelledChoices({}))
    world.run(main)
    return world


def test_a_function_in_a_thread_answers_at_a_drawn_time() -> None:
    seen: list[Any] = []

    async def main() -> None:
        for letters in ("a", "ab", "abc"):
            length = await trio.to_thread.run_sync(len, letters)
            seen.append((length, trio.current_time()))

    world = _run(main, LabelledChoices({"thread": [0, 6, 3]}))
    assert seen == [(1, 0), (2, 0.1), (3, pytest.approx(0.102))]
    assert [choice.label for choice in world.choices.record] == ["thread"] * 3


def test_two_threads_may_answer_in_either_order_and_every_seed_in_its_own() -> None:
    async def play() -> None:
        async def ask(name: str) -> None:
            await trio.to_thread.run_sync(str, name)
            order.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "a")
            nursery.start_soon(ask, "b")

    orders = []
    for seed in (*range(20), *range(20)):
        order: list[str] = []
        orders.append((_run(play, SeedChoices(seed)).trace.digest, "".join(order)))
    assert orders[:20] == orders[20:]
    assert {each for _, each in orders} == {"ab", "ba"}


def test_what_a_thread_raises_is_raised_where_it_was_asked_for() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await trio.to_thread.run_sync(lambda: 1 / 0)

    _run(main)


def test_a_thread_is_abandoned_where_that_is_allowed_and_waited_for_where_it_is_not() -> None:
    ended: list[float] = []

    async def main() -> None:
        for may_abandon in (True, False):
            with trio.move_on_after(0.2):
                await trio.to_thread.run_sync(str, abandon_on_cancel=may_abandon)
            ended.append(trio.current_time())

    _run(main, LabelledChoices({"thread": [7, 7]}))
    assert ended == [0.2, 0.7]


def test_a_limiter_lets_so_many_threads_run_and_no_more() -> None:
    ended: list[float] = []

    async def main() -> None:
        limiter = trio.CapacityLimiter(1)

        async def ask() -> None:
            await trio.to_thread.run_sync(str, limiter=limiter)
            ended.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)

    _run(main, LabelledChoices({"thread": [6, 6]}))
    assert ended == [0.1, 0.2]


def test_a_thread_that_sleeps_answers_later_and_stops_nobody() -> None:
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await trio.sleep(1)
            ticks.append(trio.current_time())

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick)
            await trio.to_thread.run_sync(time.sleep, 2.5)
            assert trio.current_time() == 2.5
            nursery.cancel_scope.cancel()

    _run(main)
    assert ticks == [1, 2]


def test_a_thread_is_outside_of_the_loop_and_may_call_into_it() -> None:
    async def main() -> None:
        def work() -> float:
            with pytest.raises(RuntimeError):
                trio.lowlevel.current_task()
            trio.from_thread.check_cancelled()
            return trio.from_thread.run_sync(trio.current_time)

        assert await trio.to_thread.run_sync(work) == trio.current_time() == 0

    _run(main)


@pytest.mark.parametrize("may_abandon", [True, False])
def test_a_thread_calls_async_functions_and_the_hosts_go_on_meanwhile(may_abandon: bool) -> None:
    seen: list[Any] = []
    local = threading.local()

    async def later(name: str) -> str:
        await trio.sleep(1)
        seen.append((name, trio.current_time()))
        return name

    def work(name: str) -> str:
        local.name = name
        for _ in range(2):
            assert trio.from_thread.run(later, name) == local.name == name
            time.sleep(10)
        with pytest.raises(ZeroDivisionError):
            trio.from_thread.run(fails)
        return name.upper()

    async def fails() -> None:
        raise ZeroDivisionError

    async def ask(name: str) -> None:
        done = await trio.to_thread.run_sync(work, name, abandon_on_cancel=may_abandon)
        seen.append((done, trio.current_time()))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "a")
            await trio.sleep(0.25)
            nursery.start_soon(ask, "b")

    _run(main)
    calls = [("a", 1), ("b", 1.25), ("a", 2), ("b", 2.25)]
    assert seen == [*calls, ("A", 22), ("B", 22.25)]


def test_a_thread_s_calls_into_the_loop_replay_and_draw_their_times() -> None:
    async def main() -> None:
        async def tick(name: str) -> None:
            ticks.append((name, trio.current_time()))

        async def ask(name: str) -> None:
            await trio.to_thread.run_sync(lambda: [trio.from_thread.run(tick, name) for _ in "ab"])

        async with trio.open_nursery() as nursery:
            for name in ("a", "b"):
                nursery.start_soon(ask, name)

    digests, orders = [], []
    for seed in (*range(8), *range(8)):
        ticks: list[tuple[str, float]] = []
        digests.append(_run(main, SeedChoices(seed)).trace.digest)
        orders.append(tuple(ticks))
    assert (digests[:8], orders[:8]) == (digests[8:], orders[8:])
    assert len({"".join(name for name, _ in order) for order in orders}) > 2


def test_a_call_of_a_cancelled_task_s_thread_is_cancelled_with_it() -> None:
    """As in trio: the thread hears of it, and ends; one that was abandoned is called back to its end."""
    ended: list[str] = []

    def work() -> None:
        try:
            trio.from_thread.run(trio.sleep_forever)
        except (trio.Cancelled, trio.RunFinishedError) as error:
            ended.append(type(error).__name__)
            raise

    async def main() -> None:
        for may_abandon in (False, True):
            with trio.move_on_after(1) as scope:
                await trio.to_thread.run_sync(work, abandon_on_cancel=may_abandon)
            assert scope.cancelled_caught
        ended.append("main")

    _run(main)
    assert ended == ["Cancelled", "main", "Cancelled"]


@pytest.mark.parametrize(
    ("name", "work"),
    {
        r"threading\.Condition\.wait": lambda: queue.Queue[int]().get(),
        r"_thread\.start_new_thread|threading\.Thread\.start": lambda: threading.Thread(
            target=int
        ).start(),
    }.items(),
)
def test_what_a_thread_cannot_do_is_an_escape_by_name(name: str, work: Callable[[], Any]) -> None:
    async def main() -> None:
        await trio.to_thread.run_sync(work)

    with pytest.raises(Escape, match=rf"({name})\n(.*\n)+  instead: "):
        _run(main)


def test_threads_of_anyio_and_of_asyncio_are_trio_s() -> None:
    seen: list[str] = []

    async def on_asyncio() -> None:
        seen.append(await asyncio.to_thread(str, "to_thread"))
        seen.append(await asyncio.get_running_loop().run_in_executor(None, str, "executor"))

    async def serve() -> None:
        seen.append(await anyio.to_thread.run_sync(str, "anyio"))
        async with trio_asyncio.open_loop():
            await trio_asyncio.aio_as_trio(on_asyncio)()

    async def main() -> None:
        await world.boot("a", serve).ended.wait()

    world = World(LabelledChoices({}))
    Network(world)
    world.run(main)
    assert seen == ["anyio", "to_thread", "executor"]

"""Cancellation at the n-th place where a task yields, complete under bounded search."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import pytest
import trio

from trinamo.sim import Choices, ReplayChoices, Violation, World
from trinamo.sim.explore import explore_bounded

Steps = Callable[[list[str]], Awaitable[None]]


def seen(steps: Steps, nth: int, points: int = 8) -> str:
    """What the steps that are cancelled at their n-th yield had done by then."""
    world = World(ReplayChoices([nth]), policy="fifo")
    done: list[str] = []

    async def host() -> None:
        with trio.CancelScope() as scope:
            world.cancels(scope, points)
            await steps(done)
            done.append("end")

    async def main() -> None:
        await world.boot("a", host).ended.wait()

    world.run(main)
    assert len(world.trace.of_kind("cancel")) <= 1
    return " ".join(done)


async def three_steps(done: list[str]) -> None:
    await trio.lowlevel.checkpoint()
    done.append("checkpoint")
    await trio.sleep(1)
    done.append("sleep")
    await trio.Event().wait()


async def two_shielded(done: list[str]) -> None:
    with trio.CancelScope(shield=True):
        await trio.sleep(1)
        done.append("shielded")
    await trio.lowlevel.checkpoint()
    done.append("checkpoint")


@pytest.mark.parametrize(("nth", "expected"), [(1, ""), (2, "checkpoint"), (3, "checkpoint sleep")])
def test_a_task_is_cancelled_where_it_yields_the_nth_time(nth: int, expected: str) -> None:
    assert seen(three_steps, nth) == expected


@pytest.mark.parametrize(
    ("nth", "expected"),
    [
        (0, "shielded checkpoint end"),
        (1, "shielded"),
        (2, "shielded"),
        (3, "shielded checkpoint end"),
    ],
)
def test_a_shield_holds_and_a_task_that_ends_before_is_not_cancelled(
    nth: int, expected: str
) -> None:
    assert seen(two_shielded, nth) == expected


def test_only_yields_of_the_task_that_asked_are_counted() -> None:
    async def with_another(done: list[str]) -> None:
        async with trio.open_nursery() as nursery:

            async def other() -> None:
                for _ in range(20):
                    await trio.lowlevel.checkpoint()
                done.append("other")

            nursery.start_soon(other)

    assert seen(with_another, 2) == "other end"


class RWLock:
    """Readers together or one writer; who comes behind a waiting writer waits. The kind of lock that
    forgets to wake those behind a writer that gives up.
    """

    def __init__(self, *, wakes: bool) -> None:
        self.wakes = wakes
        self.readers, self.writes = 0, False
        self.waiting: deque[tuple[trio.lowlevel.Task, bool]] = deque()

    async def acquire(self, *, is_writer: bool) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        entry = (trio.lowlevel.current_task(), is_writer)
        self.waiting.append(entry)
        self.admit(entry[0])
        if entry not in self.waiting:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return

        def abort(_raise: object) -> trio.lowlevel.Abort:
            self.waiting.remove(entry)
            if self.wakes:
                self.admit()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def admit(self, runs: trio.lowlevel.Task | None = None) -> None:
        while self.waiting:
            task, is_writer = self.waiting[0]
            if self.writes or (is_writer and self.readers):
                return
            self.waiting.popleft()
            self.writes, self.readers = is_writer, self.readers + (not is_writer)
            if task is not runs:
                trio.lowlevel.reschedule(task)

    def release(self) -> None:
        self.writes, self.readers = False, max(0, self.readers - 1)
        self.admit()


def readers_and_a_writer(*, wakes: bool) -> Callable[[Choices], None]:
    """The first reader stays until the second has come, and a writer between them may give up."""

    def play(choices: Choices) -> None:
        world = World(choices, policy="fifo")
        lock, second_came = RWLock(wakes=wakes), trio.Event()

        async def first() -> None:
            await lock.acquire(is_writer=False)
            with trio.move_on_after(10):
                await second_came.wait()
            lock.release()

        async def writer() -> None:
            await trio.sleep(1)
            with trio.CancelScope() as scope:
                world.cancels(scope)
                await lock.acquire(is_writer=True)
                lock.release()
            if scope.cancelled_caught:
                world.note("gave up")

        async def second() -> None:
            await trio.sleep(2)
            await lock.acquire(is_writer=False)
            second_came.set()
            lock.release()

        async def host() -> None:
            async with trio.open_nursery() as nursery:
                for each in (first, writer, second):
                    nursery.start_soon(each)

        async def main() -> None:
            host_a = world.boot("a", host)
            await trio.sleep(5)
            if world.noted["gave up"] and not second_came.is_set():
                raise Violation("readers share", "a reader waits though only readers hold the lock")
            await host_a.ended.wait()

        world.run(main)

    return play


class Pool:
    """So many places; the place is lost if connecting is cut short."""

    def __init__(self, size: int, *, is_careful: bool) -> None:
        self.places, self.is_careful = trio.Semaphore(size), is_careful

    async def get(self) -> None:
        await self.places.acquire()
        try:
            # Connecting: it waits, and then lets others run.
            await trio.sleep(1)
            await trio.lowlevel.checkpoint()
        except BaseException:
            if self.is_careful:
                self.places.release()
            raise
        self.places.release()


def impatient_client(*, is_careful: bool) -> Callable[[Choices], None]:
    def play(choices: Choices) -> None:
        world = World(choices, policy="fifo")
        pool = Pool(1, is_careful=is_careful)

        async def client() -> None:
            with trio.CancelScope() as scope:
                world.cancels(scope)
                await pool.get()
            await pool.get()

        async def main() -> None:
            await world.boot("client", client).ended.wait()

        world.run(main)

    return play


@pytest.mark.parametrize(
    "scenario", [readers_and_a_writer(wakes=True), impatient_client(is_careful=True)]
)
def test_what_bears_cancellation_everywhere_is_shown_to(
    scenario: Callable[[Choices], None],
) -> None:
    search = explore_bounded(scenario, max_deviations=2)
    assert search.is_complete
    assert search.failed_runs == 0
    assert search.runs_by_deviations[:2] == [1, 8]
    assert search.runs < 50


def test_a_writer_that_gives_up_and_wakes_nobody_is_found_by_explore() -> None:
    search = explore_bounded(readers_and_a_writer(wakes=False), max_deviations=2)
    assert search.is_complete
    # At once there is nobody behind it; the other reader has come when all rest the second time.
    assert (search.runs_by_deviations, search.failed_runs) == ([1, 8, 3], 1)
    assert search.first is not None
    assert search.first.deviation_count == 2
    assert list(search.keys) == ["readers share: a reader waits though only readers hold the lock"]


def test_a_place_of_a_pool_that_is_lost_by_cancellation_is_found_by_explore() -> None:
    search = explore_bounded(impatient_client(is_careful=False), max_deviations=1)
    assert search.is_complete
    # Cancelled as it got the place, while connecting blocks, and while it lets others run.
    assert [key.partition(":")[0] for key in search.keys] == ["deadlock"]
    assert search.failed_runs == 3

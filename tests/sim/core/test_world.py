from __future__ import annotations

import re
from collections.abc import Generator

import pytest
import trio

from trinamo.sim import (
    Deadlock,
    HostState,
    Livelock,
    ReplayChoices,
    SeedChoices,
    StepLimit,
    TimeLimit,
    World,
)


async def _sleep_for_ever() -> None:
    await trio.sleep_forever()


def test_virtual_time_jumps_to_deadlines_and_events() -> None:
    world = World(SeedChoices(0))
    seen: list[tuple[str, float]] = []

    async def main() -> None:
        world.after(5, lambda: seen.append(("event", trio.current_time())))
        await trio.sleep(10)
        seen.append(("task", trio.current_time()))

    world.run(main)
    assert seen == [("event", 5.0), ("task", 10.0)]
    assert world.ended_s == 10.0


def test_events_of_one_moment_happen_in_the_order_they_were_asked_for() -> None:
    world = World(SeedChoices(0))
    seen: list[int] = []

    async def main() -> None:
        for number in range(5):
            world.after(1, seen.append, number)
        await trio.sleep(2)

    world.run(main)
    assert seen == [0, 1, 2, 3, 4]


def test_the_fifo_policy_runs_tasks_in_the_order_of_creation() -> None:
    seen: list[int] = []

    async def step(number: int) -> None:
        seen.append(number)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(step, number)

    World(SeedChoices(0), policy="fifo").run(main)
    assert seen == [0, 1, 2, 3, 4]


def test_under_the_choice_policy_the_replay_list_orders_the_steps() -> None:
    def run(values: list[int]) -> tuple[list[int], World]:
        seen: list[int] = []

        async def step(number: int) -> None:
            seen.append(number)

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(step, number)

        world = World(ReplayChoices(values), policy="choice")
        world.run(main)
        return seen, world

    dull, world = run([])
    assert dull == [0, 1, 2]
    three_runnable = [choice.n for choice in world.choices.record].index(3)
    non_default, _ = run([0] * three_runnable + [2, 1])
    assert non_default == [2, 1, 0]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="no such policy"):
        World(SeedChoices(0), policy="lottery")  # type: ignore[arg-type]


def test_a_paused_host_takes_no_step_until_it_is_resumed() -> None:
    world = World(SeedChoices(0))
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await trio.sleep(1)
            ticks.append(trio.current_time())

    async def main() -> None:
        world.boot("a", tick)
        world.after(2.5, world.pause, "a")
        world.after(7.25, world.resume, "a")
        await trio.sleep(8.5)

    world.run(main)
    assert ticks == [1, 2, 7.25, 8.25]


def test_a_killed_host_runs_no_cleanup_inside_the_simulation() -> None:
    world = World(SeedChoices(0))
    cleaned_up: list[bool] = []

    async def hold() -> None:
        try:
            await trio.sleep_forever()
        finally:
            world.note("cleanup")
            cleaned_up.append(world.is_unwinding)

    async def main() -> None:
        host = world.boot("a", hold)
        world.after(1, world.kill, "a")
        await host.ended.wait()
        assert world.task_count("a") == 1
        await trio.sleep(5)
        assert cleaned_up == []
        assert host.state is HostState.DEAD

    world.run(main)
    # Once the run is over the coroutines are unwound, outside the trace.
    assert cleaned_up == [True]
    assert world.trace.of_kind("cleanup") == []


def test_a_task_of_a_killed_host_that_was_about_to_run_does_not() -> None:
    world = World(SeedChoices(0), policy="fifo")
    steps: list[str] = []

    async def victim() -> None:
        steps.append("victim")

    async def killer() -> None:
        world.kill("victim")

    async def main() -> None:
        world.boot("killer", killer)
        world.boot("victim", victim)
        await trio.sleep(1)
        assert steps == []

    world.run(main)


def test_a_restarted_host_is_a_new_incarnation_and_the_old_one_stays_dead() -> None:
    world = World(SeedChoices(0))
    ticks: list[tuple[int, float]] = []

    async def tick(life: int) -> None:
        while not world.is_unwinding:
            await trio.sleep(1)
            ticks.append((life, trio.current_time()))

    async def main() -> None:
        world.boot("a", tick, 1)
        world.after(1.5, world.kill, "a")
        world.after(3, world.boot, "a", tick, 2)
        await trio.sleep(4.5)
        assert ticks == [(1, 1), (2, 4)]
        assert world.host("a").generation == 2

    world.run(main)


def test_a_running_host_cannot_be_booted_again() -> None:
    world = World(SeedChoices(0))

    async def main() -> None:
        world.boot("a", _sleep_for_ever)
        world.boot("a", _sleep_for_ever)

    with pytest.raises(ValueError, match="is running"):
        world.run(main)


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_cleanup_that_fails_beside_a_cancelled_task_counts_only_for_the_living(
    is_killed: bool,
) -> None:
    """The failure and the cancellation come in one group, of which the dead are excused."""
    world = World(SeedChoices(0))

    async def fail_in_the_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("cleanup")

    async def hold() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_in_the_end)
            await trio.sleep_forever()

    async def main() -> None:
        world.boot("a", hold)
        await trio.sleep(1)
        if is_killed:
            world.kill("a")

    if is_killed:
        world.run(main)
    else:
        with pytest.raises(ValueError, match="cleanup"):
            world.run(main)


def test_stopping_a_host_runs_its_cleanup_inside_the_simulation() -> None:
    world = World(SeedChoices(0))

    async def hold() -> None:
        try:
            await trio.sleep_forever()
        finally:
            world.note("cleanup")

    async def main() -> None:
        host = world.boot("a", hold)
        await trio.sleep(1)
        world.stop("a")
        await host.ended.wait()
        assert host.state is HostState.DOWN

    world.run(main)
    assert world.trace.of_kind("cleanup")[0].host == "a.1"


def test_a_host_whose_main_function_raises_fails_the_run() -> None:
    world = World(SeedChoices(0))

    async def crash() -> None:
        raise KeyError("lost")

    async def main() -> None:
        world.boot("a", crash)
        await trio.sleep(1)

    with pytest.raises(KeyError, match="lost"):
        world.run(main)


def test_a_failing_event_fails_the_run() -> None:
    world = World(SeedChoices(0))

    async def main() -> None:
        world.after(1, lambda: 1 / 0)
        await trio.sleep(2)

    with pytest.raises(ZeroDivisionError):
        world.run(main)


def test_a_deadlock_is_reported_with_what_every_task_waits_for() -> None:
    world = World(SeedChoices(0))

    async def wait_for_godot() -> None:
        await trio.Event().wait()

    async def main() -> None:
        await world.boot("a", wait_for_godot).ended.wait()

    with pytest.raises(Deadlock, match=r"a\.1 a:main: .*wait_for_godot"):
        world.run(main)


def test_a_spinning_task_meets_the_step_limit() -> None:
    async def spin() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    with pytest.raises(StepLimit, match="1000 task steps"):
        World(SeedChoices(0), steps_max=1000).run(spin)


def test_an_endless_wait_with_a_timer_meets_the_time_limit() -> None:
    async def poll() -> None:
        while True:
            await trio.sleep(1)

    with pytest.raises(TimeLimit, match=r"60.* virtual seconds"):
        World(SeedChoices(0), virtual_s_max=60).run(poll)


def test_a_world_runs_once() -> None:
    world = World(SeedChoices(0))

    async def main() -> None:
        await trio.lowlevel.checkpoint()

    world.run(main)
    with pytest.raises(RuntimeError, match="runs once"):
        world.run(main)


def test_a_fault_can_wait_for_the_nth_note() -> None:
    world = World(SeedChoices(0))
    struck: list[float] = []

    async def main() -> None:
        world.after_note("beat", 3, lambda: struck.append(trio.current_time()), delay_s=0.5)
        for _ in range(5):
            await trio.sleep(1)
            world.note("beat")

    world.run(main)
    assert struck == [3.5]


def test_waiting_until_all_tasks_are_blocked_works_in_virtual_time() -> None:
    world = World(SeedChoices(0))

    async def main() -> None:
        world.boot("a", _sleep_for_ever)
        await trio.testing.wait_all_tasks_blocked()
        assert trio.current_time() == 0

    world.run(main)


def test_run_sync_soon_is_no_deadlock() -> None:
    async def main() -> None:
        event = trio.Event()
        trio.lowlevel.current_trio_token().run_sync_soon(event.set)
        await event.wait()

    World(SeedChoices(0)).run(main)


def test_a_fault_planned_for_after_the_end_does_no_harm() -> None:
    world = World(SeedChoices(0))

    async def linger() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(2)

    async def main() -> None:
        world.boot("a", linger)
        world.after(2, world.boot, "b", linger)
        await trio.sleep(1)

    world.run(main)
    assert world.ended_s == 1.0


def test_the_step_limit_says_what_was_runnable() -> None:
    async def spin() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        world.boot("a", spin)
        await trio.sleep_forever()

    world = World(SeedChoices(0), steps_max=100)
    with pytest.raises(StepLimit, match=r"runnable: a\.1 a:main"):
        world.run(main)


def test_the_time_limit_says_what_was_going_to_happen() -> None:
    async def main() -> None:
        world.after(90, list)
        await trio.sleep_forever()

    world = World(SeedChoices(0), virtual_s_max=60)
    with pytest.raises(TimeLimit, match=r"90\.000000 list"):
        world.run(main)


class _Reply:
    """As libraries have it: awaiting it awaits a coroutine of its own."""

    def __await__(self) -> Generator[object, None, None]:
        return self._poll().__await__()

    async def _poll(self) -> None:
        while True:
            await trio.lowlevel.checkpoint()


async def _await_reply() -> None:
    await _Reply()


def test_a_task_that_spins_is_a_livelock_and_the_frame_of_its_library_is_named() -> None:
    async def main() -> None:
        await trio.sleep(0.5)
        await world.boot("client", _await_reply).ended.wait()

    world = World(SeedChoices(0))
    with pytest.raises(Livelock, match=r"20000 task steps while the clock stood at 0\.5") as caught:
        world.run(main)
    assert world.steps < 20_100
    assert re.search(r"client\.1 client:main: .* _poll < \S+ _await_reply", str(caught.value))


def test_how_long_the_clock_may_stand_is_for_the_world_to_say() -> None:
    async def main() -> None:
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        await trio.sleep(0.1)
        for _ in range(100):
            await trio.lowlevel.checkpoint()

    World(SeedChoices(0), instant_steps_max=190).run(main)
    with pytest.raises(Livelock):
        World(SeedChoices(0), instant_steps_max=90).run(main)


def test_a_deadlock_names_who_holds_the_locks_and_the_circle() -> None:
    left, right, places = trio.Lock(), trio.Lock(), trio.CapacityLimiter(1)

    async def take(first: trio.Lock, second: trio.Lock) -> None:
        async with first:
            await trio.sleep(1)
            async with second:
                raise AssertionError

    async def borrow() -> None:
        async with places:
            await trio.sleep_forever()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, left, right, name="reader")
            nursery.start_soon(take, right, left, name="writer")
            nursery.start_soon(borrow, name="guest")
            await trio.sleep(1)
            nursery.start_soon(borrow, name="late")

    with pytest.raises(Deadlock) as caught:
        World(SeedChoices(0), policy="fifo").run(main)
    lines = str(caught.value).splitlines()
    at = r", at test_world\.py:\d+, holds"
    said = "\n".join(lines)
    assert re.search(rf"driver reader: .* waits for the lock that driver writer{at}", said)
    assert re.search(rf"driver writer: .* waits for the lock that driver reader{at}", said)
    assert re.search(rf"driver late: .* waits for the limiter that driver guest{at}", said)
    assert lines[-1] == "  each waits for the next: driver reader -> driver writer -> driver reader"

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
import trio

from tests.sim.programs import echo, response_stream
from trinamo.sim import (
    Choices,
    Policy,
    ReplayChoices,
    SeedChoices,
    Violation,
    World,
    first_difference,
    search,
)
from trinamo.sim.core.policies import PCT_CHANGES, PCT_HORIZONS, pct_chance
from trinamo.sim.programs import leased_queue

POLICIES: tuple[Policy, ...] = get_args(Policy)


def _steps(policy: Policy, choices: list[int] | int, hosts: bool = False) -> str:
    """The order in which two tasks, a and b, take three steps each."""
    seen = ""

    async def walk(name: str) -> None:
        nonlocal seen
        for _ in range(3):
            seen += name
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        if hosts:
            world.boot("x", walk, "a")
            world.boot("y", walk, "b")
            await trio.sleep(1)
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(walk, "a")
                nursery.start_soon(walk, "b")

    source = SeedChoices(choices) if isinstance(choices, int) else ReplayChoices(choices)
    world = World(source, policy=policy)
    world.run(main)
    return seen


def test_the_dull_order_is_fair_under_every_recording_policy() -> None:
    for policy in ("fifo", "choice", "grouped", "step"):
        assert _steps(policy, []) == "ababab"


def test_single_steps_reach_orders_that_batches_cannot() -> None:
    by_step = {_steps("step", seed) for seed in range(150)}
    by_batch = {_steps("batch", seed) for seed in range(60)}
    assert "aaabbb" in by_step
    assert "aaabbb" not in by_batch
    assert len(by_step) == 20  # All ways to interleave three and three steps.


def test_priorities_run_one_task_as_long_as_it_can() -> None:
    orders = Counter(_steps("pct", seed) for seed in range(40))
    assert {"aaabbb", "bbbaaa"} <= set(orders)


def test_priorities_do_not_starve_the_others() -> None:
    async def spin() -> None:
        while not done.is_set():
            await trio.lowlevel.checkpoint()

    async def finish() -> None:
        done.set()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(spin)
            nursery.start_soon(finish)

    for seed in range(5):
        done = trio.Event()
        World(SeedChoices(seed), policy="pct", steps_max=2000).run(main)


def test_grouping_takes_no_decision_between_hosts() -> None:
    assert {_steps("grouped", seed, hosts=True) for seed in range(20)} == {"ababab"}
    assert len({_steps("grouped", seed) for seed in range(20)}) > 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_gives_one_trace_under_every_policy(policy: Policy) -> None:
    first, again = (echo.run(SeedChoices(3), policy=policy, clients=2) for _ in range(2))
    assert first_difference(first.world.trace, again.world.trace) == ""
    assert first.digest == again.digest


@pytest.mark.parametrize("policy", POLICIES)
def test_a_record_replays_the_run_under_every_policy(policy: Policy) -> None:
    first = leased_queue.run(SeedChoices(5), policy=policy)
    again = leased_queue.run(ReplayChoices(first.choices.values, 5), policy=policy)
    assert first_difference(first.trace, again.trace) == ""


@pytest.mark.parametrize("policy", ["step", "pct", "grouped"])
def test_the_response_stream_holds_under_the_single_step_policies(policy: Policy) -> None:
    plan = response_stream.Plan(streams=2, items=5, policy=policy)
    assert response_stream.run(plan, SeedChoices(2)).violations() == []


def test_a_pause_holds_back_tasks_that_were_put_back_for_later() -> None:
    async def tick() -> None:
        while True:
            ticks.append(trio.current_time())
            await trio.lowlevel.checkpoint()
            await trio.sleep(1)

    async def main() -> None:
        world.boot("a", tick)
        world.boot("b", tick)
        await trio.lowlevel.checkpoint()
        world.pause("a")
        await trio.sleep(2.5)
        world.kill("b")
        before = len(ticks)
        await trio.sleep(5)
        assert len(ticks) == before

    ticks: list[float] = []
    world = World(SeedChoices(1), policy="step")
    world.run(main)


def _lose_updates(choices: Choices, policy: Policy = "pct") -> None:
    """Two tasks of 22 checkpoints, each with one between a read and a write."""
    shared = 0

    async def add() -> None:
        nonlocal shared
        for number in range(22):
            read = shared
            await trio.lowlevel.checkpoint()
            if number == 7:
                shared = read + 1

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(add)
            nursery.start_soon(add)

    World(choices, policy=policy).run(main)
    if shared != 2:
        raise Violation("no update is lost", f"{shared} of 2")


def _is_lost(policy: Policy, seed: int) -> bool:
    try:
        _lose_updates(SeedChoices(seed), policy)
    except Violation:
        return True
    return False


@pytest.mark.parametrize(("policy", "found_min"), [("pct", 3), ("step", 60)])
def test_a_lost_update_of_a_short_run_is_found(policy: Policy, found_min: int) -> None:
    found = sum(_is_lost(policy, seed) for seed in range(300))
    # Whoever goes first is changed at one step: the depth is 2, and either of the two may be that.
    promised = 300 * pct_chance(tasks=1, steps=50, depth=2)
    print(f"{policy}: {found} of 300 seeds; pct promises {promised:.1f}")
    assert found >= max(found_min, promised)


def test_the_promise_of_pct_knows_its_limits() -> None:
    assert pct_chance(tasks=1, steps=8, depth=1) > pct_chance(tasks=2, steps=8, depth=1) > 0
    assert pct_chance(tasks=2, steps=300, depth=2) > pct_chance(tasks=2, steps=300, depth=3) > 0
    assert pct_chance(tasks=2, steps=8, depth=PCT_CHANGES + 2) == 0
    assert pct_chance(tasks=2, steps=PCT_HORIZONS[-1] + 1, depth=1) == 0


def test_what_pct_finds_shrinks_to_the_changes_of_priority_that_matter() -> None:
    found = search(_lose_updates)
    assert found is not None
    assert [each.label for each in found.decisions] == ["priority change"]

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
import trio

from tests.sim.programs import echo, response_stream
from trinamo.sim import Policy, ReplayChoices, SeedChoices, World, first_difference
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

"""Faults between two steps, faults at a note, and faults whose note never comes."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import trio

from trinamo.sim import Network, Policy, ReplayChoices, SeedChoices, World, arm

POLICIES: tuple[Policy, ...] = get_args(Policy)
SEEDS = range(40)


def _reaches_b(policy: Policy, seed: int, delay_s: float) -> bool:
    """Whether a host that is killed after its note a still gets to b, five checkpoints later."""

    async def host() -> None:
        world.note("a")
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        world.note("b")
        await trio.sleep_forever()

    async def main() -> None:
        world.after_note("a", 1, world.kill, "x", delay_s=delay_s)
        world.boot("x", host)
        await trio.sleep(1)

    world = World(SeedChoices(seed), policy=policy)
    world.run(main)
    return bool(world.trace.of_kind("b"))


@pytest.mark.parametrize("policy", ["step", "pct"])
def test_a_fault_falls_between_any_two_steps_where_steps_are_interleaved(policy: Policy) -> None:
    assert {_reaches_b(policy, seed, delay_s=0.0001) for seed in SEEDS} == {True, False}


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"step", "pct"}))
def test_a_fault_waits_until_nothing_can_run_under_the_other_policies(policy: Policy) -> None:
    assert {_reaches_b(policy, seed, delay_s=0.0001) for seed in range(5)} == {True}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fault_without_delay_strikes_at_its_note(policy: Policy) -> None:
    assert {_reaches_b(policy, seed, delay_s=0.0) for seed in range(5)} == {False}


@pytest.mark.parametrize("policy", ["step", "pct"])
def test_a_delivery_and_a_deadline_fall_between_two_steps(policy: Policy) -> None:
    def order(seed: int) -> str:
        seen: list[str] = []

        async def answer(stream: trio.SocketStream) -> None:
            await stream.receive_some()
            seen.append("d")

        async def rest() -> None:
            await trio.sleep(0.0008)
            seen.append("t")

        async def main() -> None:
            world.boot("server", trio.serve_tcp, answer, 80)
            await trio.sleep(0.1)
            stream = await trio.open_tcp_stream("server", 80)
            await trio.sleep(0.1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rest)
                await stream.send_all(b"x")
                for _ in range(4):
                    await trio.lowlevel.checkpoint()
                seen.append("s")

        world = World(SeedChoices(seed), policy=policy)
        Network(world)
        world.run(main)
        return "".join(seen)

    orders = {order(seed) for seed in range(150)}
    assert {"sdt", "dst", "dts"} <= orders


def test_the_dull_run_takes_every_step_before_the_next_event() -> None:
    world = World(ReplayChoices([]), policy="step")
    seen: list[str] = []

    async def main() -> None:
        world.after(0.0001, seen.append, "event")
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        seen.append("steps")
        await trio.sleep(1)

    world.run(main)
    assert seen == ["steps", "event"]


@pytest.mark.parametrize("policy", ["step", "pct"])
def test_events_keep_no_task_waiting_for_longer_than_their_bound(policy: Policy) -> None:
    """Time goes on while tasks can run, but two steps of one busy task are never far apart."""
    for seed in range(20):
        world = World(SeedChoices(seed), policy=policy)
        times_s: list[float] = []

        async def main(world: World = world, times_s: list[float] = times_s) -> None:
            for number in range(400):
                world.after(number * 0.0001, lambda: None)
            for _ in range(50):
                times_s.append(trio.current_time())
                await trio.lowlevel.checkpoint()

        world.run(main)
        steps_s = [after - before for before, after in itertools.pairwise(times_s)]
        assert max(steps_s) <= 0.0011


def test_notes_are_counted_from_when_the_fault_was_asked_for() -> None:
    world = World(SeedChoices(0))
    struck: list[float] = []

    async def main() -> None:
        for _ in range(2):
            world.note("beat")
        world.after_note("beat", 2, lambda: struck.append(trio.current_time()))
        for _ in range(3):
            await trio.sleep(1)
            world.note("beat")

    world.run(main)
    assert struck == [2.0]
    with pytest.raises(ValueError, match="counted from 1"):
        world.after_note("beat", 0, print)


def test_a_fault_whose_note_never_came_is_told() -> None:
    world = World(SeedChoices(0))

    async def main() -> None:
        world.note("beat")
        world.after_note("beat", 3, world.kill, "x", name="the kill of x")
        world.after_note("beat", 1, lambda: None)
        await trio.sleep(1)
        world.note("beat")

    world.run(main)
    assert world.untested == [
        "the kill of x never struck: it waited for note 3 of 'beat', and 1 came"
    ]


def test_what_a_fault_at_a_note_raises_fails_the_run() -> None:
    def fail() -> None:
        raise KeyError("struck")

    world = World(SeedChoices(0))

    async def main() -> None:
        world.after_note("beat", 1, fail)
        world.note("beat")
        await trio.sleep(1)

    with pytest.raises(KeyError, match="struck"):
        world.run(main)


def test_a_fault_may_be_tied_to_a_note_of_an_event_and_of_another_fault() -> None:
    world = World(SeedChoices(0))
    struck: list[str] = []

    def second() -> None:
        struck.append("second")

    async def main() -> None:
        world.after_note("first", 1, second)
        world.after_note("event", 1, world.note, "first")
        world.after(1, world.note, "event")
        await trio.sleep(1.5)

    world.run(main)
    assert struck == ["second"]


def test_a_late_skew_does_not_jump_the_wall_clock() -> None:
    world = World(SeedChoices(0))
    shown: list[float] = []

    async def main() -> None:
        async def look() -> None:
            for _ in range(3):
                shown.append(world.wall())
                await trio.sleep(50)

        await trio.sleep(1000)
        host = world.boot("a", look)
        world.skew("a", 0.0, drift=0.1)
        await host.ended.wait()

    world.run(main)
    assert [round(wall - shown[0], 6) for wall in shown] == [0.0, 55.0, 110.0]
    assert round(shown[0] - 1_700_000_000.0, 6) == 1000.0


@pytest.mark.parametrize("maker", ["a", "b"])
def test_a_fault_may_strike_whoever_made_the_note(maker: str) -> None:
    """As a call, and as a fault of a plan, which boots it again."""
    world = World(SeedChoices(0))
    network = Network(world)
    booted: list[str] = []

    async def host(name: str) -> None:
        world.note("late" if name == maker else "early")
        await trio.sleep_forever()

    def boot(name: str) -> None:
        booted.append(name)
        world.boot(name, host, name)

    async def main() -> None:
        world.after_note("late", 1, world.pause, on="note")
        arm(
            world,
            network,
            [{"do": "kill", "on": "note", "after_note": "late", "at_s": 1, "for_s": 1}],
            boot=boot,
        )
        boot("a")
        boot("b")
        await trio.sleep(5)

    world.run(main)
    assert [row.field("host") for row in world.trace.of_kind("pause")] == [maker]
    assert [row.field("host") for row in world.trace.of_kind("kill")] == [maker]
    assert booted == ["a", "b", maker]


def test_a_fault_on_the_maker_of_a_note_that_the_scenario_made_is_told_and_strikes_nobody() -> None:
    world = World(SeedChoices(0))

    async def main() -> None:
        world.after_note("beat", 1, world.kill, on="note", name="the kill")
        world.note("beat")
        await trio.sleep(1)

    world.run(main)
    assert world.untested == [
        "the kill never struck: note 1 of 'beat' was made by the scenario, not on a host"
    ]
    assert not world.aimed


def test_a_fault_of_a_plan_strikes_a_host_or_the_maker_of_its_note() -> None:
    world = World(SeedChoices(0))
    network = Network(world)
    for fault in ({"on": "note"}, {"on": "note", "after_note": "a", "host": "x"}, {}):
        with pytest.raises(ValueError, match='or with `after_note` and on="note"'):
            arm(world, network, [{"do": "kill", "at_s": 0.0, **fault}])  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match='strikes on="note"'):
        world.after_note("a", 1, print, on="maker")  # type: ignore[arg-type]

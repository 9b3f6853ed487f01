"""Rules over state and time: what breaks them, when, and that those that hold change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, get_args

import pytest
import trio

from trinamo.sim import Deadlock, Network, Policy, SeedChoices, Violation, World, search
from trinamo.sim.explore import run

POLICIES: tuple[Policy, ...] = get_args(Policy)


class Door:
    """State that a host changes."""

    def __init__(self) -> None:
        self.is_open = False
        self.visitors = 0


def played(
    work: Callable[[Door], Any], rules: Callable[[World, Door], object], policy: Policy = "batch"
) -> World:
    world, door = World(SeedChoices(1), policy=policy), Door()

    async def main() -> None:
        await world.boot("a", work, door).ended.wait()

    rules(world, door)
    world.run(main)
    return world


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_that_lasts_for_one_step_is_seen(policy: Policy) -> None:
    async def work(door: Door) -> None:
        await trio.sleep(1)
        door.visitors = -1
        await trio.lowlevel.checkpoint()
        door.visitors = 0

    def rules(world: World, door: Door) -> None:
        world.always("no negative visitors", lambda: door.visitors >= 0)

    with pytest.raises(
        Violation, match=r"no negative visitors: it does not hold at 1 s\nafter a step of a\.1 "
    ):
        played(work, rules, policy)


def test_what_an_event_does_and_what_main_does_last_is_seen() -> None:
    for last in (True, False):
        world, door = World(SeedChoices(0)), Door()

        async def main(last: bool = last, world: World = world, door: Door = door) -> None:
            world.always("closed", lambda: not door.is_open)
            if last:
                door.is_open = True
                return
            world.after(1, setattr, door, "is_open", True)
            world.after(1.5, setattr, door, "is_open", False)
            await trio.sleep(2)

        with pytest.raises(
            Violation, match=r"after the end of main" if last else r"at 1 s\nafter an event"
        ):
            world.run(main)


async def opens_late(door: Door) -> None:
    await trio.sleep(2)
    door.is_open = True
    await trio.sleep(10)


def test_what_must_come_to_hold_is_asked_at_its_deadline() -> None:
    def by(within_s: float) -> Callable[[World, Door], object]:
        return lambda world, door: world.eventually("opens", lambda: door.is_open, within_s)

    assert played(opens_late, by(2)).ended_s == 12
    with pytest.raises(Violation, match=r"opens: it did not come to hold by 1\.9 s"):
        played(opens_late, by(1.9))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_thing_leads_to_another_each_time(policy: Policy) -> None:
    async def work(door: Door) -> None:
        for hold_s in (0.5, 0.9, 2.0):
            await trio.sleep(1)
            door.visitors = 1
            await trio.sleep(hold_s)
            door.is_open = True
            await trio.lowlevel.checkpoint()
            door.visitors, door.is_open = 0, False
        await trio.sleep(10)

    def within(within_s: float) -> Callable[[World, Door], object]:
        return lambda world, door: world.leads_to(
            "let in", lambda: door.visitors > 0, lambda: door.is_open, within_s
        )

    assert not played(work, within(2), policy).untested
    with pytest.raises(
        Violation, match=r"let in: what began at 4\.4 s did not lead to it by 5\.4 s"
    ):
        played(work, within(1), policy)


def test_a_deadline_of_a_rule_hides_no_deadlock() -> None:
    async def work(_door: Door) -> None:
        await trio.sleep_forever()

    with pytest.raises(Deadlock):
        played(work, lambda world, door: world.eventually("opens", lambda: door.is_open, 5))


def test_a_rule_that_the_end_of_the_run_leaves_open_was_not_tested() -> None:
    async def work(_door: Door) -> None:
        await trio.sleep(3)

    world = played(work, lambda world, door: world.eventually("opens", lambda: door.is_open, 5))
    assert world.untested == [
        'the rule "opens" was not decided: the run ended at 3 s, and it has until 5 s'
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_rules_that_hold_leave_the_digest_as_it_is(policy: Policy) -> None:
    def digest(*, has_rules: bool) -> str:
        world = World(SeedChoices(5), policy=policy)
        Network(world)

        async def answer(stream: trio.SocketStream) -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                async for chunk in stream:
                    await stream.send_all(bytes(chunk))

        async def ask() -> None:
            async with await trio.open_tcp_stream("server", 80) as stream:
                for _ in range(5):
                    await stream.send_all(b"x" * 100)
                    await stream.receive_some(50)

        async def main() -> None:
            if has_rules:
                world.always("true", lambda: True)
                world.eventually("soon", lambda: trio.current_time() > 0.5, 30)
                world.leads_to("answered", lambda: True, lambda: False, 2000)
            world.boot("server", trio.serve_tcp, answer, 80)
            await trio.sleep(0.1)
            await world.boot("client", ask).ended.wait()
            await trio.sleep(1)

        return world.run(main)

    assert digest(has_rules=True) == digest(has_rules=False)


@pytest.mark.parametrize("bad", ["draws", "notes", "raises"])
def test_a_predicate_that_does_more_than_look_ends_the_run(bad: str) -> None:
    def rules(world: World, _door: Door) -> None:
        def predicate() -> bool:
            if bad == "draws":
                world.choices.below(2, "mine")
            elif bad == "notes":
                world.note("looked")
            else:
                raise KeyError("mine")
            return True

        world.always("looks", predicate)

    error = KeyError if bad == "raises" else RuntimeError
    with pytest.raises(error, match="mine" if bad == "raises" else "may only look: 'looks'"):
        played(opens_late, rules)


def test_a_search_shrinks_what_breaks_a_rule_and_counts_the_run_as_watched() -> None:
    async def main(world: World) -> None:
        door = Door()
        world.always("few visitors", lambda: door.visitors < 2)
        for number in range(5):
            door.visitors += world.choices.chance(3, f"visitor {number}")
            await trio.sleep(1)

    found = search(main, seeds=range(20))
    assert found is not None
    assert (found.rule, len(found.decisions)) == ("few visitors", 2)

    def play(choices: Any) -> None:
        world = World(choices)
        world.run(lambda: main(world))

    assert run(play, 0).is_watched

"""Rules that watch a run: what they are told, how they end it, and what they find."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import trio

from tests.sim.checkers.protocols import election, replicated_register
from trinamo.sim import (
    Checker,
    Delivery,
    Linearizability,
    Operation,
    Row,
    SeedChoices,
    Violation,
    World,
    register,
)
from trinamo.sim.explore import run


def noting(*notes: tuple[str, dict[str, Any]]) -> Callable[[World], None]:
    """A run that makes these notes on a host."""

    def play(world: World) -> None:
        async def host() -> None:
            for kind, fields in notes:
                await trio.sleep(0.1)
                world.note(kind, **fields)

        async def main() -> None:
            await world.boot("a", host).ended.wait()

        world.run(main)

    return play


def judged(checker: Checker, *notes: tuple[str, dict[str, Any]]) -> str:
    """What it finds wrong; empty if nothing."""
    world = World(SeedChoices(1))
    world.watch(checker)
    try:
        noting(*notes)(world)
    except Violation as broken:
        return str(broken)
    return ""


def test_a_checker_hears_of_every_note_with_its_host_and_time_and_of_the_end() -> None:
    class Listening(Checker):
        def __init__(self) -> None:
            self.heard: list[Row] = []
            self.has_ended = False

        def on(self, note: Row) -> None:
            self.heard.append(note)

        def at_end(self) -> None:
            self.has_ended = True

    world = World(SeedChoices(1))
    checker = world.watch(Listening())
    noting(("one", {"n": 1}), ("two", {}))(world)
    assert [(row.kind, row.host, row.field("n")) for row in checker.heard[:1]] == [
        ("one", "a.1", 1)
    ]
    assert checker.heard[1].time_s == pytest.approx(0.2)
    assert checker.has_ended


def test_what_a_checker_raises_ends_the_run_though_the_code_that_noted_catches_everything() -> None:
    class NoSecond(Checker):
        def on(self, note: Row) -> None:
            if note.kind == "second":
                self.violate("there was a second")

    world = World(SeedChoices(1))
    world.watch(NoSecond())

    async def host() -> None:
        for kind in ("first", "second", "third"):
            with contextlib.suppress(Exception):
                world.note(kind)
            await trio.sleep(1)

    async def main() -> None:
        await world.boot("a", host).ended.wait()

    with pytest.raises(Violation, match="NoSecond: there was a second"):
        world.run(main)
    assert world.trace.of_kind("third") == []


def test_a_run_that_failed_is_not_judged_at_its_end() -> None:
    class Never(Checker):
        def at_end(self) -> None:
            self.violate("asked")

    world = World(SeedChoices(1))
    world.watch(Never())

    async def main() -> None:
        await trio.sleep(1)
        raise KeyError("its own")

    with pytest.raises(KeyError):
        world.run(main)


SENT, GOT = ("sent", {"id": 1}), ("got", {"id": 1})


@pytest.mark.parametrize(
    ("notes", "wrong"),
    [
        ([SENT, GOT], ""),
        ([SENT, GOT, GOT], ""),
        ([SENT], "delivery: never delivered: 1 of 0.100 s"),
        ([GOT], "delivery: 1 was delivered on a.1 and never sent"),
        ([SENT, ("gave up", {"id": 1})], ""),
        ([SENT, ("gave up", {"id": 1}), GOT], ""),
    ],
)
def test_what_was_sent_arrives(notes: list[tuple[str, dict[str, Any]]], wrong: str) -> None:
    assert judged(Delivery("sent", "got", withdrawn="gave up"), *notes) == wrong


def test_a_second_delivery_may_be_a_violation() -> None:
    once = Delivery("sent", "got", is_once=True)
    assert judged(once, SENT, GOT, GOT) == "delivery: 1 was delivered a second time, on a.1"


# --- linearizability ---------------------------------------------------------------------------


def verdict(history: Linearizability) -> bool | None:
    try:
        history.at_end()
    except Violation:
        return False
    return None if history.undecided else True


def test_a_value_that_was_seen_cannot_be_unseen() -> None:
    history = Linearizability(initial=0)
    write = history.call("w", "write", 1)
    for result in (1, 0):
        history.ends(history.call("r", "read"), result)
    history.ends(write)
    with pytest.raises(Violation, match=r"no order of the operations") as broken:
        history.at_end()
    assert "r read() → 0" in str(broken.value)


def test_operations_at_the_same_time_may_come_in_any_order() -> None:
    history = Linearizability(initial=0)
    first, second = history.call("a", "write", 1), history.call("b", "write", 2)
    history.ends(first)
    history.ends(second)
    history.ends(history.call("r", "read"), 1)
    assert verdict(history) is True


def test_an_operation_without_return_may_have_happened_or_not() -> None:
    for seen in (0, 1):
        history = Linearizability(initial=0)
        history.call("w", "write", 1)
        history.ends(history.call("r", "read"), seen)
        assert verdict(history) is True


def test_a_dropped_operation_did_not_happen() -> None:
    history = Linearizability(initial=0)
    history.drop(history.call("w", "write", 1))
    history.ends(history.call("r", "read"), 1)
    assert verdict(history) is False


def test_keys_are_judged_one_by_one_and_named() -> None:
    history = Linearizability(initial=None)
    history.ends(history.call("w", "write", 1, key="x"))
    history.ends(history.call("r", "read", key="y"), None)
    history.ends(history.call("r", "read", key="x"), None)
    with pytest.raises(Violation, match="on 'x'"):
        history.at_end()


def test_a_compare_and_swap_writes_once() -> None:
    history = Linearizability(initial=0)
    for won in (True, True):
        history.ends(history.call("a", "cas", 0, 5), won)
    assert verdict(history) is False


def test_a_history_too_hard_to_judge_is_neither_right_nor_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trinamo.sim.checkers.linearizability.TRIES_MAX", 20)
    history = Linearizability(initial=0)
    calls = [history.call(f"w{n}", "write", n) for n in range(12)]
    for call in calls:
        history.ends(call)
    history.ends(history.call("r", "read"), 99)
    assert verdict(history) is None
    assert history.undecided == [None]
    assert "were too many" in next(iter(history.hints()))


def random_history(dice: random.Random) -> Linearizability:
    history, waiting = Linearizability(initial=0), list[Operation]()
    for _ in range(dice.randint(2, 10)):
        if waiting and dice.random() < 0.5:
            operation = waiting.pop(dice.randrange(len(waiting)))
            history.ends(operation, dice.randint(0, 2) if operation.name == "read" else None)
        elif sum(map(len, history._operations.values())) < 5:
            name = dice.choice(["read", "write"])
            arguments = (dice.randint(0, 2),) if name == "write" else ()
            waiting.append(history.call("c", name, *arguments))
    return history


def holds_by_brute_force(
    operations: list[Operation], model: Callable[..., Any] = register, initial: Hashable = 0
) -> bool:
    """Any order of any subset that has all finished ones, and keeps what was before what."""
    done = [each for each in operations if each.returned != float("inf")]
    open_ones = [each for each in operations if each.returned == float("inf")]
    for size in range(len(open_ones) + 1):
        for extra in itertools.combinations(open_ones, size):
            if any(
                is_right(order, model, initial) for order in itertools.permutations([*done, *extra])
            ):
                return True
    return False


def is_right(order: tuple[Operation, ...], model: Callable[..., Any], initial: Hashable) -> bool:
    for place, each in enumerate(order):
        if any(later.returned < each.called for later in order[place + 1 :]):
            return False
    state = initial
    for each in order:
        state, result = model(state, each.name, *each.arguments)
        if each.returned != float("inf") and result != each.result:
            return False
    return True


def test_the_verdict_is_that_of_trying_every_order() -> None:
    verdicts = set()
    for seed in range(400):
        history = random_history(random.Random(seed))
        operations = history._operations.get(None, [])
        expected = holds_by_brute_force(operations)
        assert verdict(history) is expected, (seed, [str(each) for each in operations])
        verdicts.add(expected)
    assert verdicts == {True, False}


@pytest.mark.parametrize(
    ("play", "rule"), [(replicated_register, "linearizability"), (election, "one leader")]
)
def test_the_rules_find_the_bugs_of_two_small_protocols(play: Any, rule: str) -> None:
    found = {finding.invariant for seed in range(60) if (finding := run(play, seed).finding)}
    assert found == {rule}

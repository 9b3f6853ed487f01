"""The models say what objects do, and their verdicts on random histories are those of trying all orders."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from tests.sim.checkers.test_checkers import holds_by_brute_force, verdict
from trinamo.sim import Linearizability, Operation, Violation, models

Call = tuple[str, tuple[Any, ...]]


def one(dice: random.Random, *calls: Callable[[random.Random], Call]) -> Call:
    return dice.choice(calls)(dice)


def small(dice: random.Random) -> int:
    return dice.randint(1, 2)


CALLS: dict[str, Callable[[random.Random], Call]] = {
    "register": lambda dice: one(
        dice,
        lambda _: ("read", ()),
        lambda d: ("write", (small(d),)),
        lambda d: ("cas", (small(d), small(d))),
    ),
    "kv": lambda dice: one(
        dice,
        lambda d: ("get", (d.choice("xy"),)),
        lambda d: ("put", (d.choice("xy"), small(d))),
        lambda d: ("delete", (d.choice("xy"),)),
        lambda d: ("cas", (d.choice("xy"), d.choice([None, 1]), small(d))),
        lambda _: ("items", ()),
    ),
    "queue": lambda dice: one(dice, lambda d: ("put", (small(d),)), lambda _: ("get", ())),
    "set_": lambda dice: one(
        dice,
        lambda d: ("add", (small(d),)),
        lambda d: ("remove", (small(d),)),
        lambda d: ("contains", (small(d),)),
        lambda _: ("read", ()),
    ),
    "mutex": lambda dice: one(
        dice,
        lambda d: ("acquire", (d.choice("ab"),)),
        lambda d: ("try_acquire", (d.choice("ab"),)),
        lambda d: ("release", (d.choice("ab"),)),
    ),
    "counter": lambda dice: one(
        dice,
        lambda d: ("add", (small(d),)),
        lambda d: ("add_and_get", (small(d),)),
        lambda _: ("read", ()),
    ),
}


def random_history(name: str, dice: random.Random) -> Linearizability:
    """What clients may have seen: each result is one that the model gives in some state, or a wrong one."""
    model = getattr(models, name)
    history, waiting = Linearizability(model), list[Operation]()
    state: Hashable = None
    for _ in range(dice.randint(3, 10)):
        if waiting and dice.random() < 0.55:
            operation = waiting.pop(dice.randrange(len(waiting)))
            # Mostly what an execution at the moment of the return gives, so that some histories hold.
            state, result = model(state, operation.name, *operation.arguments)
            if result is models.IMPOSSIBLE:
                result = None
            if dice.random() < 0.25:
                result = dice.choice([None, True, False, 0, 1, 2, 3, frozenset({1})])
            history.ends(operation, result)
        elif sum(map(len, history._operations.values())) < 5:
            method, arguments = CALLS[name](dice)
            waiting.append(history.call("c", method, *arguments))
    return history


@pytest.mark.parametrize("name", CALLS)
def test_the_verdict_on_every_model_is_that_of_trying_every_order(name: str) -> None:
    verdicts = []
    for seed in range(250):
        history = random_history(name, random.Random(f"{name}/{seed}"))
        operations = history._operations.get(None, [])
        expected = holds_by_brute_force(operations, getattr(models, name), None)
        assert verdict(history) is expected, (seed, [str(each) for each in operations])
        verdicts.append(expected)
    assert min(verdicts.count(False), verdicts.count(True)) > 25


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("kv", [("put", ("x", 1), None), ("cas", ("x", 1, 2), True), ("cas", ("x", 1, 3), False), ("get", ("x",), 2), ("delete", ("x",), None), ("items", (), frozenset())]),
        ("queue", [("get", (), None), ("put", (1,), None), ("put", (2,), None), ("get", (), 1), ("get", (), 2)]),
        ("set_", [("add", (1,), None), ("add", (1,), None), ("contains", (1,), True), ("remove", (1,), None), ("read", (), frozenset())]),
        ("mutex", [("acquire", ("a",), None), ("try_acquire", ("b",), False), ("release", ("a",), None), ("try_acquire", ("b",), True)]),
        ("counter", [("add", (2,), None), ("read", (), 2), ("add_and_get", (-1,), 1)]),
    ],
)  # fmt: skip
def test_what_an_object_does_alone(
    name: str, calls: list[tuple[str, tuple[Any, ...], Any]]
) -> None:
    state: Hashable = None
    for method, arguments, expected in calls:
        state, result = getattr(models, name)(state, method, *arguments)
        assert result == expected
        hash(state)


@pytest.mark.parametrize("name", CALLS)
def test_an_operation_that_a_model_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"a {name.strip('_')} has .*, not 'fly'"):
        getattr(models, name)(None, "fly")


def test_a_lock_that_two_hold_at_once_is_found_with_a_timeline() -> None:
    history = Linearizability(models.mutex)
    first = history.call("a", "acquire", "a")
    history.ends(first)
    second = history.call("b", "acquire", "b")
    history.ends(second)
    release = history.call("a", "release", "a")
    history.ends(release)
    history.call("c", "acquire", "c")
    with pytest.raises(Violation, match="no order of the operations") as broken:
        history.at_end()
    lines = str(broken.value).splitlines()
    at = lines.index("as they came, time from left to right:")
    assert lines[at + 1 :] == [
        "  []     a acquire('a') → None",
        "    []   b acquire('b') → None",
        "      [] a release('a') → None",
    ]

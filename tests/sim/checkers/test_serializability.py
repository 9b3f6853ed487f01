"""Transactions on lists: the verdict is that of trying every order, and a circle says why."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from trinamo.sim import Serializability, Violation
from trinamo.sim.checkers.serializability import Transaction

Steps = list[tuple[str, str, Any]]


def history_of(*transactions: tuple[str, Steps]) -> Serializability:
    """Of transactions as ("committed", [("append", "x", 1), ("read", "y", [])])."""
    history = Serializability()
    for state, steps in transactions:
        each = history.begin("c")
        for name, key, value in steps:
            getattr(each, name)(key, value)
        if state == "committed":
            history.commit(each)
        elif state == "aborted":
            history.abort(each)
    return history


def wrong_with(history: Serializability) -> str:
    try:
        history.at_end()
    except Violation as broken:
        return broken.text
    return ""


A, B, R = "append", "append", "read"


@pytest.mark.parametrize(
    ("transactions", "wrong"),
    [
        # Each reads what the other has not written yet: write skew.
        ([("committed", [(R, "x", []), (A, "y", 1)]), ("committed", [(R, "y", []), (A, "x", 1)])], "no order"),
        # Both saw the list empty, and both appended: a lost update.
        ([("committed", [(R, "x", []), (A, "x", 1)]), ("committed", [(R, "x", []), (A, "x", 2)])], "no order"),
        ([("committed", [(R, "x", []), (A, "x", 1)]), ("committed", [(R, "x", [1]), (A, "x", 2)])], ""),
        ([("committed", [(A, "x", 1)]), ("committed", [(A, "x", 2)]), ("committed", [(R, "x", [1, 2])]), ("committed", [(R, "x", [2, 1])])], "two orders"),
        ([("aborted", [(A, "x", 1)]), ("committed", [(R, "x", [1])])], "what was aborted is read"),
        ([("committed", [(R, "x", [9])])], "nobody appended 9"),
        # It saw the first of two appends of one transaction.
        ([("committed", [(A, "x", 1), (A, "x", 2)]), ("committed", [(R, "x", [1])])], "no order"),
        ([("committed", [(A, "x", 1), (A, "x", 2)]), ("committed", [(R, "x", [2, 1])])], "changed places"),
        ([("committed", [(A, "x", 1), (R, "x", [])])], "does not read what it appended"),
        ([("committed", [(A, "x", 1), (R, "x", [1])])], ""),
        # Nobody knows whether the first was committed, until its value is read.
        ([("open", [(A, "x", 1), (A, "y", 1)]), ("committed", [(R, "y", [])])], ""),
        ([("open", [(A, "x", 1), (A, "y", 1)]), ("committed", [(R, "x", [1]), (R, "y", [])])], "no order"),
    ],
)  # fmt: skip
def test_what_may_and_may_not_be_read(transactions: list[tuple[str, Steps]], wrong: str) -> None:
    text = wrong_with(history_of(*transactions))
    assert wrong in text
    assert bool(wrong) == bool(text)


def test_a_circle_is_the_shortest_and_says_why_each_comes_before_the_next() -> None:
    text = wrong_with(
        history_of(
            ("committed", [(R, "x", []), (A, "y", 1)]),
            ("committed", [(R, "y", []), (A, "z", 1)]),
            ("committed", [(R, "z", [1]), (A, "x", 1), (R, "y", [])]),
        )
    )
    assert text.splitlines()[1:] == [
        "  T1 of c: append('y', 1), read('x') → []",
        "    rw: it did not see what the next one appended to 'x'",
        "  T3 of c: append('x', 1), read('z') → [1], read('y') → []",
        "    rw: it did not see what the next one appended to 'y'",
    ]


def test_two_appends_of_one_value_are_a_mistake_of_the_scenario() -> None:
    with pytest.raises(ValueError, match="give every append a value of its own"):
        history_of(("open", [(A, "x", 1)]), ("open", [(A, "x", 1)])).at_end()


def test_a_history_without_a_committed_transaction_says_so() -> None:
    assert [*history_of(("open", [(A, "x", 1)])).hints()]
    assert not [*history_of(("committed", [(A, "x", 1)])).hints()]


def holds_by_brute_force(transactions: list[Transaction]) -> bool:
    """Some order of the committed and some of the open ones in which each reads what is there."""
    sure = [each for each in transactions if each.state == "committed"]
    maybe = [each for each in transactions if each.state == "open"]
    return any(
        runs(order)
        for size in range(len(maybe) + 1)
        for extra in itertools.combinations(maybe, size)
        for order in itertools.permutations([*sure, *extra])
    )


def runs(order: tuple[Transaction, ...]) -> bool:
    lists: dict[Any, list[Any]] = {}
    for each in order:
        appended = 0
        for key, values, count in each.reads:
            for to, value in each.appended[appended:count]:
                lists.setdefault(to, []).append(value)
            appended = count
            if tuple(lists.get(key, [])) != values:
                return False
        for to, value in each.appended[appended:]:
            lists.setdefault(to, []).append(value)
    return True


def random_history(dice: random.Random) -> Serializability:
    """Steps of some transactions in any order on real lists, and now and then a read that is wrong."""
    history, lists, number = Serializability(), dict[str, list[int]](), itertools.count(1)
    running = [history.begin(f"c{n}") for n in range(dice.randint(2, 4))]
    left = {each: dice.randint(1, 3) for each in running}
    while running:
        each = dice.choice(running) if dice.random() < 0.4 else running[0]
        key = dice.choice("xy")
        if dice.random() < 0.5:
            lists.setdefault(key, []).append(next(number))
            each.append(key, lists[key][-1])
        else:
            seen = list(lists.get(key, []))
            if dice.random() < 0.1:
                dice.shuffle(seen)
                seen = seen[: dice.randint(0, len(seen))]
            each.read(key, seen)
        left[each] -= 1
        if not left[each]:
            running.remove(each)
            # What was aborted was on the lists all the same: a dirty read, if anybody looked.
            end = dice.choice([history.commit, history.commit, history.commit, history.abort, None])
            if end is not None:
                end(each)
    return history


def test_the_verdict_is_that_of_trying_every_order() -> None:
    verdicts = []
    for seed in range(1500):
        history = random_history(random.Random(seed))
        expected = holds_by_brute_force(history._transactions)
        text = wrong_with(history)
        assert (not text) is expected, (seed, text, [str(each) for each in history._transactions])
        verdicts.append(expected)
    assert min(verdicts.count(True), verdicts.count(False)) > 300

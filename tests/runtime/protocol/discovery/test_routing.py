from __future__ import annotations

import random
from collections import Counter

from trinamo.runtime.protocol.discovery.candidates import Candidates, Policy, Standing, pick


def candidates() -> Candidates:
    """`a`, `b` and `c`, which all are well."""
    made = Candidates()
    for each in "cab":
        made.place(ord(each), Standing.WELL)
    return made


def picks(
    policy: Policy, count: int, load: dict[str, int] | None = None, *, without: str = ""
) -> str:
    made, rng = candidates(), random.Random(7)
    group, gone = made.asked([ord(each) for each in without])
    assert len(gone) == len(without)

    def load_of(number: int) -> int:
        return (load or {}).get(chr(number), 0)

    return "".join(
        chr(pick(policy, group, gone, turn=turn, load=load_of, rng=rng)) for turn in range(count)
    )


def test_round_robin_takes_turns() -> None:
    assert picks(Policy.ROUND_ROBIN, 7) == "abcabca"
    assert picks(Policy.ROUND_ROBIN, 5, without="b") == "acaca"


def test_random_reaches_everybody_about_equally() -> None:
    assert all(800 < count < 1200 for count in Counter(picks(Policy.RANDOM, 3000)).values())
    assert Counter(picks(Policy.RANDOM, 300, without="ac")) == {"b": 300}


def test_least_loaded_takes_the_one_with_the_fewest_in_flight() -> None:
    assert picks(Policy.LEAST_LOADED, 3, {"a": 2, "b": 1, "c": 2}) == "bbb"
    assert picks(Policy.LEAST_LOADED, 3, {"a": 2, "b": 1, "c": 3}, without="b") == "aaa"


def test_least_loaded_spreads_ties() -> None:
    assert picks(Policy.LEAST_LOADED, 6) == "abcabc"
    assert set(picks(Policy.LEAST_LOADED, 6, {"b": 1})) == {"a", "c"}
    assert picks(Policy.LEAST_LOADED, 4, without="a") == "bcbc"


def test_of_two_that_are_drawn_the_less_loaded_is_taken() -> None:
    """The most loaded of three never is, the least loaded in two draws of three."""
    counts = Counter(picks(Policy.POWER_OF_TWO, 3000, {"a": 3, "b": 1, "c": 2}))
    assert counts["a"] == 0
    assert 1800 < counts["b"] < 2200
    assert sum(counts.values()) == 3000


def test_behind_those_that_were_tried_come_those_that_are_passed_over() -> None:
    made = Candidates()
    made.place(ord("a"), Standing.WELL)
    made.place(ord("b"), Standing.OUT)
    group, tried = made.asked([ord("a")])
    assert chr(pick(Policy.RANDOM, group, tried, turn=0, load=int, rng=random.Random(7))) == "b"

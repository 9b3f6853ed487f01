from __future__ import annotations

import random
from collections import Counter

import pytest

from trinamo.runtime.errors import RequestError, UnavailableError
from trinamo.runtime.protocol.discovery.instances import Instance
from trinamo.runtime.protocol.discovery.routing import Policy, pick

ABC = [Instance(endpoint="n/c/e", id=each, transports={}) for each in "abc"]


def picks(policy: Policy, count: int, load: dict[str, int] | None = None) -> str:
    rng = random.Random(7)
    return "".join(
        pick(policy, ABC, turn=turn, load=lambda id_: (load or {}).get(id_, 0), rng=rng).id
        for turn in range(count)
    )


def test_round_robin_takes_turns() -> None:
    assert picks(Policy.ROUND_ROBIN, 7) == "abcabca"


def test_random_reaches_everybody_about_equally() -> None:
    assert all(800 < count < 1200 for count in Counter(picks(Policy.RANDOM, 3000)).values())


def test_least_loaded_takes_the_one_with_the_fewest_in_flight() -> None:
    assert picks(Policy.LEAST_LOADED, 3, {"a": 2, "b": 1, "c": 2}) == "bbb"


def test_least_loaded_spreads_ties() -> None:
    assert picks(Policy.LEAST_LOADED, 6) == "abcabc"
    assert set(picks(Policy.LEAST_LOADED, 6, {"b": 1})) == {"a", "c"}


def test_of_two_that_are_drawn_the_less_loaded_is_taken() -> None:
    """The most loaded of three never is, the least loaded in two draws of three."""
    counts = Counter(picks(Policy.POWER_OF_TWO, 3000, {"a": 3, "b": 1, "c": 2}))
    assert counts["a"] == 0
    assert 1800 < counts["b"] < 2200
    assert sum(counts.values()) == 3000


@pytest.mark.parametrize("policy", list(Policy))
def test_a_named_instance_is_honoured_under_every_policy(policy: Policy) -> None:
    rng = random.Random(7)
    assert pick(policy, ABC, turn=0, load=lambda _: 0, rng=rng, instance_id="c").id == "c"
    with pytest.raises(UnavailableError, match="instance z is not live"):
        pick(policy, ABC, turn=0, load=lambda _: 0, rng=rng, instance_id="z")


def test_direct_needs_a_name() -> None:
    with pytest.raises(RequestError):
        picks(Policy.DIRECT, 1)


@pytest.mark.parametrize("policy", [p for p in Policy if p is not Policy.DIRECT])
def test_nobody_to_choose_is_unavailable(policy: Policy) -> None:
    with pytest.raises(UnavailableError):
        pick(policy, [], turn=0, load=lambda _: 0, rng=random.Random(7))

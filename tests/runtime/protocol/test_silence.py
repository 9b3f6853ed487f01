"""The vigil over a vanished instance's requests: who is given up, and when."""

from __future__ import annotations

from hypothesis import given, strategies as st

from trinamo.runtime.protocol.silence import (
    LOOKS_PER_GRACE,
    PRESENCE,
    Presence,
    Sign,
    Vigil,
)


def test_a_request_is_given_up_after_the_whole_grace_and_named_once() -> None:
    vigil: Vigil[str] = Vigil(8.0)
    assert [vigil.look({"a": 3}, now) for now in (0.0, 2.0, 4.0, 6.0)] == [[]] * 4
    assert vigil.look({"a": 3}, 8.0) == ["a"]
    assert vigil.look({"a": 3}, 10.0) == []


def test_every_item_begins_the_grace_anew() -> None:
    vigil: Vigil[str] = Vigil(8.0)
    for now, count in ((0.0, 1), (6.0, 2), (12.0, 3), (18.0, 3)):
        assert vigil.look({"a": count}, now) == []
    assert vigil.look({"a": 3}, 20.0) == ["a"]


def test_a_consumer_that_does_not_read_is_not_the_worker_s_silence() -> None:
    """The worker may be waiting for us; the grace begins once something could come again."""
    vigil: Vigil[str] = Vigil(8.0)
    for now in (0.0, 8.0, 16.0, 24.0):
        assert vigil.look({"a": None}, now) == []
    assert vigil.look({"a": 3}, 26.0) == []
    assert vigil.look({"a": 3}, 33.0) == []
    assert vigil.look({"a": 3}, 34.0) == ["a"]


def test_requests_are_judged_one_by_one_and_an_ended_one_is_forgotten() -> None:
    vigil: Vigil[str] = Vigil(8.0)
    vigil.look({"silent": 1, "lively": 1, "ended": 1}, 0.0)
    assert vigil.look({"silent": 1, "lively": 9}, 8.0) == ["silent"]
    assert vigil.look({"ended": 1, "lively": 9}, 9.0) == []
    assert vigil.look({"ended": 1, "lively": 9}, 16.0) == ["lively"]


@given(
    st.lists(
        st.tuples(st.floats(0.01, 30.0), st.sampled_from(["item", "nothing", "paused"])),
        max_size=40,
    )
)
def test_nobody_is_given_up_who_spoke_within_the_grace(steps: list[tuple[float, str]]) -> None:
    """A request named by `look` had nothing new in every look since one at least a grace ago."""
    vigil: Vigil[int] = Vigil(10.0)
    now, count, quiet_since = 0.0, 0, 0.0
    vigil.look({1: count}, now)
    for wait_s, step in steps:
        now += wait_s
        count += step == "item"
        given_up = vigil.look({1: None if step == "paused" else count}, now)
        if step == "nothing":
            assert not given_up or now - quiet_since >= 10.0
        else:
            assert not given_up
            quiet_since = now


def test_a_silent_request_is_named_within_a_grace_and_a_quarter() -> None:
    vigil: Vigil[int] = Vigil(10.0)
    looks = 0
    while not vigil.look({1: 5}, looks * vigil.wait_s):
        looks += 1
    assert looks <= LOOKS_PER_GRACE + 1


def test_only_a_deletion_starts_the_grace_and_giving_up_is_final() -> None:
    assert set(PRESENCE[Presence.LISTED]) == {Sign.DELETED}
    assert not PRESENCE[Presence.GIVEN_UP]
    assert set(PRESENCE) == set(Presence)

"""Silent requests, of vanished instances and of those that are asked: who is given up, and when."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trinamo.runtime.protocol.streams.silence import (
    LOOKS_PER_GRACE,
    PRESENCE,
    Inquiry,
    Presence,
    Reply,
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


def ask(
    inquiry: Inquiry[str], replies: list[Reply], *, start: float, heard: dict[str, int | None]
) -> list[tuple[float, str]]:
    """One probe after the other, each waited for as long as the pause: who is given up when."""
    ended: list[tuple[float, str]] = []
    for number, reply in enumerate(replies):
        asked_at = start + number * inquiry.wait_s
        inquiry.look(heard, asked_at + inquiry.wait_s)
        found = inquiry.take(reply, asked_at, asked_at + inquiry.wait_s)
        ended += [(asked_at + inquiry.wait_s, each) for each in found]
    return ended


def silent(grace_s: float = 8.0) -> Inquiry[str]:
    """One whose request has been silent for its whole grace."""
    inquiry: Inquiry[str] = Inquiry(grace_s)
    for quarter in range(LOOKS_PER_GRACE):
        assert not inquiry.look({"a": 3}, quarter * inquiry.wait_s)
    assert inquiry.look({"a": 3}, grace_s)
    return inquiry


@given(st.floats(0.01, 1e5))
def test_no_answer_all_through_a_second_grace_ends_it_whatever_the_grace(grace_s: float) -> None:
    """Also where four quarters add up to a little less than the whole."""
    inquiry = silent(grace_s)
    ended = ask(inquiry, [Reply.NOTHING] * 6, start=grace_s, heard={"a": 3})
    assert [name for _, name in ended] == ["a"]
    assert ended[0][0] <= 2 * grace_s * (1 + 1e-9)


def test_one_answer_gives_two_graces_more() -> None:
    replies = [*[Reply.NOTHING] * 3, Reply.ANSWERED, *[Reply.NOTHING] * 8]
    ended = ask(silent(), replies, start=8.0, heard={"a": 3})
    assert ended == [(16.0 + 16.0, "a")]


def test_what_could_not_be_asked_breaks_the_row() -> None:
    """Nothing is known of that time; a whole grace of probes has to go unanswered after it."""
    replies = [*[Reply.NOTHING] * 3, Reply.UNASKED, *[Reply.NOTHING] * 4]
    inquiry = silent()
    assert ask(inquiry, replies[:4], start=8.0, heard={"a": 3}) == []
    assert not inquiry.is_unanswered
    assert ask(inquiry, replies[4:], start=16.0, heard={"a": 3}) == [(24.0, "a")]


def test_somebody_else_s_answer_ends_at_once_what_is_silent() -> None:
    inquiry = silent()
    heard: dict[str, int | None] = {"a": 3, "young": 0, "unread": None}
    assert ask(inquiry, [Reply.REPLACED], start=8.0, heard=heard) == [(10.0, "a")]


def test_probes_in_a_hurry_do_not_make_a_grace() -> None:
    inquiry = silent()
    inquiry.look({"a": 3}, 20.0)
    assert [inquiry.take(Reply.NOTHING, 20.0, 20.0 + n / 10) for n in range(9)] == [[]] * 9
    assert inquiry.take(Reply.NOTHING, 27.0, 28.0) == ["a"]


def test_who_was_stopped_itself_blames_nobody() -> None:
    """Of a minute in which we did not run one probe tells no more than of a second."""
    inquiry = silent()
    assert ask(inquiry, [Reply.NOTHING], start=8.0, heard={"a": 3}) == []
    assert inquiry.look({"a": 3}, 70.0)
    assert inquiry.take(Reply.NOTHING, 10.0, 70.0) == []
    ended = ask(inquiry, [Reply.NOTHING] * 2, start=70.0, heard={"a": 3})
    assert ended == [(74.0, "a")]


@pytest.mark.parametrize(
    ("second", "is_life"), [(None, False), (4, True), (3, False)], ids=["unread", "item", "nothing"]
)
def test_an_item_of_any_request_is_a_sign_of_life(second: int | None, is_life: bool) -> None:
    inquiry: Inquiry[str] = Inquiry(8.0)
    inquiry.look({"a": 3, "b": 3}, 0.0)
    inquiry.look({"a": 3, "b": second}, 8.0)
    ended = ask(inquiry, [Reply.NOTHING] * 4, start=8.0, heard={"a": 3, "b": second})
    assert [name for _, name in ended if name == "a"] == ([] if is_life else ["a"])


def test_the_item_of_one_request_counts_though_another_begins_in_silence() -> None:
    inquiry: Inquiry[str] = Inquiry(8.0)
    inquiry.look({"a": 3, "b": 3}, 0.0)
    inquiry.look({"a": 3, "b": 4, "new": 0}, 8.0)
    ended = ask(inquiry, [Reply.NOTHING] * 4, start=8.0, heard={"a": 3, "b": 4})
    assert [name for _, name in ended if name == "a"] == []


def test_a_consumer_that_reads_again_is_no_sign_of_life() -> None:
    """What it reads may have come long ago."""
    inquiry: Inquiry[str] = Inquiry(8.0)
    inquiry.look({"a": 3, "b": None}, 0.0)
    inquiry.look({"a": 3, "b": 9}, 8.0)
    ended = ask(inquiry, [Reply.NOTHING] * 4, start=8.0, heard={"a": 3, "b": 9})
    assert ended == [(16.0, "a"), (16.0, "b")]


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Reply)[:3]), st.sampled_from(["item", "nothing", "paused"])),
        max_size=60,
    )
)
def test_nobody_is_given_up_whose_worker_gave_a_sign_within_two_graces(
    steps: list[tuple[Reply, str]],
) -> None:
    """Neither an item nor an answer for two graces, nothing but unanswered probes for the last."""
    inquiry: Inquiry[str] = Inquiry(8.0)
    count, now, sign_at = 1, 0.0, 0.0
    row = 0
    inquiry.look({"a": count}, now)
    for reply, step in steps:
        asked_at, now = now, now + inquiry.wait_s
        count += step == "item"
        inquiry.look({"a": None if step == "paused" else count}, now)
        ended = inquiry.take(reply, asked_at, now)
        row = row + 1 if reply is Reply.NOTHING and step == "nothing" else 0
        if reply is Reply.ANSWERED or step == "item":
            sign_at = now
        if ended:
            assert now - sign_at >= 16.0
            assert row >= LOOKS_PER_GRACE


def test_silence_alone_ends_nothing_that_discovery_names_and_giving_up_is_final() -> None:
    assert PRESENCE[Presence.LISTED][Sign.SILENCE] is Presence.QUESTIONED
    assert Presence.GIVEN_UP not in PRESENCE[Presence.LISTED].values()
    ends = PRESENCE[Presence.QUESTIONED].items()
    assert {sign for sign, into in ends if into is Presence.GIVEN_UP} == {
        Sign.UNANSWERED,
        Sign.REPLACED,
    }
    assert not PRESENCE[Presence.GIVEN_UP]
    assert set(PRESENCE) == set(Presence)
    assert {sign for steps in PRESENCE.values() for sign in steps} == set(Sign)

"""Silent requests, of deleted instances and of those that are probed: who is given up, and when."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.protocol.discovery.presence import (
    LOOKS_PER_GRACE,
    PRESENCE,
    InFlight,
    Liveness,
    Presence,
    Sign,
)

GRACE_S = 8.0
PAUSE_S = GRACE_S / LOOKS_PER_GRACE


class Request(InFlight):
    """It has brought as much as `came` says."""

    def __init__(self, came: int | None = 3, *, is_waiting: bool = False) -> None:
        super().__init__(is_waiting=is_waiting)
        self.came = came

    def heard(self) -> int | None:
        return self.came

    def fail(self, error: DisconnectedError) -> None:
        raise AssertionError


def watched(*requests: Request, grace_s: float = GRACE_S) -> Liveness:
    made = Liveness(grace_s, 10.0)
    made.requests |= dict.fromkeys(requests)
    return made


def deleted(*requests: Request, sign: Sign = Sign.DELETED) -> Liveness:
    """One that was deleted at 0."""
    made = watched(*requests)
    made.step(sign, 0.0)
    return made


def silent(request: Request, *, grace_s: float = GRACE_S) -> Liveness:
    """One whose request has been silent for its whole grace."""
    made = watched(request, grace_s=grace_s)
    for quarter in range(LOOKS_PER_GRACE):
        assert made.look(quarter * made.pause_s) == []
        assert made.presence is Presence.LISTED
    assert made.look(grace_s) == []
    assert made.presence is Presence.SILENT
    return made


def ask(made: Liveness, replies: list[Sign], *, start: float) -> list[tuple[float, InFlight]]:
    """One probe after the other, each waited for as long as the pause: who is given up when."""
    ended: list[tuple[float, InFlight]] = []
    for number, reply in enumerate(replies):
        asked_at = start + number * made.pause_s
        now = asked_at + made.pause_s
        ended += [(now, each) for each in made.look(now)]
        ended += [(now, each) for each in made.take(reply, asked_at, now)]
    return ended


# --- deleted and silent --------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [Sign.DELETED, Sign.LAPSED])
def test_a_request_is_given_up_after_the_whole_grace_and_named_once(sign: Sign) -> None:
    request = Request()
    made = deleted(request, sign=sign)
    assert [made.look(now) for now in (0.0, 2.0, 4.0, 6.0)] == [[]] * 4
    assert made.look(8.0) == [request]
    assert made.look(10.0) == made.look(30.0) == []


def test_every_item_begins_the_grace_anew() -> None:
    request = Request()
    made = deleted(request)
    for now, request.came in ((0.0, 1), (6.0, 2), (12.0, 3), (18.0, 3)):
        assert made.look(now) == []
    assert made.look(20.0) == [request]


def test_the_grace_begins_with_the_deletion() -> None:
    """The worker may have lost its lease in a long prefill, and is about to register again."""
    request = Request()
    made = watched(request)
    assert [made.look(now) for now in (0.0, 50.0)] == [[], []]
    made.step(Sign.DELETED, 50.0)
    assert [made.look(now) for now in (52.0, 57.0)] == [[], []]
    assert made.look(58.0) == [request]


def test_a_consumer_that_does_not_read_is_not_the_worker_s_silence() -> None:
    """The worker may be waiting for us; the grace begins once something could come again."""
    request = Request(None)
    made = deleted(request)
    assert [made.look(now) for now in (0.0, 8.0, 16.0, 24.0)] == [[]] * 4
    request.came = 3
    assert [made.look(now) for now in (26.0, 33.0)] == [[], []]
    assert made.look(34.0) == [request]


def test_requests_are_judged_one_by_one() -> None:
    quiet, lively, waiting = Request(), Request(), Request(is_waiting=True)
    made = deleted(quiet, lively, waiting)
    made.look(0.0)
    lively.came = 9
    assert made.look(8.0) == [quiet]
    del made.requests[quiet]
    assert made.look(9.0) == []
    assert made.look(16.0) == [lively]


@given(
    st.lists(
        st.tuples(st.floats(0.01, 30.0), st.sampled_from(["item", "nothing", "paused"])),
        max_size=40,
    )
)
def test_nobody_is_given_up_who_spoke_within_the_grace(steps: list[tuple[float, str]]) -> None:
    """A request that is given up had nothing new in every look since one a grace ago."""
    request = Request(0)
    made = deleted(request)
    now, count, quiet_since = 0.0, 0, 0.0
    made.look(now)
    for wait_s, step in steps:
        now += wait_s
        count += step == "item"
        request.came = None if step == "paused" else count
        given_up = made.look(now)
        if given_up:
            assert step == "nothing"
            assert now - quiet_since >= GRACE_S - 1e-5
            return
        if step != "nothing":
            quiet_since = now


def test_a_silent_request_is_given_up_within_a_grace_and_a_quarter() -> None:
    made, looks = deleted(Request()), 0
    while not made.look(looks * made.pause_s):
        looks += 1
    assert looks <= LOOKS_PER_GRACE + 1


# --- named, silent, and probed -------------------------------------------------------------------


@given(st.floats(0.01, 1e5))
def test_no_answer_all_through_a_second_grace_ends_it_whatever_the_grace(grace_s: float) -> None:
    """Also where four quarters add up to a little less than the whole."""
    request = Request()
    made = silent(request, grace_s=grace_s)
    ended = ask(made, [Sign.UNANSWERED] * 6, start=grace_s)
    assert [each for _, each in ended] == [request]
    assert ended[0][0] <= 2 * grace_s * (1 + 1e-9)


@pytest.mark.parametrize("answer", [Sign.ACCEPTED, Sign.ANSWERED])
def test_one_answer_gives_two_graces_more(answer: Sign) -> None:
    request = Request()
    replies = [*[Sign.UNANSWERED] * 3, answer, *[Sign.UNANSWERED] * 8]
    assert ask(silent(request), replies, start=8.0) == [(16.0 + 16.0, request)]


def test_what_could_not_be_asked_breaks_the_row() -> None:
    """Nothing is known of that time; a whole grace of probes has to go unanswered after it."""
    request = Request()
    made = silent(request)
    assert ask(made, [*[Sign.UNANSWERED] * 3, Sign.UNASKED], start=8.0) == []
    assert made.presence is Presence.SILENT
    assert ask(made, [Sign.UNANSWERED] * 4, start=16.0) == [(24.0, request)]


def test_somebody_else_s_answer_ends_at_once_what_is_silent() -> None:
    request, young, unread = Request(), Request(0), Request(None)
    made = silent(request)
    made.requests |= {young: None, unread: None}
    assert ask(made, [Sign.REPLACED], start=8.0) == [(10.0, request)]


def test_probes_in_a_hurry_do_not_make_a_grace() -> None:
    request = Request()
    made = silent(request)
    made.look(20.0)
    assert [made.take(Sign.UNANSWERED, 20.0, 20.0 + n / 10) for n in range(9)] == [[]] * 9
    assert made.take(Sign.UNANSWERED, 27.0, 28.0) == [request]


def test_who_was_stopped_itself_blames_nobody() -> None:
    """Of a minute in which we did not run one probe tells no more than of a second."""
    request = Request()
    made = silent(request)
    assert ask(made, [Sign.UNANSWERED], start=8.0) == []
    made.look(70.0)
    assert made.take(Sign.UNANSWERED, 10.0, 70.0) == []
    assert ask(made, [Sign.UNANSWERED] * 2, start=70.0) == [(74.0, request)]


@pytest.mark.parametrize(
    ("second", "is_life"), [(None, False), (4, True), (3, False)], ids=["unread", "item", "nothing"]
)
def test_an_item_of_any_request_is_a_sign_of_life(second: int | None, is_life: bool) -> None:
    one, other = Request(), Request()
    made = watched(one, other)
    made.look(0.0)
    other.came = second
    made.look(8.0)
    ended = ask(made, [Sign.UNANSWERED] * 4, start=8.0)
    assert [each for _, each in ended if each is one] == ([] if is_life else [one])


def test_the_item_of_one_request_counts_though_another_begins_in_silence() -> None:
    one, other = Request(), Request()
    made = watched(one, other)
    made.look(0.0)
    other.came = 4
    made.requests[Request(0)] = None
    made.look(8.0)
    assert ask(made, [Sign.UNANSWERED] * 4, start=8.0) == []


def test_a_consumer_that_reads_again_is_no_sign_of_life() -> None:
    """What it reads may have come long ago."""
    one, other = Request(), Request(None)
    made = watched(one, other)
    made.look(0.0)
    other.came = 9
    made.look(8.0)
    assert ask(made, [Sign.UNANSWERED] * 4, start=8.0) == [(16.0, one), (16.0, other)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([Sign.ACCEPTED, Sign.UNANSWERED, Sign.UNASKED]),
            st.sampled_from(["item", "nothing", "paused"]),
        ),
        max_size=60,
    )
)
def test_nobody_is_given_up_whose_worker_gave_a_sign_within_two_graces(
    steps: list[tuple[Sign, str]],
) -> None:
    """Neither an item nor an answer for two graces, nothing but unanswered probes for the last."""
    request = Request(1)
    made = watched(request)
    count, now, sign_at = 1, 0.0, 0.0
    row = 0
    made.look(now)
    for reply, step in steps:
        asked_at, now = now, now + PAUSE_S
        count += step == "item"
        request.came = None if step == "paused" else count
        ended = made.look(now)
        ended += made.take(reply, asked_at, now)
        row = row + 1 if reply is Sign.UNANSWERED and step == "nothing" else 0
        if reply is Sign.ACCEPTED or step == "item":
            sign_at = now
        if ended:
            assert now - sign_at >= 2 * GRACE_S
            assert row >= LOOKS_PER_GRACE
            return


def test_one_that_did_not_answer_is_probed_on_after_it_left() -> None:
    """A deletion, which says more, must not give its requests more time."""
    request = Request()
    made = silent(request)
    assert ask(made, [Sign.UNANSWERED] * 3, start=8.0) == []
    made.step(Sign.DELETED, 15.0)
    assert made.is_probed
    assert ask(made, [Sign.UNANSWERED], start=14.0) == [(16.0, request)]
    made.look(18.0)
    assert not made.is_probed


def test_a_registration_is_a_sign_of_life() -> None:
    request = Request()
    made = silent(request)
    ask(made, [Sign.UNANSWERED] * 3, start=8.0)
    made.step(Sign.REGISTERED, 15.0)
    assert made.presence is Presence.LISTED
    assert ask(made, [Sign.UNANSWERED] * 7, start=15.0) == []
    assert ask(made, [Sign.UNANSWERED] * 2, start=29.0) == [(33.0, request)]


# --- the table -----------------------------------------------------------------------------------


def test_silence_alone_ends_nothing_that_discovery_names() -> None:
    assert PRESENCE[Presence.LISTED][Sign.SILENCE] is Presence.SILENT
    for state in (Presence.LISTED, Presence.SILENT, Presence.UNRESPONSIVE):
        leaving = {sign for sign, into in PRESENCE[state].items() if into is Presence.LEFT}
        assert leaving == {Sign.DELETED}
    assert set(PRESENCE) == set(Presence)


def test_only_acceptance_keeps_a_stale_instance() -> None:
    answers = {Sign.ACCEPTED, Sign.ANSWERED, Sign.UNASKED, Sign.UNANSWERED, Sign.REPLACED}
    ends = {sign for sign, into in PRESENCE[Presence.STALE].items() if into is Presence.LEFT}
    assert answers - ends == {Sign.ACCEPTED}


@given(st.lists(st.sampled_from(Sign), max_size=20))
def test_every_step_is_the_table_s(signs: list[Sign]) -> None:
    made = watched()
    for now, sign in enumerate(signs):
        before = made.presence
        made.step(sign, now)
        assert made.presence is PRESENCE[before].get(sign, before)
        assert (made.stale_until < 100) is (made.presence is Presence.STALE)

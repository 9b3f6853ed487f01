from __future__ import annotations

import pytest

from trinamo.runtime.errors import RemoteProtocolError, RequestError
from trinamo.runtime.protocol.discovery.instances import (
    EndpointName,
    Instance,
    InstanceChange,
    LiveSet,
    Standing,
    decode_instance,
    encode_instance,
)


def instance(number: int, *, draining: bool = False, incarnation: int = 1) -> Instance:
    return Instance(
        endpoint="a/b/c",
        id=f"{number:x}",
        transports={"tcp": f"h:{number}"},
        draining=draining,
        incarnation=incarnation,
    )


def live_set(*instances: Instance) -> LiveSet:
    live = LiveSet()
    live.replace((each.key, encode_instance(each)) for each in instances)
    return live


A, B, C = instance(1), instance(2), instance(3)


def test_a_name_has_three_parts_and_a_key_prefix_that_ends() -> None:
    name = EndpointName.parse("a/b/foo")
    assert (str(name), name.key_prefix) == ("a/b/foo", "instances/a/b/foo/")


@pytest.mark.parametrize(
    "text", ["", "a/b", "a/b/c/d", "a//c", "A/b/c", "a/b/c d", "-/b/c", "a/b/" + "c" * 64]
)
def test_a_text_that_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        EndpointName.parse(text)


def test_an_instance_comes_back_as_it_was() -> None:
    assert decode_instance(A.key, encode_instance(A)) == A


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (A.key, b""),
        (A.key, b"\xff"),
        (A.key, b"{}"),
        (A.key, encode_instance(B)),
        (
            "instances/a/b/c/XYZ",
            encode_instance(Instance(endpoint="a/b/c", id="XYZ", transports={})),
        ),
    ],
)
def test_an_entry_that_is_not_the_instance_of_its_key_is_refused(key: str, value: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_instance(key, value)


def test_a_snapshot_says_who_joined_and_a_resync_who_left() -> None:
    live = LiveSet()
    assert live.replace([(A.key, encode_instance(A)), (B.key, encode_instance(B))]).joined == (A, B)
    change = live.replace([(B.key, encode_instance(B)), (C.key, encode_instance(C))])
    assert (change.joined, change.left) == ((C,), (A,))
    assert live.instances == [B, C]
    assert live.get("1") is None
    assert live.get("2") == B


def test_a_bad_entry_is_refused_alone() -> None:
    live = LiveSet()
    change = live.replace([(A.key, b"junk"), (B.key, encode_instance(B))])
    assert (change.joined, len(change.refused), len(live)) == ((B,), 1, 1)
    assert live.put(A.key, b"junk").refused
    assert live.instances == [B]


def test_an_instance_registered_anew_has_neither_joined_nor_left() -> None:
    live = live_set(A)
    again = instance(1, incarnation=2)
    change = live.put(again.key, encode_instance(again))
    assert (change.joined, change.left, live.instances) == ((), (), [again])


def test_deleting_an_unknown_key_changes_nothing() -> None:
    live = live_set(A)
    assert live.delete(B.key).left == ()
    assert live.delete(A.key).left == (A,)
    assert len(live) == 0


def test_an_inhibited_instance_is_no_candidate_until_its_time_is_over() -> None:
    live = live_set(A, B)
    live.inhibit(A.id, until=10)
    assert live.candidates(9) == [B]
    assert live.inhibited_count(9) == 1
    assert live.candidates(10) == [A, B]
    assert live.inhibited_count(10) == 0


def test_a_standing_tells_why_an_instance_is_passed_over() -> None:
    leaving = instance(4, draining=True)
    live = live_set(A, B, C, leaving)
    live.inhibit(A.id, until=10)
    live.inhibit(B.id, until=10)
    live.suspect(B.id)

    seen = {each.id: live.standing(each, 9) for each in live.instances}
    later = live.standing(A, 10)

    assert seen == {
        A.id: Standing.INHIBITED,
        B.id: Standing.SUSPECTED,
        C.id: Standing.LIVE,
        leaving.id: Standing.DRAINING,
    }
    assert later is Standing.LIVE


def test_inhibition_never_leaves_nobody() -> None:
    live = live_set(A, B)
    live.inhibit(A.id, until=10)
    live.inhibit(B.id, until=10)
    assert live.candidates(0) == [A, B]


def test_a_draining_instance_is_no_candidate_even_if_it_is_the_only_one() -> None:
    live = live_set(instance(1, draining=True))
    assert live.candidates(0) == []
    assert len(live.instances) == 1


@pytest.mark.parametrize("how", ["re-registration", "answer", "leaving"])
def test_inhibition_ends_with(how: str) -> None:
    live = live_set(A, B)
    live.inhibit(A.id, until=10)
    if how == "re-registration":
        live.put(A.key, encode_instance(instance(1, incarnation=2)))
    elif how == "answer":
        live.clear_inhibition(A.id)
    else:
        live.delete(A.key)
        live.put(A.key, encode_instance(A))
    assert {each.id for each in live.candidates(0)} == {"1", "2"}


def test_the_same_entry_seen_again_does_not_end_inhibition() -> None:
    """A resync repeats what is known; that is no sign of life."""
    live = live_set(A, B)
    live.inhibit(A.id, until=10)
    live.put(A.key, encode_instance(A))
    assert live.candidates(0) == [B]


def test_one_who_is_not_live_cannot_be_inhibited() -> None:
    live = live_set(A)
    live.inhibit(B.id, until=10)
    assert live.inhibited_count(0) == 0


# --- deleted, but reached ------------------------------------------------------------------------


def reached(*instances: Instance) -> LiveSet:
    """A set that keeps what is deleted, with a connection to each."""
    live = LiveSet(keeps_deleted=True)
    live.replace((each.key, encode_instance(each)) for each in instances)
    for each in instances:
        live.trust(each.id)
    return live


def test_a_deleted_instance_whose_connection_stands_lingers_until_it_is_dismissed() -> None:
    live = reached(A)
    assert live.delete(A.key) == InstanceChange(lingering=(A,))
    assert live.delete(A.key) == InstanceChange()
    assert live.replace([]) == InstanceChange()
    assert (live.instances, live.lingering_count, live.is_wanted(A.id)) == ([A], 1, True)
    assert live.standing(A, 0) is Standing.LINGERING
    assert live.dismiss(A.id) == InstanceChange(left=(A,))
    assert live.dismiss(A.id) == InstanceChange()
    assert (live.instances, live.lingering_count, live.is_wanted(A.id)) == ([], 0, False)


def test_a_resync_makes_linger_what_it_does_not_name() -> None:
    live = reached(A, B)
    again = instance(2, incarnation=2)
    assert live.replace([(B.key, encode_instance(again))]) == InstanceChange(lingering=(A,))
    assert live.instances == [A, again]


def test_coming_back_ends_the_lingering_and_is_neither_joining_nor_leaving() -> None:
    live = reached(A)
    live.delete(A.key)
    again = instance(1, incarnation=2)
    assert live.put(A.key, encode_instance(again)) == InstanceChange(returned=(again,))
    assert live.dismiss(A.id) == InstanceChange()
    assert live.instances == [again]
    assert live.delete(A.key).lingering == (again,)


@pytest.mark.parametrize("why", ["never stood", "lost", "draining", "moved", "not wanted"])
def test_nobody_lingers_whose_connection_does_not_stand_or_who_leaves(why: str) -> None:
    live = LiveSet(keeps_deleted=why != "not wanted")
    live.put(A.key, encode_instance(A))
    if why != "never stood":
        live.trust(A.id)
    if why == "lost":
        assert live.suspect(A.id)
    if why == "draining":
        leaving = instance(1, draining=True)
        assert live.put(A.key, encode_instance(leaving)).draining == (leaving,)
        assert not live.is_wanted(A.id)
    if why == "moved":
        elsewhere = Instance(endpoint="a/b/c", id=A.id, transports={"tcp": "elsewhere:1"})
        assert live.put(A.key, encode_instance(elsewhere)).moved == (elsewhere,)
    assert len(live.delete(A.key).left) == 1
    assert len(live) == 0


def test_a_connection_that_stands_again_makes_up_for_its_loss() -> None:
    live = reached(A)
    live.suspect(A.id)
    assert live.trust(A.id)
    assert live.delete(A.key).lingering == (A,)


def test_who_joins_again_after_leaving_begins_without_a_connection() -> None:
    live = reached(A)
    live.delete(A.key)
    live.dismiss(A.id)
    live.put(A.key, encode_instance(A))
    assert live.delete(A.key).left == (A,)


def test_who_lingers_comes_after_those_that_discovery_names() -> None:
    live = reached(A, B, C)
    live.delete(A.key)
    assert live.candidates(0) == [B, C]
    assert live.candidates(0, exclude=[B.id]) == [C]
    assert live.candidates(0, exclude=[B.id, C.id]) == [A]
    live.inhibit(B.id, until=10)
    live.inhibit(C.id, until=10)
    assert live.candidates(0) == [A]
    live.inhibit(A.id, until=10)
    assert live.candidates(0) == [A, B, C]


def test_if_discovery_names_less_than_half_the_first_to_return_do_not_get_it_all() -> None:
    live = reached(A, B, C)
    for each in (A, B, C):
        live.delete(each.key)
    assert live.candidates(0) == [A, B, C]
    live.put(A.key, encode_instance(A))
    assert live.candidates(0) == [A, B, C]
    live.put(B.key, encode_instance(B))
    assert live.candidates(0) == [A, B]

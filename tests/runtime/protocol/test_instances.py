from __future__ import annotations

import pytest

from trinamo.runtime.errors import RemoteProtocolError, RequestError
from trinamo.runtime.protocol.instances import (
    EndpointName,
    Instance,
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

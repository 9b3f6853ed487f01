"""The table of instances: who is there, how each is seen, and who may be chosen."""

from __future__ import annotations

import pytest

from tests.runtime.caller.requests import Request
from tests.runtime.caller.tables import Table, instance
from trinamo.runtime.caller.instances import CAUSES_MAX
from trinamo.runtime.caller.record import InstanceStatus
from trinamo.runtime.errors import ConnectError
from trinamo.runtime.protocol.discovery.instances import Instance
from trinamo.runtime.protocol.discovery.presence import Presence, Sign

A, B, C = instance(1), instance(2), instance(3)


def test_a_snapshot_says_who_joined_and_a_resync_who_left() -> None:
    table = Table(A, B)
    assert table.notes == [("instance.join", "1"), ("instance.join", "2")]
    table.replace({B.key: B, C.key: C})
    assert table.notes == [("instance.leave", "1"), ("instance.join", "3")]
    assert table.instances == [B, C]
    assert (table.get("1"), "2" in table) == (None, True)


def test_what_an_entry_that_was_refused_said_before_stays() -> None:
    table = Table(A)
    table.replace({A.key: None, B.key: B, C.key: None})
    assert table.instances == [A, B]


def test_an_instance_registered_anew_has_neither_joined_nor_left() -> None:
    table = Table(A)
    changes, _ = table.change_count, table.notes
    again = instance(1, incarnation=2)
    table.put(again)
    assert (table.instances, table.notes, table.change_count) == ([again], [], changes)


def test_deleting_an_unknown_key_changes_nothing() -> None:
    table = Table(A)
    table.delete(B.key)
    table.delete("instances/of/another/1")
    assert table.instances == [A]
    table.delete(A.key)
    assert table.instances == []


def test_an_inhibited_instance_is_no_candidate_until_its_time_is_over() -> None:
    table = Table(A, B)
    table.fault(A)
    assert table.candidates(9) == [B]
    assert table.candidates(10) == [A, B]


def test_a_status_tells_why_an_instance_is_passed_over() -> None:
    leaving = instance(4, draining=True)
    table = Table(A, B, C, leaving)
    table.fault(A, B)
    table.connected(table.record(B), "tcp")
    table.disconnected(table.record(B))
    table.disconnected(table.record(C))

    assert [table.status(each, 9) for each in (A, B, C, leaving)] == [
        InstanceStatus.INHIBITED,
        InstanceStatus.SUSPECTED,
        InstanceStatus.UNREACHED,
        InstanceStatus.DRAINING,
    ]
    assert table.status(A, 10) is InstanceStatus.LIVE


def test_a_connection_that_never_was_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    """The log says where it was sought, and why it was not reached: once for each outage."""
    table = Table(A)
    record, why = table.record(A), ConnectError("cannot be reached at h:1: Connection refused")
    for _ in range(2):
        table.disconnected(record, why)
    table.connected(record, "tcp")
    for each in (None, why, why):
        table.disconnected(record, each)

    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        "instance 1 of a/b/c: cannot be reached at h:1: Connection refused",
        "instance 1 of a/b/c: connection lost",
        "instance 1 of a/b/c: cannot be reached at h:1: Connection refused",
    ]


def test_another_cause_of_an_outage_is_told_too_but_not_without_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first may have been a mere accident of how the connection ended."""
    table = Table(A)
    record = table.record(A)
    for number in (0, 1, 0, 1, *range(2, 100)):
        table.disconnected(record, ConnectError(f"cause {number}"))

    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert told == [f"instance 1 of a/b/c: cause {number}" for number in range(CAUSES_MAX)]


def test_one_that_answers_no_probe_is_passed_over() -> None:
    table = Table(A, B)
    record = table.record(A)
    for sign in (Sign.SILENCE, Sign.UNANSWERED):
        table.step(record, sign)
    assert (table.status(A), table.candidates(0)) == (InstanceStatus.INHIBITED, [B])
    table.step(record, Sign.ACCEPTED)
    assert table.candidates(0) == [A, B]


def test_inhibition_never_leaves_nobody() -> None:
    table = Table(A, B)
    table.fault(A, B)
    assert table.candidates(0) == [A, B]


def test_a_draining_instance_is_no_candidate_even_if_it_is_the_only_one() -> None:
    table = Table(instance(1, draining=True))
    assert table.candidates(0) == []
    assert len(table.instances) == 1


@pytest.mark.parametrize("how", ["re-registration", "answer", "leaving"])
def test_inhibition_ends_with(how: str) -> None:
    table = Table(A, B)
    table.fault(A)
    if how == "re-registration":
        table.put(instance(1, incarnation=2))
    elif how == "answer":
        table.answer(table.record(A))
    else:
        table.delete(A.key)
        table.put(A)
    assert {each.id for each in table.candidates(0)} == {"1", "2"}


def test_the_same_entry_seen_again_does_not_end_inhibition() -> None:
    """A resync repeats what is known; that is no sign of life."""
    table = Table(A, B)
    table.fault(A)
    table.put(A)
    assert table.candidates(0) == [B]


def test_only_those_without_a_common_transport_are_foreign() -> None:
    table = Table(A, transports=["nats"])
    assert table.candidates(0) == []
    table.put(Instance(endpoint="a/b/c", id="1", transports={"nats": "subject"}))
    assert [each.id for each in table.candidates(0)] == ["1"]


# --- deleted, but reached ------------------------------------------------------------------------


def reached(*instances: Instance) -> Table:
    """One that keeps what is deleted, with a connection to each."""
    table = Table(*instances, keeps=True)
    for each in instances:
        table.connected(table.record(each), "tcp")
    assert table.notes
    return table


@pytest.mark.parametrize("sign", [Sign.OUT_OF_GRACE, Sign.DISCONNECTED, Sign.UNANSWERED])
def test_a_deleted_instance_whose_connection_stands_is_stale_until_it_is_evicted(
    sign: Sign,
) -> None:
    table = reached(A)
    table.delete(A.key)
    table.delete(A.key)
    table.replace({})
    assert table.notes == [("instance.stale", "1")]
    assert (table.instances, table.status(A)) == ([A], InstanceStatus.STALE)
    record = table.record(A)
    table.step(record, sign)
    table.step(record, sign)
    assert table.notes == [("instance.leave", "1")]
    assert (table.instances, record.is_over) == ([], True)


def test_a_resync_makes_stale_what_it_does_not_name() -> None:
    table = reached(A, B)
    again = instance(2, incarnation=2)
    table.replace({B.key: again})
    assert table.notes == [("instance.stale", "1")]
    assert table.instances == [A, again]


def test_coming_back_ends_the_grace_and_is_neither_joining_nor_leaving() -> None:
    table = reached(A)
    table.delete(A.key)
    again = instance(1, incarnation=2)
    table.put(again)
    table.step(table.record(A), Sign.OUT_OF_GRACE)
    assert table.instances == [again]
    table.delete(A.key)
    stale, back = ("instance.stale", "1"), ("instance.return", "1")
    assert table.notes == [stale, back, stale]


@pytest.mark.parametrize("why", ["never connected", "lost", "draining", "moved", "not wanted"])
def test_nobody_is_kept_whose_connection_does_not_stand_or_who_leaves(why: str) -> None:
    table = Table(A, keeps=why != "not wanted")
    if why != "never connected":
        table.connected(table.record(A), "tcp")
    if why == "lost":
        table.disconnected(table.record(A))
    if why == "draining":
        before = table.change_count
        table.put(instance(1, draining=True))
        assert table.change_count == before + 1
    if why == "moved":
        table.put(Instance(endpoint="a/b/c", id=A.id, transports={"tcp": "elsewhere:1"}))
    table.delete(A.key)
    assert table.instances == []


def test_a_connection_that_stands_again_makes_up_for_its_loss() -> None:
    table = reached(A)
    record = table.record(A)
    table.disconnected(record)
    table.connected(record, "tcp")
    table.delete(A.key)
    assert record.presence is Presence.STALE


async def test_who_joins_again_after_leaving_begins_without_a_connection_but_with_its_requests() -> (
    None
):
    table = reached(A)
    record, request = table.record(A), Request(is_waiting=False)
    with table.flight(A.id, request):
        table.delete(A.key)
        table.step(record, Sign.OUT_OF_GRACE)
        assert (record.is_over, table.in_flight) == (False, 1)
        table.put(A)
        assert (record.is_over, table.in_flight, table.load(A.id)) == (True, 1, 1)
        table.delete(A.key)
        assert (table.instances, table.in_flight) == ([], 1)
    assert table.in_flight == 0


def test_stale_ones_come_after_those_that_discovery_names() -> None:
    table = reached(A, B, C)
    table.delete(A.key)
    assert table.candidates(0) == [B, C]
    assert table.candidates(0, exclude=[B.id]) == [C]
    assert table.candidates(0, exclude=[B.id, C.id]) == [A]
    table.fault(B, C)
    assert table.candidates(0) == [A]
    table.fault(A)
    assert table.candidates(0) == [A, B, C]


def test_if_discovery_names_less_than_half_the_first_to_return_do_not_get_it_all() -> None:
    table = reached(A, B, C)
    for each in (A, B, C):
        table.delete(each.key)
    assert table.candidates(0) == [A, B, C]
    table.put(A)
    assert table.candidates(0) == [A, B, C]
    table.put(B)
    assert table.candidates(0) == [A, B]


@pytest.mark.parametrize("keeps", [False, True])
def test_what_left_without_draining_is_named_whether_or_not_it_may_be_stale(keeps: bool) -> None:
    """`router.stale_grace_s: null` is a choice of an operator, whose workers may be killed, too."""
    for transports, names in ((["tcp"], [A]), (None, [])):
        table = Table(A, keeps=keeps, transports=transports)
        table.delete(A.key)
        assert [each for each, _ in table.gone()] == names

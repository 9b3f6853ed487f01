from __future__ import annotations

import pytest

from trinamo.runtime.errors import (
    DisconnectedError,
    KilledError,
    LocalProtocolError,
    RemoteProtocolError,
)
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Data,
    Declined,
    Failed,
    Handshake,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.machine import End, Ended, Machine, Role, Tables
from trinamo.runtime.protocol.streams.request import Reason, StreamType
from trinamo.runtime.protocol.streams.request_stream import REQUEST_STREAM
from trinamo.runtime.protocol.streams.response_stream import RESPONSE_STREAM

EVENTS = (Handshake, Opened, Declined, Data, Sentinel, Failed, Stop, Kill, Refused, Closed)
ALL = pytest.mark.parametrize("tables", [RESPONSE_STREAM, REQUEST_STREAM], ids=lambda t: t.name)


def test_the_other_end_of_the_other_end_is_this_end() -> None:
    assert Role.WORKER.other is Role.CALLER
    assert Role.CALLER.other is Role.WORKER


@ALL
def test_every_state_is_a_row_and_every_target_a_row_of_its_own_role(tables: Tables) -> None:
    """A table with holes would raise KeyError where a protocol error is due."""
    for role in Role:
        rows = tables.transitions[role]
        assert tables.start[role] in rows
        assert set(rows) == set(type(tables.start[role]))
        for steps in rows.values():
            assert set(steps) <= set(EVENTS)
            assert set(steps.values()) <= set(rows)


@ALL
def test_couplings_name_states_of_both_ends_and_settle_at_once(tables: Tables) -> None:
    """One coupling must not lead into another: `_step` follows only one."""
    for (worker, caller), (moved, into) in tables.couplings.items():
        assert worker in tables.transitions[Role.WORKER]
        assert caller in tables.transitions[Role.CALLER]
        assert into in tables.transitions[moved]
        after = (into, caller) if moved is Role.WORKER else (worker, into)
        assert after not in tables.couplings


@ALL
def test_every_state_can_be_reached(tables: Tables) -> None:
    for role in Role:
        reached = {tables.start[role]}
        for _ in tables.transitions[role]:
            reached |= {
                into for state in reached for into in tables.transitions[role][state].values()
            }
            reached |= {into for (moved, into) in tables.couplings.values() if moved is role}
        assert reached == set(tables.transitions[role])


@ALL
def test_every_end_may_always_close_once_it_is_heard_of(tables: Tables) -> None:
    """A connection can break in any state, so Closed is listed wherever the end is not over."""
    over = {"TRUNCATED", "GONE"}
    for role in Role:
        for state, steps in tables.transitions[role].items():
            assert (Closed in steps) is (state.name not in over)


@ALL
def test_every_row_is_taken_and_every_other_step_refused_on_both_sides(tables: Tables) -> None:
    for ours in Role:
        for role in Role:
            for state in tables.transitions[role]:
                for event in EVENTS:
                    check_step(tables, ours, role, state, event)


def check_step(tables: Tables, ours: Role, role: Role, state: object, event: type) -> None:
    machine = Machine(tables, ours)
    machine.states[role] = state
    following = tables.transitions[role][state].get(event)  # type: ignore[index]
    take = machine.send if role is ours else machine.receive
    instance: object = object.__new__(event)
    assert machine.allows(role, event) is (following is not None)
    if following is None:
        error = LocalProtocolError if role is ours else RemoteProtocolError
        with pytest.raises(error, match=f"{role.value} in state .* must not send {event.__name__}"):
            take(instance)
        assert machine.states[role] is state
    else:
        take(instance)
        after = {each: tables.start[each] for each in Role} | {role: following}
        coupled = tables.couplings.get((after[Role.WORKER], after[Role.CALLER]))
        expected = coupled[1] if coupled is not None and coupled[0] is role else following
        assert machine.states[role] is expected


def test_a_machine_says_where_both_ends_are() -> None:
    machine = Machine(RESPONSE_STREAM, Role.WORKER)
    machine.send(Handshake("s", StreamType.RESPONSE))
    machine.receive(Stop())
    assert repr(machine) == "<response stream worker=OPENING caller=STOPPING>"


# --- how a stream ended ---------------------------------------------------------------------------


@ALL
def test_every_end_is_a_step_of_its_role(tables: Tables) -> None:
    for role, ends in tables.ends.items():
        steps = {event for state in tables.transitions[role].values() for event in state}
        assert set(ends) <= steps


def opened(ours: Role) -> Machine:
    machine = Machine(RESPONSE_STREAM, ours)
    take = machine.send if ours is Role.WORKER else machine.receive
    take(Handshake("s", StreamType.RESPONSE))
    take(Opened())
    return machine


def test_the_first_end_counts_whatever_comes_later() -> None:
    machine = opened(Role.CALLER)
    machine.send(Stop())
    before = machine.ended
    machine.receive(Sentinel())
    machine.receive(Closed("lost"))
    machine.send(Kill())
    machine.broken(RemoteProtocolError("late"))
    machine.give_up(DisconnectedError("late"))
    assert before is None
    assert machine.ended == Ended(End.COMPLETE, Role.WORKER, Sentinel())
    assert machine.error is None


def test_a_stream_without_an_end_mark_is_never_complete() -> None:
    cut, broken, given_up = opened(Role.CALLER), opened(Role.CALLER), opened(Role.CALLER)
    cut.receive(Closed("the link broke"))
    broken.broken(RemoteProtocolError("nonsense"))
    given_up.give_up(DisconnectedError("the instance vanished"))
    assert [str(machine.error) for machine in (cut, broken, given_up)] == [
        "the link broke; the answer is not complete",
        "nonsense",
        "the instance vanished",
    ]
    ends = [machine.ended and (machine.ended.end, machine.ended.by) for machine in (cut, broken)]
    assert ends == [(End.CUT, Role.WORKER), (End.BROKEN, Role.WORKER)]


def test_who_leaves_gets_that_instead_of_an_end_that_it_has_not_had() -> None:
    machine = opened(Role.CALLER)
    machine.receive(Sentinel())
    machine.leave(KilledError("left"))
    assert machine.ended is not None
    assert machine.ended.end is End.LEFT
    assert type(machine.error) is KilledError


@pytest.mark.parametrize(
    ("word", "end", "reason"),
    [
        (Kill(Reason.DEADLINE), End.LEFT, Reason.DEADLINE),
        (Refused("x", "", Reason.CLIENT_DISCONNECT), End.REFUSED, Reason.CLIENT_DISCONNECT),
        (Closed(), End.CUT, Reason.CONSUMER_DROPPED),
        (RemoteProtocolError("nonsense"), End.BROKEN, Reason.PROTOCOL_ERROR),
    ],
)
def test_a_worker_is_told_why_its_caller_ended_the_stream(
    word: object, end: End, reason: Reason
) -> None:
    machine = opened(Role.WORKER)
    if isinstance(word, RemoteProtocolError):
        machine.broken(word)
    else:
        machine.receive(word)
    machine.send(Sentinel())
    ended = machine.ended
    assert ended == Ended(end, Role.CALLER, word)
    assert ended is not None
    assert ended.reason is reason

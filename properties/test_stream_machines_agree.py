"""Two machines that hear each other's steps agree, whatever is said and however late it is heard."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, strategies as st

from properties.strategies import events
from trinamo.runtime.errors import LocalProtocolError, RemoteProtocolError
from trinamo.runtime.protocol.control import Control, Data, Failed, Kill, Refused, Sentinel, Stop
from trinamo.runtime.protocol.machine import Machine, Role, Tables
from trinamo.runtime.protocol.request_stream import REQUEST_STREAM
from trinamo.runtime.protocol.response_stream import RESPONSE_STREAM

ALL = pytest.mark.parametrize("tables", [RESPONSE_STREAM, REQUEST_STREAM], ids=lambda t: t.name)

# Who acts, whether it speaks or listens, and what it would say.
moves = st.lists(st.tuples(st.sampled_from(Role), st.booleans(), events), max_size=40)
Move = tuple[Role, bool, Control]


class Conversation:
    """Both ends and the two one-way wires between them; frames stay in order on each wire."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.ends = {role: Machine(tables, role) for role in Role}
        self.wires: dict[Role, deque[Control]] = {role: deque() for role in Role}
        self.heard: dict[Role, list[Control]] = {role: [] for role in Role}

    def say(self, role: Role, event: Control) -> bool:
        """Say it if the table allows it; otherwise it must be refused as our own bug."""
        allowed = self.ends[role].allows(role, type(event))
        try:
            self.ends[role].send(event)
        except LocalProtocolError:
            assert not allowed
            return False
        assert allowed
        self.wires[role].append(event)
        return True

    def hear(self, role: Role) -> None:
        """Take one step off the other end's wire. It was legal to say, so it is legal to hear."""
        if self.wires[role.other]:
            event = self.wires[role.other].popleft()
            self.ends[role].receive(event)
            self.heard[role].append(event)

    def play(self, moves: list[Move]) -> None:
        for role, speaks, event in moves:
            if speaks:
                self.say(role, event)
            else:
                self.hear(role)
        for role in Role:
            while self.wires[role.other]:
                self.hear(role)


@ALL
@given(moves=moves)
def test_what_one_end_may_say_the_other_end_takes(tables: Tables, moves: list[Move]) -> None:
    """No word is legal to its speaker and an error to its hearer, also when words cross."""
    Conversation(tables).play(moves)


@ALL
@given(words=st.lists(st.tuples(st.sampled_from(Role), events), max_size=40))
def test_ends_that_hear_at_once_are_in_the_same_states(
    tables: Tables, words: list[tuple[Role, Control]]
) -> None:
    conversation = Conversation(tables)
    for role, event in words:
        if conversation.say(role, event):
            conversation.hear(role.other)
        assert conversation.ends[Role.WORKER].states == conversation.ends[Role.CALLER].states


@ALL
@given(words=st.lists(st.tuples(st.sampled_from(Role), events), max_size=40))
def test_a_word_refused_by_one_end_is_refused_by_the_other_and_changes_nothing(
    tables: Tables, words: list[tuple[Role, Control]]
) -> None:
    ours, theirs = Machine(tables, Role.WORKER), Machine(tables, Role.CALLER)
    for role, event in words:
        speaker, hearer = (ours, theirs) if role is Role.WORKER else (theirs, ours)
        before = dict(speaker.states)
        try:
            speaker.send(event)
        except LocalProtocolError:
            with pytest.raises(RemoteProtocolError):
                hearer.receive(event)
            assert speaker.states == hearer.states == before
        else:
            hearer.receive(event)


@given(moves=moves)
def test_a_caller_hears_one_end_mark_at_most_and_no_item_after_it(moves: list[Move]) -> None:
    """I2, as far as the tables can hold it: nothing that counts follows a terminal."""
    conversation = Conversation(RESPONSE_STREAM)
    conversation.play(moves)
    heard = conversation.heard[Role.CALLER]
    wanted = not any(isinstance(e, (Kill, Refused)) for e in conversation.heard[Role.WORKER])
    marks = [i for i, event in enumerate(heard) if isinstance(event, (Sentinel, Failed))]
    if wanted and marks:
        assert len(marks) == 1
        assert not any(isinstance(event, Data) for event in heard[marks[0] :])


@given(moves=moves)
def test_stop_is_said_once_and_never_after_kill(moves: list[Move]) -> None:
    """Kill is never downgraded."""
    conversation = Conversation(RESPONSE_STREAM)
    conversation.play(moves)
    said = [type(e) for e in conversation.heard[Role.WORKER] if isinstance(e, (Stop, Kill))]
    assert said in ([], [Stop], [Kill], [Stop, Kill])

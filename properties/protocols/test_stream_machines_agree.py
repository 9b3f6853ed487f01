"""Two machines that hear each other's steps agree, whatever is said and however late it is heard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial

import attrs
import pytest
from hypothesis import given, strategies as st

from properties.strategies import WORDS as ALL_WORDS, events
from trinamo.runtime.errors import LocalProtocolError, RemoteProtocolError
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
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
from trinamo.runtime.protocol.streams.machine import Machine, Role, Tables
from trinamo.runtime.protocol.streams.request_stream import REQUEST_STREAM, InputState
from trinamo.runtime.protocol.streams.response_stream import RESPONSE_STREAM, CallerState

ALL = pytest.mark.parametrize("tables", [RESPONSE_STREAM, REQUEST_STREAM], ids=lambda t: t.name)

WORDS = {type(word): word for word in ALL_WORDS}
ENDS = (Closed, Kill, Refused, Declined)
"""Words after which little follows."""
Move = tuple[Role, bool, Control | int]
"""Who acts, whether it speaks or listens, and what it would say: a word, or which of the legal ones."""

# Of words drawn blindly most are refused, and the first farewell ends the story: one in eight is.
_word = st.integers(0, 60).flatmap(
    lambda number: st.just(number) if number % 8 else st.sampled_from(list(WORDS.values()))
)
# Lists of Hypothesis' own length have six; a move that does nothing is its dullest.
moves = st.lists(st.tuples(st.sampled_from(Role), st.booleans(), _word), min_size=30, max_size=40)


@attrs.define
class Story:
    """What one end has said and heard, in order; the rules in words, which know of no table."""

    said: list[type] = attrs.Factory(list)
    heard: list[type] = attrs.Factory(list)
    heard_before_leaving: list[type] = attrs.Factory(list)

    def say(self, word: type) -> None:
        if word is Closed and Closed not in self.said:
            self.heard_before_leaving = self.heard[:]
        self.said.append(word)

    def worker_answers(self) -> set[type]:
        """What a worker on a response stream may say."""
        terminals, unwanted = {Declined, Sentinel, Failed}, {Kill, Refused, Closed}
        if terminals & set(self.said):
            return {Closed}
        if Closed in self.said:
            # Who was not wanted any more when it left may leave again: nothing depends on it.
            return {Closed} if unwanted & set(self.heard_before_leaving) else set()
        if unwanted & set(self.heard):
            return {Handshake, Opened, Data, Closed} | terminals
        if Handshake not in self.said:
            return {Handshake, Closed}
        is_open = Opened in self.said
        return {Data, Sentinel, Failed, Closed} if is_open else {Opened, Declined, Closed}

    def caller_asks(self) -> set[type]:
        """The same of its caller: one Stop, before any Kill; a refusal only of who is still wanted."""
        if Closed in self.said:
            return set()
        if {Kill, Refused} & set(self.said):
            return {Closed}
        return {Kill, Closed} if Stop in self.said else {Stop, Kill, Refused, Closed}

    def worker_listens(self) -> set[type]:
        """What a worker on a request stream may say: a greeting, and that it leaves."""
        if Closed in self.said:
            return set()
        return {Closed} if Handshake in self.said else {Handshake, Closed}

    def caller_sends(self) -> set[type]:
        """The same of its caller: input once somebody listens, and one end mark."""
        if Closed in self.said:
            return set()
        if {Sentinel, Stop, Kill, Refused} & set(self.said):
            return {Closed}
        early = {Refused, Kill, Closed}
        return early | {Data, Sentinel, Stop} if Handshake in self.heard else early


RULES = {
    (RESPONSE_STREAM.name, Role.WORKER): Story.worker_answers,
    (RESPONSE_STREAM.name, Role.CALLER): Story.caller_asks,
    (REQUEST_STREAM.name, Role.WORKER): Story.worker_listens,
    (REQUEST_STREAM.name, Role.CALLER): Story.caller_sends,
}


class Conversation:
    """Both ends and the two one-way wires between them; frames stay in order on each wire."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.ends = {role: Machine(tables, role) for role in Role}
        self.wires: dict[Role, deque[Control]] = {role: deque() for role in Role}
        self.stories = {role: Story() for role in Role}
        self.heard: dict[Role, list[Control]] = {role: [] for role in Role}

    def say(self, role: Role, event: Control) -> bool:
        """Say it if the rules allow it; otherwise it must be refused as our own bug."""
        story = self.stories[role]
        allowed = type(event) in RULES[self.tables.name, role](story)
        assert self.ends[role].allows(role, type(event)) == allowed
        try:
            self.ends[role].send(event)
        except LocalProtocolError:
            assert not allowed
            return False
        assert allowed
        story.say(type(event))
        self.wires[role].append(event)
        return True

    def hear(self, role: Role) -> None:
        """Take one step off the other end's wire. It was legal to say, so it is legal to hear."""
        if self.wires[role.other]:
            event = self.wires[role.other].popleft()
            self.ends[role].receive(event)
            self.heard[role].append(event)
            self.stories[role].heard.append(type(event))

    def legal(self, role: Role) -> list[Control]:
        """What it may say now."""
        allowed = RULES[self.tables.name, role](self.stories[role])
        return [word for each, word in WORDS.items() if each in allowed]

    def play(self, moves: list[Move]) -> None:
        for role, speaks, word in moves:
            legal = self.legal(role)
            if speaks and isinstance(word, int):
                # One in five, or every story is short.
                stays = [each for each in legal if word % 5 == 0 or not isinstance(each, ENDS)]
                if stays:
                    self.say(role, stays[word % len(stays)])
            elif speaks:
                assert not isinstance(word, int)
                self.say(role, word)
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


Place = tuple[object, ...]
ON_THE_WAY_MAX = 2


def place_of(talk: Conversation) -> Place:
    """All that what follows depends on."""
    stories = [
        (
            frozenset(story.said),
            frozenset(story.heard),
            frozenset(story.heard_before_leaving),
        )
        for story in talk.stories.values()
    ]
    states = [tuple(end.states.values()) for end in talk.ends.values()]
    return (*states, *(tuple(map(type, wire)) for wire in talk.wires.values()), *stories)


def copy_of(talk: Conversation) -> Conversation:
    made = Conversation(talk.tables)
    for role in Role:
        made.ends[role].states = dict(talk.ends[role].states)
        made.wires[role] = deque(talk.wires[role])
        made.heard[role] = talk.heard[role][:]
        story = talk.stories[role]
        made.stories[role] = Story(story.said[:], story.heard[:], story.heard_before_leaving[:])
    return made


def walk(tables: Tables) -> dict[Role, set[Enum]]:
    """Go everywhere, with every word at every place; the states that each end was in."""
    start = Conversation(tables)
    met: dict[Role, set[Enum]] = {role: set() for role in Role}
    seen, waiting = {place_of(start)}, [start]
    while waiting:
        talk = waiting.pop()
        for role in Role:
            met[role].add(talk.ends[role].states[role])
            ways: list[Callable[[Conversation], object]] = []
            if talk.wires[role.other]:
                ways.append(partial(Conversation.hear, role=role))
            if len(talk.wires[role]) < ON_THE_WAY_MAX:
                ways += [partial(Conversation.say, role=role, event=word) for word in ALL_WORDS]
            for go in ways:
                next_talk = copy_of(talk)
                go(next_talk)
                place = place_of(next_talk)
                if place not in seen:
                    seen.add(place)
                    waiting.append(next_talk)
    return met


@pytest.mark.parametrize(
    "tables",
    [pytest.param(RESPONSE_STREAM, marks=pytest.mark.check), REQUEST_STREAM],
    ids=lambda t: t.name,
)
def test_every_word_is_right_at_every_place_that_two_ends_can_reach(tables: Tables) -> None:
    """With two words on the way in each direction: no word, and no crossing of words, is left out."""
    assert walk(tables) == {role: set(tables.transitions[role]) for role in Role}


@given(moves=moves)
def test_stop_is_said_once_and_never_after_kill(moves: list[Move]) -> None:
    """Kill is never downgraded."""
    conversation = Conversation(RESPONSE_STREAM)
    conversation.play(moves)
    said = [type(e) for e in conversation.heard[Role.WORKER] if isinstance(e, (Stop, Kill))]
    assert said in ([], [Stop], [Kill], [Stop, Kill])


def _without(tables: Tables, role: Role, state: Enum, event: type) -> Tables:
    rows = {r: {s: dict(row) for s, row in of.items()} for r, of in tables.transitions.items()}
    del rows[role][state][event]
    return attrs.evolve(tables, transitions=rows)


def _with(tables: Tables, role: Role, state: Enum, event: type) -> Tables:
    rows = {r: {s: dict(row) for s, row in of.items()} for r, of in tables.transitions.items()}
    rows[role][state][event] = state
    return attrs.evolve(tables, transitions=rows)


MUTANTS = [
    (_with(RESPONSE_STREAM, Role.CALLER, CallerState.STOPPING, Stop), [Stop(), Stop()]),
    (_with(RESPONSE_STREAM, Role.CALLER, CallerState.KILLED, Stop), [Kill(), Stop()]),
    (_without(RESPONSE_STREAM, Role.CALLER, CallerState.STOPPING, Kill), [Stop(), Kill()]),
    (_with(REQUEST_STREAM, Role.CALLER, InputState.WAITING, Data), [Data(b"x")]),
]


@pytest.mark.parametrize(("tables", "words"), MUTANTS)
def test_a_row_too_many_or_too_few_is_found_out(tables: Tables, words: list[Control]) -> None:
    with pytest.raises(AssertionError):
        Conversation(tables).play([(Role.CALLER, True, word) for word in words])

"""Two coupled state machines, one per end of a stream, driven by tables.

A table *is* the specification: `{role: {state: {event class: next state}}}`, and couplings
`{(worker state, caller state): (role, next state)}` for what one side's step does to the other.
A row that is not listed is a `LocalProtocolError` when we were about to take it and a
`RemoteProtocolError` when the peer took it. No clock, no socket, no await.

How the stream ended, and who ended it, is decided here too, once: the first step that its table calls
an end, a breach of the protocol, or what this end decides by itself. Only `leave` replaces it: a consumer
that goes before it has had that end. Whoever wants to know asks `ended`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ...errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from .control import Kill, Refused
from .request import Reason


class TableKey(enum.Enum):
    """What the tables are keyed by. Hashed by identity: an `Enum` does so by name, in Python."""

    __hash__ = object.__hash__


class Role(TableKey):
    """The two ends: a worker serves, a caller asks."""

    WORKER = "worker"
    CALLER = "caller"

    @property
    def other(self) -> Role:
        return Role.CALLER if self is Role.WORKER else Role.WORKER


class End(TableKey):
    """How a stream ended."""

    COMPLETE = "its end mark says that it is whole"
    FAILED = "the handler failed"
    CUT = "it has no end mark: that end closed it, or the link was lost"
    STOPPED = "the caller ends its input early, and what came of it counts"
    LEFT = "the caller wants nothing more"
    REFUSED = "the caller turned the worker away"
    BROKEN = "that end broke the protocol"
    GIVEN_UP = "this end waits for the other no longer"


@attrs.frozen
class Ended:
    """How one stream ended, who ended it, and what it said or was found to have done."""

    end: End
    by: Role
    word: object
    """The event, or the error."""

    @property
    def reason(self) -> Reason:
        """Why it ended, for the context of a worker whose caller ended it."""
        if isinstance(self.word, (Kill, Refused)):
            return self.word.reason
        is_breach = isinstance(self.word, RemoteProtocolError)
        return Reason.PROTOCOL_ERROR if is_breach else Reason.CONSUMER_DROPPED


Transitions = Mapping[Role, Mapping[enum.Enum, Mapping[type, enum.Enum]]]
Couplings = Mapping[tuple[enum.Enum, enum.Enum], tuple[Role, enum.Enum]]


@attrs.frozen
class Tables:
    """One protocol: its name, the start state of each role, transitions, couplings, and ends."""

    name: str
    start: Mapping[Role, enum.Enum]
    transitions: Transitions
    couplings: Couplings
    ends: Mapping[Role, Mapping[type, End]]
    """Which steps end the stream, and how: the first of them that is taken counts."""
    error: Callable[[Ended], Exception | None]
    """What whoever takes the items gets behind the last of them; None: they are whole."""


class Machine:
    """Both ends' states as seen from `our_role`."""

    __slots__ = ("_tables", "ended", "our_role", "states")

    def __init__(self, tables: Tables, our_role: Role) -> None:
        self._tables = tables
        self.our_role = our_role
        self.states: dict[Role, Any] = dict(tables.start)
        self.ended: Ended | None = None
        """Until the stream has ended."""

    def __repr__(self) -> str:
        worker, caller = self.states[Role.WORKER], self.states[Role.CALLER]
        return f"<{self._tables.name} worker={worker.name} caller={caller.name}>"

    def allows(self, role: Role, event: type) -> bool:
        return event in self._tables.transitions[role][self.states[role]]

    def send(self, event: object) -> None:
        """Record that we are about to say `event`; raises `LocalProtocolError` if we may not."""
        self._step(self.our_role, event, LocalProtocolError)

    def receive(self, event: object) -> None:
        """Record that the peer said `event`; raises `RemoteProtocolError` if it may not."""
        self._step(self.our_role.other, event, RemoteProtocolError)

    @property
    def error(self) -> Exception | None:
        """What whoever takes the items gets behind the last of them; None while there is nothing."""
        return None if self.ended is None else self._tables.error(self.ended)

    def broken(self, error: RemoteProtocolError) -> None:
        """The other end broke the protocol; this ends the stream, unless it has ended."""
        self._conclude(End.BROKEN, self.our_role.other, error)

    def give_up(self, error: Exception) -> None:
        """This end waits no longer, for `error`; this ends the stream, unless it has ended."""
        self._conclude(End.GIVEN_UP, self.our_role, error)

    def leave(self, error: Exception) -> None:
        """Whoever takes the items here wants no more, and gets `error` in place of an end it has not had."""
        self.ended = Ended(End.LEFT, self.our_role, error)

    def _conclude(self, end: End, by: Role, word: object) -> None:
        if self.ended is None:
            self.ended = Ended(end, by, word)

    def _step(self, role: Role, event: object, error: type[ProtocolError]) -> None:
        state, kind = self.states[role], type(event)
        following = self._tables.transitions[role][state].get(kind)
        if following is None:
            raise error(
                f"{self._tables.name}: the {role.value} in state {state.name} "
                f"must not send {kind.__name__}"
            )
        end = self._tables.ends[role].get(kind)
        if end is not None:
            self._conclude(end, role, event)
        self.states[role] = following
        pair = (self.states[Role.WORKER], self.states[Role.CALLER])
        coupled = self._tables.couplings.get(pair)
        if coupled is not None:
            moved, into = coupled
            self.states[moved] = into

"""Two coupled state machines, one per end of a stream, driven by tables.

A table *is* the specification: `{role: {state: {event class: next state}}}`, and couplings
`{(worker state, caller state): (role, next state)}` for what one side's step does to the other.
A row that is not listed is a `LocalProtocolError` when we were about to take it and a
`RemoteProtocolError` when the peer took it. No clock, no socket, no await.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs

from ...errors import LocalProtocolError, ProtocolError, RemoteProtocolError


class TableKey(enum.Enum):
    """What the tables are keyed by. Hashed by identity: an `Enum` does so by name, in Python."""

    __hash__ = object.__hash__


class Role(TableKey):
    """The two ends: a worker serves, a caller asks."""

    WORKER = "worker"
    CALLER = "caller"

    @property
    def other(self) -> Role:
        """The other end."""
        return Role.CALLER if self is Role.WORKER else Role.WORKER


Transitions = Mapping[Role, Mapping[enum.Enum, Mapping[type, enum.Enum]]]
Couplings = Mapping[tuple[enum.Enum, enum.Enum], tuple[Role, enum.Enum]]


@attrs.frozen
class Tables:
    """One protocol: its name, the start state of each role, transitions and couplings."""

    name: str
    start: Mapping[Role, enum.Enum]
    transitions: Transitions
    couplings: Couplings


class Machine:
    """Both ends' states as seen from `our_role`."""

    __slots__ = ("_tables", "our_role", "states")

    def __init__(self, tables: Tables, our_role: Role) -> None:
        self._tables = tables
        self.our_role = our_role
        self.states: dict[Role, Any] = dict(tables.start)

    def __repr__(self) -> str:
        worker, caller = self.states[Role.WORKER], self.states[Role.CALLER]
        return f"<{self._tables.name} worker={worker.name} caller={caller.name}>"

    def allows(self, role: Role, event: type) -> bool:
        """Whether `role` may take this step now."""
        return event in self._tables.transitions[role][self.states[role]]

    def send(self, event: object) -> None:
        """Record that we are about to say `event`; raises `LocalProtocolError` if we may not."""
        self._step(self.our_role, type(event), LocalProtocolError)

    def receive(self, event: object) -> None:
        """Record that the peer said `event`; raises `RemoteProtocolError` if it may not."""
        self._step(self.our_role.other, type(event), RemoteProtocolError)

    def _step(self, role: Role, event: type, error: type[ProtocolError]) -> None:
        state = self.states[role]
        following = self._tables.transitions[role][state].get(event)
        if following is None:
            raise error(
                f"{self._tables.name}: the {role.value} in state {state.name} "
                f"must not send {event.__name__}"
            )
        self.states[role] = following
        pair = (self.states[Role.WORKER], self.states[Role.CALLER])
        coupled = self._tables.couplings.get(pair)
        if coupled is not None:
            moved, into = coupled
            self.states[moved] = into

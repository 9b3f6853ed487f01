"""One key that a process keeps registered, and what it knows of it in the store. Decides; no I/O.

`Registrar` (`registration.py`) puts it and watches it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from ..errors import FencedError
from ..planes import Delete, Entry, Put, Resync, Snapshot, WatchEvent

Render = Callable[[int], bytes]
"""From the incarnation to the value to put."""


@attrs.define(eq=False)
class RegisteredKey:
    """One key that is wanted, and what we know of it in the store."""

    name: str
    render: Render
    watch: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    value: bytes = b""
    """What we last put, or are putting."""
    incarnation: int = 0
    """Of the lease under which it was put as `render` has it; 0 if that is still to be done."""
    revision: int = 0
    """Of our own last write under the present lease; 0 if none is known."""
    foreign: int = 0
    """The last revision at which it was not what we had put, or was gone."""
    was_ours: bool = False
    """Then somebody else's hold on it is waited out."""
    refusal: FencedError | None = None

    def learn(self, event: WatchEvent, lease_id: int) -> bool:
        """Whether somebody else has changed it since our own last write; remembers when."""
        told = _told(event, self.name)
        if told is None or told.revision <= self.revision:
            return False
        entry = told.entry
        if entry is not None and (entry.lease_id, entry.value) == (lease_id, self.value):
            return False
        self.foreign = told.revision
        return True


@attrs.frozen
class _Told:
    """What an event says of one key: its entry, or None if it is not there, as of a revision."""

    revision: int
    entry: Entry | None


def _told(event: WatchEvent, key: str) -> _Told | None:
    match event:
        case Put(entry):
            return _Told(entry.mod_revision, entry) if entry.key == key else None
        case Delete(name, revision):
            return _Told(revision, None) if name == key else None
        case Snapshot(revision, entries) | Resync(revision, entries):
            for entry in entries:
                if entry.key == key:
                    return _Told(entry.mod_revision, entry)
            return _Told(revision, None)

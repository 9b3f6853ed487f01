"""The control store's model: revisions, leases, history. Sans-IO.

It behaves as etcd v3 does where `ControlPlane` can see it: one global revision, a delete of many
keys (also by a lease) is one revision, a compacted history refuses to be read, and a restart
re-arms every lease to its full time. It does not wait, read a clock or know who calls: every
method that time matters to takes `now`, seconds on whatever monotonic clock the caller uses.

Leases expire when somebody looks: each method first removes what is due at `now`, and whoever
waits for a change wakes up at `next_expiry`. So no task is needed, and nobody can see a key whose
lease is over. `control.py` puts this behind the `ControlPlane` interface.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import attrs

from trinamo.runtime.errors import (
    CompactedError,
    ConnectError,
    ControlPlaneError,
    LeaseLostError,
)
from trinamo.runtime.planes import Delete, Entry, Lease, Put, PutOutcome, Snapshot

VALUE_BYTES_MAX: Final = 1 << 20
HISTORY_MAX: Final = 10_000

Change = Put | Delete


@attrs.define
class _LeaseState:
    """A live lease: when it ends, and the keys that end with it."""

    ttl_s: float
    deadline: float
    keys: set[str] = attrs.field(factory=set)


class MemoryStore:
    """A key-value store with history. Share one object between planes that share data.

    Args:
        value_bytes_max: Larger values are refused with `ControlPlaneError`.
        history_max: How many revisions of history are kept; older ones are compacted, so a
            watcher that is further behind gets a `Resync`.
    """

    def __init__(
        self, *, value_bytes_max: int = VALUE_BYTES_MAX, history_max: int = HISTORY_MAX
    ) -> None:
        self.value_bytes_max = value_bytes_max
        self.revision = 1
        self.compact_revision = 0
        self.is_up = True
        self._history_max = history_max
        # Entry i holds the changes of revision `_history_start + i`.
        self._history: list[tuple[Change, ...]] = []
        self._history_start = 2
        self._entries: dict[str, Entry] = {}
        self._keys: list[str] = []
        self._leases: dict[int, _LeaseState] = {}
        self._last_lease_id = 0
        self._observers: dict[int, Callable[[], None]] = {}
        self._last_observer = 0

    def number_leases_from(self, first: int) -> None:
        """Give the next lease this id. Ids of a lost disk must name nothing on the next one."""
        assert first > self._last_lease_id, "lease ids are never given twice"
        self._last_lease_id = first - 1

    # --- reading -----------------------------------------------------------------------------

    def get(self, key: str, *, now: float) -> Entry | None:
        """The entry under exactly `key`, or None."""
        self._begin(now)
        self._check_key(key)
        return self._entries.get(key)

    def range(self, prefix: str, *, now: float) -> Snapshot:
        """Every entry whose key starts with `prefix`, in key order, at the current revision."""
        self._begin(now)
        return Snapshot(self.revision, tuple(self._entries[key] for key in self._under(prefix)))

    def changes(
        self, prefix: str, *, start_revision: int, revisions_max: int = 256, now: float
    ) -> tuple[Sequence[Change], int]:
        """The changes under `prefix` from `start_revision` on, and the revision to ask for next.

        It looks at no more than `revisions_max` revisions. Raises `CompactedError` if
        `start_revision` is no longer in the history.
        """
        self._begin(now)
        if start_revision <= self.compact_revision:
            raise CompactedError(
                f"revision {start_revision} is compacted; history starts after "
                f"{self.compact_revision}",
                compact_revision=self.compact_revision,
            )
        first = start_revision - self._history_start
        stop = min(first + revisions_max, len(self._history))
        found = [
            change
            for revision in self._history[first:stop]
            for change in revision
            if _key_of(change).startswith(prefix)
        ]
        return found, max(start_revision, self._history_start + stop)

    # --- writing -----------------------------------------------------------------------------

    def put(self, key: str, value: bytes, *, lease_id: int = 0, now: float) -> int:
        """Write and return the new revision. Raises `LeaseLostError` for an unknown lease."""
        self._begin(now)
        self._check_write(key, value)
        self._lease(lease_id)
        self._put(key, value, lease_id)
        return self.revision

    def compare_and_put(
        self, key: str, value: bytes, *, mod_revision: int, lease_id: int = 0, now: float
    ) -> PutOutcome:
        """Write only if the key's `mod_revision` is this one; 0 means only if it is absent."""
        self._begin(now)
        self._check_write(key, value)
        held = self._entries.get(key)
        if (held.mod_revision if held is not None else 0) != mod_revision:
            return PutOutcome(succeeded=False, revision=self.revision)
        self._lease(lease_id)
        self._put(key, value, lease_id)
        return PutOutcome(succeeded=True, revision=self.revision)

    def delete(self, key: str, *, now: float) -> bool:
        """Delete exactly `key`; whether it was there."""
        self._begin(now)
        self._check_key(key)
        return self._delete([key] if key in self._entries else []) == 1

    def delete_prefix(self, prefix: str, *, now: float) -> int:
        """Delete every key that starts with `prefix`, in one revision; how many there were."""
        self._begin(now)
        return self._delete(self._under(prefix))

    # --- leases ------------------------------------------------------------------------------

    def grant_lease(self, ttl_s: float, *, now: float) -> Lease:
        """A new lease, rounded up to whole seconds as etcd does."""
        self._begin(now)
        if not (ttl_s > 0 and math.isfinite(ttl_s)):
            raise ControlPlaneError(f"a lease of {ttl_s} s is impossible", definite=True)
        granted_s = float(math.ceil(ttl_s))
        self._last_lease_id += 1
        self._leases[self._last_lease_id] = _LeaseState(granted_s, now + granted_s)
        # Whoever sleeps until the next expiry may have to wake up earlier now.
        self._notify()
        return Lease(self._last_lease_id, granted_s)

    def keep_alive(self, lease_id: int, *, now: float) -> float:
        """Renew and return the seconds left. Raises `LeaseLostError` if the lease is gone."""
        self._begin(now)
        lease = self._lease(lease_id, required=True)
        assert lease is not None
        lease.deadline = now + lease.ttl_s
        return lease.ttl_s

    def revoke_lease(self, lease_id: int, *, now: float) -> None:
        """End a lease and delete its keys in one revision. A lease not known is no error."""
        self._begin(now)
        self._end_lease(lease_id)

    def expire(self, now: float) -> None:
        """Remove the leases that are due, in the order of their deadlines."""
        due = sorted((s.deadline, i) for i, s in self._leases.items() if s.deadline <= now)
        for _, lease_id in due:
            self._end_lease(lease_id)

    @property
    def next_expiry(self) -> float:
        """When the next lease is due; infinity if there is none or the store is halted."""
        if not self.is_up:
            return math.inf
        return min((lease.deadline for lease in self._leases.values()), default=math.inf)

    # --- what tests and the simulator do to a store -------------------------------------------

    def compact(self, revision: int | None = None) -> None:
        """Forget the history up to and including `revision` (default: all of it)."""
        wanted = self.revision if revision is None else min(revision, self.revision)
        dropped = max(0, wanted + 1 - self._history_start)
        del self._history[:dropped]
        self._history_start += dropped
        self.compact_revision = max(self.compact_revision, wanted)

    def load(self, backup: MemoryStore) -> None:
        """Hold what `backup` holds now, its history and its leases, in place of all there is."""
        self.revision, self.compact_revision = backup.revision, backup.compact_revision
        self._history, self._history_start = [*backup._history], backup._history_start
        self._entries, self._keys = {**backup._entries}, [*backup._keys]
        self._leases = {
            number: attrs.evolve(lease, keys={*lease.keys})
            for number, lease in backup._leases.items()
        }

    def halt(self) -> None:
        """The server is down: every method raises `ConnectError`, no lease expires."""
        self.is_up = False

    def restart(self, *, now: float) -> None:
        """The server is up again with all its data, and each lease has its full time anew."""
        self.is_up = True
        for lease in self._leases.values():
            lease.deadline = now + lease.ttl_s
        self._notify()

    @contextmanager
    def observe(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` after each change while inside. It must not call the store."""
        self._last_observer += 1
        key = self._last_observer
        self._observers[key] = callback
        try:
            yield
        finally:
            del self._observers[key]

    # --- inside ------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        if not self.is_up:
            raise ConnectError("the memory store is halted")
        self.expire(now)

    def _check_key(self, key: str) -> None:
        if not key:
            raise ControlPlaneError("a key must not be empty", definite=True)

    def _check_write(self, key: str, value: bytes) -> None:
        self._check_key(key)
        if len(value) > self.value_bytes_max:
            raise ControlPlaneError(
                f"the value of {key!r} has {len(value)} bytes; at most {self.value_bytes_max}",
                definite=True,
            )

    def _under(self, prefix: str) -> list[str]:
        first = bisect.bisect_left(self._keys, prefix)
        stop = first
        while stop < len(self._keys) and self._keys[stop].startswith(prefix):
            stop += 1
        return self._keys[first:stop]

    def _lease(self, lease_id: int, *, required: bool = False) -> _LeaseState | None:
        lease = self._leases.get(lease_id)
        if lease is None and (required or lease_id != 0):
            raise LeaseLostError(f"the store does not know lease {lease_id:x}")
        return lease

    def _put(self, key: str, value: bytes, lease_id: int) -> None:
        held = self._entries.get(key)
        revision = self.revision + 1
        if held is None:
            bisect.insort(self._keys, key)
        else:
            self._detach(held)
        created = revision if held is None else held.create_revision
        entry = Entry(key, value, revision, created, lease_id)
        self._entries[key] = entry
        if lease_id:
            self._leases[lease_id].keys.add(key)
        self._record((Put(entry),))

    def _delete(self, keys: Sequence[str]) -> int:
        if not keys:
            return 0
        for key in keys:
            self._detach(self._entries.pop(key))
            del self._keys[bisect.bisect_left(self._keys, key)]
        self._record(tuple(Delete(key, self.revision + 1) for key in keys))
        return len(keys)

    def _detach(self, entry: Entry) -> None:
        lease = self._leases.get(entry.lease_id)
        if lease is not None:
            lease.keys.discard(entry.key)

    def _end_lease(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._delete(sorted(lease.keys))

    def _record(self, changes: tuple[Change, ...]) -> None:
        self.revision += 1
        self._history.append(changes)
        # Twice the bound, so that the list is shifted once per `history_max` writes.
        if len(self._history) >= 2 * self._history_max:
            self.compact(self.revision - self._history_max)
        self._notify()

    def _notify(self) -> None:
        for callback in list(self._observers.values()):
            callback()


def _key_of(change: Change) -> str:
    return change.entry.key if isinstance(change, Put) else change.key

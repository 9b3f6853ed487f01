"""The control plane in memory: the `ControlPlane` interface over a `MemoryStore`.

Several planes may share one store; then each is what one process would see of one server. It
passes the conformance suite that real etcd passes, so what works here works there. It opens no
task: whoever watches also lets due leases expire. The model itself is in `store.py`.

For tests and the simulator, `ControlFaults` breaks the link of one plane (or of all planes given
the same object), and `MemoryStore.halt`, `restart` and `compact` do to the server what operators
and accidents do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Self, TypeVar

import trio

from trinamo.runtime.errors import CompactedError, ConnectError, UnknownOutcomeError
from trinamo.runtime.planes import Entry, Lease, PutOutcome, Resync, Snapshot, WatchEvent

from .store import MemoryStore

T = TypeVar("T")


class ControlFaults:
    """What can go wrong between a plane and its store.

    Attributes:
        delay_s: How long a call takes before it reaches the store.
        reply_delay_s: How long its answer takes; a call cancelled here has taken effect.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.reply_delay_s = 0.0
        self._unknown_outcomes = 0
        self._link_is_up = trio.Event()
        self._link_is_up.set()

    @property
    def is_link_up(self) -> bool:
        return self._link_is_up.is_set()

    def cut_link(self) -> None:
        """From now on calls raise `ConnectError` and watches stall."""
        if self._link_is_up.is_set():
            self._link_is_up = trio.Event()

    def mend_link(self) -> None:
        """End what `cut_link` began; stalled watches go on where they were."""
        self._link_is_up.set()

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.cut_link()
        try:
            yield
        finally:
            self.mend_link()

    def lose_replies(self, count: int = 1) -> None:
        """The next `count` writes take effect and then raise `UnknownOutcomeError`."""
        self._unknown_outcomes = count

    async def wait_link(self) -> None:
        while not self._link_is_up.is_set():
            await self._link_is_up.wait()

    def take_lost_reply(self) -> bool:
        """Whether this write's reply is to be lost; counts it."""
        if self._unknown_outcomes == 0:
            return False
        self._unknown_outcomes -= 1
        return True


class MemoryControlPlane:
    """One process's view of a `MemoryStore`.

    Args:
        store: The data; a private one if none is given.
        faults: What goes wrong on the way; nothing if none is given.
    """

    def __init__(
        self, store: MemoryStore | None = None, *, faults: ControlFaults | None = None
    ) -> None:
        self.store = MemoryStore() if store is None else store
        self.faults = ControlFaults() if faults is None else faults

    async def get(self, key: str) -> Entry | None:
        return await self._read(lambda now: self.store.get(key, now=now))

    async def range(self, prefix: str) -> Snapshot:
        return await self._read(lambda now: self.store.range(prefix, now=now))

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        return await self._write(lambda now: self.store.put(key, value, lease_id=lease_id, now=now))

    async def compare_and_put(
        self, key: str, value: bytes, *, mod_revision: int, lease_id: int = 0
    ) -> PutOutcome:
        return await self._write(
            lambda now: self.store.compare_and_put(
                key, value, mod_revision=mod_revision, lease_id=lease_id, now=now
            )
        )

    async def delete(self, key: str) -> bool:
        return await self._write(lambda now: self.store.delete(key, now=now))

    async def delete_prefix(self, prefix: str) -> int:
        return await self._write(lambda now: self.store.delete_prefix(prefix, now=now))

    async def grant_lease(self, ttl_s: float) -> Lease:
        """See `ControlPlane.grant_lease`; rounds up to whole seconds."""
        return await self._write(lambda now: self.store.grant_lease(ttl_s, now=now))

    async def keep_alive(self, lease_id: int) -> float:
        return await self._read(lambda now: self.store.keep_alive(lease_id, now=now))

    async def revoke_lease(self, lease_id: int) -> None:
        await self._write(lambda now: self.store.revoke_lease(lease_id, now=now))

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """See `ControlPlane.watch`. It buffers nothing: a slow reader reads the store's history."""
        watch = _Watch(self.store, self.faults, prefix)
        with self.store.observe(watch.wake):
            yield watch

    async def check_health(self) -> str:
        """One line about the store; raises `ConnectError` during an outage."""
        snapshot = await self._read(lambda now: self.store.range("", now=now))
        return f"memory store, {len(snapshot.entries)} keys, revision {snapshot.revision}"

    async def _read(self, operation: Callable[[float], T]) -> T:
        await trio.sleep(self.faults.delay_s)
        if not self.faults.is_link_up:
            raise ConnectError("the link to the memory store is cut")
        result = operation(trio.current_time())
        if self.faults.reply_delay_s:
            await trio.sleep(self.faults.reply_delay_s)
        return result

    async def _write(self, operation: Callable[[float], T]) -> T:
        result = await self._read(operation)
        if self.faults.take_lost_reply():
            raise UnknownOutcomeError("the reply to a write was lost")
        return result


class _Watch:
    """The reading end of one watch: where it is in the store's history."""

    def __init__(self, store: MemoryStore, faults: ControlFaults, prefix: str) -> None:
        self._store = store
        self._faults = faults
        self._prefix = prefix
        self._next_revision = 0
        self._ready: deque[WatchEvent] = deque()
        self._changed = trio.Event()

    def wake(self) -> None:
        self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        # An event leaves the queue only after the last checkpoint, so a cancelled wait loses none.
        await trio.lowlevel.checkpoint()
        while not self._ready:
            await self._faults.wait_link()
            self._changed = trio.Event()
            if self._step():
                continue
            with trio.move_on_at(self._store.next_expiry):
                await self._changed.wait()
        return self._ready.popleft()

    def _step(self) -> bool:
        """Read what there is; False if there is nothing to do before the store changes."""
        if not self._store.is_up:
            return False
        now = trio.current_time()
        asked = self._next_revision
        try:
            if asked == 0:
                self._restart_from(self._store.range(self._prefix, now=now))
            else:
                changes, self._next_revision = self._store.changes(
                    self._prefix, start_revision=asked, now=now
                )
                self._ready.extend(changes)
        except CompactedError:
            snapshot = self._store.range(self._prefix, now=now)
            self._restart_from(Resync(snapshot.revision, snapshot.entries))
        return self._next_revision > asked

    def _restart_from(self, state: Snapshot | Resync) -> None:
        self._ready.append(state)
        self._next_revision = state.revision + 1

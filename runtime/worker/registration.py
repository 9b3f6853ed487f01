"""Being found: keys in the control plane under a lease that is kept alive.

`Registrar` grants the lease and then runs two tasks that never wait for each other: one renews
(`protocol/discovery/lease.py` says when), the other puts the keys. If the store has lost the lease
it grants another and puts every key again, with a fresh incarnation under the same instance id. The
process lives on through all of it: losing the lease means nobody new finds us for a while, not that
the work in hand is wrong.

Every write is fenced: it takes effect only if the key is free or still as our own last write left
it, so no two living processes own one instance id, and what a process sends under an old lease
changes nothing. Every key is watched: one of ours that a stranger deletes, or overwrites without a
lease of his own, is put back (decision 0016); in a cluster with a secret so is one that no member signed.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import attrs
import trio

from ..env import Env
from ..errors import (
    ControlPlaneError,
    FencedError,
    LeaseLostError,
    TrinamoError,
    UnavailableError,
)
from ..logs.notices import LogNotices
from ..metrics.metrics import Metrics
from ..nurseries import open_nursery
from ..planes import ControlPlane, Delete, Entry, Put, Resync, Snapshot, WatchEvent
from ..planes.retries import Retries
from ..protocol.discovery.lease import LeaseTimer
from ..protocol.undecodable import Unsigned
from ..sinks import Changes

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
    written_at: float = math.inf
    """When that was; infinite before the first."""
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


_log = logging.getLogger("trinamo.registration")
_BACKOFF_MIN_S: Final = 0.1
_BACKOFF_MAX_S: Final = 2.0
_WRITTEN_ANEW_S: Final = 2 * 3600.0
"""Signatures are valid for hours: what stands for longer is written again with a fresh one."""
_LEASES_MAX: Final = 1024
_CALM_S: Final = 10.0
"""A key that was left alone for so long is put back without much of a pause."""


@attrs.define
class LeaseFacts:
    """What the metrics and `trinamo status` show."""

    lease_id: int = 0
    """0 while there is none."""
    incarnation: int = 0
    """How many leases this process has had."""
    lost_count: int = 0


class Registrar:
    """Keeps a set of keys registered for as long as `run` runs."""

    def __init__(
        self,
        control: ControlPlane,
        env: Env,
        *,
        ttl_s: float = 10.0,
        on_change: Callable[[LeaseFacts], None] = lambda _: None,
        metrics: Metrics | None = None,
    ) -> None:
        self._control = control
        self._env = env
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._keys: dict[str, RegisteredKey] = {}
        metrics = metrics or Metrics(env)
        self._fences = metrics.count(
            "registrations_fenced", "Writes of our keys refused: another process holds them"
        )
        self._restorations = metrics.count(
            "registrations_restored", "Keys of ours put back: others had removed or changed them"
        )
        self._notices = LogNotices(_log)
        self._changed = trio.Event()
        self._progress = Changes()
        self._watches: trio.Nursery | None = None
        self._holding = trio.CancelScope()
        self._is_revoked = False
        self._leases: deque[int] = deque(maxlen=_LEASES_MAX)
        """That we have had. Nobody else gets one of them from the store; who may write there can have one
        made again, and put under it what we once wrote and signed."""
        self.state = LeaseFacts()

    async def register(self, key: str, render: Render) -> None:
        """Have `render(incarnation)` under `key`, now, after every lost lease, whoever removes it.

        A key that is registered already is written again. Returns once the key is there.
        Cancelled before that, it stays wanted: `withdraw` it. Raises `FencedError`, and forgets the
        key, if another process holds it; a key that was ours before is tried until it is free.
        Raises `UnavailableError` if it is withdrawn, or the lease given up, meanwhile.
        """
        if self._is_revoked:
            raise UnavailableError(f"{key} is not registered: the lease has been given up")
        wanted = self._keys.get(key)
        if wanted is None:
            wanted = self._keys[key] = RegisteredKey(key, render)
            self._watch(wanted)
        wanted.render, wanted.incarnation = render, 0
        self._changed.set()
        while not self._is_registered(wanted):
            if wanted.refusal is not None:
                raise wanted.refusal
            if self._keys.get(key) is not wanted:
                raise UnavailableError(f"{key} was withdrawn before it was registered")
            await self._progress.wait()

    def abandon(self, key: str) -> None:
        """Want `key` no more; it is deleted in time. Synchronous, for those who cannot wait."""
        if self._forget(key) and self._watches is not None:
            self._watches.start_soon(self._delete, key)

    async def withdraw(self, key: str) -> None:
        """Delete `key` and keep it deleted; a store that is away is retried until cancelled.

        Registered again meanwhile, it stays. A key that another process holds is left alone; it is read first and then deleted, so one
        that changes hands between the two, within a round trip, is deleted all the same.
        """
        self._forget(key)
        await self._delete(key)

    async def _delete(self, key: str) -> None:
        backoff_s = _BACKOFF_MIN_S
        while key not in self._keys:
            try:
                held = await self._control.get(key)
                is_ours = held is not None and held.lease_id in self._leases
                if is_ours and key not in self._keys:
                    await self._control.delete(key)
            except TrinamoError as error:
                self._notices.warn("retrying; cannot withdraw", f"{key}: {error}")
                await trio.sleep(self._jitter(backoff_s))
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
            else:
                return

    def _forget(self, key: str) -> bool:
        wanted = self._keys.pop(key, None)
        if wanted is not None:
            wanted.watch.cancel()
        self._progress.notify()
        return wanted is not None

    def _is_registered(self, key: RegisteredKey) -> bool:
        """Whether it is there as we want it, for all we know."""
        return (
            bool(self.state.lease_id)
            and key.incarnation == self.state.incarnation
            and key.foreign <= key.revision
        )

    def _jitter(self, seconds: float) -> float:
        # A herd of workers that lost the store together must not come back together.
        return seconds * self._env.rng.uniform(0.5, 1.5)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the lease until cancelled, or until `revoke`. Started once the first is granted."""
        try:
            async with open_nursery() as self._watches:
                for key in self._keys.values():
                    self._watch(key)
                with self._holding:
                    started = False
                    while True:
                        timer = await self._grant()
                        if not started:
                            started = True
                            task_status.started()
                        try:
                            await self._hold(timer)
                        except LeaseLostError as error:
                            self._lost(error)
                self._watches.cancel_scope.cancel()
        finally:
            self._watches = None

    def _lost(self, error: LeaseLostError) -> None:
        self.state.lost_count += 1
        self.state.lease_id = 0
        for key in self._keys.values():
            # Of a store that has begun anew all revisions are smaller.
            key.revision = key.foreign = 0
        _log.warning("lease lost: %s; registering again", error)
        self._env.note("lease.lost", incarnation=self.state.incarnation)
        self._on_change(self.state)

    async def revoke(self) -> None:
        """Give the lease up, so that every key is gone at once, and stays gone; `run` ends."""
        self._is_revoked = True
        for key in list(self._keys):
            self._forget(key)
        self._holding.cancel()
        if self.state.lease_id:
            lease_id, self.state.lease_id = self.state.lease_id, 0
            self._on_change(self.state)
            await self._control.revoke_lease(lease_id)

    # --- the lease ---

    async def _grant(self) -> LeaseTimer:
        backoff_s = _BACKOFF_MIN_S
        while True:
            asked_at = trio.current_time()
            try:
                lease = await self._control.grant_lease(self._ttl_s)
            except TrinamoError as error:
                self._notices.warn("retrying; no lease granted", error)
                await trio.sleep(self._jitter(backoff_s))
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
                continue
            self.state.lease_id = lease.id
            self._leases.append(lease.id)
            self.state.incarnation += 1
            self._env.note("lease.granted", incarnation=self.state.incarnation)
            self._on_change(self.state)
            return LeaseTimer.granted(lease.ttl_s, asked_at=asked_at)

    async def _hold(self, timer: LeaseTimer) -> None:
        """Renew and register until the lease is lost; a store that is away is waited for."""
        async with open_nursery() as nursery:
            nursery.start_soon(self._keep_putting)
            next_renewal = self._renewal_at(timer)
            while True:
                await trio.sleep_until(next_renewal)
                next_renewal = await self._renew(timer)

    async def _renew(self, timer: LeaseTimer) -> float:
        asked_at = trio.current_time()
        try:
            remaining_s = await self._control.keep_alive(self.state.lease_id)
        except LeaseLostError:
            raise
        except TrinamoError as error:
            left_s = timer.deadline - trio.current_time()
            told = f"{left_s:.1f} s left" if left_s > 0 else f"it ran out {-left_s:.1f} s ago"
            self._notices.warn("lease not renewed", f"{error}; {told}")
            # Counted from the question: while the store is away one is always under way, or nearly,
            # and it is answered as soon as there is a connection.
            return asked_at + self._early(timer.retry_s(asked_at))
        timer.renewed(remaining_s, asked_at=asked_at)
        return self._renewal_at(timer)

    def _renewal_at(self, timer: LeaseTimer) -> float:
        now = trio.current_time()
        return now + self._early(timer.wait_s(now))

    def _early(self, seconds: float) -> float:
        # Earlier than due, never later; without it a herd that came back together would renew in
        # step for ever.
        return seconds * self._env.rng.uniform(0.8, 1.0)

    # --- the keys ---

    async def _keep_putting(self) -> None:
        backoff_s = _BACKOFF_MIN_S
        while True:
            self._changed = trio.Event()
            try:
                await self._put_missing()
                backoff_s = _BACKOFF_MIN_S
                written_at = min(
                    (each.written_at for each in self._keys.values()), default=math.inf
                )
                due = written_at + _WRITTEN_ANEW_S
            except LeaseLostError:
                raise
            except TrinamoError as error:
                self._notices.warn("retrying; cannot register", error)
                due = trio.current_time() + self._jitter(backoff_s)
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
            with trio.move_on_at(due):
                await self._changed.wait()

    async def _put_missing(self) -> None:
        failed: ControlPlaneError | None = None
        for key in list(self._keys.values()):
            if trio.current_time() >= key.written_at + _WRITTEN_ANEW_S:
                key.incarnation = 0
            if self._is_registered(key):
                continue
            try:
                await self._put(key)
            except LeaseLostError:
                raise
            except FencedError as error:
                if self._fenced(key, error):
                    failed = error
            except ControlPlaneError as error:
                # The store refuses this one, as for want of a permission: the others do not wait.
                failed = error
        if failed is not None:
            raise failed

    async def _put(self, key: RegisteredKey) -> None:
        incarnation, render = self.state.incarnation, key.render
        is_lost = key.incarnation == incarnation
        await self._claim(key, render(incarnation))
        if self._keys.get(key.name) is not key:
            # Withdrawn while we were putting it: the delete may have come first.
            await self._control.delete(key.name)
        elif key.render is render:
            key.incarnation = incarnation
        if is_lost:
            self._notices.warn("put back, others had deleted or overwritten it", key.name)
            self._env.note("lease.restored", key=key.name)
            self._restorations.value += 1
        self._progress.notify()

    async def _claim(self, key: RegisteredKey, value: bytes) -> None:
        """Write `key` under our lease, unless it is somebody else's: then `FencedError`."""
        lease_id = self.state.lease_id
        known, key.revision = key.revision, 0
        key.value = value
        outcome = await self._control.compare_and_put(
            key.name, value, mod_revision=known, lease_id=lease_id
        )
        if not outcome.succeeded:
            held = await self._control.get(key.name)
            # Under a lease of ours it is ours; under none, no living process holds what once was ours; and
            # what no member has signed holds nothing.
            if held is not None and not (
                held.lease_id in self._leases
                or (key.was_ours and not held.lease_id)
                or isinstance(held.value, Unsigned)
            ):
                whose = f"lease {held.lease_id:x}" if held.lease_id else "no lease"
                raise FencedError(
                    f"{key.name} is held by another process, under {whose}; ours is {lease_id:x}"
                )
            # Free by now, or a write of ours whose answer was lost, or put there by a stranger.
            outcome = await self._control.compare_and_put(
                key.name,
                value,
                mod_revision=0 if held is None else held.mod_revision,
                lease_id=lease_id,
            )
            if not outcome.succeeded:
                raise ControlPlaneError(f"{key.name} changes under our hands", definite=True)
        key.revision, key.written_at = outcome.revision, trio.current_time()
        key.was_ours = True

    def _fenced(self, key: RegisteredKey, error: FencedError) -> bool:
        """Count it; whether to try again, because the key was ours before."""
        self._fences.value += 1
        self._env.note("lease.fenced", key=key.name)
        if key.was_ours:
            return True
        # Whoever asked for it is told; it was never ours, so there is nothing to come back to.
        _log.error("cannot register: %s", error)
        key.refusal = error
        if self._keys.get(key.name) is key:
            self._forget(key.name)
        self._progress.notify()
        return False

    # --- what others do to them ---

    def _watch(self, key: RegisteredKey) -> None:
        if self._watches is not None:
            self._watches.start_soon(self._look_after, key)

    async def _look_after(self, key: RegisteredKey) -> None:
        with key.watch:
            await Retries(_log, f"{key.name} is not watched").run(partial(self._look, key))

    async def _look(self, key: RegisteredKey, begun: Callable[[], None]) -> None:
        backoff_s, last_at = _BACKOFF_MIN_S, -math.inf
        async with self._control.watch(key.name) as events:
            async for event in events:
                begun()
                if not key.learn(event, self.state.lease_id):
                    continue
                # Whoever fights us over a key gets no more than a write every few seconds.
                is_calm = trio.current_time() - last_at > _CALM_S
                backoff_s = _BACKOFF_MIN_S if is_calm else min(backoff_s * 2, _BACKOFF_MAX_S)
                await trio.sleep(self._jitter(backoff_s))
                last_at = trio.current_time()
                self._changed.set()

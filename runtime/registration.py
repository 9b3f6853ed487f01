"""Being found: keys in the control plane under a lease that is kept alive.

`Registrar` is one task per process. It grants the lease, renews it (`protocol/lease.py` says
when), and if the store has lost it grants another and puts every key again, with a fresh
incarnation under the same instance id. The process lives on through all of it: losing the lease
means nobody new finds us for a while, not that the work in hand is wrong.

Every write is fenced: it takes effect only if the key is free or still as our own last write left
it, so no two living processes own one instance id, and what a process sends under an old lease
changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import attrs
import trio

from .env import Env
from .errors import ControlPlaneError, FencedError, LeaseLostError, TrinamoError
from .metrics import Metrics
from .planes import ControlPlane
from .protocol.lease import LeaseTimer

__all__ = ["LeaseState", "Registrar"]

_log = logging.getLogger("trinamo.registration")
_BACKOFF_MIN_S: Final = 0.1
_BACKOFF_MAX_S: Final = 2.0

Render = Callable[[int], bytes]
"""From the incarnation to the value to put."""


@attrs.define
class LeaseState:
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
        on_change: Callable[[LeaseState], None] = lambda _: None,
        metrics: Metrics | None = None,
    ) -> None:
        self._control = control
        self._env = env
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._keys: dict[str, Render] = {}
        self._registered: dict[str, int] = {}
        self._metrics = metrics
        self._revisions: dict[str, int] = {}
        """Of our own last write to each key under the present lease."""
        self._owned: set[str] = set()
        """Keys that were ours once: somebody else's hold on one is waited out."""
        self._refused: dict[str, FencedError] = {}
        self._changed = trio.Event()
        self._progress: trio.Event | None = None
        self.state = LeaseState()

    async def register(self, key: str, render: Render) -> None:
        """Have `render(incarnation)` under `key`, now and after every lost lease.

        A key that is registered already is written again. Returns once the key is there.
        Cancelled before that, it stays wanted: `withdraw` it. Raises `FencedError`, and forgets the
        key, if another process holds it; a key that was ours before is tried until it is free.
        """
        self._keys[key] = render
        self._registered.pop(key, None)
        self._refused.pop(key, None)
        self._changed.set()
        while self._registered.get(key) != self.state.incarnation or not self.state.lease_id:
            await self._wait_progress()
            if key in self._refused:
                raise self._refused.pop(key)

    async def withdraw(self, key: str) -> None:
        """Delete `key` and keep it deleted; a store that is away is retried until cancelled.

        A key that another process holds is left alone; it is read first and then deleted, so one
        that changes hands between the two, within a round trip, is deleted all the same.
        """
        self._keys.pop(key, None)
        self._owned.discard(key)
        backoff_s = _BACKOFF_MIN_S
        while True:
            try:
                held = await self._control.get(key)
                # What was under an older lease of ours is gone with it.
                if held is not None and held.lease_id == self.state.lease_id:
                    await self._control.delete(key)
            except TrinamoError as error:
                _log.warning("cannot withdraw %s: %s; retrying", key, error)
                await trio.sleep(self._jitter(backoff_s))
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
            else:
                self._registered.pop(key, None)
                return

    async def _wait_progress(self) -> None:
        if self._progress is None:
            self._progress = trio.Event()
        await self._progress.wait()

    def _made_progress(self) -> None:
        if self._progress is not None:
            self._progress.set()
            self._progress = None

    def _jitter(self, seconds: float) -> float:
        # A herd of workers that lost the store together must not come back together.
        return seconds * self._env.rng.uniform(0.5, 1.5)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the lease until cancelled. Started once the first lease is granted."""
        started = False
        while True:
            timer = await self._grant()
            if not started:
                started = True
                task_status.started()
            try:
                await self._hold(timer)
            except LeaseLostError as error:
                self.state.lost_count += 1
                self.state.lease_id = 0
                self._registered.clear()
                self._revisions.clear()
                _log.warning("lease lost: %s; registering again", error)
                self._env.note("lease.lost", incarnation=self.state.incarnation)
                self._on_change(self.state)

    async def revoke(self) -> None:
        """Give the lease up, so that every key is gone at once, and stays gone."""
        # Should `run` still go on and see the lease lost, it has nothing to put again.
        self._keys.clear()
        if self.state.lease_id:
            lease_id, self.state.lease_id = self.state.lease_id, 0
            self._on_change(self.state)
            await self._control.revoke_lease(lease_id)

    async def _grant(self) -> LeaseTimer:
        backoff_s = _BACKOFF_MIN_S
        while True:
            asked_at = trio.current_time()
            try:
                lease = await self._control.grant_lease(self._ttl_s)
            except TrinamoError as error:
                _log.warning("no lease granted: %s; retrying", error)
                await trio.sleep(self._jitter(backoff_s))
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
                continue
            self.state.lease_id = lease.id
            self.state.incarnation += 1
            self._changed.set()
            self._env.note("lease.granted", incarnation=self.state.incarnation)
            self._on_change(self.state)
            return LeaseTimer.granted(lease.ttl_s, asked_at=asked_at)

    async def _hold(self, timer: LeaseTimer) -> None:
        """Renew and register until the lease is lost; a store that is away is waited for."""
        next_renewal = self._renewal_at(timer)
        backoff_s = _BACKOFF_MIN_S
        while True:
            try:
                await self._put_missing()
                backoff_s = _BACKOFF_MIN_S
                due = next_renewal
            except LeaseLostError:
                raise
            except TrinamoError as error:
                _log.warning("cannot register: %s; retrying", error)
                due = min(next_renewal, trio.current_time() + self._jitter(backoff_s))
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
            with trio.move_on_at(due):
                await self._changed.wait()
            if trio.current_time() >= next_renewal:
                next_renewal = await self._renew(timer)

    async def _renew(self, timer: LeaseTimer) -> float:
        asked_at = trio.current_time()
        try:
            remaining_s = await self._control.keep_alive(self.state.lease_id)
        except LeaseLostError:
            raise
        except TrinamoError as error:
            now = trio.current_time()
            _log.warning("lease not renewed: %s; %.1f s left", error, timer.deadline - now)
            return now + self._jitter(timer.retry_s(now))
        timer.renewed(remaining_s, asked_at=asked_at)
        return self._renewal_at(timer)

    def _renewal_at(self, timer: LeaseTimer) -> float:
        # Earlier than due, never later; without it a herd that came back together would renew in
        # step for ever.
        now = trio.current_time()
        return now + timer.wait_s(now) * self._env.rng.uniform(0.8, 1.0)

    async def _put_missing(self) -> None:
        self._changed = trio.Event()
        incarnation = self.state.incarnation
        failed: ControlPlaneError | None = None
        for key, render in list(self._keys.items()):
            if self._registered.get(key) == incarnation:
                continue
            try:
                await self._claim(key, render(incarnation))
            except FencedError as error:
                if self._fenced(key, error):
                    failed = error
                continue
            except LeaseLostError:
                raise
            except ControlPlaneError as error:
                # The store refuses this one, as for want of a permission: the others do not wait.
                failed = error
                continue
            wanted = self._keys.get(key)
            if wanted is render:
                self._registered[key] = incarnation
            elif wanted is None:
                # Withdrawn while we were putting it: the delete may have come first.
                await self._control.delete(key)
            self._made_progress()
        if failed is not None:
            raise failed

    async def _claim(self, key: str, value: bytes) -> None:
        """Write `key` under our lease, unless it is somebody else's: then `FencedError`."""
        lease_id = self.state.lease_id
        known = self._revisions.pop(key, 0)
        outcome = await self._control.compare_and_put(
            key, value, mod_revision=known, lease_id=lease_id
        )
        if not outcome.succeeded:
            held = await self._control.get(key)
            if held is not None and held.lease_id != lease_id:
                whose = f"lease {held.lease_id:x}" if held.lease_id else "no lease"
                raise FencedError(
                    f"{key} is held by another process, under {whose}; ours is {lease_id:x}"
                )
            # Free by now, or a write of ours whose answer was lost.
            outcome = await self._control.compare_and_put(
                key,
                value,
                mod_revision=0 if held is None else held.mod_revision,
                lease_id=lease_id,
            )
            if not outcome.succeeded:
                raise ControlPlaneError(f"{key} changes under our hands", definite=True)
        self._revisions[key] = outcome.revision
        self._owned.add(key)

    def _fenced(self, key: str, error: FencedError) -> bool:
        """Count it; whether to try again, because the key was ours before."""
        if self._metrics is not None:
            self._metrics.registration_fenced()
        self._env.note("lease.fenced", key=key)
        if key in self._owned:
            return True
        # Whoever asked for it is told; it was never ours, so there is nothing to come back to.
        _log.error("cannot register: %s", error)
        self._refused[key] = error
        self._keys.pop(key, None)
        self._made_progress()
        return False

"""Being found: keys in the control plane under a lease that is kept alive.

`Registrar` is one task per process. It grants the lease, renews it (`protocol/lease.py` says
when), and if the store has lost it grants another and puts every key again, with a fresh
incarnation under the same instance id. The process lives on through all of it: losing the lease
means nobody new finds us for a while, not that the work in hand is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import attrs
import trio

from .env import Env
from .errors import LeaseLostError, TrinamoError
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
    ) -> None:
        self._control = control
        self._env = env
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._keys: dict[str, Render] = {}
        self._registered: dict[str, int] = {}
        self._changed = trio.Event()
        self._progress: trio.Event | None = None
        self.state = LeaseState()

    async def register(self, key: str, render: Render) -> None:
        """Have `render(incarnation)` under `key`, now and after every lost lease.

        A key that is registered already is written again. Returns once the key is there.
        Cancelled before that, it stays wanted: `withdraw` it.
        """
        self._keys[key] = render
        self._registered.pop(key, None)
        self._changed.set()
        while self._registered.get(key) != self.state.incarnation or not self.state.lease_id:
            await self._wait_progress()

    async def withdraw(self, key: str) -> None:
        """Delete `key` and keep it deleted; a store that is away is retried until cancelled."""
        self._keys.pop(key, None)
        backoff_s = _BACKOFF_MIN_S
        while True:
            try:
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
        for key, render in list(self._keys.items()):
            if self._registered.get(key) == incarnation:
                continue
            await self._control.put(key, render(incarnation), lease_id=self.state.lease_id)
            wanted = self._keys.get(key)
            if wanted is render:
                self._registered[key] = incarnation
            elif wanted is None:
                # Withdrawn while we were putting it: the delete may have come first.
                await self._control.delete(key)
            self._made_progress()

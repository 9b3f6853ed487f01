"""A lock of the whole cluster, which is also how a leader is chosen: on leases and revisions, no more.

Each contender puts a key of its own under its lease; the oldest of them has the lock (the recipe of
etcd's `concurrency` package). So they are served in the order in which they came, and whoever dies
leaves with its lease (docs/decisions/0054).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import attrs
import trio

from ..errors import LeaseLostError, RequestError, TrinamoError, UnknownOutcomeError
from ..nurseries import open_nursery
from ..planes import ControlPlane, Delete, Entry, Put

LOCK_TTL_S: Final = 10.0
LOCKS_KEY: Final = "locks/"
SAFE_SHARE: Final = 0.8
"""Of a lease, for which its holder counts on it; the rest is for its clean-up, and for clocks that drift."""
_LEAVING_S: Final = 1.0
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@attrs.frozen
class Lock:
    """A lock that is held."""

    revision: int
    """Higher than of any holder before. Whoever this one writes to fences by it: it refuses lower ones."""


@asynccontextmanager
async def open_lock(
    control: ControlPlane, name: str, *, value: bytes = b"", ttl_s: float = LOCK_TTL_S
) -> AsyncIterator[Lock]:
    """Wait for the lock `name`, and hold it while inside; `value` is what `find_holder` tells others.

    The block is cancelled once somebody else may have it soon: the lease was not renewed for most
    of `ttl_s`, or is gone. That is a `LeaseLostError` when the block is left. Cancelled, it leaves
    nothing behind, at the latest after `ttl_s`. Raises what `ControlPlane` does while it is not in
    line yet.
    """
    if not _NAME.fullmatch(name):
        raise RequestError(f"{name!r} is no name of a lock: a-z, 0-9, and then also . _ -")
    began = trio.current_time()
    lease = await control.grant_lease(ttl_s)
    own = f"{LOCKS_KEY}{name}/{lease.id:x}"
    is_whole = False
    try:
        async with open_nursery() as nursery:
            scope = nursery.cancel_scope
            scope.deadline = began + lease.ttl_s * SAFE_SHARE
            nursery.start_soon(_renew, control, lease.id, lease.ttl_s, scope)
            while True:
                # A try of which nothing is known is repeated, and finds the key there.
                with suppress(UnknownOutcomeError):
                    await control.compare_and_put(own, value, mod_revision=0, lease_id=lease.id)
                    break
            yield Lock(await nursery.start(_follow, control, own, scope))
            is_whole = not scope.cancel_called
            scope.cancel()
    finally:
        with trio.move_on_after(_LEAVING_S, shield=True), suppress(TrinamoError):
            await control.revoke_lease(lease.id)
    if not is_whole:
        raise LeaseLostError(
            f"the lock {name} was lost, or may have been: its lease was not renewed"
        )


async def find_holder(control: ControlPlane, name: str) -> Entry | None:
    """The entry of whoever has the lock `name` now, or None; raises what `ControlPlane.range` does."""
    entries = (await control.range(f"{LOCKS_KEY}{name}/")).entries
    return min(entries, key=lambda each: each.create_revision, default=None)


async def _renew(
    control: ControlPlane, lease_id: int, ttl_s: float, scope: trio.CancelScope
) -> None:
    pause_s = ttl_s / 3
    while True:
        await trio.sleep(pause_s)
        # The store counts from a later moment than this.
        began, pause_s = trio.current_time(), ttl_s / 20
        try:
            with trio.move_on_after(ttl_s / 3):
                left_s = await control.keep_alive(lease_id)
                scope.deadline, pause_s = began + left_s * SAFE_SHARE, ttl_s / 3
        except LeaseLostError:
            scope.cancel()
        except TrinamoError:
            continue


async def _follow(
    control: ControlPlane, own: str, scope: trio.CancelScope, *, task_status: trio.TaskStatus[int]
) -> None:
    """Report the revision of `own` once it is the oldest of the line; cancel `scope` if it is gone."""
    line: dict[str, int] = {}
    is_first = False
    async with control.watch(own.rpartition("/")[0] + "/") as events:
        async for event in events:
            if isinstance(event, Put):
                line[event.entry.key] = event.entry.create_revision
            elif isinstance(event, Delete):
                line.pop(event.key, None)
            else:
                line = {each.key: each.create_revision for each in event.entries}
            if own not in line:
                scope.cancel()
                await trio.sleep_forever()
            if not is_first and line[own] == min(line.values()):
                is_first = True
                task_status.started(line[own])

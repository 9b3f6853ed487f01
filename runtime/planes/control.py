"""The control plane: small data with strong consistency.

A plane that keeps counts has a method `statistics()`: what `/metrics` shows of outages. Counts only grow, and
reading them costs nothing, so a scrape may do it at any time, also after the plane was closed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import attrs


@attrs.frozen
class Entry:
    """One key as the store holds it. `mod_revision` is the store revision of its last change."""

    key: str
    value: bytes
    mod_revision: int
    create_revision: int
    lease_id: int = 0


@attrs.frozen
class Snapshot:
    """All entries under a prefix as of `revision`, in key order. Always a watch's first event."""

    revision: int
    entries: Sequence[Entry]


@attrs.frozen
class Put:
    """A key was created or changed."""

    entry: Entry


@attrs.frozen
class Delete:
    """A key is gone, by a delete or with its lease, as of `revision`."""

    key: str
    revision: int


@attrs.frozen
class Resync:
    """History between two points was lost; this is all that is true now.

    Whatever the receiver holds and `entries` does not name has been deleted meanwhile.
    """

    revision: int
    entries: Sequence[Entry]


WatchEvent = Snapshot | Put | Delete | Resync


@attrs.frozen
class Lease:
    """A lease as granted: the store deletes its keys `ttl_s` seconds after the last keep-alive."""

    id: int
    ttl_s: float


@attrs.frozen
class PutOutcome:
    """What a guarded write found. `revision` is the store's revision after the attempt."""

    succeeded: bool
    revision: int


class ControlPlane(Protocol):
    """Small data with strong consistency: registration, discovery, leases, configuration.

    Keys are `/`-separated text. Values are bounded (1 MiB unless the transport
    says less). Unless said otherwise every method raises `ConnectError` (nothing was sent),
    `UnknownOutcomeError` (a write may have happened), `DeadlineError` (a read got no answer in
    time) or `ControlPlaneError` (the store said no).
    """

    async def get(self, key: str) -> Entry | None:
        """The entry under exactly `key`, or None."""
        ...

    async def range(self, prefix: str) -> Snapshot:
        """Every entry whose key starts with `prefix`, from one revision."""
        ...

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """Write without a guard and return the new revision; `lease_id` 0 means for ever.

        Raises `LeaseLostError` if the lease is not known.
        """
        ...

    async def compare_and_put(
        self, key: str, value: bytes, *, mod_revision: int, lease_id: int = 0
    ) -> PutOutcome:
        """Write only if the key's `mod_revision` is this one; 0 means only if it is absent.

        Safe to repeat after `UnknownOutcomeError`: at most one attempt takes effect.
        """
        ...

    async def delete(self, key: str) -> bool:
        """Delete exactly `key`; whether it was there."""
        ...

    async def delete_prefix(self, prefix: str) -> int:
        """Delete every key that starts with `prefix`; how many there were."""
        ...

    async def grant_lease(self, ttl_s: float) -> Lease:
        """Ask for a lease. The store may round `ttl_s` up to whole seconds."""
        ...

    async def keep_alive(self, lease_id: int) -> float:
        """Renew once and return the seconds left. Raises `LeaseLostError` if it is gone."""
        ...

    async def revoke_lease(self, lease_id: int) -> None:
        """Give the lease up and delete its keys now. A lease not known is no error."""
        ...

    def watch(self, prefix: str) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Watch a prefix: first a `Snapshot`, then every change after it, in revision order.

        No change between the snapshot and the stream is lost. After an outage the stream resumes
        where it was; if history was compacted meanwhile, or is not known to be the same (a store
        restored from a backup), one `Resync` takes its place. The
        iterator never ends by itself; it raises only what is beyond repair.
        """
        ...

    async def check_health(self) -> str:
        """One line about the store (version, address); raises if it does not answer."""
        ...


@attrs.frozen
class ControlStatistics:
    """What a control plane has met so far."""

    is_connected: bool
    """Whether the last thing heard of the store was an answer; False before the first one."""
    watches: int
    """Watches open now."""
    stream_losses: int
    """How often a stream to the store ended unasked, with watches or leases on it."""
    resyncs: int
    """How often a watch had to read everything again because history was gone."""
    silence_s: float = 0.0
    """Seconds since the store last answered; a quiet store is asked every few seconds."""


@runtime_checkable
class CountsControl(Protocol):
    """A control plane that counts."""

    def statistics(self) -> ControlStatistics:
        """The counts as of now; synchronous, never fails."""
        ...

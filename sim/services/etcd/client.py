"""The control plane over a simulated store: `ControlPlane`, with the manners of `transports/etcd`.

Towards its caller it behaves as the real one does: reads and keep-alives are repeated within the
deadline, guarded writes too, unguarded ones are sent at most once; what was sent and never answered
is an `UnknownOutcomeError`, what was never sent a `ConnectError`. Watches are in `watches.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from trinamo.runtime.errors import ControlPlaneError, LeaseLostError, UnknownOutcomeError
from trinamo.runtime.planes import Entry, Lease, PutOutcome, Snapshot, WatchEvent
from trinamo.runtime.protocol.streams.codec import Frame
from trinamo.transports.memory.store import VALUE_BYTES_MAX

from ..calls import Caller
from ..connector import Connector, running
from ..peer import Peer
from ..wire import Ping, Pong, Reply, encode
from .server import PORT
from .watches import Watch, Watches
from .wire import decode_from_store

__all__ = ["SimulatedControlPlane", "open_simulated_etcd"]


class SimulatedControlPlane:
    """One process's connection to a `SimulatedEtcd`. Made by `open_simulated_etcd`."""

    def __init__(
        self, connector: Connector, *, timeout_s: float, per_try_timeout_s: float, pending_max: int
    ) -> None:
        self._connector = connector
        self._caller = Caller(connector, timeout_s=timeout_s, per_try_timeout_s=per_try_timeout_s)
        self._watches = Watches(pending_max=pending_max)

    @property
    def value_bytes_max(self) -> int:
        """The largest value a put may carry."""
        return VALUE_BYTES_MAX

    # --- ControlPlane ------------------------------------------------------------------------------

    async def get(self, key: str) -> Entry | None:
        """See `ControlPlane.get`."""
        entry: Entry | None = await self._caller.read("get", (key,), Entry | None)
        return entry

    async def range(self, prefix: str) -> Snapshot:
        """See `ControlPlane.range`."""
        snapshot: Snapshot = await self._caller.read("range", (prefix,), Snapshot)
        return snapshot

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """See `ControlPlane.put`. Sent at most once."""
        revision: int = await self._caller.write_once("put", (key, value, lease_id), int)
        return revision

    async def compare_and_put(
        self, key: str, value: bytes, *, mod_revision: int, lease_id: int = 0
    ) -> PutOutcome:
        """See `ControlPlane.compare_and_put`. Repeated over lost replies within the deadline."""
        result = await self._caller.call(
            "compare_and_put",
            (key, value, mod_revision, lease_id),
            tuple[PutOutcome, Entry | None],
            is_repeatable=True,
            writes=True,
        )
        outcome, held = result.value
        if outcome.succeeded or not result.is_doubtful:
            return PutOutcome(outcome.succeeded, outcome.revision)
        # The guard may have failed because of the try before this one, whose reply was lost. A
        # lease is known to its owner only, so a value under ours was written by us.
        if lease_id and held is not None and (held.value, held.lease_id) == (value, lease_id):
            return PutOutcome(succeeded=True, revision=held.mod_revision)
        raise UnknownOutcomeError(
            f"{self._connector.where}: the reply to the first try at {key!r} was lost, and the key "
            "has changed since"
        )

    async def delete(self, key: str) -> bool:
        """See `ControlPlane.delete`. Sent at most once."""
        was_there: bool = await self._caller.write_once("delete", (key,), bool)
        return was_there

    async def delete_prefix(self, prefix: str) -> int:
        """See `ControlPlane.delete_prefix`. Sent at most once."""
        count: int = await self._caller.write_once("delete_prefix", (prefix,), int)
        return count

    async def grant_lease(self, ttl_s: float) -> Lease:
        """See `ControlPlane.grant_lease`. A lease granted twice holds nothing and ends by itself."""
        if not (ttl_s > 0 and math.isfinite(ttl_s)):
            raise ControlPlaneError(f"a lease of {ttl_s} s is impossible", definite=True)
        result = await self._caller.call(
            "grant_lease", (ttl_s,), Lease, is_repeatable=True, writes=True
        )
        lease: Lease = result.value
        return lease

    async def keep_alive(self, lease_id: int) -> float:
        """See `ControlPlane.keep_alive`."""
        left_s: float = await self._caller.read("keep_alive", (lease_id,), float)
        return left_s

    async def revoke_lease(self, lease_id: int) -> None:
        """See `ControlPlane.revoke_lease`."""
        with suppress(LeaseLostError):
            await self._caller.call(
                "revoke_lease", (lease_id,), None, is_repeatable=True, writes=True
            )

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """See `ControlPlane.watch`. All watches share the connection; an outage makes them wait."""
        watch = Watch(self._watches, prefix, self.range)
        self._watches.add(watch)
        self._connector.expect()
        try:
            yield watch
        finally:
            self._watches.remove(watch)

    async def check_health(self) -> str:
        """One line about the store."""
        line: str = await self._caller.read("status", (), str)
        return line

    async def run(self) -> None:
        """Keep the connection until cancelled; `open_simulated_etcd` does."""
        await self._connector.run(self)

    # --- the connection: Session -------------------------------------------------------------------

    def opened(self, peer: Peer) -> None:
        """See `Session`."""
        self._watches.opened(peer)

    @property
    def is_expectant(self) -> bool:
        """See `Session`."""
        return self._watches.are_there_any or self._caller.is_waiting

    def ping(self, peer: Peer) -> None:
        """See `Session`."""
        peer.post(encode(Ping()))

    def lost(self) -> None:
        """See `Session`."""
        self._watches.lost()
        self._caller.lost()

    def received(self, frame: Frame) -> None:
        """See `Session`."""
        header, data = frame
        message = decode_from_store(header)
        if isinstance(message, Reply):
            self._caller.receive(message, data)
        elif not isinstance(message, Pong):
            self._watches.receive(message, data)


@asynccontextmanager
async def open_simulated_etcd(
    host: str = "etcd",
    port: int = PORT,
    *,
    rng: random.Random,
    timeout_s: float = 5.0,
    per_try_timeout_s: float = 1.0,
    silence_s: float = 6.0,
    asks_idly: bool = True,
    pending_max: int = 1024,
) -> AsyncIterator[SimulatedControlPlane]:
    """Open a control plane over the store on `host`, from the running task's host.

    It does not wait for the store: ask `check_health` whether it answers.

    Args:
        host: The store's host.
        port: Where it listens.
        rng: Dice for the pauses between two tries to connect: the environment's.
        timeout_s: The bound on one call with all its tries.
        per_try_timeout_s: The bound on one try of a call that may be repeated.
        silence_s: When a connection that says nothing is given up for a new one.
        asks_idly: Ask a silent connection also while nobody waits for anything.
        pending_max: How many changes may wait for a slow watcher before the store keeps the rest.
    """
    connector = Connector(
        host,
        port,
        rng=rng,
        dial_timeout_s=per_try_timeout_s,
        silence_s=silence_s,
        asks_idly=asks_idly,
    )
    plane = SimulatedControlPlane(
        connector,
        timeout_s=timeout_s,
        per_try_timeout_s=per_try_timeout_s,
        pending_max=pending_max,
    )
    async with running(plane.run):
        yield plane

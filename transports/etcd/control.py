"""`EtcdControlPlane`, and `open_etcd`, which owns everything it is made of.

Values, revisions and leases are etcd's own; nothing is cached. Read `client.py` for what happens
to a call when a server goes away, `watching.py` for what happens to a watch.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import trio

from trinamo.runtime.config.planes import EtcdConfig
from trinamo.runtime.errors import (
    CompactedError,
    ControlPlaneError,
    LeaseLostError,
    UnknownOutcomeError,
)
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import (
    ControlStatistics,
    Entry,
    Lease,
    PutOutcome,
    Snapshot,
    WatchEvent,
)

from . import wire_pb2 as wire
from .bridge import REPLY_BYTES_MAX, GrpcChannel, open_channel, parse_endpoints, resolve
from .client import Credentials, EtcdClient, lease_seconds
from .keeping import LeaseKeeper
from .rpc import NO_SPACE, SPACE_REMEDY, TooLargeError
from .watches import WatchTable, entry_of, prefix_range
from .watching import WatchKeeper, WatchReader

_log = logging.getLogger("trinamo.etcd")

# etcd takes requests of 1.5 MiB as it is shipped; a value of 1 MiB fits with its key.
VALUE_BYTES_MAX: Final = 1 << 20
PAGE_KEYS_MAX: Final = 128
"""Of a page; fewer where they do not fit into one reply, `bridge.REPLY_BYTES_MAX`."""
# These releases can lose consistency after a crash: https://github.com/etcd-io/etcd/issues/13766
INCONSISTENT_VERSIONS: Final = frozenset({"3.5.0", "3.5.1", "3.5.2"})


class EtcdControlPlane:
    """The control plane over etcd. Made by `open_etcd`, whose nursery runs its two streams.

    In etcd `key_prefix` stands before each key; no caller sees it.
    """

    def __init__(self, client: EtcdClient, *, silence_s: float, key_prefix: str = "") -> None:
        self._client, self._key_prefix = client, key_prefix
        self._watches = WatchKeeper(client, WatchTable(key_prefix=key_prefix), silence_s=silence_s)
        self._leases = LeaseKeeper(client)

    async def get(self, key: str) -> Entry | None:
        reply = await self._client.read("Range", wire.RangeRequest(key=self._key(key)))
        return entry_of(reply.kvs[0], self._key_prefix) if reply.kvs else None

    async def range(self, prefix: str) -> Snapshot:
        """See `ControlPlane.range`. Large ranges are read in pages, all at one revision."""
        while True:
            try:
                return await self._range(prefix)
            except CompactedError:
                # Another program compacted between two pages; the next try is at a new revision.
                await trio.lowlevel.checkpoint()

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """See `ControlPlane.put`. Sent at most once."""
        reply = await self._client.write_once("Put", self._put(key, value, lease_id))
        return int(reply.header.revision)

    async def compare_and_put(
        self, key: str, value: bytes, *, mod_revision: int, lease_id: int = 0
    ) -> PutOutcome:
        """See `ControlPlane.compare_and_put`. Repeated over lost replies within the deadline."""
        put = self._put(key, value, lease_id)
        request = wire.TxnRequest(
            compare=[
                wire.Compare(
                    result=wire.Compare.EQUAL,
                    target=wire.Compare.MOD,
                    key=put.key,
                    mod_revision=mod_revision,
                )
            ],
            success=[wire.RequestOp(request_put=put)],
            failure=[wire.RequestOp(request_range=wire.RangeRequest(key=put.key))],
        )
        reply, is_doubtful = await self._client.write_repeatably("Txn", request)
        if reply.succeeded or not is_doubtful:
            return PutOutcome(succeeded=reply.succeeded, revision=reply.header.revision)
        # The guard may have failed because of the try before this one, whose reply was lost. A
        # lease is known to its owner only, so a value under ours was written by us.
        held = reply.responses[0].response_range.kvs
        if lease_id and held and (held[0].value, held[0].lease) == (value, lease_id):
            return PutOutcome(succeeded=True, revision=held[0].mod_revision)
        raise UnknownOutcomeError(
            f"etcd at {self._client.where}: the reply to the first try at {key!r} was lost, and "
            "the key has changed since"
        )

    async def delete(self, key: str) -> bool:
        """See `ControlPlane.delete`. Sent at most once."""
        request = wire.DeleteRangeRequest(key=self._key(key))
        return bool((await self._client.write_once("DeleteRange", request)).deleted)

    async def delete_prefix(self, prefix: str) -> int:
        """See `ControlPlane.delete_prefix`. Sent at most once."""
        key, range_end = prefix_range(self._key_prefix + prefix)
        request = wire.DeleteRangeRequest(key=key, range_end=range_end)
        return int((await self._client.write_once("DeleteRange", request)).deleted)

    async def grant_lease(self, ttl_s: float) -> Lease:
        """See `ControlPlane.grant_lease`. etcd grants whole seconds, and at least two or so.

        Repeated over lost replies: a lease granted twice holds nothing and ends by itself.
        """
        request = wire.LeaseGrantRequest(ttl_s=lease_seconds(ttl_s))
        reply, _ = await self._client.write_repeatably("LeaseGrant", request)
        return Lease(id=reply.id, ttl_s=float(reply.ttl_s))

    async def keep_alive(self, lease_id: int) -> float:
        """See `ControlPlane.keep_alive`. All leases share one stream."""
        return await self._leases.keep_alive(lease_id)

    async def revoke_lease(self, lease_id: int) -> None:
        """See `ControlPlane.revoke_lease`. Repeatable: etcd's lease ids do not come back."""
        request = wire.LeaseRevokeRequest(id=lease_id)
        with suppress(LeaseLostError):
            await self._client.write_repeatably("LeaseRevoke", request)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """See `ControlPlane.watch`. All watches share one stream; an outage only makes it wait."""
        reader = WatchReader(self._watches, prefix, self.range)
        try:
            yield reader
        finally:
            reader.close()

    async def check_health(self) -> str:
        """One line: release and addresses, and warnings: an alarm, a release known to be broken."""
        status = await self._client.read("Status", wire.StatusRequest())
        line = f"etcd {status.version} at {self._client.where}"
        if not status.leader:
            raise ControlPlaneError(f"{line} has no leader")
        if any(NO_SPACE in each for each in status.errors):
            line += f"; warning: it takes no writes, nobody can register: {SPACE_REMEDY}"
        if status.version in INCONSISTENT_VERSIONS:
            line += (
                "; warning: this release can lose consistency after a crash (etcd issue 13766), "
                "use 3.5.3 or later in production"
            )
        return line

    def statistics(self) -> ControlStatistics:
        return ControlStatistics(
            is_connected=self._client.is_connected,
            watches=len(self._watches.table),
            stream_losses=self._client.stream_losses,
            resyncs=self._watches.table.resyncs,
            silence_s=self._client.silence_s,
        )

    async def compact(self) -> None:
        """Make etcd forget its history up to now; for maintenance and tests.

        Watches that are behind get a `Resync`.
        """
        revision = (await self._client.read("Range", wire.RangeRequest(key=b"\0"))).header.revision
        with suppress(CompactedError):
            await self._client.write_repeatably(
                "Compact", wire.CompactionRequest(revision=revision)
            )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the two streams until cancelled; `open_etcd` does."""
        async with open_nursery() as nursery:
            nursery.start_soon(self._watches.run, name="etcd watches")
            nursery.start_soon(self._leases.run, name="etcd leases")
            task_status.started()

    async def _range(self, prefix: str) -> Snapshot:
        key, range_end = prefix_range(self._key_prefix + prefix)
        entries: list[Entry] = []
        revision, limit, keys_only = 0, PAGE_KEYS_MAX, False
        while True:
            request = wire.RangeRequest(
                key=key, range_end=range_end, limit=limit, revision=revision, keys_only=keys_only
            )
            try:
                reply = await self._client.read("Range", request)
            except TooLargeError:
                # Whoever may write here may write values that are no member's. They keep out nobody.
                limit, keys_only = max(1, limit // 2), limit == 1
                continue
            revision = revision or reply.header.revision
            if keys_only and reply.kvs:
                _log.warning(
                    "%r: its value is longer than %d bytes: nobody looks at it. Delete it, or find out"
                    " who wrote it",
                    reply.kvs[0].key.decode(errors="backslashreplace"),
                    REPLY_BYTES_MAX,
                )
                # What comes after it may be as small as ever, and thousands of keys.
                limit = PAGE_KEYS_MAX
            else:
                entries.extend(entry_of(kv, self._key_prefix) for kv in reply.kvs)
            if not reply.more:
                return Snapshot(revision, entries)
            key, keys_only = reply.kvs[-1].key + b"\0", False

    def _key(self, key: str) -> bytes:
        if not key:
            raise ControlPlaneError("a key must not be empty", definite=True)
        return (self._key_prefix + key).encode()

    def _put(self, key: str, value: bytes, lease_id: int) -> wire.PutRequest:
        if len(value) > VALUE_BYTES_MAX:
            raise ControlPlaneError(
                f"the value of {key!r} has {len(value)} bytes; at most {VALUE_BYTES_MAX}",
                definite=True,
            )
        return wire.PutRequest(key=self._key(key), value=value, lease=lease_id)


@asynccontextmanager
async def open_etcd(
    endpoints: str | Sequence[str],
    section: EtcdConfig = EtcdConfig(),  # noqa: B008 -- frozen
) -> AsyncIterator[EtcdControlPlane]:
    """Open a control plane over one etcd cluster, as the section `control_plane.etcd` says.

    It does not wait for a server: ask `check_health` whether one answers. Names of several
    endpoints are resolved now and once; a single name, which may stand for all members, is resolved
    by gRPC whenever it reconnects.

    Args:
        endpoints: `host:port` of one or more members, instead of the section's; with `http://` or
            `https://` if you like, which speaks TLS, too.
        section: How to speak to them.

    Raises `ConfigError` for TLS files that cannot be read, `ConnectError` for names that do not
    resolve.
    """
    parsed = parse_endpoints(endpoints)
    password = section.password
    client = EtcdClient(
        GrpcChannel(
            open_channel(
                await resolve(parsed),
                section.tls,
                uses_tls=section.tls.enabled or parsed.uses_tls,
                server_name=section.tls.server_name or parsed.server_name,
            )
        ),
        where=",".join(parsed.addresses),
        credentials=Credentials(section.username, password.reveal())
        if section.username and password
        else None,
        timeout_s=section.request_timeout_s,
        per_try_timeout_s=section.attempt_timeout_s,
    )
    async with open_plane(
        client, silence_s=section.silence_s, key_prefix=section.key_prefix
    ) as plane:
        yield plane


@asynccontextmanager
async def open_plane(
    client: EtcdClient, *, silence_s: float, key_prefix: str = ""
) -> AsyncIterator[EtcdControlPlane]:
    """Run a control plane over `client`, which is closed at the end; see `open_etcd`."""
    plane = EtcdControlPlane(client, silence_s=silence_s, key_prefix=key_prefix)
    try:
        async with open_nursery() as nursery:
            await nursery.start(plane.run)
            try:
                yield plane
            finally:
                nursery.cancel_scope.cancel()
    finally:
        client.close()

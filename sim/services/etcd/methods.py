"""What each unary method of etcd does to the store, in etcd's own messages. Sans-IO.

Only what `transports/etcd` asks is known: one guard on a modification revision, keys and prefixes.
No state of the past is kept: a range at an older revision is refused as a compacted one is.
"""

from __future__ import annotations

from typing import Any

import attrs

from trinamo.runtime.errors import CompactedError, LeaseLostError, TrinamoError
from trinamo.runtime.planes import Entry
from trinamo.transports.etcd import wire_pb2 as wire
from trinamo.transports.memory.store import MemoryStore

VERSION = "3.6.0"


def refusal(error: TrinamoError) -> tuple[str, str]:
    """The status and the words with which etcd says this no."""
    match error:
        case LeaseLostError():
            return "NOT_FOUND", "etcdserver: requested lease not found"
        case CompactedError():
            return "OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted"
        case _:
            return "INVALID_ARGUMENT", f"etcdserver: {error.message}"


def header_of(store: MemoryStore, store_id: int) -> wire.Header:
    """What every reply says of the store. A store that lost its data is another cluster."""
    return wire.Header(cluster_id=store_id, member_id=1, revision=store.revision)


def key_value_of(entry: Entry) -> wire.KeyValue:
    """Etcd's own of an `Entry`."""
    return wire.KeyValue(
        key=entry.key.encode(),
        value=entry.value,
        mod_revision=entry.mod_revision,
        create_revision=entry.create_revision,
        lease=entry.lease_id,
    )


def prefix_of(range_end: bytes) -> str:
    """The prefix that ends here: what `prefix_range` of `transports/etcd` makes a range end of."""
    return "" if range_end == b"\0" else (range_end[:-1] + bytes([range_end[-1] - 1])).decode()


@attrs.frozen
class Methods:
    """The methods at one moment, `now` on the store's clock."""

    store: MemoryStore
    store_id: int
    now: float

    def answer(self, name: str, request: Any) -> Any:
        """The reply; raises `TrinamoError` where the store says no."""
        reply = getattr(self, f"_{name.lower()}")(request)
        if name != "LeaseKeepAlive":
            reply.header.CopyFrom(header_of(self.store, self.store_id))
        return reply

    def _range(self, request: Any) -> wire.RangeResponse:
        if request.revision and request.revision != self.store.revision:
            raise CompactedError("no state of the past is kept", compact_revision=0)
        if request.range_end:
            first, prefix = request.key.decode(), prefix_of(request.range_end)
            entries = [e for e in self.store.range(prefix, now=self.now).entries if e.key >= first]
        else:
            entry = self.store.get(request.key.decode(), now=self.now)
            entries = [] if entry is None else [entry]
        limit = request.limit or len(entries)
        return wire.RangeResponse(
            kvs=map(key_value_of, entries[:limit]),
            more=len(entries) > limit,
            count=len(entries),
        )

    def _put(self, request: Any) -> wire.PutResponse:
        self.store.put(request.key.decode(), request.value, lease_id=request.lease, now=self.now)
        return wire.PutResponse()

    def _deleterange(self, request: Any) -> wire.DeleteRangeResponse:
        if request.range_end:
            deleted = self.store.delete_prefix(prefix_of(request.range_end), now=self.now)
        else:
            deleted = int(self.store.delete(request.key.decode(), now=self.now))
        return wire.DeleteRangeResponse(deleted=deleted)

    def _txn(self, request: Any) -> wire.TxnResponse:
        (guard,), put = request.compare, request.success[0].request_put
        outcome = self.store.compare_and_put(
            put.key.decode(),
            put.value,
            mod_revision=guard.mod_revision,
            lease_id=put.lease,
            now=self.now,
        )
        if outcome.succeeded:
            done = wire.ResponseOp(response_put=wire.PutResponse())
        else:
            held = self._range(request.failure[0].request_range)
            done = wire.ResponseOp(response_range=held)
        return wire.TxnResponse(succeeded=outcome.succeeded, responses=[done])

    def _compact(self, request: Any) -> wire.CompactionResponse:
        self.store.compact(request.revision)
        return wire.CompactionResponse()

    def _leasegrant(self, request: Any) -> wire.LeaseGrantResponse:
        lease = self.store.grant_lease(request.ttl_s, now=self.now)
        return wire.LeaseGrantResponse(id=lease.id, ttl_s=int(lease.ttl_s))

    def _leaserevoke(self, request: Any) -> wire.LeaseRevokeResponse:
        self.store.revoke_lease(request.id, now=self.now)
        return wire.LeaseRevokeResponse()

    def _leasekeepalive(self, request: Any) -> wire.LeaseKeepAliveResponse:
        try:
            left_s = self.store.keep_alive(request.id, now=self.now)
        except LeaseLostError:
            left_s = 0
        return wire.LeaseKeepAliveResponse(id=request.id, ttl_s=int(left_s))

    def _status(self, request: Any) -> wire.StatusResponse:  # noqa: ARG002 -- as the others
        return wire.StatusResponse(version=VERSION, leader=1)

"""The methods of etcd that are called here, and what a channel to it must offer.

`GrpcChannel` (`bridge.py`) is one; the simulator has another over its own network
(`sim/services/etcd/channel.py`). All that is above it is the same code in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

import attrs

from . import wire_pb2 as wire

Metadata = tuple[tuple[str, str], ...]


@attrs.frozen
class Method:
    """Where a method is, and the messages of its two directions."""

    service: str
    request: Any
    reply: Any


METHODS: Final = {
    "Range": Method("KV", wire.RangeRequest, wire.RangeResponse),
    "Put": Method("KV", wire.PutRequest, wire.PutResponse),
    "DeleteRange": Method("KV", wire.DeleteRangeRequest, wire.DeleteRangeResponse),
    "Txn": Method("KV", wire.TxnRequest, wire.TxnResponse),
    "Compact": Method("KV", wire.CompactionRequest, wire.CompactionResponse),
    "LeaseGrant": Method("Lease", wire.LeaseGrantRequest, wire.LeaseGrantResponse),
    "LeaseRevoke": Method("Lease", wire.LeaseRevokeRequest, wire.LeaseRevokeResponse),
    "LeaseKeepAlive": Method("Lease", wire.LeaseKeepAliveRequest, wire.LeaseKeepAliveResponse),
    "Watch": Method("Watch", wire.WatchRequest, wire.WatchResponse),
    "Status": Method("Maintenance", wire.StatusRequest, wire.StatusResponse),
    "Authenticate": Method("Auth", wire.AuthenticateRequest, wire.AuthenticateResponse),
}


class Stream(Protocol):
    """An open bidirectional stream."""

    def send_nowait(self, *requests: Any) -> None:
        """Queue requests, in order. Raises `StreamLostError` if far too many are waiting."""
        ...

    async def receive(self) -> Sequence[Any]:
        """The replies that are there, at least one; a cancelled wait loses none.

        Raises `StreamLostError` when there are no more.
        """
        ...

    def cancel(self) -> None:
        """End it; whoever receives gets `StreamLostError`."""
        ...


class EtcdChannel(Protocol):
    """A way to a cluster, which comes and goes; only a call that `waits` waits for it to be there."""

    async def call(
        self, name: str, request: Any, *, timeout_s: float, metadata: Metadata, waits: bool = False
    ) -> Any:
        """Call a unary method of `METHODS`; raises `StatusError`.

        With `waits` it goes as soon as there is a connection, if one comes in time.
        When cancelled, the call may still have taken effect.
        """
        ...

    def open_stream(self, name: str, *, metadata: Metadata) -> AbstractAsyncContextManager[Stream]:
        """Open a stream of a method for as long as inside. It connects in the background."""
        ...

    def close(self) -> None:
        """End every call and stream; later ones fail."""
        ...

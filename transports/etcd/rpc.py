"""The methods of etcd that are called here, and what a channel to it must offer.

`GrpcChannel` (`bridge.py`) is one; the simulator has another over its own network
(`sim/services/etcd/channel.py`). All that is above it is the same code in both. How a
call or a stream fails, and what that means, is only a mapping here; `client.py` acts on it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

import attrs

from trinamo.runtime.errors import (
    CompactedError,
    ControlPlaneError,
    LeaseLostError,
    OverloadedError,
    TrinamoError,
)

from . import wire_pb2 as wire

NO_SPACE: Final = "NOSPACE"
"""The alarm of a member whose database is full."""
SPACE_REMEDY: Final = (
    "its database has grown to --quota-backend-bytes (2 GB by default); compact and defragment it, then"
    " `etcdctl alarm disarm`"
)


class StatusError(Exception):
    """A call ended with a status of gRPC, `code` by its name. Never leaves this package."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class TooLargeError(ControlPlaneError):
    """The reply is longer than a message may be, `bridge.REPLY_BYTES_MAX`. Never leaves this package."""


class CallVerdict(enum.Enum):
    """What is known about a call that failed."""

    UNSENT = "nothing was sent"
    UNKNOWN = "it may have taken effect"
    DENIED = "refused for want of a valid token"
    FINAL = "the store said no"


# gRPC says UNAVAILABLE for a call that was never sent and for one that broke half-way; only its
# words tell them apart. A sentence not listed counts as sent, which errs on the safe side.
_UNSENT_WORDS: Final = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "errors resolving",
    "DNS resolution failed",
    "empty address list",
)
_UNKNOWN_CODES: Final = frozenset(
    {
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "CANCELLED",
        "INTERNAL",
        "UNKNOWN",
        "ABORTED",
        "DATA_LOSS",
    }
)
# A server that wants a token and got none says INVALID_ARGUMENT, and so does one whose users
# were changed since the token was made.
_DENIED_WORDS: Final = ("user name is empty", "revision of auth store is old")


def judge(error: StatusError) -> CallVerdict:
    """What a failed call leaves behind."""
    code, text = error.code, error.text
    if code == "UNAVAILABLE" and any(part in text for part in _UNSENT_WORDS):
        return CallVerdict.UNSENT
    if code == "UNAUTHENTICATED" or any(part in text for part in _DENIED_WORDS):
        return CallVerdict.DENIED
    return CallVerdict.UNKNOWN if code in _UNKNOWN_CODES else CallVerdict.FINAL


def is_too_large(error: StatusError) -> bool:
    """Whether this side refused a message for its length."""
    return error.code == "RESOURCE_EXHAUSTED" and "larger than max" in error.text


def final_error(error: StatusError) -> TrinamoError:
    """The error for a call that the store refused: it certainly did not happen."""
    code, text = error.code, error.text
    if code == "NOT_FOUND" and "lease" in text:
        return LeaseLostError(text)
    if code == "OUT_OF_RANGE" and "compacted" in text:
        return CompactedError(text)
    if code == "RESOURCE_EXHAUSTED" and "too many requests" in text:
        return OverloadedError(text, bound="etcd requests")
    if is_too_large(error):
        return TooLargeError(f"etcd: {text}", definite=True)
    if code == "RESOURCE_EXHAUSTED" and "space exceeded" in text:
        text += f": {SPACE_REMEDY}"
    return ControlPlaneError(f"etcd: {text}", definite=True)


class StreamLostError(Exception):
    """The stream is over, whoever ended it. Open another; never leaves this package."""

    def __init__(self, message: str, cause: StatusError | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.verdict = CallVerdict.UNKNOWN if cause is None else judge(cause)


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

"""What a failed gRPC call means to us: may it be repeated, and which error is it in the end?

Only a mapping; `client.py` acts on it.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import grpc

from trinamo.runtime.errors import (
    CompactedError,
    ControlPlaneError,
    LeaseLostError,
    OverloadedError,
    TrinamoError,
)

__all__ = ["Verdict", "final_error", "judge", "words"]


class Verdict(enum.Enum):
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
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DATA_LOSS,
    }
)
# A server that wants a token and got none says INVALID_ARGUMENT, and so does one whose users
# were changed since the token was made.
_DENIED_WORDS: Final = ("user name is empty", "revision of auth store is old")


def words(error: Any) -> str:
    """The text of a gRPC error."""
    return str(error.details() or error.code().name)


def judge(error: Any) -> Verdict:
    """What a failed call leaves behind."""
    code, text = error.code(), words(error)
    if code is grpc.StatusCode.UNAVAILABLE and any(part in text for part in _UNSENT_WORDS):
        return Verdict.UNSENT
    if code is grpc.StatusCode.UNAUTHENTICATED or any(part in text for part in _DENIED_WORDS):
        return Verdict.DENIED
    return Verdict.UNKNOWN if code in _UNKNOWN_CODES else Verdict.FINAL


def final_error(error: Any) -> TrinamoError:
    """The error for a call that the store refused: it certainly did not happen."""
    code, text = error.code(), words(error)
    if code is grpc.StatusCode.NOT_FOUND and "lease" in text:
        return LeaseLostError(text)
    if code is grpc.StatusCode.OUT_OF_RANGE and "compacted" in text:
        return CompactedError(text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "too many requests" in text:
        return OverloadedError(text, bound="etcd requests")
    return ControlPlaneError(f"etcd: {text}", definite=True)

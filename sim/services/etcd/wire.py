"""The messages between a client and the simulated etcd: calls and their answers, and pings. Sans-IO.

A frame's header is one message; its data is the call's arguments or the answer, messages of etcd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from trinamo.runtime.errors import RemoteProtocolError

T = TypeVar("T")


class Call(msgspec.Struct, tag=True, frozen=True):
    """Do `op` with the arguments in the data, and answer under `id`."""

    id: int
    op: str


class CallResult(msgspec.Struct, tag="Answer", frozen=True):
    """The call is done; its result is in the data."""

    id: int


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """The service says no to the call: it certainly had no effect."""

    id: int
    code: str
    message: str


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for answers to call `id` any more."""

    id: int


class Heartbeat(msgspec.Struct, tag="Ping", frozen=True):
    """Say something."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Heartbeat`."""


Reply = CallResult | Refusal

encode: Final = msgspec.msgpack.encode


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """What the peer said; `RemoteProtocolError` if it makes no sense."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"no message of this protocol: {error}") from error


def reader(kind: Any) -> Callable[[bytes], Any]:
    """What reads a header that is one of these messages; see `decode`."""
    decoder = msgspec.msgpack.Decoder(kind)
    return lambda header: decode(decoder, header)

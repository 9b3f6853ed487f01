"""The messages that all simulated services share: calls and their answers, and pings. Sans-IO.

A frame's header is one message; its data is the MessagePack of the call's arguments or of the
answer. `services/etcd/wire.py` and `services/nats/wire.py` add what is theirs.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from trinamo.runtime.errors import RemoteProtocolError

__all__ = [
    "Answer",
    "Call",
    "NoLeader",
    "Ping",
    "Pong",
    "Refusal",
    "Reply",
    "arguments",
    "decode",
    "encode",
]

T = TypeVar("T")


class Call(msgspec.Struct, tag=True, frozen=True):
    """Do `op` with the arguments in the data, and answer under `id`."""

    id: int
    op: str


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The call is done; its result is in the data."""

    id: int


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """The service says no to the call: it certainly had no effect."""

    id: int
    code: str
    message: str


class NoLeader(msgspec.Struct, tag=True, frozen=True):
    """The cluster is between two leaders. The call was not taken, but its sender cannot know."""

    id: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Say something."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Ping`."""


Reply = Answer | Refusal | NoLeader

encode: Final = msgspec.msgpack.encode


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """What the peer said; `RemoteProtocolError` if it makes no sense."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"no message of this protocol: {error}") from error


def arguments(**kinds: Any) -> dict[str, msgspec.msgpack.Decoder[Any]]:
    """A decoder for the arguments of each call."""
    return {op: msgspec.msgpack.Decoder[Any](kind) for op, kind in kinds.items()}

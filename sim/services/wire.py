"""The messages that all simulated services share: calls and their answers, and pings. Sans-IO.

A frame's header is one message; its data is the call's arguments or the answer: messages of etcd,
or the MessagePack of what the broker's queues are asked. What is NATS's stands last: its
conversations are those of NATS, its bytes are not, and a payload travels as the frame's data.
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


class NoLeader(msgspec.Struct, tag=True, frozen=True):
    """The broker's queues are between two leaders. The call was not taken."""

    id: int


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for answers to call `id` any more."""

    id: int


class Heartbeat(msgspec.Struct, tag="Ping", frozen=True):
    """Say something."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Heartbeat`."""


Reply = CallResult | Refusal | NoLeader

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


def arguments(**kinds: Any) -> dict[str, msgspec.msgpack.Decoder[Any]]:
    """A decoder for the arguments of each call."""
    return {op: msgspec.msgpack.Decoder[Any](kind) for op, kind in kinds.items()}


class Subscribe(msgspec.Struct, tag=True, frozen=True):
    """Deliver what matches `pattern` under `id`, which the client chose."""

    id: int
    pattern: str
    group: str


class Unsubscribe(msgspec.Struct, tag=True, frozen=True):
    """Deliver no more under `id`."""

    id: int


class Publish(msgspec.Struct, tag=True, frozen=True):
    """Deliver the data to whoever is interested."""

    subject: str
    reply: str
    headers: dict[str, str]


class Deliver(msgspec.Struct, tag=True, frozen=True):
    """The data is a message for subscription `id`."""

    id: int
    subject: str
    reply: str
    headers: dict[str, str]


FromClient = Subscribe | Unsubscribe | Publish | Heartbeat | Call | Forget
FromBroker = Deliver | Pong | Reply

decode_from_client = reader(FromClient)
decode_from_broker = reader(FromBroker)

"""What a simulated broker and its clients say to each other. Sans-IO.

As with etcd, the conversations are those of NATS, the bytes are not: interest and messages, pings,
and calls (`services/wire.py`) for the work queues. A payload travels as the frame's data.
"""

from __future__ import annotations

import msgspec

from ..wire import Call, Ping, Pong, Reply, decode

__all__ = [
    "Deliver",
    "Forget",
    "FromBroker",
    "FromClient",
    "Publish",
    "Subscribe",
    "Unsubscribe",
    "decode_from_broker",
    "decode_from_client",
]


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


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for the answer to call `id` any more."""

    id: int


FromClient = Subscribe | Unsubscribe | Publish | Ping | Call | Forget
FromBroker = Deliver | Pong | Reply

_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_broker: msgspec.msgpack.Decoder[FromBroker] = msgspec.msgpack.Decoder(FromBroker)


def decode_from_client(header: bytes) -> FromClient:
    """What a client said; `RemoteProtocolError` if it makes no sense."""
    return decode(_from_client, header)


def decode_from_broker(header: bytes) -> FromBroker:
    """What the broker said; `RemoteProtocolError` if it makes no sense."""
    return decode(_from_broker, header)

"""What a simulated broker and its clients say to each other. Sans-IO.

The conversations are those of NATS, the bytes are not: interest and messages, pings,
and calls (`services/wire.py`) for the work queues. A payload travels as the frame's data.
"""

from __future__ import annotations

import msgspec

from ..wire import Call, Forget, Ping, Pong, Reply, reader


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


FromClient = Subscribe | Unsubscribe | Publish | Ping | Call | Forget
FromBroker = Deliver | Pong | Reply

decode_from_client = reader(FromClient)
decode_from_broker = reader(FromBroker)

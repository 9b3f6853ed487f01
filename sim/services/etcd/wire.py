"""What a simulated store and its clients say to each other. Sans-IO.

Besides calls (`services/wire.py`) there are watches. This is no rendering of etcd's protocol
buffers: it has the same conversations (unary calls, one multiplexed watch stream, pings), not the
same bytes.
"""

from __future__ import annotations

import msgspec

from trinamo.runtime.planes import Delete, Entry, Put

from ..wire import Call, Ping, Pong, Reply, decode, encode

__all__ = [
    "Changed",
    "Compacted",
    "Created",
    "FromClient",
    "FromStore",
    "Unwatch",
    "WatchFrom",
    "decode_changes",
    "decode_from_client",
    "decode_from_store",
    "encode_changes",
]


class WatchFrom(msgspec.Struct, tag=True, frozen=True):
    """Send every change under `prefix` from `revision` on, under `id`, which the client chose."""

    id: int
    prefix: str
    revision: int


class Unwatch(msgspec.Struct, tag=True, frozen=True):
    """Send no more under `id`."""

    id: int


class Created(msgspec.Struct, tag=True, frozen=True):
    """The watch stands; the store's identity, and its revision now."""

    id: int
    store_id: int
    revision: int


class Changed(msgspec.Struct, tag=True, frozen=True):
    """Changes are in the data; the watch goes on at `next_revision`."""

    id: int
    next_revision: int


class Compacted(msgspec.Struct, tag=True, frozen=True):
    """The watch has ended, because its next revision is no longer in the history."""

    id: int


FromClient = Call | WatchFrom | Unwatch | Ping
FromStore = Reply | Created | Changed | Compacted | Pong

_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_store: msgspec.msgpack.Decoder[FromStore] = msgspec.msgpack.Decoder(FromStore)
# One change: the entry of a put, or the key and revision of a delete.
_Change = tuple[Entry | None, str, int]
_changes: msgspec.msgpack.Decoder[list[_Change]] = msgspec.msgpack.Decoder(list[_Change])


def decode_from_client(header: bytes) -> FromClient:
    """What a client said; `RemoteProtocolError` if it makes no sense."""
    return decode(_from_client, header)


def decode_from_store(header: bytes) -> FromStore:
    """What the store said; `RemoteProtocolError` if it makes no sense."""
    return decode(_from_store, header)


def encode_changes(changes: list[Put | Delete]) -> bytes:
    """The data of a `Changed`."""
    return encode(
        [
            (change.entry, "", 0)
            if isinstance(change, Put)
            else (None, change.key, change.revision)
            for change in changes
        ]
    )


def decode_changes(data: bytes) -> list[Put | Delete]:
    """And back."""
    return [
        Delete(key, revision) if entry is None else Put(entry)
        for entry, key, revision in decode(_changes, data)
    ]

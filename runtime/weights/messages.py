"""What a holder publishes of a model file, and what it and a taker tell each other. Sans-IO.

A card under `weights/<sha256 of the file>/<instance>` says that an instance has the file. The taker
opens an exchange with it: `Ask`, then `HolderOpened`, then for each chunk a `Want` and a `LentChunk`, which names
the block of the holder's memory that has the chunk now and the ticket to READ it with. Peers say
nothing about paths, and all that they say is bounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated, Final

import attrs
import msgspec

from ..errors import RemoteProtocolError
from ..protocol.discovery.instances import is_instance_id
from ..protocol.undecodable import UNDECODABLE, check_signed, decoding_fault

WEIGHTS_PREFIX: Final = "weights/"
CHUNKS_MAX: Final = 1 << 16
"""Of one file: 256 GiB in chunks of 4 MiB; the list of their digests has 2 MiB then."""
WINDOW: Final = 2
"""Chunks that one taker has asked for and not yet checked: one is staged while another is read."""
_DIGEST_BYTES: Final = 32
_CHUNK_BYTES_MIN, _CHUNK_BYTES_MAX = 1 << 12, 1 << 26
_BYTES_MAX: Final = CHUNKS_MAX * _CHUNK_BYTES_MAX

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
_Size = Annotated[int, msgspec.Meta(ge=1, le=_BYTES_MAX)]
_Chunk = Annotated[int, msgspec.Meta(ge=0, le=CHUNKS_MAX)]
_ChunkBytes = Annotated[int, msgspec.Meta(ge=_CHUNK_BYTES_MIN, le=_CHUNK_BYTES_MAX)]


class WeightsCard(msgspec.Struct, frozen=True, kw_only=True):
    """One instance has one file. Its digest and its instance are in the key."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    """What the holder serves it as."""
    namespace: Annotated[str, msgspec.Meta(max_length=64)]
    """Of the holder: only workers of the same one ask it."""
    byte_count: _Size


def weights_key(sha256: str, instance_id: str) -> str:
    """Where one holder says that it has a file."""
    return f"{WEIGHTS_PREFIX}{sha256}/{instance_id}"


def encode_weights_card(card: WeightsCard) -> bytes:
    return msgspec.json.encode(card)


def decode_weights_card(key: str, value: bytes) -> tuple[str, str, WeightsCard]:
    """Digest, instance and card of an entry; `RemoteProtocolError` for what is none."""
    check_signed(key[:160], value)
    sha256, _, instance_id = key.removeprefix(WEIGHTS_PREFIX).partition("/")
    try:
        msgspec.convert(sha256, Sha256)
        card = msgspec.json.decode(value, type=WeightsCard)
    except UNDECODABLE as error:
        raise RemoteProtocolError(
            f"{key[:160]}: no offer of weights: {decoding_fault(error)}"
        ) from error
    if not is_instance_id(instance_id):
        raise RemoteProtocolError(f"{key[:160]}: names no instance")
    return sha256, instance_id, card


# --- the exchange ----------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The first word of a taker."""

    sha256: Sha256
    taker: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """For people: its host and process."""


class HolderOpened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """The first word of a holder: the file in chunks, and the memory that they come through."""

    byte_count: _Size
    chunk_bytes: _ChunkBytes
    digests: Annotated[bytes, msgspec.Meta(max_length=CHUNKS_MAX * _DIGEST_BYTES)]
    """The SHA-256 of each chunk, one after the other."""
    memory: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    """What a transfer router connects to."""


class Want(msgspec.Struct, frozen=True, array_like=True):
    """Stage this chunk."""

    chunk: _Chunk
    done: _Chunk
    """Leading chunks that the taker has checked: it reads none of them again."""


class LentChunk(msgspec.Struct, frozen=True, kw_only=True, tag="lent"):
    """The chunk is in this block until it is done, and the ticket is good for it alone."""

    chunk: _Chunk
    block: Annotated[int, msgspec.Meta(ge=0)]
    ticket: Annotated[int, msgspec.Meta(ge=1, le=2**62)]


Item = HolderOpened | LentChunk


def region_fingerprint(chunk_bytes: int) -> str:
    """Equal on both sides of a transfer of chunks."""
    return f"weights/{chunk_bytes}"


@attrs.frozen
class Manifest:
    """A file in chunks, each with its digest; the last may be shorter."""

    sha256: str
    byte_count: int
    chunk_bytes: int
    digests: bytes = attrs.field(repr=False)

    @classmethod
    def of(cls, sha256: str, opened: HolderOpened) -> Manifest:
        """What a holder says; `RemoteProtocolError` if it does not add up."""
        made = cls(sha256, opened.byte_count, opened.chunk_bytes, opened.digests)
        if len(made.digests) != made.count * _DIGEST_BYTES:
            raise RemoteProtocolError(
                f"{len(made.digests)} bytes of digests for {made.count} chunks"
            )
        return made

    @property
    def count(self) -> int:
        return -(-self.byte_count // self.chunk_bytes)

    def length(self, chunk: int) -> int:
        return min(self.chunk_bytes, self.byte_count - chunk * self.chunk_bytes)

    def is_right(self, chunk: int, data: memoryview) -> bool:
        """Whether these are the bytes of a chunk."""
        at = chunk * _DIGEST_BYTES
        return hashlib.sha256(data).digest() == self.digests[at : at + _DIGEST_BYTES]

    def spans(self) -> Iterator[tuple[int, int]]:
        """Where each chunk begins in the file, and how long it is."""
        for chunk in range(self.count):
            yield chunk * self.chunk_bytes, self.length(chunk)

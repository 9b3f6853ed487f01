"""What the two ends of a tcp transfer stream say to each other.

Frames are those of `protocol/streams/codec.py`: the header is one message of this module as
msgpack, the data part is raw: the blocks of a `Slice`, or a list of block numbers. The initiator
dials, says `Hello`, and asks; the other end, the owner of the memory, answers.

```
Read   -> Slice Sums Slice Sums ... Finished        blocks come, each slice is followed by its sums
Write, Slice Sums ... -> Confirmed ... Finished     blocks go, each verified slice is confirmed
Abort  -> Failed                                    no slice of it follows the answer
Ping   -> Finished;  Notify -> Finished
```

A stream that begins with `Inquiry` in place of `Hello` carries one question and one answer.

```
Inquiry -> Answer                                   has this incarnation let go of a ticket?
```

Every request may be answered with `TransferFailed` instead. Sums come after the bytes, so a sender that
loses its right to the blocks in the middle of a slice can say so instead of vouching for them.
Peer bytes raise nothing but `RemoteProtocolError`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from ...errors import RemoteProtocolError
from ..undecodable import decoded
from .description import BLOCKS_MAX, NOTIFY_BYTES_MAX

PREFIX: Final = struct.Struct(">II")
"""Header bytes, data bytes; as in `protocol/streams/codec.py`."""
HEADER_BYTES_MAX: Final = 16 * 1024
BLOCK_LIST_BYTES_MAX: Final = 4 * BLOCKS_MAX
SUM_BYTES: Final = 8
"""Of each block's checksum in `Sums`, little-endian, whatever the algorithm."""

_U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=2048)]
_Word = Annotated[str, msgspec.Meta(max_length=64)]
_Key = Annotated[bytes, msgspec.Meta(max_length=64)]


class TransferMessage(
    msgspec.Struct, frozen=True, array_like=True, tag_field="_", forbid_unknown_fields=True
):
    """The parent of all messages; on the wire an array that begins with its tag."""


class Request(TransferMessage, frozen=True):
    """The parent of what the initiator asks, by a number that it counts up."""

    id: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class Hello(TransferMessage, frozen=True, tag=1):
    """The initiator's first message."""

    version: int
    wanted: _Word
    """Whom the initiator means to reach; another one refuses."""
    checksums: Annotated[list[_Word], msgspec.Meta(max_length=8)]
    """What it can compute, best first."""
    key: _Key = b""
    """Seals what the initiator sends behind the welcome; empty in a cluster without a secret."""


class Welcome(TransferMessage, frozen=True, tag=2):
    """The owner's answer, or `TransferFailed` with id 0."""

    checksum: _Word
    """For all transfers of this stream."""
    key: _Key = b""
    """Seals what the owner sends behind this."""


class Read(Request, frozen=True, tag=3):
    """Send these blocks (in the data part)."""

    region: _U63
    generation: _U63
    block_bytes: _U63
    ticket: _U63


class Write(Request, frozen=True, tag=4):
    """Take these blocks (in the data part); slices follow."""

    region: _U63
    generation: _U63
    block_bytes: _U63
    ticket: _U63
    notify: Annotated[bytes, msgspec.Meta(max_length=NOTIFY_BYTES_MAX)] | None


class Slice(TransferMessage, frozen=True, tag=5):
    """`count` blocks from position `first` of the list, in the data part."""

    id: _U63
    first: _U63
    count: _U63


class Sums(TransferMessage, frozen=True, tag=6):
    """The checksums of the slice before; empty if the stream has none."""

    id: _U63
    sums: bytes


class Confirmed(TransferMessage, frozen=True, tag=7):
    """So many leading blocks have arrived and are verified."""

    id: _U63
    count: _U63


class Finished(TransferMessage, frozen=True, tag=8):
    """The request is done; its last message."""

    id: _U63


class TransferFailed(TransferMessage, frozen=True, tag=9):
    """The request failed or was aborted; its last message."""

    id: _U63
    code: _Word
    message: _Text
    definite: bool


class Abort(Request, frozen=True, tag=10):
    """Forget the request."""


class Notify(Request, frozen=True, tag=11):
    """A read from `region` is done, of the blocks that were granted to `ticket`."""

    region: _U63
    ticket: _U63
    message: Annotated[bytes, msgspec.Meta(max_length=NOTIFY_BYTES_MAX)]


class Ping(Request, frozen=True, tag=12):
    """Are you there?"""


class Inquiry(TransferMessage, frozen=True, tag=13):
    """Has the incarnation that I mean let go of what I granted by this ticket, which is revoked by now?"""

    version: int
    incarnation: _Word
    ticket: _U63


class InquiryAnswer(TransferMessage, frozen=True, tag=14):
    """The last message of its stream."""

    is_meant: bool
    """Whether the incarnation that was meant answers. Another one does not say who it is."""
    is_settled: bool
    """False, too, if it cannot say, or is not the one that was meant."""


_AnyMessage = (
    Hello | Welcome | Read | Write | Slice | Sums | Confirmed | Finished | TransferFailed | Abort
    | Notify | Ping | Inquiry | InquiryAnswer
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_AnyMessage] = msgspec.msgpack.Decoder(_AnyMessage)


def encode_message(message: TransferMessage, data_bytes: int = 0) -> bytes:
    """The frame up to its data part, which the caller sends after it."""
    header = _encoder.encode(message)
    return PREFIX.pack(len(header), data_bytes) + header


def decode_message(header: bytes | memoryview) -> _AnyMessage:
    return decoded(_decoder.decode, header, "not a transfer message")


def pack_blocks(blocks: Sequence[int]) -> bytes:
    """Block numbers as little-endian u32."""
    packed = array("I", blocks)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_blocks(data: bytes | bytearray) -> list[int]:
    if len(data) % 4:
        raise RemoteProtocolError(f"a block list of {len(data)} bytes")
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()

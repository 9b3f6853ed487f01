"""When a peer cannot touch blocks any more that we gave it: what proves it, and what only looks so.

Blocks that were granted by a ticket may be used again once the peer has stopped, and a peer that is
dead has. But one that is frozen (stopped, swapped out, behind a cut link) looks as dead as can be,
and writes when it wakes. So the peer is asked, and what came of it, an `InquiryResult`, is read by
a table, `READINGS`. Silence is never a proof, however long it lasts.

Asked is an *incarnation* of a process, at an address where it listens from its first transfer to its
last. Both are in its `PeerDescriptor`, which travels in the peer's own request: who gets the ticket is
who is asked about. Sans-IO; who asks is `kv/transfer/settlement.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Final

import attrs
import msgspec

from ...errors import RemoteProtocolError
from ..undecodable import decoded

PEER_BYTES_MAX: Final = 512


class PeerStatus(enum.StrEnum):
    """What is known of a peer that was given a ticket which is revoked by now."""

    SETTLED = "settled"
    """Nothing of it with the ticket is under way, and what it starts from now on is refused."""
    MOVING = "moving"
    """It still moves, or cannot say that it does not."""
    GONE = "gone"
    """Its process is dead, or has closed all that could touch memory of ours."""
    UNKNOWN = "unknown"
    """It did not say, and may live. Ask again."""


PROOFS: Final = (PeerStatus.SETTLED, PeerStatus.GONE)
"""After these it cannot touch the blocks any more."""


class InquiryResult(enum.Enum):
    """What came of one question."""

    SAYS_SETTLED = "the incarnation that was asked answered that it has settled"
    SAYS_MOVING = "the incarnation that was asked answered that it has not"
    REPLACED = "another incarnation answered at the address"
    REFUSED = "the connection was refused"
    SILENT = "the connection was taken, but no answer came in time"
    BROKEN = "the connection was taken, and ended before an answer"
    NONSENSE = "what answered was no answer of ours"
    UNREACHED = "no connection in time, no way to the host, or no such name"


@attrs.frozen
class Reading:
    """What a result says of the peer."""

    status: PeerStatus
    """GONE counts only where this incarnation has answered at this very address before. Otherwise the
    address may lead to us, or to somebody else, such as 127.0.0.1 told to another host."""
    why: str


# fmt: off
READINGS: Final[Mapping[InquiryResult, Reading]] = {
    InquiryResult.SAYS_SETTLED: Reading(PeerStatus.SETTLED,
        "it counts a transfer before it looks at the ticket, and the ticket was revoked before"),
    InquiryResult.SAYS_MOVING: Reading(PeerStatus.MOVING,
        "also where nobody there can say, as while the process shuts down"),
    InquiryResult.REPLACED: Reading(PeerStatus.GONE,
        "two cannot listen at one address, and the first let go of it after its last transfer"),
    InquiryResult.REFUSED: Reading(PeerStatus.GONE,
        "a kernel refuses only where nobody listens; where too many wait, it drops"),
    InquiryResult.SILENT: Reading(PeerStatus.UNKNOWN,
        "the kernel of a frozen process takes connections as before"),
    InquiryResult.BROKEN: Reading(PeerStatus.UNKNOWN,
        "a reset is not yet a death: if it was one, the next connection is refused"),
    InquiryResult.NONSENSE: Reading(PeerStatus.UNKNOWN,
        "whoever answered may stand in front of it, or be of another version"),
    InquiryResult.UNREACHED: Reading(PeerStatus.UNKNOWN,
        "a cut link looks the same as a host that is off"),
}
# fmt: on
PATHLESS: Final = (InquiryResult.NONSENSE, InquiryResult.UNREACHED)
"""All others show that packets of the peer's host reach us now."""


def status_of(result: InquiryResult, *, is_known: bool) -> PeerStatus:
    """What one result says; `is_known`: the peer has answered at the same address before."""
    found = READINGS[result].status
    return PeerStatus.UNKNOWN if found is PeerStatus.GONE and not is_known else found


_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9_.-]+$")]


class PeerDescriptor(msgspec.Struct, frozen=True, array_like=True):
    """Who a peer is, and where it can be asked."""

    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=272)]
    """Of its `SettlementPlane`, in that plane's own form."""
    incarnation: _Word
    """Of its process; another after every restart."""


encode_peer: Final = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(PeerDescriptor)


def decode_peer(data: bytes) -> PeerDescriptor:
    """The descriptor in `data`, bounds checked; `RemoteProtocolError` for anything else."""
    if len(data) > PEER_BYTES_MAX:
        raise RemoteProtocolError(
            f"a descriptor of {len(data)} bytes; at most {PEER_BYTES_MAX} are taken"
        )
    return decoded(_decoder.decode, data, "not a peer's descriptor")

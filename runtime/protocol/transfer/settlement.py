"""When a peer cannot touch blocks any more that we gave it: what proves it, and what only looks so.

Blocks that were granted by a ticket may be used again once the peer has stopped, and a peer that is
dead has. But one that is frozen (stopped, swapped out, behind a cut link) looks as dead as can be,
and writes when it wakes. So the peer is asked, and a `Sign` of what came of it is read by a table,
`READINGS`. Silence is never a proof, however long it lasts.

Asked is the *life* of a process at an address where it listens from its first transfer to its last.
That life and address are on its `PeerCard`, which travels in the peer's own request: the life that
gets the ticket is the life that is asked about. Sans-IO; who asks is `kv/transfer/grants.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Final

import attrs
import msgspec

from ...errors import RemoteProtocolError
from ..undecodable import UNDECODABLE

__all__ = [
    "CARD_BYTES_MAX",
    "PATHLESS",
    "PROOFS",
    "READINGS",
    "PeerCard",
    "Reading",
    "Sign",
    "Standing",
    "decode_card",
    "encode_card",
    "standing_of",
]

CARD_BYTES_MAX: Final = 512


class Standing(enum.StrEnum):
    """What is known of a peer that was given a ticket which is revoked by now."""

    SETTLED = "settled"
    """Nothing of it with the ticket is under way, and what it starts from now on is refused."""
    MOVING = "moving"
    """It still moves, or cannot say that it does not."""
    GONE = "gone"
    """Its process is dead, or has closed all that could touch memory of ours."""
    UNKNOWN = "unknown"
    """It did not say, and may live. Ask again."""


PROOFS: Final = (Standing.SETTLED, Standing.GONE)
"""After these it cannot touch the blocks any more."""


class Sign(enum.Enum):
    """What came of one question."""

    SAYS_SETTLED = "the life that was asked answered that it has settled"
    SAYS_MOVING = "the life that was asked answered that it has not"
    OTHER_LIFE = "another life answered at the address"
    REFUSED = "the connection was refused"
    SILENT = "the connection was taken, but no answer came in time"
    BROKEN = "the connection was taken, and ended before an answer"
    NONSENSE = "what answered was no answer of ours"
    UNREACHED = "no connection in time, no way to the host, or no such name"


@attrs.frozen
class Reading:
    """What a sign says."""

    standing: Standing
    """GONE counts only where this life has answered at this very address before. Otherwise the
    address may lead to us, or to somebody else, such as 127.0.0.1 told to another host."""
    why: str


# fmt: off
READINGS: Final[Mapping[Sign, Reading]] = {
    Sign.SAYS_SETTLED: Reading(Standing.SETTLED,
        "it counts a transfer before it looks at the ticket, and the ticket was revoked before"),
    Sign.SAYS_MOVING: Reading(Standing.MOVING,
        "also where nobody there can say, as while the process shuts down"),
    Sign.OTHER_LIFE: Reading(Standing.GONE,
        "two cannot listen at one address, and the first let go of it after its last transfer"),
    Sign.REFUSED: Reading(Standing.GONE,
        "a kernel refuses only where nobody listens; where too many wait, it drops"),
    Sign.SILENT: Reading(Standing.UNKNOWN,
        "the kernel of a frozen process takes connections as before"),
    Sign.BROKEN: Reading(Standing.UNKNOWN,
        "a reset is not yet a death: if it was one, the next connection is refused"),
    Sign.NONSENSE: Reading(Standing.UNKNOWN,
        "whoever answered may stand in front of it, or be of another version"),
    Sign.UNREACHED: Reading(Standing.UNKNOWN,
        "a cut link looks the same as a host that is off"),
}
# fmt: on
PATHLESS: Final = (Sign.NONSENSE, Sign.UNREACHED)
"""All others show that packets of the peer's host reach us now."""


def standing_of(sign: Sign, *, is_known: bool) -> Standing:
    """What one sign says; `is_known`: this life has answered at the same address before."""
    found = READINGS[sign].standing
    return Standing.UNKNOWN if found is Standing.GONE and not is_known else found


_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9_.-]+$")]


class PeerCard(msgspec.Struct, frozen=True, array_like=True):
    """Who a peer is, and where its life can be asked for."""

    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=272)]
    """Of its `SettlementPlane`, in that plane's own form."""
    life: _Word
    """The incarnation of that plane; another after every restart."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PeerCard)


def encode_card(card: PeerCard) -> bytes:
    """The bytes that `decode_card` takes."""
    return _encoder.encode(card)


def decode_card(data: bytes) -> PeerCard:
    """The card in `data`, bounds checked; `RemoteProtocolError` for anything else."""
    if len(data) > CARD_BYTES_MAX:
        raise RemoteProtocolError(
            f"a card of {len(data)} bytes; at most {CARD_BYTES_MAX} are taken"
        )
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"not a peer's card: {error}") from error

"""What proves that a peer has stopped: the table, and the descriptor that says whom to ask."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.transfer.settlement import (
    PATHLESS,
    PEER_BYTES_MAX,
    PROOFS,
    READINGS,
    InquiryResult,
    PeerDescriptor,
    PeerStatus,
    decode_peer,
    encode_peer,
    status_of,
)

PEER = PeerDescriptor("worker-3", "[fe80::1]:7000", "00ff00ff00ff00ff")


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (InquiryResult.SAYS_SETTLED, PeerStatus.SETTLED),
        (InquiryResult.SAYS_MOVING, PeerStatus.MOVING),
        (InquiryResult.REPLACED, PeerStatus.GONE),
        (InquiryResult.REFUSED, PeerStatus.GONE),
        (InquiryResult.SILENT, PeerStatus.UNKNOWN),
        (InquiryResult.BROKEN, PeerStatus.UNKNOWN),
        (InquiryResult.NONSENSE, PeerStatus.UNKNOWN),
        (InquiryResult.UNREACHED, PeerStatus.UNKNOWN),
    ],
)
def test_every_result_has_one_status(result: InquiryResult, status: PeerStatus) -> None:
    assert status_of(result, is_known=True) is status


def test_the_table_has_a_row_and_a_reason_for_every_result() -> None:
    assert list(READINGS) == list(InquiryResult)
    assert all(reading.why for reading in READINGS.values())


def test_the_decision_shows_the_table() -> None:
    decisions = Path(__file__).parents[4] / "docs" / "decisions"
    page = (decisions / "0012-settled-by-proof.md").read_text("utf-8")
    for result, reading in READINGS.items():
        assert f"| {result.value} | {reading.status} | {reading.why} |\n" in page


def test_who_has_never_answered_at_an_address_is_not_proven_dead_by_it() -> None:
    """It may lead to us: 127.0.0.1, told by another host."""
    proofs = [result for result in InquiryResult if status_of(result, is_known=False) in PROOFS]
    assert proofs == [InquiryResult.SAYS_SETTLED]


def test_no_silence_is_a_proof() -> None:
    silent = (
        InquiryResult.SILENT,
        InquiryResult.BROKEN,
        InquiryResult.UNREACHED,
        InquiryResult.NONSENSE,
    )
    assert not [result for result in silent if status_of(result, is_known=True) in PROOFS]
    assert {status_of(result, is_known=True) for result in PATHLESS} == {PeerStatus.UNKNOWN}


def test_a_descriptor_is_what_it_was_after_its_travel() -> None:
    assert decode_peer(encode_peer(PEER)) == PEER


def garbage() -> list[bytes]:
    dice = random.Random(1)
    whole = encode_peer(PEER)
    return [
        b"",
        whole[:-1],
        whole + b"x",
        bytes(PEER_BYTES_MAX + 1),
        b"\x91" * 400,
        msgspec.msgpack.encode(["", "a:1", "ff"]),
        msgspec.msgpack.encode(["e" * 129, "a:1", "ff"]),
        msgspec.msgpack.encode(["e", "a" * 273, "ff"]),
        msgspec.msgpack.encode(["e", "a:1", "not a life"]),
        msgspec.msgpack.encode(["e", "a:1"]),
        msgspec.msgpack.encode(["e", b"\xff", "ff"]),
        *(dice.randbytes(dice.randrange(60)) for _ in range(50)),
    ]


@pytest.mark.parametrize("data", garbage())
def test_garbage_is_no_card(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_peer(data)


def test_the_longest_card_fits() -> None:
    longest = PeerDescriptor("e" * 128, "a" * 272, "f" * 64)
    assert decode_peer(encode_peer(longest)) == longest

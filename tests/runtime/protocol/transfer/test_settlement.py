"""What proves that a peer has stopped: the table, and the card that says whom to ask."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.transfer.settlement import (
    CARD_BYTES_MAX,
    PATHLESS,
    PROOFS,
    READINGS,
    PeerCard,
    Sign,
    Standing,
    decode_card,
    encode_card,
    standing_of,
)

CARD = PeerCard("worker-3", "[fe80::1]:7000", "00ff00ff00ff00ff")


@pytest.mark.parametrize(
    ("sign", "standing"),
    [
        (Sign.SAYS_SETTLED, Standing.SETTLED),
        (Sign.SAYS_MOVING, Standing.MOVING),
        (Sign.OTHER_LIFE, Standing.GONE),
        (Sign.REFUSED, Standing.GONE),
        (Sign.SILENT, Standing.UNKNOWN),
        (Sign.BROKEN, Standing.UNKNOWN),
        (Sign.NONSENSE, Standing.UNKNOWN),
        (Sign.UNREACHED, Standing.UNKNOWN),
    ],
)
def test_every_sign_has_one_standing(sign: Sign, standing: Standing) -> None:
    assert standing_of(sign, is_known=True) is standing


def test_the_table_has_a_row_and_a_reason_for_every_sign() -> None:
    assert list(READINGS) == list(Sign)
    assert all(reading.why for reading in READINGS.values())


def test_the_page_on_transfers_shows_the_table() -> None:
    page = (Path(__file__).parents[4] / "docs" / "transfer.md").read_text("utf-8")
    for sign, reading in READINGS.items():
        assert f"| {sign.value} | {reading.standing} | {reading.why} |\n" in page


def test_who_has_never_answered_at_an_address_is_not_proven_dead_by_it() -> None:
    """It may lead to us: 127.0.0.1, told by another host."""
    proofs = [sign for sign in Sign if standing_of(sign, is_known=False) in PROOFS]
    assert proofs == [Sign.SAYS_SETTLED]


def test_no_silence_is_a_proof() -> None:
    silent = (Sign.SILENT, Sign.BROKEN, Sign.UNREACHED, Sign.NONSENSE)
    assert not [sign for sign in silent if standing_of(sign, is_known=True) in PROOFS]
    assert {standing_of(sign, is_known=True) for sign in PATHLESS} == {Standing.UNKNOWN}


def test_a_card_is_what_it_was_after_its_travel() -> None:
    assert decode_card(encode_card(CARD)) == CARD


def garbage() -> list[bytes]:
    dice = random.Random(1)
    whole = encode_card(CARD)
    return [
        b"",
        whole[:-1],
        whole + b"x",
        bytes(CARD_BYTES_MAX + 1),
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
        decode_card(data)


def test_the_longest_card_fits() -> None:
    longest = PeerCard("e" * 128, "a" * 272, "f" * 64)
    assert decode_card(encode_card(longest)) == longest

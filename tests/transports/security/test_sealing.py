"""Sealed messages: who opens them, where, and how often."""

from __future__ import annotations

import random

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.transports.security.sealing import (
    HEAD_BYTES,
    PROCESSES_MAX,
    SEALED_BYTES,
    WINDOW,
    Arrivals,
    Sealer,
)

OLD, NEW = bytes(32), bytes(range(32))


def sealer(*secrets: bytes, seed: int = 1) -> Sealer:
    return Sealer(secrets, random.Random(seed))


def test_what_is_sealed_opens_at_every_member_for_what_it_is_about() -> None:
    one, other = sealer(NEW), sealer(NEW, seed=2)
    sealed = one.seal(b"the prompt", b"here")
    assert b"prompt" not in sealed
    assert len(sealed) == len(b"the prompt") + SEALED_BYTES
    assert other.open(sealed, b"here") == one.open(sealed, b"here") == b"the prompt"
    assert other.open(other.seal(b"", b""), b"") == b""


def test_a_process_says_the_same_twice_by_other_bytes_and_two_runs_by_the_same() -> None:
    one, again = sealer(NEW), sealer(NEW)
    said = [one.seal(b"x", b"") for _ in range(3)]
    assert len(set(said)) == 3
    assert len({each[:HEAD_BYTES] for each in said}) == 3
    assert said == [again.seal(b"x", b"") for _ in range(3)]


def test_it_travels_as_the_page_says() -> None:
    """`docs/protocols/sealed_messages.md`, computed by hand."""

    def derived(length: int, what: bytes, salt: bytes | None = None) -> bytes:
        return HKDF(hashes.SHA256(), length, salt, what).derive(NEW)

    process, number = random.Random(7).randbytes(16), (2).to_bytes(8, "big")
    key = AESGCM(derived(32, b"trinamo broker", process))
    head = derived(8, b"trinamo broker id") + process + number
    one = sealer(NEW, seed=7)
    sealed = [one.seal(b"x", b"here") for _ in range(3)][2]
    assert sealed == head + key.encrypt(bytes(4) + number, b"x", b"here")


@pytest.mark.parametrize("about", [b"", b"there", b"here "])
def test_elsewhere_it_does_not_open(about: bytes) -> None:
    other = sealer(NEW, seed=2)
    with pytest.raises(RemoteProtocolError, match="secret_file"):
        other.open(sealer(NEW).seal(b"x", b"here"), about)
    assert other.refused == 1


def test_each_changed_bit_and_each_end_cut_off_is_refused() -> None:
    once = Arrivals()
    other = sealer(NEW, seed=2)
    sealed = sealer(NEW).seal(b"x", b"here")
    changed = [
        sealed[:at] + bytes([sealed[at] ^ 1 << bit]) + sealed[at + 1 :]
        for at in range(len(sealed))
        for bit in range(8)
    ]
    shorter = [sealed[:count] for count in range(len(sealed))]
    for each in (*changed, *shorter, sealed + b"\0"):
        with pytest.raises(RemoteProtocolError):
            other.open(each, b"here")
    assert other.refused == len(changed) + len(shorter) + 1
    assert other.open(sealed, b"here", once=once) == b"x", "the others were not taken for it"


def test_while_a_secret_takes_the_place_of_another_both_open_and_the_first_seals() -> None:
    before, between, after = sealer(OLD), sealer(NEW, OLD, seed=2), sealer(NEW, seed=3)
    assert between.open(before.seal(b"x", b""), b"") == b"x"
    assert between.open(after.seal(b"x", b""), b"") == b"x"
    assert after.open(between.seal(b"x", b""), b"") == b"x"
    with pytest.raises(RemoteProtocolError):
        before.open(between.seal(b"x", b""), b"")


def test_what_comes_once_is_refused_when_it_comes_again_or_too_late() -> None:
    once = Arrivals()
    one, other = sealer(NEW), sealer(NEW, seed=2)
    said = [one.seal(b"%d" % number, b"") for number in range(WINDOW + 2)]
    for number in (1, 0, WINDOW, 2, WINDOW + 1, 3):
        assert other.open(said[number], b"", once=once) == b"%d" % number
    assert other.refused == 0
    # The newest of them that is told apart is the second.
    for number in (0, 1, 2, 3, WINDOW, WINDOW + 1):
        with pytest.raises(RemoteProtocolError, match="before"):
            other.open(said[number], b"", once=once)
    assert other.refused == 6
    assert other.open(said[0], b"") == b"0", "an answer may come late"
    assert other.open(said[4], b"", once=once) == b"4"


def test_as_many_processes_as_are_said_are_remembered() -> None:
    once = Arrivals()
    other = sealer(NEW)
    said = [sealer(NEW, seed=seed).seal(b"x", b"") for seed in range(2, PROCESSES_MAX + 2)]
    for each in said:
        other.open(each, b"", once=once)
    with pytest.raises(RemoteProtocolError, match="before"):
        other.open(said[0], b"", once=once)
    # Who speaks again stays, and whoever has been silent for longest goes.
    with pytest.raises(RemoteProtocolError, match="before"):
        other.open(said[2], b"", once=once)
    for seed in range(PROCESSES_MAX + 2, PROCESSES_MAX + 5):
        other.open(sealer(NEW, seed=seed).seal(b"x", b""), b"", once=once)
    for silent in (1, 3):
        assert other.open(said[silent], b"", once=once) == b"x"
    for spoke in (0, 2):
        with pytest.raises(RemoteProtocolError, match="before"):
            other.open(said[spoke], b"", once=once)
    # Strangers push nobody out.
    for seed in range(8):
        with pytest.raises(RemoteProtocolError, match="secret_file"):
            other.open(sealer(OLD, seed=seed).seal(b"x", b""), b"", once=once)
    with pytest.raises(RemoteProtocolError, match="before"):
        other.open(said[1], b"", once=once)


def test_what_comes_elsewhere_makes_no_request_a_new_one() -> None:
    """Before: a report of each of 4,096 processes, said again long after their end, did."""
    other, frontend, requests, reports = sealer(NEW), sealer(NEW, seed=2), Arrivals(), Arrivals()
    request = frontend.seal(b"x", b"a request")
    assert other.open(request, b"a request", once=requests) == b"x"
    for seed in range(3, PROCESSES_MAX + 4):
        other.open(sealer(NEW, seed=seed).seal(b"", b"a report"), b"a report", once=reports)
    with pytest.raises(RemoteProtocolError, match="before"):
        other.open(request, b"a request", once=requests)


def test_without_a_secret_all_passes_as_it_is() -> None:
    once = Arrivals()
    open_one = sealer()
    assert not open_one.seals
    assert open_one.open(open_one.seal(b"x", b"here"), b"there", once=once) == b"x"

"""A short run of the command in `fuzz.py`, and whether its oracles see what they are for."""

from __future__ import annotations

import random

import pytest

from tests.transports.http.http1.fuzz import ViolationError, fuzz, make_input
from tests.transports.http.http1.other_reader import read_by_h11
from trinamo.transports.http.http1 import heads
from trinamo.transports.http.http1.connection import Http1Connection


async def test_mutated_requests_break_nothing() -> None:
    played = await fuzz(5_000, seed=1)
    assert played.requests > 2_000, "mutation leaves too little whole to reach anything"


def test_the_same_seed_makes_the_same_inputs() -> None:
    first, second = random.Random(7), random.Random(7)
    assert [make_input(first) for _ in range(100)] == [make_input(second) for _ in range(100)]


def test_the_other_reader_finds_requests_one_after_the_other() -> None:
    get = b"GET /a?b HTTP/1.1\r\nHost: localhost\r\n\r\n"
    post = (
        b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    )
    assert read_by_h11(get + post + b"garbage", 2048) == [
        (b"GET", b"/a?b", b""),
        (b"POST", b"/c", b"hello"),
    ]


async def test_a_reader_that_overlooks_chunks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what smuggling is."""
    monkeypatch.setattr(heads, "find_fault_in_fields", lambda *_: None)
    monkeypatch.setattr(
        heads.RequestHead, "is_chunked", property(lambda _: False, lambda *_: None), raising=False
    )
    with pytest.raises(ViolationError):
        await fuzz(5_000, seed=1)


async def test_a_refusal_that_ends_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Http1Connection, "_linger", lambda _: None)
    with pytest.raises(ViolationError):
        await fuzz(5_000, seed=1)

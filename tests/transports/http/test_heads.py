"""Heads that two readers could read as two different requests are refused, and nothing follows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.transports.http.test_shapes import exchange
from trinamo.transports.http.http1.heads import (
    find_fault_in_bytes,
    find_fault_in_fields,
)

HOST = b"host: localhost\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
BODY = b"content-type: application/json\r\n"
BEHIND = b"GET /live HTTP/1.1\r\n" + HOST + b"\r\n"
"""A request that an attacker hides behind another."""


@pytest.mark.parametrize("piece_bytes", [1, 1000])
async def test_what_only_looks_like_it_is_answered(serve: Any, piece_bytes: int) -> None:
    """LF and spaces in a body are nobody's business, nor are several requests in one piece."""
    running = await serve()
    body = b'{\n "prompt":\n\t"hi",\n\n "max_tokens": 5\n}'
    length = b"content-length: %d\r\n\r\n" % len(body)
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    post = b"POST /v1/completions HTTP/1.1\r\n" + HOST + BODY
    data = post + length + body + post + CHUNKED + b"\r\n" + chunks + BEHIND
    data += b"GET /live HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"
    received = await exchange(running, data, piece_bytes=piece_bytes)
    assert received.count(b"HTTP/1.1 200 ") == 4
    assert len(running.engine.requests) == 2
    await running.wait_quiet()


async def test_garbage_is_told_in_words(serve: Any) -> None:
    running = await serve()
    received = await exchange(running, b"\x16\x03\x01\x02\x00\x01\x00", piece_bytes=1000)
    assert received.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"this is no HTTP request" in received
    await running.wait_quiet()


@pytest.mark.parametrize("end", range(1, len(BEHIND) + 1))
def test_no_part_of_a_good_head_is_faulty(end: int) -> None:
    """Judged after each byte, so that nothing is refused because it came in pieces."""
    assert find_fault_in_bytes(BEHIND[:end]) is None


def test_a_transfer_encoding_alone_is_no_fault() -> None:
    assert find_fault_in_fields(b"1.1", [(b"transfer-encoding", b"chunked")]) is None
    assert find_fault_in_fields(b"1.0", [(b"content-length", b"5")]) is None

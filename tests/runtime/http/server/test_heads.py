"""Heads that two readers could read as two different requests are refused, and nothing follows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from trinamo.runtime.protocol.openai.http_head import (
    find_fault_in_bytes,
    find_fault_in_fields,
)

HOST = b"host: localhost\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
BODY = b"content-type: application/json\r\n"
BEHIND = b"GET /live HTTP/1.1\r\n" + HOST + b"\r\n"
"""A request that an attacker hides behind another."""

FAULTY = {
    "transfer-encoding and content-length": (
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + CHUNKED + b"content-length: 5\r\n\r\n"
        b"0\r\n\r\n" + BEHIND
    ),
    "content-length and transfer-encoding": (
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n"
        b"0\r\n\r\n" + BEHIND
    ),
    "two content-lengths": (
        b"POST /live HTTP/1.1\r\n" + HOST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n"
    ),
    "chunks in HTTP/1.0": b"POST /live HTTP/1.0\r\n" + HOST + CHUNKED + b"\r\n0\r\n\r\n" + BEHIND,
    "a bare LF after the request line": b"GET /live HTTP/1.1\n" + HOST + b"\r\n",
    "a bare LF after a header": b"GET /live HTTP/1.1\r\nhost: localhost\n\r\n",
    "bare LFs throughout": b"GET /live HTTP/1.1\nhost: localhost\n\n" + BEHIND,
    "a bare LF as the end": b"GET /live HTTP/1.1\r\n" + HOST + b"\n" + BEHIND,
    "a folded header": b"GET /live HTTP/1.1\r\nx-a: b\r\n c\r\n" + HOST + b"\r\n",
    "a header folded by a tab": b"GET /live HTTP/1.1\r\n" + HOST + b"x-a: b\r\n\tc: d\r\n\r\n",
    "a space before the colon": b"GET /live HTTP/1.1\r\n" + HOST + b"x-a : b\r\n\r\n",
    "no host": b"GET /live HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /live HTTP/1.1\r\n" + HOST + b"host: other\r\n\r\n",
}


async def exchange(running: Any, data: bytes, *, piece_bytes: int) -> bytes:
    """Send `data` in pieces; everything that comes until the server closes."""
    received = b""
    async with await running.connect() as stream:
        try:
            for start in range(0, len(data), piece_bytes):
                await stream.send_all(data[start : start + piece_bytes])
        except trio.BrokenResourceError:
            pass
        with trio.fail_after(10):
            while data := await stream.receive_some():
                received += data
    return received


@pytest.mark.parametrize("piece_bytes", [1, 1000])
@pytest.mark.parametrize("fault", FAULTY)
async def test_a_head_that_can_be_read_in_two_ways_is_a_400_and_the_last(
    serve: Any, fault: str, piece_bytes: int
) -> None:
    running = await serve()
    received = await exchange(running, FAULTY[fault], piece_bytes=piece_bytes)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "malformed_request")
    await running.wait_quiet()


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

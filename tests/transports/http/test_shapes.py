"""What a request may look like: each shape, what it is answered with, and whether anything follows it.

After each shape comes a good request. A shape that ends the connection must hide it, every other one
must not: that is what a smuggler would turn round.
"""

from __future__ import annotations

import json
import re
from typing import Any

import attrs
import pytest
import trio

HOST = b"host: localhost\r\n"
JSON = b"content-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
BODY = b'{"prompt":"hi"}'
BEHIND = b"GET /live HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"


@attrs.frozen
class Shape:
    """Bytes, and the answers to them: a status, or those that are right."""

    name: str
    data: bytes
    answers: tuple[int | set[int], ...]
    closes: bool = False


def get(
    name: str, fields: bytes, status: int | set[int] = 200, line: bytes = b"GET /live HTTP/1.1"
) -> Shape:
    """One without a body. All that is not answered with success closes."""
    return Shape(name, line + b"\r\n" + fields + b"\r\n", (status,), closes=status != 200)


def post(name: str, fields: bytes, body: bytes, status: int | set[int] = 200) -> Shape:
    """One with a body."""
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON + fields + b"\r\n"
    return Shape(name, head + body, (status,), closes=status != 200)


def chunks(name: str, body: bytes, status: int | set[int] = 200) -> Shape:
    return post(name, CHUNKED, body, status)


def line(name: str, data: bytes, status: int | set[int], *, closes: bool = True) -> Shape:
    """A request line."""
    return Shape(name, data + b"\r\n" + HOST + b"\r\n", (status,), closes=closes)


LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
LAST = b"0\r\n\r\n"
LIVE = b"GET /live HTTP/1.1\r\n" + HOST + b"\r\n"

SHAPES = [
    # Two lengths, or one that two readers take differently.
    post("length and chunks", LENGTH + CHUNKED, CHUNK + LAST, 400),
    post("chunks and length", CHUNKED + LENGTH, CHUNK + LAST, 400),
    post("two lengths", b"content-length: 5\r\ncontent-length: 6\r\n", BODY, 400),
    post("two lengths in one", b"content-length: 5, 6\r\n", BODY, 400),
    post("a signed length", b"content-length: +15\r\n", BODY, 400),
    post("a negative length", b"content-length: -15\r\n", BODY, 400),
    post("a hexadecimal length", b"content-length: 0xf\r\n", BODY, 400),
    post("a length with an underscore", b"content-length: 1_5\r\n", BODY, 400),
    post("a length in other digits", b"content-length: \xb2\r\n", BODY, 400),
    post("an empty length", b"content-length:\r\n", BODY, 400),
    post("a length with more behind it", b"content-length: 15 15\r\n", BODY, 400),
    post("a length of 21 digits", b"content-length: 100000000000000000000\r\n", b"", {400, 413}),
    post("a length", LENGTH, BODY),
    post("a length with zeros", b"content-length: 0015\r\n", BODY),
    # Codings.
    post("chunks in capitals", b"Transfer-Encoding: CHUNKED\r\n", CHUNK + LAST),
    post("an unknown coding", b"transfer-encoding: xchunked\r\n", CHUNK + LAST, {400, 501}),
    post("chunks twice", b"transfer-encoding: chunked, chunked\r\n", CHUNK + LAST, {400, 501}),
    post("chunks in two fields", CHUNKED + CHUNKED, CHUNK + LAST, {400, 501}),
    post("identity", b"transfer-encoding: identity\r\n", BODY, {400, 501}),
    post("gzip and chunks", b"transfer-encoding: gzip, chunked\r\n", CHUNK + LAST, {400, 501}),
    post("chunks and identity", b"transfer-encoding: chunked, identity\r\n", CHUNK + LAST, {400, 501}),
    post("a tab before chunked", b"transfer-encoding:\tchunked\r\n", CHUNK + LAST),
    post("a vertical tab", b"transfer-encoding: \x0bchunked\r\n", CHUNK + LAST, {400, 501}),
    post("a space in the name", b"transfer -encoding: chunked\r\n", CHUNK + LAST, 400),
    post("a space before the colon", b"transfer-encoding : chunked\r\n", CHUNK + LAST, 400),
    Shape(
        "chunks in HTTP/1.0",
        b"POST /v1/completions HTTP/1.0\r\n" + HOST + JSON + CHUNKED + b"\r\n" + CHUNK + LAST,
        (400,),
        closes=True,
    ),
    # Chunks.
    chunks("chunks", CHUNK + LAST),
    chunks("a chunk with an extension", b"f;a=b\r\n" + BODY + b"\r\n" + LAST),
    chunks("a chunk with zeros", b"000f\r\n" + BODY + b"\r\n" + LAST),
    chunks("a trailer", CHUNK + b"0\r\nx-a: b\r\n\r\n"),
    chunks("a size of letters", b"xyz\r\n" + BODY + b"\r\n" + LAST, 400),
    chunks("a hexadecimal size with 0x", b"0xf\r\n" + BODY + b"\r\n" + LAST, 400),
    chunks("a negative size", b"-f\r\n" + BODY + b"\r\n" + LAST, 400),
    chunks("a signed size", b"+f\r\n" + BODY + b"\r\n" + LAST, 400),
    chunks("a space before the size", b" f\r\n" + BODY + b"\r\n" + LAST, 400),
    chunks("no size", b"\r\n" + BODY + b"\r\n" + LAST, 400),
    chunks("a size of 21 digits", b"f" * 21 + b"\r\n" + BODY + b"\r\n" + LAST, 400),
    chunks("a size that ends with LF", b"f\n" + BODY + b"\r\n" + LAST, 400),
    chunks("LF in an extension", b"f;a\nb\r\n" + BODY + b"\r\n" + LAST, 400),
    chunks("a chunk that is longer than it says", b"e\r\n" + BODY + b"\r\n" + LAST, 400),
    chunks("a chunk that ends with LF", b"f\r\n" + BODY + b"\n" + LAST, 400),
    chunks("a last chunk that ends with LF", CHUNK + b"0\n\n", 400),
    chunks("a trailer with a space before the colon", CHUNK + b"0\r\nx : y\r\n\r\n", 400),
    # Lines of a head.
    get("a bare LF after a header", b"host: localhost\n", 400),
    Shape("bare LFs throughout", b"GET /live HTTP/1.1\nhost: localhost\n\n", (400,), closes=True),
    Shape("a bare LF as the end", b"GET /live HTTP/1.1\r\n" + HOST + b"\n", (400,), closes=True),
    line("a bare LF after the request line", b"GET /live HTTP/1.1\n" + HOST[:-2], 400),
    get("a bare CR in a value", HOST + b"x-a: b\rc: d\r\n", 400),
    get("a folded header", b"x-a: b\r\n c\r\n" + HOST, 400),
    get("a header folded by a tab", HOST + b"x-a: b\r\n\tc: d\r\n", 400),
    get("a folded first line", b" x-a: b\r\n" + HOST, 400),
    get("a space before a colon", HOST + b"x-a : b\r\n", 400),
    get("a name with a space", HOST + b"x a: b\r\n", 400),
    get("no name", HOST + b": b\r\n", 400),
    get("no colon", HOST + b"x-a\r\n", 400),
    get("a name that is not ASCII", HOST + b"x\xe9: b\r\n", 400),
    get("NUL in a name", HOST + b"x\x00: b\r\n", 400),
    get("NUL in a value", HOST + b"x-a: b\x00c\r\n", 400),
    get("a control character in a value", HOST + b"x-a: b\x07c\r\n", 400),
    get("bytes above ASCII in a value", HOST + b"x-a: \xe9\xff\r\n"),
    get("an empty value", HOST + b"x-a:\r\n"),
    get("blanks round a value", HOST + b"x-a: \t b \t\r\n"),
    get("no host", b"", 400),
    get("two hosts", HOST + HOST, 400),
    get("two hosts in one", b"host: a, b\r\n", 400),
    # Request lines.
    line("no version", b"GET /live", 400),
    line("HTTP/2.0", b"GET /live HTTP/2.0", 505),
    line("HTTP/3.7", b"GET /live HTTP/3.7", {400, 505}),
    line("a version in small letters", b"GET /live http/1.1", 400),
    line("a version of three parts", b"GET /live HTTP/1.1.1", 400),
    line("two spaces", b"GET  /live HTTP/1.1", 400),
    line("a tab", b"GET\t/live HTTP/1.1", 400),
    line("a space in the target", b"GET /li ve HTTP/1.1", 400),
    line("a space behind", b"GET /live HTTP/1.1 ", 400),
    line("a space in front", b" GET /live HTTP/1.1", 400),
    line("no method", b"/live HTTP/1.1", 400),
    line("bytes above ASCII in the target", b"GET /\xc3\xa9 HTTP/1.1", 400),
    line("NUL in the target", b"GET /\x00 HTTP/1.1", 400),
    line("nothing that is HTTP", b"\x16\x03\x01\x02\x00\x01\x00", 400),
    line("the preface of HTTP/2", b"PRI * HTTP/2.0", 505),
    # What only looks like it.
    Shape("an empty line in front", b"\r\n" + LIVE, (200,)),
    Shape("three requests in one piece", LIVE * 3, (200, 200, 200)),
    Shape("HEAD", b"HEAD /live HTTP/1.1\r\n" + HOST + b"\r\n", (200,)),
    Shape("an upgrade", LIVE[:-2] + b"upgrade: h2c\r\nconnection: upgrade\r\n\r\n", (200,)),
    Shape("HTTP/1.0", b"GET /live HTTP/1.0\r\n\r\n", (200,), closes=True),
    Shape("close", LIVE[:-2] + b"connection: close\r\n\r\n", (200,), closes=True),
    line("a path that is none", b"GET /none HTTP/1.1", 404, closes=False),
    line("a method that is not for the path", b"DELETE /live HTTP/1.1", 405, closes=False),
    Shape("another name", LIVE.replace(b"localhost", b"evil.example"), (421,)),
    # Too much.
    get("a header of 40,000 bytes", HOST + b"x-a: " + b"b" * 40_000 + b"\r\n", 431),
    get("3,000 headers", HOST + b"x-a: bcdefghij\r\n" * 3_000, 431),
    line("a target of 40,000 bytes", b"GET /" + b"a" * 40_000 + b" HTTP/1.1", {414, 431}),
    chunks("an extension of 40,000 bytes", b"f;" + b"a" * 40_000 + b"\r\n", {400, 431}),
    chunks("trailers of 40,000 bytes", CHUNK + b"0\r\n" + b"x: y\r\n" * 7_000 + b"\r\n", {400, 431}),
    post("a length above the bound", b"content-length: 99000000\r\n", b"", 413),
]  # fmt: skip


async def exchange(running: Any, data: bytes, *, piece_bytes: int) -> bytes:
    """Send `data` in pieces; everything that comes until the server closes."""
    received = b""
    async with await running.connect() as stream, trio.open_nursery() as nursery:

        async def send() -> None:
            try:
                for start in range(0, len(data), piece_bytes):
                    await stream.send_all(data[start : start + piece_bytes])
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

        nursery.start_soon(send)
        with trio.fail_after(120):
            try:
                while piece := await stream.receive_some():
                    received += piece
            except trio.BrokenResourceError:
                pass
        nursery.cancel_scope.cancel()
    return received


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20], ids=["by bytes", "at once"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
async def test_a_shape_has_its_answer_and_hides_or_shows_what_follows(
    serve: Any, shape: Shape, piece_bytes: int
) -> None:
    if piece_bytes == 1 and len(shape.data) > 1000:
        piece_bytes = 997
    running = await serve()
    received = await exchange(running, shape.data + BEHIND, piece_bytes=piece_bytes)
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", received)]
    expected = [*shape.answers, *([] if shape.closes else [200])]
    assert len(found) == len(expected), received[:600]
    for status, wanted in zip(found, expected, strict=True):
        assert status in (wanted if isinstance(wanted, set) else {wanted}), received[:600]
    if found[-1] in (400, 431, 505):
        head, _, body = received.rpartition(b"\r\n\r\n")
        assert b"connection: close" in head.rpartition(b"HTTP/1.1 ")[2]
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    await running.wait_quiet()

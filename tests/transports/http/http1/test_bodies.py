"""Where a body ends: lengths, chunks, and what is refused of them."""

from __future__ import annotations

import pytest

from trinamo.transports.http.http1.heads import (
    CHUNK_BYTES_MIN,
    EXTENSION_BYTES_MAX,
    TRAILER_BYTES_MAX,
    BodyReader,
    FaultError,
    RequestHead,
)

HOST = (b"host", b"localhost")


def chunks() -> BodyReader:
    headers = [HOST, (b"transfer-encoding", b"chunked")]
    return BodyReader(RequestHead(b"POST", b"/", b"1.1", headers))


def length(size: int) -> BodyReader:
    headers = [HOST, (b"content-length", b"%d" % size)]
    return BodyReader(RequestHead(b"POST", b"/", b"1.1", headers))


def read(reader: BodyReader, data: bytes, piece_bytes: int = 1 << 20) -> tuple[bytes, bytes]:
    """The body, and what is left behind it."""
    buffer, body = bytearray(), bytearray()
    for start in range(0, len(data), piece_bytes):
        buffer += data[start : start + piece_bytes]
        reader.read(buffer, body)
    return bytes(body), bytes(buffer)


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 1000])
def test_a_length_ends_where_it_says(piece_bytes: int) -> None:
    reader = length(5)
    assert read(reader, b"helloGET", piece_bytes) == (b"hello", b"GET")
    assert reader.is_complete
    assert length(0).is_complete


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    "data",
    [
        b"5\r\nhello\r\n0\r\n\r\n",
        b"2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\n\r\n",
        b"0005;\r\nhello\r\n000;x\r\na: b\r\nc:\r\n\r\n",
    ],
)
def test_chunks_end_behind_their_trailers(data: bytes, piece_bytes: int) -> None:
    reader = chunks()
    assert read(reader, data + b"GET", piece_bytes) == (b"hello", b"GET")
    assert reader.is_complete


def test_an_unfinished_body_says_so() -> None:
    for data in (b"", b"5\r\nhel", b"5\r\nhello", b"5\r\nhello\r\n", b"0\r\n", b"0\r\na: b\r\n"):
        reader = chunks()
        read(reader, data)
        assert not reader.is_complete


@pytest.mark.parametrize(
    "data",
    [
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello!0\r\n\r\n",
        b"5\r\nhello\r\n0\r\n\n",
        b" 5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"5 ;a\r\nhello\r\n",
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"-1\r\n",
        b"\r\n5\r\nhello\r\n",
        b"g\r\n",
        b"11111111111111111\r\n",
        b"5;a\x00\r\nhello\r\n",
        b"5;a\rb\r\nhello\r\n",
        b"0\r\n a: b\r\n\r\n",
        b"0\r\na : b\r\n\r\n",
        b"0\r\na\r\n\r\n",
        b"0\r\na: \x00\r\n\r\n",
        b"0\r\na: b\nc: d\r\n\r\n",
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 1000])
def test_chunks_that_can_be_read_in_two_ways_are_refused(data: bytes, piece_bytes: int) -> None:
    with pytest.raises(FaultError) as caught:
        read(chunks(), data, piece_bytes)
    assert caught.value.fault.status == 400


@pytest.mark.parametrize("count", [1, 4, EXTENSION_BYTES_MAX])
def test_extensions_are_bounded_together(count: int) -> None:
    """One long extension, or many short ones; a line that never ends is one."""
    each = b";" + b"x" * (EXTENSION_BYTES_MAX // count - 1)
    good = (b"10" + each + b"\r\n" + b"a" * 16 + b"\r\n") * count
    assert len(read(chunks(), good)[0]) == 16 * count
    with pytest.raises(FaultError):
        read(chunks(), good + b"1;\r\na\r\n")
    with pytest.raises(FaultError):
        read(chunks(), b"1;" + b"x" * (EXTENSION_BYTES_MAX + 100))


def test_trailers_are_bounded() -> None:
    with pytest.raises(FaultError) as caught:
        read(chunks(), b"0\r\n" + b"a: b\r\n" * TRAILER_BYTES_MAX)
    assert caught.value.fault.status == 431
    with pytest.raises(FaultError):
        read(chunks(), b"0\r\na: " + b"b" * TRAILER_BYTES_MAX)


@pytest.mark.parametrize(("size", "count"), [(1, 1024), (15, 1024), (16, 10_000)])
def test_many_chunks_may_be_short_but_not_all_that_short(size: int, count: int) -> None:
    """Each costs the same work: of one byte each, a client's 4 MB a second took half a processor."""
    chunk = b"%x\r\n" % size + b"a" * size + b"\r\n"
    assert len(read(chunks(), chunk * count, 1000)[0]) == size * count
    if size < CHUNK_BYTES_MIN:
        with pytest.raises(FaultError) as caught:
            read(chunks(), chunk * (count + 1), 1000)
        assert caught.value.fault.status == 400

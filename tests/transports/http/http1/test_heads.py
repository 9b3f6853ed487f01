"""Heads as our own server reads them: what is bounded, and what llhttp would let pass."""

from __future__ import annotations

import pytest

from trinamo.transports.http.http1.heads import (
    TARGET_BYTES_MAX,
    FaultError,
    HeadReader,
    RequestHead,
)
from trinamo.transports.http.refusals import HEADERS_MAX

HOST = b"host: localhost\r\n"


def read(data: bytes, bytes_max: int = 32_768) -> RequestHead:
    head = HeadReader(bytes_max).read(bytearray(data))
    assert head is not None
    return head


def refused(data: bytes, bytes_max: int = 32_768) -> int:
    with pytest.raises(FaultError) as caught:
        HeadReader(bytes_max).read(bytearray(data))
    return caught.value.fault.status


def get(target: bytes, *lines: bytes, host: bytes = HOST, version: bytes = b"1.1") -> bytes:
    head = [b"GET %b HTTP/%b\r\n" % (target, version), host, *(line + b"\r\n" for line in lines)]
    return b"".join(head) + b"\r\n"


def test_a_head_is_taken_and_what_follows_is_left() -> None:
    buffer = bytearray(get(b"/a/b?c=%20d", b"X-Name:\t value \t") + b"body")
    head = HeadReader(1000).read(buffer)
    assert head is not None
    assert (head.method, head.path, head.query) == (b"GET", b"/a/b", b"c=%20d")
    assert head.headers == [(b"host", b"localhost"), (b"x-name", b"value")]
    assert bytes(buffer) == b"body"


@pytest.mark.parametrize(
    ("version", "lines", "is_last"),
    [
        (b"1.1", [], False),
        (b"1.1", [b"connection: keep-alive"], False),
        (b"1.1", [b"connection: close"], True),
        (b"1.1", [b"Connection: TE, Close"], True),
        (b"1.1", [b"connection: keep-alive", b"connection: close"], True),
        (b"1.0", [], True),
        (b"1.0", [b"connection: Keep-Alive"], False),
        (b"1.0", [b"connection: keep-alive, close"], True),
    ],
)
def test_whether_a_request_is_the_last(version: bytes, lines: list[bytes], is_last: bool) -> None:
    assert read(get(b"/", *lines, version=version)).is_last == is_last


def test_only_http_1_1_expects_to_be_told_to_continue() -> None:
    line = b"Expect: 100-Continue"
    assert read(get(b"/", line)).expects_continue
    assert not read(get(b"/", line, version=b"1.0")).expects_continue
    assert not read(get(b"/", b"expect: the worst")).expects_continue


@pytest.mark.parametrize("target", [b"http://localhost/a?b", b"HTTP://LOCALHOST/a?b"])
def test_a_url_of_our_own_name_is_its_path(target: bytes) -> None:
    head = read(get(target))
    assert (head.path, head.query) == (b"/a", b"b")


def test_a_url_without_a_path_asks_for_the_root() -> None:
    assert read(get(b"http://localhost")).path == b"/"
    assert read(get(b"http://localhost?b")).query == b"b"


def test_an_asterisk_is_for_options_alone() -> None:
    assert read(b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n").path == b"*"
    assert refused(get(b"*")) == 400


def test_an_upgrade_is_no_concern_of_the_next_request() -> None:
    buffer = bytearray(get(b"/a", b"upgrade: h2c", b"connection: upgrade") + get(b"/b"))
    reader = HeadReader(1000)
    paths = [head.path for head in (reader.read(buffer), reader.read(buffer)) if head is not None]
    assert paths == [b"/a", b"/b"]


REFUSED = {
    "another server's URL": (get(b"http://other/"), 400),
    "a URL and no host": (get(b"http://localhost/", host=b"", version=b"1.0"), 400),
    "a URL of another kind": (get(b"ftp://localhost/"), 400),
    "a fragment": (get(b"/a#b"), 400),
    "no path": (get(b"a"), 400),
    "control characters in the path": (get(b"/\x01"), 400),
    "bytes above ASCII in the path": (get(b"/\xc3\xa4"), 400),
    "a tunnel": (b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST + b"\r\n", 501),
    "two spaces": (b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a space behind the version": (b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n", 400),
    "a tab for a space": (b"GET\t/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 400),
    "HTTP/1.2": (get(b"/", version=b"1.2"), 400),
    "HTTP/2.0": (get(b"/", version=b"2.0"), 505),
    "another protocol": (b"SOURCE / ICE/1.0\r\n\r\n", 400),
    "a lone CR in front": (b"\r" + get(b"/"), 400),
    "a method in small letters": (b"get / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "no host": (get(b"/", host=b""), 400),
    "two hosts": (get(b"/", b"Host: localhost"), 400),
    "two hosts in HTTP/1.0": (get(b"/", b"host: localhost", version=b"1.0"), 400),
    "a host with a path": (get(b"/", host=b"host: localhost/a\r\n"), 400),
    "a host with a blank": (get(b"/", host=b"host: local host\r\n"), 400),
    "a host with a comma and a blank": (get(b"/", host=b"host: a, b\r\n"), 400),
    "a user in the host": (get(b"/", host=b"host: me@localhost\r\n"), 400),
    "two lengths": (get(b"/", b"content-length: 1", b"content-length: 2"), 400),
    "the same length twice": (get(b"/", b"content-length: 1", b"content-length: 1"), 400),
    "a list of lengths": (get(b"/", b"content-length: 1, 1"), 400),
    "a signed length": (get(b"/", b"content-length: +1"), 400),
    "a negative length": (get(b"/", b"content-length: -1"), 400),
    "a hexadecimal length": (get(b"/", b"content-length: 0x1"), 400),
    "an empty length": (get(b"/", b"content-length:"), 400),
    "a length beyond 64 bits": (get(b"/", b"content-length: 99999999999999999999"), 400),
    "a length of thousands of digits": (get(b"/", b"content-length: " + b"9" * 5000), 400),
    "a length and chunks": (get(b"/", b"content-length: 1", b"transfer-encoding: chunked"), 400),
    "chunks and a length": (get(b"/", b"transfer-encoding: chunked", b"content-length: 1"), 400),
    "chunks in HTTP/1.0": (get(b"/", b"transfer-encoding: chunked", version=b"1.0"), 400),
    "another coding": (get(b"/", b"transfer-encoding: gzip"), 400),
    "a coding in front": (get(b"/", b"transfer-encoding: gzip, chunked"), 501),
    "a coding behind": (get(b"/", b"transfer-encoding: chunked, identity"), 400),
    "no coding": (get(b"/", b"transfer-encoding:"), 400),
    "chunked twice": (get(b"/", b"transfer-encoding: chunked, chunked"), 400),
    "two codings": (
        get(b"/", b"transfer-encoding: chunked", b"transfer-encoding: chunked"), 400,
    ),
    "a coding with a vertical tab": (get(b"/", b"transfer-encoding: \x0bchunked"), 400),
    "a space before the colon": (get(b"/", b"x : y"), 400),
    "a space in a name": (get(b"/", b"x y: z"), 400),
    "a name without a colon": (get(b"/", b"x"), 400),
    "no name": (get(b"/", b": x"), 400),
    "a null byte": (get(b"/", b"x: \x00"), 400),
    "a control character": (get(b"/", b"x: \x1b[2J"), 400),
    "a lone CR": (get(b"/", b"x: a\rb: c"), 400),
    "a lone LF": (get(b"/", b"x: a\nb: c"), 400),
    "a folded line": (get(b"/", b"x: a\r\n b"), 400),
    "a fold at the start": (b"GET / HTTP/1.1\r\n x: y\r\n" + HOST + b"\r\n", 400),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_be_read_in_two_ways_is_refused(what: str) -> None:
    """However it is cut: the status may be seen earlier, and is then 400 as well."""
    data, status = REFUSED[what]
    assert refused(data) == status
    reader, buffer = HeadReader(32_768), bytearray()

    def drip() -> None:
        for byte in data:
            buffer.append(byte)
            reader.read(buffer)

    with pytest.raises(FaultError) as caught:
        drip()
    assert caught.value.fault.status == status


def test_a_head_is_bounded_complete_or_not() -> None:
    head = get(b"/", b"x: " + b"y" * 1000)
    assert read(head, len(head)).path == b"/"
    assert refused(head, len(head) - 1) == 431
    assert refused(head[:-4], 500) == 431
    assert refused(b"G" * 501, 500) == 431


def test_headers_are_counted() -> None:
    assert len(read(get(b"/", *[b"x: y"] * (HEADERS_MAX - 1))).headers) == HEADERS_MAX
    assert refused(get(b"/", *[b"x: y"] * HEADERS_MAX)) == 431


def test_the_target_is_bounded() -> None:
    longest = b"/" + b"a" * (TARGET_BYTES_MAX - 1)
    assert read(get(longest)).path == longest
    assert refused(get(longest + b"a")) == 414


def test_empty_lines_before_a_request_are_nothing() -> None:
    buffer, reader = bytearray(b"\r\n\r\n"), HeadReader(100)
    assert reader.read(buffer) is None
    buffer += b"\r"
    assert reader.read(buffer) is None
    buffer += b"\n" + get(b"/")
    head = reader.read(buffer)
    assert head is not None
    assert head.path == b"/"

"""HTTP/1.1 as our own server reads it: pieces do not matter, and nothing that arrives breaks it."""

from __future__ import annotations

import attrs
import trio
from hypothesis import given, strategies as st

from properties.strategies import cut, cuts
from tests.transports.http.http1.served import HOST, LAST, echo_handler, serving

METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS")


@attrs.frozen
class Asked:
    """A request, its bytes, and what `echo` makes of it."""

    method: bytes
    path: bytes
    body: bytes
    data: bytes

    @property
    def answer(self) -> bytes:
        return b"%b %b %b" % (self.method, self.path, self.body)


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """A good one: without a body, with a length, or in chunks, with extensions and trailers."""
    method = draw(st.sampled_from(METHODS)).encode()
    path = draw(st.just("/direct") | st.text("abc/-%20", max_size=8).map("/{}".format)).encode()
    lines = draw(st.lists(st.sampled_from([b"x-a: b\r\n", b"ACCEPT:*/*\r\n", b"x-b:\r\n"])))
    head = b"%b %b HTTP/1.1\r\n%b%b" % (method, path, HOST, b"".join(lines))
    body = draw(st.binary(max_size=40))
    form = draw(st.sampled_from(["none", "length", "chunks"]))
    if form == "none":
        return Asked(method, path, b"", head + b"\r\n")
    if form == "length":
        return Asked(
            method, path, body, b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
        )
    pieces = [piece for piece in cut(body, draw(cuts)) if piece]
    extension = draw(st.sampled_from([b"", b";a", b';a="b"']))
    chunks = [b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces]
    trailers = draw(st.sampled_from([b"", b"x-c: d\r\n"]))
    data = b"%btransfer-encoding: chunked\r\n\r\n%b0\r\n%b\r\n" % (head, b"".join(chunks), trailers)
    return Asked(method, path, body, data)


async def converse(pieces: list[bytes]) -> tuple[bytes, bool]:
    """All that is sent for these reads and a FIN; whether the connection is over then."""
    handlers = {(m.encode(), b"/direct"): echo_handler for m in METHODS}
    async with serving(handlers=handlers) as served:
        await served.say(*filter(None, pieces))
        sent = await served.end()
        return sent, served.is_over


def bodies_of(sent: bytes) -> list[bytes]:
    """The bodies of answers that say their lengths."""
    bodies: list[bytes] = []
    while sent:
        head, _, rest = sent.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n"), sent
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        bodies.append(rest[:length])
        sent = rest[length:]
    return bodies


@given(st.lists(requests(), max_size=4), cuts)
def test_requests_are_the_same_however_they_are_cut(asked: list[Asked], where: list[int]) -> None:
    """Each is answered, with its own body, in order: at once, and in any pieces."""
    data = b"".join(request.data for request in asked) + LAST
    sent, is_over = trio.run(converse, [data])
    assert is_over
    assert bodies_of(sent) == [*(request.answer for request in asked), b"GET /last "]
    assert trio.run(converse, cut(data, where)) == (sent, True)


@given(st.lists(requests(), min_size=1, max_size=2), st.data())
def test_one_wrong_byte_ends_a_connection_at_most(asked: list[Asked], data: st.DataObject) -> None:
    """Nothing leaves it but answers, whole ones, and it is over when the client is."""
    stream = bytearray(b"".join(request.data for request in asked))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(stream) - 1))
        stream[where] = data.draw(st.sampled_from(list(b"\r\n :;/0gG\x00\x80\xff")))
    sent, is_over = trio.run(converse, cut(bytes(stream), data.draw(cuts)))
    assert is_over
    check_answers(sent)


@given(st.binary(max_size=200), cuts)
def test_garbage_is_refused_or_waits(garbage: bytes, where: list[int]) -> None:
    sent, is_over = trio.run(converse, cut(garbage, where))
    assert is_over
    check_answers(sent)


def check_answers(sent: bytes) -> None:
    """Each has a status and a length, and the body is as long; the one that closes is the last."""
    while sent:
        head, _, rest = sent.partition(b"\r\n\r\n")
        status = int(head.split(b" ")[1])
        assert 200 <= status < 600
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert len(rest) >= length
        sent = rest[length:]
        assert not (b"connection: close" in head and sent)

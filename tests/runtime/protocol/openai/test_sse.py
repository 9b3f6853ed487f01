"""Server-sent events: what is written, and what a reader makes of any bytes."""

from __future__ import annotations

import json

import pytest

from trinamo.runtime.errors import LocalProtocolError, RemoteProtocolError
from trinamo.runtime.protocol.openai.sse import (
    DONE,
    DONE_DATA,
    ServerSentEvent,
    SseParser,
    TextTemplate,
    encode_data,
)


def parse(data: bytes) -> list[ServerSentEvent]:
    return SseParser().feed(data)


def test_an_event_is_a_data_line_and_an_empty_line() -> None:
    assert encode_data(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert parse(DONE) == [ServerSentEvent(DONE_DATA)]


def test_data_of_several_lines_is_our_own_bug() -> None:
    with pytest.raises(LocalProtocolError):
        encode_data(b"a\nb")


def test_a_template_renders_the_text_as_json() -> None:
    template = TextTemplate({"a": [1, TextTemplate.MARK], "b": "c"})
    text = 'quote " backslash \\ newline \n ✓'
    (event,) = parse(template.render(text))
    assert json.loads(event.data) == {"a": [1, text], "b": "c"}


@pytest.mark.parametrize("chunk", [{"a": 1}, [TextTemplate.MARK, TextTemplate.MARK]])
def test_a_template_needs_its_mark_exactly_once(chunk: object) -> None:
    with pytest.raises(LocalProtocolError, match="not once"):
        TextTemplate(chunk)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_all_three_line_endings_are_read(end: bytes) -> None:
    body = end.join([b"event: x", b"data: a", b"data:b", b"", b"data: c", b"", b""])
    assert parse(body) == [ServerSentEvent("a\nb", "x"), ServerSentEvent("c")]


def test_comments_ids_and_events_without_data_are_read_over() -> None:
    assert parse(b": ping\n\nid: 7\nretry: 5\n\nevent: x\n\ndata\n\n") == [ServerSentEvent("")]


def test_a_byte_order_mark_is_read_over_only_at_the_start() -> None:
    assert parse(b"\xef\xbb\xbfdata: a\n\n") == [ServerSentEvent("a")]
    assert parse(b"data: a\n\n\xef\xbb\xbfdata: b\n\n") == [ServerSentEvent("a")]


def test_a_carriage_return_at_the_end_of_a_read_ends_the_line_once() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\n\r") == [ServerSentEvent("a")]
    assert parser.feed(b"\ndata: b\r\n\r\n") == [ServerSentEvent("b")]


def test_an_unfinished_event_is_visible_as_such() -> None:
    parser = SseParser()
    seen = [parser.is_idle]
    for piece in (b"data: a\n", b"\n"):
        parser.feed(piece)
        seen.append(parser.is_idle)
    assert seen == [True, False, True]


@pytest.mark.parametrize("body", [b"x" * 200, b"data: xxxxxxxxx\n" * 20])
def test_an_event_without_an_end_is_bounded(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="more than 100 bytes"):
        SseParser(event_bytes_max=100).feed(body)


def test_bytes_that_are_not_utf_8_are_the_server_s_fault() -> None:
    with pytest.raises(RemoteProtocolError, match="not UTF-8"):
        parse(b"data: \xff\n")

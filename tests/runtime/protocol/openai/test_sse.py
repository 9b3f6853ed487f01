"""Server-sent events as they are written."""

from __future__ import annotations

import json

import pytest

from tests.sse import ServerSentEvent, parse_events
from trinamo.runtime.errors import LocalProtocolError
from trinamo.runtime.protocol.openai.answers import (
    DONE,
    DONE_DATA,
    TextTemplate,
    encode_data,
)


def test_an_event_is_a_data_line_and_an_empty_line() -> None:
    assert encode_data(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert parse_events(DONE) == [ServerSentEvent(DONE_DATA.decode())]


def test_data_of_several_lines_is_our_own_bug() -> None:
    with pytest.raises(LocalProtocolError):
        encode_data(b"a\nb")


def test_a_template_renders_the_text_as_json() -> None:
    template = TextTemplate({"a": [1, TextTemplate.MARK], "b": "c"})
    text = 'quote " backslash \\ newline \n ✓'
    (event,) = parse_events(template.render(text))
    assert json.loads(event.data) == {"a": [1, text], "b": "c"}


@pytest.mark.parametrize("chunk", [{"a": 1}, [TextTemplate.MARK, TextTemplate.MARK]])
def test_a_template_needs_its_mark_exactly_once(chunk: object) -> None:
    with pytest.raises(LocalProtocolError, match="not once"):
        TextTemplate(chunk)

"""Server-sent events survive any split of their bytes, and any bytes are read or refused."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, strategies as st

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.openai.sse import (
    ServerSentEvent,
    SseParser,
    TextTemplate,
    encode_data,
)

# What an event stream is made of, so that lines, endings and fields are met often.
stream_bytes = st.lists(
    st.sampled_from([b"data: a", b"data:", b"event: e", b":", b"\n", b"\r", b"\r\n", "✓".encode()])
    | st.binary(max_size=3)
).map(b"".join)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(place % (len(data) + 1) for place in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


def parse(pieces: list[bytes]) -> tuple[list[ServerSentEvent], bool]:
    """The events, and whether the bytes were refused."""
    parser = SseParser(event_bytes_max=64)
    events: list[ServerSentEvent] = []
    try:
        for piece in pieces:
            events += parser.feed(piece)
    except RemoteProtocolError:
        return events, True
    return events, False


@given(stream_bytes, st.lists(st.integers(min_value=0), max_size=8))
def test_any_split_gives_the_same_events(data: bytes, cuts: list[int]) -> None:
    """The events depend on the bytes alone, not on how they arrive; so does the refusal.

    Events that came before refused bytes in the same read are not handed out.
    """
    whole, is_refused = parse([data])
    split, is_split_refused = parse(cut(data, cuts))
    if not is_refused:
        assert (split, is_split_refused) == (whole, False)
    bytewise, is_bytewise_refused = parse([data[i : i + 1] for i in range(len(data))])
    if is_refused:
        assert is_bytewise_refused
    assert split[: len(bytewise)] == bytewise[: len(split)]


@given(st.lists(st.text()), st.lists(st.integers(min_value=0), max_size=8))
def test_texts_come_back_as_they_were(texts: list[str], cuts: list[int]) -> None:
    """Any text that can be encoded is read back exactly, through the template and without."""
    template = TextTemplate([TextTemplate.MARK])
    body = b"".join(
        template.render(text) + encode_data(json.dumps([text]).encode()) for text in texts
    )
    parser = SseParser()
    events = [event for piece in cut(body, cuts) for event in parser.feed(piece)]
    assert [json.loads(event.data) for event in events] == [[t] for t in texts for _ in range(2)]
    assert parser.is_idle

"""Server-sent events are read as they were written, however their bytes are cut."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, strategies as st

from trinamo.runtime.protocol.openai.answers import (
    TextTemplate,
    encode_data,
)
from trinamo.transports.openai.events import EventSplitter


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(place % (len(data) + 1) for place in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(st.lists(st.text()), st.lists(st.integers(min_value=0), max_size=8))
def test_texts_come_back_as_they_were(texts: list[str], cuts: list[int]) -> None:
    """Any text that can be encoded is read back exactly, through the template and without."""
    template = TextTemplate([TextTemplate.MARK])
    body = b"".join(
        template.render(text) + encode_data(json.dumps([text]).encode()) for text in texts
    )
    parser = EventSplitter(1 << 16)
    events = [event for piece in cut(body, cuts) for event in parser.feed(piece)]
    assert [json.loads(event.data) for event in events] == [[t] for t in texts for _ in range(2)]

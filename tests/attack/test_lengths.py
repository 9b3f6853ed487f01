"""Answers whose makers do not end them."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import trio.testing

from tests.runtime.http.test_streaming import AsgiClient, Served
from trinamo.runtime.errors import EngineError
from trinamo.runtime.http.bodies import Body
from trinamo.runtime.http.streaming import BodySink, EventSink
from trinamo.runtime.protocol.openai.generate import Delta


@pytest.mark.parametrize("sink_type", [EventSink, BodySink])
@pytest.mark.parametrize(
    ("delta", "code"),
    [
        (Delta("a", [1]), "remote_protocol"),
        (Delta(), "remote_protocol"),
        (Delta("a" * 10_000), EngineError.code),
        (Delta("a" * 100_000), "overloaded"),
    ],
)
async def test_an_answer_that_does_not_end_is_ended(
    autojump_clock: trio.testing.MockClock,
    sink_type: type[EventSink | BodySink],
    delta: Delta,
    code: str,
) -> None:
    """By its tokens, by what it keeps, and by what all of them keep; then nothing is kept of it."""
    served = Served(AsgiClient(), sink_type=sink_type, tokens_max=4)
    with Body(served.answers) as others:
        others.hold((1 << 20) - (50_000 if code == "overloaded" else 1 << 19))
        is_kept = sink_type is BodySink
        made = 0

        async def endless() -> AsyncGenerator[Delta, None]:
            nonlocal made
            while made < 10_000:
                made += 1
                yield delta

        await served.run_items(endless())
        assert made < 5_000
        assert served.outcome == (code if is_kept else "remote_protocol")
    assert served.answers.bytes_held == 0

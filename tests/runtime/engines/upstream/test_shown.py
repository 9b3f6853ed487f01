"""What `/status` and the dashboard show of a frontend's upstreams."""

from __future__ import annotations

import pytest
import trio

from tests.runtime.engines.upstream.fake import (
    STREAM_HEAD,
    Asked,
    ask_until,
    chat_chunk,
    chunk,
    events,
    open_fake,
    open_hop,
)
from tests.runtime.http.dashboard import pages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


async def test_status_and_dashboard_show_the_upstreams() -> None:
    async def hang(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD + chunk(events(chat_chunk("a"), done=False)))
        await trio.sleep_forever()

    async with open_fake(hang) as fake, open_hop(fake) as front:
        body = {"model": "m", "messages": [], "stream": True}
        async with front.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            (seen,) = (await front.client.get("/status")).json()["cluster"]["instances"]
            async with pages.page(front.client) as snapshots:
                snapshot = await anext(snapshots)
        told = (seen["model"], seen["engine"], seen["state"], seen["in_flight"])
        assert told == ("m", "openai", "live", 1)
        (shown,) = snapshot["instances"]
        assert (shown["id"], shown["in_flight"]) == (seen["id"], 1)
        assert [each["name"] for each in snapshot["models"]] == ["m"]
        assert snapshot["away"] == []


async def test_an_upstream_that_fails_its_looks_is_shown_as_away() -> None:
    """It is offered to nobody, and its cards are gone; whoever looks must not take it for gone."""
    async with open_fake() as one, open_fake() as other, open_hop(one, other) as front:
        await ask_until(front, lambda: one.asked and other.asked)
        one.health = 503

        async def states() -> list[str]:
            found = (await front.client.get("/status")).json()["cluster"]["instances"]
            return sorted(each["state"] for each in found)

        with trio.fail_after(15):
            while await states() != ["away", "live"]:
                await trio.sleep(0.02)
        async with pages.page(front.client) as snapshots:
            snapshot = await anext(snapshots)
        assert sorted(each["state"] for each in snapshot["instances"]) == ["away", "registered"]
        assert [each["instances"] for each in snapshot["models"]] == [1]
        (told,) = snapshot["away"]
        assert "fails its looks" in told
        one.health = 200
        with trio.fail_after(15):
            while await states() != ["live", "live"]:
                await trio.sleep(0.02)

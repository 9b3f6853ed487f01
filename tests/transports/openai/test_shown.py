"""What `/status` and the dashboard show of a frontend's upstreams."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import trio

from tests.runtime.view import pages
from tests.transports.openai.fake import (
    STREAM_HEAD,
    Asked,
    ask_until,
    chat_chunk,
    chunk,
    events,
    open_fake,
    open_hop,
    whole,
)

KEY = "sk-5ecret-of-an-upstream"
pytestmark = [
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
        assert (shown["role"], shown["name"]) == ("upstream", fake.url.split("/")[2])
        assert [each["streams"] for each in snapshot["frontends"]] == [{seen["id"]: 1}]
        assert [each["name"] for each in snapshot["models"]] == ["m"]
        assert snapshot["away"] == []


async def test_the_key_of_an_upstream_is_told_to_nobody_else(tmp_path: Path) -> None:
    """Not by pages, status and metrics, and not by an upstream that says it in its error."""
    key_file = tmp_path / "key"
    key_file.write_text(KEY, "ascii")
    key_file.chmod(0o600)

    async def refuse(asked: Asked, stream: trio.SocketStream) -> None:
        told = {"error": {"message": f"not a key of ours: {asked.headers['authorization']}"}}
        await stream.send_all(whole(told, 401))

    settings = {"worker__upstream__key_file": str(key_file), "http__status_port": 0}
    # Nobody takes it meanwhile: the upstream that refuses the key is passed over.
    settings |= {"http__queue_timeout_s": 0.1, "router__wait_s": 0.1}
    async with open_fake(refuse) as fake, open_hop(fake, **settings) as front:
        answer = await front.chat()
        assert fake.asked[0].headers["authorization"] == f"Bearer {KEY}"
        async with pages.page(front.client) as snapshots:
            snapshot = await anext(snapshots)
            while not snapshot["failed"]:
                snapshot = await anext(snapshots)
        request_id = snapshot["failed"][0]["id"]
        paths = (
            "/status",
            "/health",
            "/metrics",
            "/v1/models",
            f"/dashboard/requests/{request_id}",
        )
        told = [(await front.client.get(path)).text for path in paths]
    assert all(told)
    assert KEY not in json.dumps(snapshot)
    assert not [text for text in told if KEY in text]
    assert KEY not in answer.text


LIVE = re.compile(r"^trinamo_live_instances\{.*\} (.*)$", re.MULTILINE)


async def test_an_upstream_that_fails_its_looks_is_shown_as_away() -> None:
    """It is given nothing new; whoever looks must not take it for gone."""
    async with open_fake() as one, open_fake() as other, open_hop(one, other) as front:
        await ask_until(front, lambda: one.asked and other.asked)
        one.health = 503

        async def states() -> list[str]:
            found = (await front.client.get("/status")).json()["cluster"]["instances"]
            return sorted(each["state"] for each in found)

        with trio.fail_after(120):
            while await states() != ["away", "live"]:
                await trio.sleep(0.02)
        async with pages.page(front.client) as snapshots:
            snapshot = await anext(snapshots)
        assert sorted(each["state"] for each in snapshot["instances"]) == ["away", "live"]
        assert [each["instances"] for each in snapshot["models"]] == [1]
        (told,) = snapshot["away"]
        assert "fails its looks" in told
        # A router without an upstream that accepts requests must set off the alert.
        other.health = 503
        with trio.fail_after(120):
            while await states() != ["away", "away"]:
                await trio.sleep(0.02)
        metrics = (await front.client.get("/metrics")).text
        assert LIVE.findall(metrics) == ["0.0"]
        other.health = 200
        one.health = 200
        with trio.fail_after(120):
            while await states() != ["live", "live"]:
                await trio.sleep(0.02)

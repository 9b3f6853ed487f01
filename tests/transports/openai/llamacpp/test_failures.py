"""llama.cpp's own servers that are busy, or killed in the middle of an answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio

from tests.runtime.one_process import OneProcess
from tests.transports.openai.fake import Front, open_cluster, open_front
from tests.transports.openai.llamacpp.server import LlamaServer, llama_server

pytestmark = [
    pytest.mark.check,
    # Streams that are left early leave generators to the garbage collector, which trio reports.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LONG: Any = {
    "model": "m",
    "messages": [{"role": "user", "content": "count"}],
    "max_tokens": 900,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture
def servers() -> Iterator[list[LlamaServer]]:
    """Two; a test may kill either."""
    with llama_server() as one, llama_server() as other:
        yield [one, other]


@asynccontextmanager
async def open_hop(servers: list[LlamaServer], **upstream: str) -> AsyncIterator[Front]:
    section = {f"worker__upstream__{key}": value for key, value in upstream.items()}
    urls = ",".join(each.url for each in servers)
    often = {"worker__upstream__health_interval_s": "0.2", **section}
    async with open_front(OneProcess(), http__upstreams=urls, **often) as front:
        await front.wait_model()
        yield front


async def seen(front: Front) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await front.client.get("/status")).json()["cluster"]["instances"]
    return found


def states(found: list[dict[str, Any]]) -> list[str]:
    return sorted(each["state"] for each in found)


async def wait_seen(front: Front, is_so: Callable[[list[dict[str, Any]]], bool]) -> None:
    with trio.fail_after(120):
        while not is_so(await seen(front)):
            await trio.sleep(0.05)


def kill_busy(servers: list[LlamaServer]) -> None:
    """`kill -9` of the one that computes, or has just ended its answer."""
    pages = [
        httpx.get(f"{each.url.removesuffix('/v1')}/metrics", timeout=120).text for each in servers
    ]
    (busy,) = [
        server
        for server, page in zip(servers, pages, strict=True)
        if "llamacpp:requests_processing 1" in page
        or "\nllamacpp:prompt_tokens_total 0\n" not in page
    ]
    busy.kill()


async def ask_and_kill(
    front: Front, servers: list[LlamaServer], **body: Any
) -> tuple[str, list[Any]]:
    """Who begins a long answer, and its events: whoever answers is killed in the middle."""
    events: list[Any] = []
    with trio.fail_after(120):
        async with front.client.stream("POST", "/v1/chat/completions", json=LONG | body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
                if len(events) == 8:
                    kill_busy(servers)
    return answer.headers["x-trinamo-worker"], events


def text_of(events: list[Any]) -> str:
    choices = [c for each in events if isinstance(each, dict) for c in each.get("choices", ())]
    return "".join(each["delta"].get("content") or "" for each in choices)


async def test_the_load_that_a_server_tells_counts_whoever_caused_it(
    servers: list[LlamaServer],
) -> None:
    """Its `/metrics` is read; who asks it without us keeps it busy all the same."""
    busy, _ = servers
    async with (
        open_hop(servers) as front,
        httpx.AsyncClient(base_url=busy.url, trust_env=False, timeout=60) as direct,
    ):
        await wait_seen(front, lambda found: [each["active"] for each in found] == [0, 0])
        async with direct.stream("POST", "/chat/completions", json=LONG):
            await wait_seen(front, lambda found: sorted(e["active"] for e in found) == [0, 1])
            assert [each["in_flight"] for each in await seen(front)] == [0, 0]
        await wait_seen(front, lambda found: [each["active"] for each in found] == [0, 0])


async def test_a_server_killed_in_mid_stream_ends_its_answer_and_is_shown_as_away(
    servers: list[LlamaServer],
) -> None:
    async with open_hop(servers) as front:
        await wait_seen(front, lambda found: states(found) == ["live", "live"])
        killed, events = await ask_and_kill(front, servers)
        await wait_seen(front, lambda found: states(found) == ["away", "live"])
        (away,) = [each for each in await seen(front) if each["state"] == "away"]
        with trio.fail_after(120):
            after = await front.chat(max_tokens=2)

    assert len(text_of(events)) > 8
    assert events[-1]["error"]["code"] == "disconnected"
    assert (away["id"], away["model"]) == (killed, "m")
    assert after.status_code == 200


async def test_with_resume_the_answer_goes_on_at_the_other_server(
    servers: list[LlamaServer],
) -> None:
    async with open_hop(servers, resume="llamacpp") as front:
        await wait_seen(front, lambda found: states(found) == ["live", "live"])
        _, events = await ask_and_kill(front, servers, max_tokens=300)
        await wait_seen(front, lambda found: states(found) == ["away", "live"])

    *chunks, end = events
    assert end == "[DONE]"
    assert [c["finish_reason"] for each in chunks for c in each["choices"]][-1] == "length"
    # One opens the answer, another ends it; whatever goes on does neither.
    assert sum("role" in c["delta"] for each in chunks for c in each["choices"]) == 1
    assert len({each["id"] for each in chunks}) == 1
    assert len(text_of(chunks)) > 100


async def test_in_a_cluster_too(servers: list[LlamaServer]) -> None:
    urls = [each.url for each in servers]
    async with open_cluster(*urls, resume="llamacpp", health_interval_s=0.2) as front:
        await wait_seen(front, lambda found: states(found) == ["live", "live"])
        _, events = await ask_and_kill(front, servers, max_tokens=300)

    assert events[-1] == "[DONE]"
    assert len({each["id"] for each in events[:-1]}) == 1

"""An upstream that is busy is not dead: it finishes what it has taken, and is given nothing new."""

from __future__ import annotations

import http.server
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.cli.places import Place, wait_for
from tests.transports.openai.fake import (
    Asked,
    Front,
    open_cluster,
    open_fake,
    open_hop,
    whole,
)

ANSWER = {"object": "chat.completion", "choices": [{"index": 0, "finish_reason": "stop"}]}
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
START_TIMEOUT_S = 90


class SingleThreaded(http.server.HTTPServer):
    """Answers one request at a time, looks included; a prompt is computed until `computed` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.is_asked, self.computed = threading.Event(), threading.Event()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"data": [{"id": "m"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, SingleThreaded)
        self.server.is_asked.set()
        self.server.computed.wait(START_TIMEOUT_S)
        self._answer(ANSWER)

    def _answer(self, said: dict[str, Any]) -> None:
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- its name there
        """Nobody reads it."""


@pytest.fixture
def server() -> Iterator[SingleThreaded]:
    with SingleThreaded() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.computed.set()
        server.shutdown()
        thread.join()


@pytest.mark.check
def test_a_prompt_that_a_single_threaded_upstream_computes_for_long_is_answered(
    tmp_path: Path, server: SingleThreaded
) -> None:
    """Meanwhile it fails its looks: who comes then is told to come again, and its model is listed."""
    place = Place(tmp_path)
    url = f"http://127.0.0.1:{server.server_port}/v1"
    often = "worker.upstream.health_interval_s=0.1"
    soon = "worker.upstream.health_failures_max=1"
    briefly = ["--set", "router.wait_s=0.1", "--set", "http.queue_timeout_s=0.5"]
    arguments = ["--upstream", url, "--set", often, "--set", soon, *briefly]
    frontend = place.start("frontend", "--port", "0", *arguments)
    try:
        wait_for(lambda: "ready: url" in place.output, START_TIMEOUT_S, "the frontend's start")
        base_url = place.ready_url
        with (
            ThreadPoolExecutor(1) as pool,
            httpx.Client(base_url=base_url, trust_env=False, timeout=START_TIMEOUT_S) as client,
        ):
            long = pool.submit(client.post, "/v1/chat/completions", json=HI)
            assert server.is_asked.wait(START_TIMEOUT_S)
            # Twice: an answer to a look from before it was asked may have come by the first time.
            wait_for(
                lambda: [states(client), states(client)] == [["away"]] * 2,
                START_TIMEOUT_S,
                "the looks that find no answer",
            )
            refused = client.post("/v1/chat/completions", json=HI)
            listed = client.get("/v1/models").json()["data"]
            server.computed.set()
            answer = long.result(START_TIMEOUT_S)
            wait_for(lambda: states(client) == ["live"], START_TIMEOUT_S, "the upstream's return")
            after = client.post("/v1/chat/completions", json=HI)
    finally:
        frontend.send_signal(signal.SIGTERM)
        frontend.wait(START_TIMEOUT_S)

    assert (answer.status_code, answer.json()) == (200, ANSWER)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert [each["id"] for each in listed] == ["m"]
    assert after.status_code == 200


def states(client: httpx.Client) -> list[str]:
    found = client.get("/status").json()["cluster"]["instances"]
    return [each["state"] for each in found]


@pytest.mark.parametrize("is_cluster", [False, True], ids=["one hop", "cluster"])
async def test_what_waits_at_an_upstream_that_fails_its_looks_is_answered_by_it(
    is_cluster: bool,
) -> None:
    """Behind a worker as behind a frontend; what comes meanwhile goes to another."""
    asked, computed = trio.Event(), trio.Event()

    async def compute(_: Asked, stream: trio.SocketStream) -> None:
        asked.set()
        await computed.wait()
        await stream.send_all(whole(ANSWER))

    async def answer(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(whole(ANSWER | {"object": "by another"}))

    async with (
        open_fake(compute) as busy,
        open_fake(answer) as other,
        open_cluster(busy.url, other.url) if is_cluster else open_hop(busy, other) as front,
        trio.open_nursery() as nursery,
    ):
        found: list[Any] = []

        async def ask() -> None:
            found.append((await front.chat()).json())

        with trio.fail_after(120):
            while not asked.is_set():
                nursery.start_soon(ask)
                await trio.sleep(0.01)
            busy.health = 503
            while len(await live(front)) != 1:
                await trio.sleep(0.02)
        before = len(busy.asked)
        for _ in range(4):
            assert (await front.chat()).json()["object"] == "by another"
        assert len(busy.asked) == before
        computed.set()

    assert found.count(ANSWER) == before


async def live(front: Front) -> list[str]:
    cluster = (await front.client.get("/status")).json()["cluster"]
    return [each["id"] for each in cluster["instances"] if each["state"] == "live"]

"""Pages that are open, and a service that tells them what a test says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import trio

from trinamo.runtime.http import HttpService
from trinamo.runtime.http.dashboard.dashboard import PREFIX
from trinamo.runtime.http.dashboard.files import file_routes
from trinamo.runtime.http.dashboard.tabs import Tabs


@asynccontextmanager
async def serving(tabs: Tabs, **settings: Any) -> AsyncIterator[HttpService]:
    """A service that serves the page and what `tabs` is sent."""
    service = HttpService.builder().config(**{"port": 0, **settings}).build()
    service.add({(b"GET", f"{PREFIX}/events".encode()): tabs.serve}, file_routes(PREFIX))
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        try:
            yield service
        finally:
            service.stop()


@asynccontextmanager
async def page(client: httpx.AsyncClient, url: str = f"{PREFIX}/events") -> AsyncIterator[Any]:
    """The events of one page, as an iterator over what they tell."""
    async with client.stream("GET", url) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"

        async def told() -> AsyncIterator[Any]:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

        events = told()
        try:
            yield events
        finally:
            await events.aclose()  # type: ignore[attr-defined]


def event(number: int, more: str = "") -> bytes:
    """One event as the dashboard makes it."""
    data = json.dumps({"number": number, "more": more}).encode()
    return b"event: snapshot\ndata: %b\n\n" % data


async def until(is_so: Any) -> None:
    """Wait for something on the other side of a socket."""
    with trio.fail_after(20):
        while not is_so():
            await trio.sleep(0.005)

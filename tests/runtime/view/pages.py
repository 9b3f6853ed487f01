"""Pages that are open, and a service that tells them what a test says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import msgspec
import trio

from tests.sim.report.browser import Browser
from trinamo import HttpService
from trinamo.runtime.view.overview import PREFIX
from trinamo.runtime.view.pages import Tabs, file_routes
from trinamo.runtime.view.snapshot import ClusterSnapshot


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


def event_of(told: ClusterSnapshot) -> bytes:
    """The same of a whole snapshot."""
    return b"event: snapshot\ndata: %b\n\n" % msgspec.json.encode(told)


async def until(is_so: Any) -> None:
    """Wait for something on the other side of a socket."""
    with trio.fail_after(120):
        while not is_so():
            await trio.sleep(0.005)


class Shown:
    """The page in the browser, whose calls block and so are made in a thread."""

    def __init__(self, chromium: Browser, tabs: Tabs) -> None:
        self.chromium, self.tabs = chromium, tabs

    async def open(self, url: str, *, width: int = 1300, scheme: str = "light") -> None:
        await self.run(self.chromium.open, url)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        await self.run(partial(self.chromium.call, "Emulation.setDeviceMetricsOverride", **metrics))
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.run(partial(self.chromium.call, "Emulation.setEmulatedMedia", features=media))

    async def tell(self, told: ClusterSnapshot, first: str = "") -> None:
        """Send it, and wait until it is drawn, `first` or else an instance in the first row."""
        await until(lambda: len(self.tabs))
        self.tabs.send(event_of(told))
        expected = json.dumps(first or told.instances[0].name)
        await self.until(
            f"document.querySelector('#instances tbody td')?.textContent === {expected}"
        )

    async def evaluate(self, expression: str) -> Any:
        return await self.run(self.chromium.evaluate, expression)

    async def until(self, expression: str) -> None:
        with trio.fail_after(120):
            while not await self.evaluate(expression):
                await trio.sleep(0.02)

    async def run(self, call: Any, *arguments: Any) -> Any:
        return await trio.to_thread.run_sync(call, *arguments)

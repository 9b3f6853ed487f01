"""Pages that are open: each is told everything, as far as it reads, whoever speaks HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import trio

from tests.certificates import Authority
from tests.runtime.http.running import on_every_server
from tests.runtime.view import pages
from trinamo.runtime.view import pages as module
from trinamo.runtime.view.pages import POLICY, Tabs

pytestmark = [
    # httpx leaves generators of its own to the garbage collector when a stream is left.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def settings(http_server: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    if http_server != "tls":
        return {"server": http_server}
    authority: Authority = request.getfixturevalue("authority")
    certificate, key = authority.sign("server")
    return {"tls": {"certificate_file": str(certificate), "key_file": str(key)}}


def client_of(service: Any) -> httpx.AsyncClient:
    url = f"{service.config.scheme}://127.0.0.1:{service.port}"
    limits = httpx.Limits(max_connections=200)
    return httpx.AsyncClient(
        base_url=url, trust_env=False, verify=False, timeout=120, limits=limits
    )


@on_every_server
async def test_every_page_is_told_every_event(settings: dict[str, Any]) -> None:
    tabs = Tabs()
    async with pages.serving(tabs, **settings) as service, client_of(service) as client:
        async with pages.page(client) as first, pages.page(client) as second:
            await pages.until(lambda: len(tabs) == 2)
            tabs.send(pages.event(1))
            tabs.send(pages.event(2))
            for each in (first, second):
                assert [(await anext(each))["number"] for _ in range(2)] == [1, 2]
            async with pages.page(client) as late:
                assert (await anext(late))["number"] == 2
        await pages.until(lambda: len(tabs) == 0)
        tabs.send(pages.event(3))
        async with pages.page(client) as later:
            await pages.until(lambda: len(tabs) == 1)
            tabs.send(pages.event(4))
            assert (await anext(later))["number"] == 4


@on_every_server
async def test_one_page_too_many_is_refused(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TABS_MAX", 2)
    tabs = Tabs()
    async with pages.serving(tabs, **settings) as service, client_of(service) as client:
        async with pages.page(client), pages.page(client):
            await pages.until(lambda: len(tabs) == 2)
            refused = await client.get("/dashboard/events")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        await pages.until(lambda: len(tabs) == 0)


async def test_a_page_that_does_not_read_is_let_go_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither does it make the frontend hold more than one event for it."""
    monkeypatch.setattr(module, "MISSED_MAX", 3)
    tabs = Tabs()
    large = "x" * (1 << 20)
    async with pages.serving(tabs) as service, client_of(service) as client:
        assert service.port is not None
        deaf = await trio.open_tcp_stream("127.0.0.1", service.port)
        await deaf.send_all(b"GET /dashboard/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await pages.until(lambda: len(tabs) == 1)
        async with pages.page(client) as reader:
            await pages.until(lambda: len(tabs) == 2)
            with trio.fail_after(60):
                number = 0
                while len(tabs) == 2:
                    number += 1
                    tabs.send(pages.event(number, large))
                    assert (await anext(reader))["number"] == number
            tabs.send(pages.event(0))
            assert (await anext(reader))["number"] == 0
        await deaf.aclose()


@on_every_server
async def test_the_files_are_served_under_a_policy_that_runs_our_scripts_alone(
    settings: dict[str, Any],
) -> None:
    async with pages.serving(Tabs(), **settings) as service, client_of(service) as client:
        html = await client.get("/dashboard")
        script = await client.get("/dashboard/app.js")
        nothing = await client.get("/dashboard/../files.py")
        posted = await client.post("/dashboard")

    assert html.headers["content-type"] == "text/html; charset=utf-8"
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    for each in (html, script):
        assert each.headers["content-security-policy"] == POLICY
        assert each.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    assert (nothing.status_code, posted.status_code) == (404, 405)

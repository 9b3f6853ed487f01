"""Pages of other origins: whom a browser lets ask, and read the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests import needs
from tests.runtime.http.running import on_every_server
from tests.sim.report.browser import CHROMIUM, Browser, browser
from trinamo import HttpService
from trinamo.runtime.errors import ConfigError

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
PAGE = "https://chat.example.com"
KEY = "sk-alice-0123456789"
ASKED = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def allowed(response: Any) -> str | None:
    found: str | None = response.headers.get("access-control-allow-origin")
    return found


@on_every_server
async def test_a_page_of_an_allowed_origin_may_ask_and_read(serve: Any, tmp_path: Path) -> None:
    """Its preflight needs no key, since no browser sends one; what it reads includes refusals."""
    file = tmp_path / "keys"
    file.write_text(KEY, "utf-8")
    running = await serve(cors_origins=[PAGE], api_keys_file=str(file))
    async with running.client() as client:
        for path in (PATH, "/v1/models"):
            response = await client.options(path, headers=ASKED)
            assert (response.status_code, allowed(response)) == (200, PAGE)
            told = response.headers["access-control-allow-headers"]
            assert told == ASKED["access-control-request-headers"]
            assert "access-control-allow-credentials" not in response.headers
        headers = {"origin": PAGE}
        refused = await client.post(PATH, json=HELLO, headers=headers)
        assert (refused.status_code, allowed(refused)) == (401, PAGE)
        headers["authorization"] = f"Bearer {KEY}"
        for body in (HELLO, {**HELLO, "stream": True}, {"model": "none", **HELLO}):
            response = await client.post(PATH, json=body, headers=headers)
            assert allowed(response) == PAGE
            assert response.headers.get_list("vary") == ["origin"]
            assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert allowed(await client.get("/v1/models", headers=headers)) == PAGE
    await running.wait_quiet()


@on_every_server
async def test_nobody_else_may(serve: Any) -> None:
    running = await serve(cors_origins=[PAGE])
    other = {**ASKED, "origin": "https://evil.example.com"}
    async with running.client() as client:
        assert allowed(await client.options(PATH, headers=other)) is None
        for headers in (other, {}):
            answer = await client.post(PATH, json=HELLO, headers=headers)
            assert allowed(answer) is None
            assert answer.headers["vary"] == "origin"
        # What operators ask is for no page.
        for path in ("/status", "/metrics", "/health"):
            assert allowed(await client.get(path, headers={"origin": PAGE})) is None
        # Allowed or not, a page that calls us by its own name is refused.
        response = await client.post(
            PATH, json=HELLO, headers={"origin": PAGE, "host": "evil.example.com"}
        )
        assert response.status_code == 421
    await running.wait_quiet()


@on_every_server
async def test_by_default_no_page_may_and_with_a_star_any(serve: Any) -> None:
    closed, opened = await serve(), await serve(cors_origins=["*"])
    async with closed.client() as client:
        assert (await client.options(PATH, headers=ASKED)).status_code == 405
        assert allowed(await client.post(PATH, json=HELLO, headers={"origin": PAGE})) is None
    async with opened.client() as client:
        assert allowed(await client.options(PATH, headers=ASKED)) == "*"
        response = await client.post(PATH, json=HELLO, headers={"origin": PAGE})
        assert allowed(response) == "*"
        assert "access-control-allow-credentials" not in response.headers
    await closed.wait_quiet()
    await opened.wait_quiet()


@pytest.mark.parametrize(
    "origin",
    ["chat.example.com", "https://chat.example.com/", "https://a.b/path", "", "null", "https://*"],
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        HttpService.builder().config(cors_origins=[origin])


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.mark.check
@needs.CHROMIUM.unless(CHROMIUM is not None)
async def test_a_page_in_a_real_browser_streams_a_chat_from_another_origin(
    serve: Any, chromium: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY, "utf-8")
    page, stranger = await serve(), await serve()
    api = await serve(cors_origins=[page.url], api_keys_file=str(file))
    ask = f"""
    fetch({json.dumps(api.url + PATH)}, {{
      method: "POST",
      headers: {{"content-type": "application/json", "authorization": "Bearer {KEY}"}},
      body: JSON.stringify({{...{json.dumps(HELLO)}, stream: true}}),
    }}).then(async (answer) => {{
      let text = "";
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {{
        const {{done, value}} = await reader.read();
        if (done) return [answer.status, answer.headers.get("x-request-id") !== null, text];
        text += value;
      }}
    }}).catch((error) => error.name)
    """

    async def run(origin: Any) -> Any:
        await trio.to_thread.run_sync(chromium.open, f"{origin.url}/live")
        return await trio.to_thread.run_sync(chromium.evaluate, ask)

    status, has_id, text = await run(page)
    assert (status, has_id) == (200, True)
    assert text.count("data: ") > 2
    assert text.endswith("data: [DONE]\n\n")
    assert await run(stranger) == "TypeError"
    assert len(api.engine.requests) == 1
    await trio.to_thread.run_sync(chromium.open, "about:blank")

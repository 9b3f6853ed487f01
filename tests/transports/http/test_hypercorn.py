"""`http.server: hypercorn`: the same application, as any ASGI server serves it, on loopback."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from tests.certificates import Authority
from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.exchanges import HttpExchange
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.transports.http.asgi import answer_over_asgi
from trinamo.transports.http.refusals import Dates

CHAT = {"model": "local", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def http_server() -> str:
    return "hypercorn"


async def never_end(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("on", [1], None, 5)
    await trio.sleep_forever()


async def test_answers_whole_and_streamed_come_over_one_connection(serve: Any) -> None:
    running = await serve()
    async with running.client() as client:
        whole = await client.post("/v1/chat/completions", json=CHAT)
        streamed = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        missing = await client.get("/nowhere")
    assert whole.json()["choices"][0]["message"]["content"] == "Hello ✓"
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    await running.wait_quiet()


async def test_a_client_that_leaves_ends_its_request(serve: Any) -> None:
    running = await serve(never_end)
    async with await running.connect() as stream:
        await stream.send_all(running.post(stream=True))
        await running.wait_for(lambda: running.engine.running == 1)
    await running.wait_quiet()


async def test_clients_that_leave_in_the_middle_of_a_body_harm_nobody(serve: Any) -> None:
    running = await serve()
    request = running.post(stream=True)
    for size in (len(request) - 1, len(request) - 20, request.index(b"\r\n\r\n") + 4):
        for resets in (False, True):
            stream = await running.connect()
            await stream.send_all(request[:size])
            await running.wait_for(lambda: running.value("connections", kind="http") == 1)
            if resets:
                await trio.aclose_forcefully(stream)
            else:
                await stream.send_eof()
                await stream.aclose()
            await running.wait_quiet()
    async with running.client() as client:
        assert (await client.get("/live")).status_code == 200
    await running.wait_quiet()


async def test_a_client_that_leaves_behind_the_head_is_sent_no_end_that_came_too_early() -> None:
    """Before: an empty body of an announced length, which a server takes for a mistake of ours."""
    has_left = trio.Event()
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])
        has_left.set()
        # As hypercorn's, it is not cancelled.
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()

    async def answer(exchange: HttpExchange) -> None:
        exchange.respond(200, b"{}", [])

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    dates = Dates(RealEnv().clock)
    with trio.fail_after(120):
        await answer_over_asgi(answer, (scope, receive, send), dates, backlog_bytes_max=1)
    assert sent == ["http.response.start"]


async def test_the_names_of_strangers_are_refused(serve: Any) -> None:
    running = await serve()
    async with running.client() as client:
        answer = await client.get("/live", headers={"host": "rebound.example"})
    assert answer.status_code == 421
    await running.wait_quiet()


def test_it_is_for_loopback_and_without_tls(authority: Authority) -> None:
    certificate, key = map(str, authority.sign("server"))
    tls = {"certificate_file": certificate, "key_file": key}
    for wrong, word in (({"tls": tls}, "TLS"), ({"host": "0.0.0.0"}, "loopback")):
        with pytest.raises(msgspec.ValidationError, match=word):
            msgspec.convert({"server": "hypercorn", **wrong}, HttpConfig)

"""HTTP/2 does what HTTP/1 does, for the same application."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator
from typing import Any

import h2.errors
import httpx
import openai
import pytest
import trio
import trio.testing

from tests.runtime.http.running import seal_now, with_tls
from tests.transports.http.http2.client import closing, connect
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest
from trinamo.transports.http.connections import LINGER_MAX_S, LINGER_S
from trinamo.transports.http.http2 import connection

pytestmark = [pytest.mark.check, with_tls]

CHAT = {"model": "local", "messages": [{"role": "user", "content": "hi"}]}
JSON = (("content-type", "application/json"),)


async def tokens_for_ever(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    while True:
        yield Delta("x" * 1000, [1])
        await trio.sleep(0.001)


async def test_whole_and_streamed_answers_are_those_of_http1(serve: Any) -> None:
    running = await serve()
    texts = {}
    for http2 in (False, True):
        async with running.client(http2=http2) as client:
            whole = await client.post("/v1/chat/completions", json=CHAT)
            streamed = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert whole.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
        events = [json.loads(line[6:]) for line in streamed.text.splitlines()[:-2:2]]
        texts[http2] = (
            whole.json()["choices"],
            whole.json()["usage"],
            [event["choices"] for event in events],
        )
        assert streamed.text.endswith("data: [DONE]\n\n")
    assert texts[False] == texts[True]
    await running.wait_quiet()


async def test_a_request_that_has_arrived_when_idle_connections_are_closed_is_answered(
    serve: Any,
) -> None:
    running = await serve()
    with closing(await connect(running)) as client:
        await client.start()
        await client.answer(await client.ask())
        await trio.testing.wait_all_tasks_blocked()
        asked = await client.chat(is_sent=False)
        seal_now(client.stream, client.h2.data_to_send())
        await running.service.server.close_idle()
        running.service.admission.drain()
        answer = await client.answer(asked)
        assert (answer.status, answer.is_whole) == (200, True)
        await client.until(lambda: client.goaway is not None)


@pytest.mark.filterwarnings("ignore:Async generator '(openai|httpx|httpcore):ResourceWarning")
async def test_openai_s_client_streams_over_it(serve: Any) -> None:
    running = await serve()
    http = openai.DefaultAsyncHttpxClient(http2=True, verify=running.trust, trust_env=False)
    client = openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key="none", http_client=http, max_retries=0
    )
    async with client:
        stream = await client.chat.completions.create(
            model="local", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Hello ✓"
    await running.wait_quiet()


async def test_many_streams_of_one_connection_go_on_side_by_side(serve: Any) -> None:
    async def ten_tokens(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        for number in range(10):
            await trio.sleep(0.002)
            yield Delta(f" {number}", [number])
        yield Delta("", [], FinishReason.STOP)

    running = await serve(ten_tokens)
    with closing(await connect(running)) as client:
        await client.start()
        asked = [await client.chat() for _ in range(100)]
        for stream_id in asked:
            answer = await client.answer(stream_id)
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n")
        assert client.goaway is None
    await running.wait_quiet()
    labels = {"model": "local", "endpoint": "chat"}
    assert running.value("requests_total", outcome="success", **labels) == 100


async def test_a_stream_that_its_client_resets_is_killed_and_no_other(serve: Any) -> None:
    running = await serve(tokens_for_ever)
    with closing(await connect(running)) as client:
        await client.start()
        first, second = await client.chat(), await client.chat()
        await client.until(lambda: all(client.answers[each].body for each in (first, second)))
        client.h2.reset_stream(first, 8)
        await client.flush()
        context = running.engine.contexts[0]
        await running.wait_for(lambda: running.engine.running == 1)
        assert context.kill_reason is Reason.CLIENT_DISCONNECT
        before = len(client.answers[second].body)
        await client.until(lambda: len(client.answers[second].body) > before + 5_000)
    await running.wait_quiet()


async def test_a_client_that_leaves_kills_all_its_streams(serve: Any) -> None:
    running = await serve(tokens_for_ever)
    with closing(await connect(running)) as client:
        await client.start()
        asked = [await client.chat() for _ in range(10)]
        await client.until(lambda: all(client.answers[each].body for each in asked))
    await running.wait_quiet()
    labels = {"model": "local", "endpoint": "chat"}
    assert running.value("requests_total", outcome="client_disconnect", **labels) == 10


async def test_in_a_lame_duck_s_time_a_connection_ends_behind_its_last_stream(serve: Any) -> None:
    """And not before: some clients give up the streams under way when they hear that it leaves."""
    running = await serve(tokens_for_ever, lame_duck_s=60)
    with closing(await connect(running)) as client:
        await client.start()
        first = await client.chat()
        await client.until(lambda: client.answers[first].body)
        running.service.stop()
        live = await client.answer(await client.ask("/live"))
        said_meanwhile = client.goaway
        assert (live.status, said_meanwhile) == (200, None)
        client.h2.reset_stream(first, 8)
        await client.flush()
        await client.until(lambda: client.goaway is not None)
        assert client.goaway == h2.errors.ErrorCodes.NO_ERROR
    await running.wait_quiet()


@pytest.mark.parametrize(("lame_duck_s", "status"), [(60, 413), (0, 503)])
async def test_who_leaves_ends_no_connection_on_which_an_answered_body_still_comes(
    serve: Any, lame_duck_s: float, status: int
) -> None:
    """httpx looks for the answer when it has sent all, and a GOAWAY before that takes it away."""
    running = await serve(tokens_for_ever, lame_duck_s=lame_duck_s)
    async with await running.connect() as other, running.client(http2=True) as client:
        await other.send_all(running.post(stream=True))
        await running.wait_for(lambda: running.engine.running == 1)
        running.service.stop()
        body = {"model": "local", "prompt": "x" * 5_000_000}
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.http_version) == (status, "HTTP/2")
    await running.wait_quiet()


async def test_with_the_stop_policy_the_engines_of_a_client_that_left_may_finish(
    serve: Any, mock_clock: trio.testing.MockClock
) -> None:
    finished: list[bool] = []

    async def finish_slowly(_: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        await context.wait_stopped()
        await trio.sleep(3)
        yield Delta("b", [2], FinishReason.STOP)
        finished.append(True)

    running = await serve(finish_slowly, on_disconnect="stop", stop_grace_s=5)
    with closing(await connect(running)) as client:
        await client.start()
        asked = await client.chat()
        await client.until(lambda: bool(client.answers[asked].body))
        mock_clock.rate = 20
    await running.wait_quiet()
    assert finished == [True]
    labels = {"model": "local", "endpoint": "chat"}
    assert running.value("requests_total", outcome="client_disconnect", **labels) == 1


async def test_head_has_no_body_and_a_path_that_is_none_is_told(serve: Any) -> None:
    running = await serve()
    with closing(await connect(running)) as client:
        await client.start()
        head = await client.answer(await client.ask(method="HEAD"))
        assert (head.status, head.body) == (200, b"")
        missing = await client.answer(await client.ask("/nothing?a=b"))
        assert missing.status == 404
        assert b"path_not_found" in missing.body
        other = await client.answer(await client.ask(authority="evil.example"))
        assert other.status == 421
    await running.wait_quiet()


@pytest.mark.parametrize("pseudo", [{"method": "CONNECT"}, {"path": "live"}, {"path": "/\xe9"}])
async def test_a_target_that_http1_could_not_say_is_refused(
    serve: Any, pseudo: dict[str, Any]
) -> None:
    running = await serve()
    with closing(await connect(running)) as client:
        await client.start()
        answer = await client.answer(await client.ask(**pseudo))
        assert answer.status in (0, 404, 405)
    await running.wait_quiet()


async def test_a_client_that_expects_to_be_asked_for_its_body_is_asked(serve: Any) -> None:
    running = await serve()
    with closing(await connect(running)) as client:
        await client.start()
        body = json.dumps(CHAT).encode()
        asked = await client.ask(
            "/v1/chat/completions",
            method="POST",
            is_whole=False,
            headers=(*JSON, ("expect", "100-continue")),
        )
        await client.until(lambda: client.answers[asked].informational == [100])
        client.h2.send_data(asked, body, end_stream=True)
        await client.flush()
        assert (await client.answer(asked)).status == 200
    await running.wait_quiet()


async def test_a_big_body_is_read_as_it_is_granted(serve: Any) -> None:
    running = await serve()
    async with running.client(http2=True) as client:
        big = {"model": "local", "prompt": "x" * 3_000_000}
        assert (await client.post("/v1/completions", json=big)).status_code == 200
        too_big = {"model": "local", "prompt": "x" * 5_000_000}
        assert (await client.post("/v1/completions", json=too_big)).status_code == 413
        assert (await client.get("/live")).status_code == 200
    await running.wait_quiet()


async def test_a_body_that_nobody_reads_holds_up_no_other_stream(serve: Any) -> None:
    """One whose request is refused at its head, so that its body is never read."""
    running = await serve()
    with closing(await connect(running)) as client:
        await client.start()
        unread = await client.ask("/live", b"x" * 16_000, is_whole=False)
        assert (await client.answer(unread)).status == 405
        for _ in range(20):
            assert (await client.answer(await client.ask())).status == 200
    await running.wait_quiet()


async def test_a_slow_client_may_send_all_of_a_body_whose_answer_has_been_sent(
    serve: Any, mock_clock: trio.testing.MockClock
) -> None:
    """Some look for an answer only then, and never again once the stream was reset."""
    running = await serve()
    with closing(await connect(running)) as client:
        await client.start()
        asked = await client.ask("/live", b"x" * 16_000, is_whole=False)
        answer = await client.answer(asked)
        assert answer.status == 405
        for _ in range(int(LINGER_MAX_S / (LINGER_S / 2)) - 1):
            mock_clock.jump(LINGER_S / 2)
            await trio.testing.wait_all_tasks_blocked()
            while (window := client.h2.local_flow_control_window(asked)) > 16_000:
                client.h2.send_data(asked, b"x" * 16_000)
                await client.flush()
            await client.until(lambda: client.h2.local_flow_control_window(asked) > window)
            assert answer.reset is None
        mock_clock.jump(LINGER_S)
        await client.until(lambda: answer.reset is not None)
        assert answer.reset == h2.errors.ErrorCodes.NO_ERROR
        mock_clock.rate = 1
        assert (await client.answer(await client.ask())).status == 200
    await running.wait_quiet()


async def test_an_engine_that_breaks_mid_stream_is_told_in_the_stream(serve: Any) -> None:
    async def breaks(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("hello", [1])
        raise ZeroDivisionError

    running = await serve(breaks)
    with closing(await connect(running)) as client:
        await client.start()
        answer = await client.answer(await client.chat())
        assert b'"error"' in answer.body
        assert b"[DONE]" not in answer.body
    await running.wait_quiet()


async def test_an_idle_connection_is_ended_with_words(serve: Any) -> None:
    running = await serve(keep_alive_s=6)
    with closing(await connect(running)) as client:
        await client.start()
        assert (await client.answer(await client.ask())).status == 200
        await client.until(lambda: client.goaway is not None)
        assert client.goaway == 0
        await client.until(lambda: False)
    await running.wait_quiet()


async def test_a_busy_client_loses_no_request_over_the_end_of_a_connection(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """httpx gives up all streams of a connection at a GOAWAY: it comes when there is none."""
    monkeypatch.setattr(connection, "STREAMS_PER_CONNECTION", 10)
    running = await serve()
    statuses: list[int] = []
    async with running.client(http2=True) as client:

        async def ask_on() -> None:
            for _ in range(10):
                answer = await client.post("/v1/chat/completions", json=CHAT)
                statuses.append(answer.status_code)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask_on)
    assert statuses == [200] * 50
    with closing(await connect(running)) as raw:
        await raw.start()
        for _ in range(10):
            assert (await raw.answer(await raw.ask("/live"))).status == 200
        await raw.until(lambda: raw.goaway is not None)
    await running.wait_quiet()


async def test_at_the_end_streams_finish_and_no_more_are_taken(serve: Any) -> None:
    async def until_stopped(_: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("hello", [1])
        await context.wait_stopped()
        yield Delta(" and bye", [2], FinishReason.STOP)

    running = await serve(until_stopped, drain_timeout_s=0.2)
    with closing(await connect(running)) as client:
        await client.start()
        asked = await client.chat()
        await client.until(lambda: bool(client.answers[asked].body))
        running.service.stop()
        answer = await client.answer(asked)
        # What the shutdown stopped does not look whole, and is told to its end all the same.
        assert b"frontend_shutdown" in answer.body
        assert answer.is_whole
        await client.until(lambda: client.goaway is not None)
        await client.until(lambda: False)
    await running.wait_quiet()


async def test_certificates_are_renewed_under_load_and_no_stream_notices(
    serve: Any, authority: Any
) -> None:
    running = await serve(tls=serve.section | {"renewal_interval_s": 0.005})
    trust = ssl.create_default_context(cafile=str(authority.ca_file))
    answered = 0

    async def load() -> None:
        nonlocal answered
        for _ in range(10):
            async with httpx.AsyncClient(
                verify=trust, http2=True, trust_env=False, timeout=120
            ) as client:
                for _ in range(5):
                    url = f"{running.url}/v1/chat/completions"
                    response = await client.post(url, json=CHAT | {"stream": True})
                    assert response.text.endswith("data: [DONE]\n\n")
                    answered += 1

    async def renew(nursery: trio.Nursery) -> None:
        while True:
            authority.sign("server")
            await trio.sleep(0.01)

    async with trio.open_nursery() as renewing:
        renewing.start_soon(renew, renewing)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(load)
        renewing.cancel_scope.cancel()
    assert answered == 200
    await running.wait_quiet()

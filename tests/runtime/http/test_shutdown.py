"""The graceful stop: streams finish, new work is refused, and no client can hold it up."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import attrs
import pytest
import trio
import trio.lowlevel
import trio.testing

from tests.runtime.http.running import on_every_server
from trinamo import HttpService
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import LocalProtocolError
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest

pytestmark = on_every_server


async def one_token_then_sleep(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("first", [1], None, 3)
    await trio.sleep_forever()


async def tokens_for_ever(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    while True:
        yield Delta("x" * 10_000, [1])
        await trio.lowlevel.checkpoint()


async def wait_closed(running: Any) -> None:
    """Wait until the service has returned: nothing listens on its port any more."""

    async def is_refused() -> bool:
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", running.port)
        except OSError:
            return True
        await stream.aclose()
        return False

    with trio.fail_after(120):
        while not await is_refused():
            await trio.sleep(0.01)
    await running.wait_quiet()


async def test_a_stream_in_flight_finishes_while_new_work_is_refused(serve: Any) -> None:
    may_finish = trio.Event()

    async def wait_then_finish(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        await may_finish.wait()
        yield Delta("b", [2], FinishReason.STOP)

    running = await serve(wait_then_finish)
    async with running.client() as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            running.service.stop()
            refused = await client.post("/v1/chat/completions", json=body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
            assert refused.json()["error"]["code"] == "unavailable"
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            assert (await client.get("/live")).status_code == 200
            may_finish.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
    await wait_closed(running)


async def test_who_still_sends_a_body_that_was_refused_can_read_why_when_a_drain_begins(
    serve: Any,
) -> None:
    running = await serve(tokens_for_ever)
    async with await running.connect() as other, await running.connect() as stream:
        await other.send_all(running.post(stream=True))
        await running.wait_for(lambda: running.engine.running == 1)
        head, _, _ = running.post().partition(b"content-length")
        await stream.send_all(head + b"content-length: 9000000\r\n\r\n")
        refused = {"model": "unknown", "endpoint": "chat", "outcome": "body_too_large"}
        await running.wait_for(lambda: running.value("requests_total", **refused) == 1)
        running.service.stop()
        await trio.testing.wait_all_tasks_blocked(0.01)
        for _ in range(10):
            await stream.send_all(b"x" * 100_000)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 413 ")
    await wait_closed(running)


async def test_a_lame_duck_answers_while_balancers_are_told_to_ask_others(serve: Any) -> None:
    """On connections that stand and on new ones; then it refuses, and ends."""
    running = await serve(lame_duck_s=60)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with running.client() as client:
        running.service.stop()
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert (await client.get("/live")).status_code == 200
        async with running.client() as another:
            for each in (client, another):
                answer = await each.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200


async def test_after_the_lame_duck_s_time_no_request_runs_into_a_refusal_on_a_connection_that_was_idle(
    serve: Any,
) -> None:
    """While a stream goes on: the client finds its idle connection closed, and asks elsewhere."""
    may_finish = trio.Event()

    async def wait_then_finish(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        await may_finish.wait()
        yield Delta("b", [2], FinishReason.STOP)

    running = await serve(wait_then_finish, lame_duck_s=0.05)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with running.client() as client:
        idle = await running.connect()
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            running.service.stop()
            with trio.fail_after(120):
                assert await idle.receive_some() == b""
            may_finish.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
    await idle.aclose()
    await wait_closed(running)


async def test_after_the_lame_duck_s_time_the_service_ends(serve: Any) -> None:
    running = await serve(lame_duck_s=0.02)
    running.service.stop()
    await wait_closed(running)


@pytest.mark.parametrize("is_used", [False, True])
async def test_a_request_that_has_arrived_when_idle_connections_are_closed_is_answered(
    serve: Any, is_used: bool
) -> None:
    """A client that got no answer would not know whether to send it again."""
    running = await serve()
    count = running.value("connections", kind="http")
    stream, idle = await running.connect(), await running.connect()
    await running.wait_for(lambda: running.value("connections", kind="http") == count + 2)
    if is_used:
        await stream.send_all(running.post())
        assert b" 200 " in await stream.receive_some()
    await trio.testing.wait_all_tasks_blocked()
    running.send_now(stream, running.post())
    await running.service.server.close_idle()
    running.service.admission.drain()
    answer = await stream.receive_some()
    assert b" 200 " in answer
    assert b"connection: close" in answer
    for each in (stream, idle):
        while await each.receive_some():
            pass
        await each.aclose()


async def test_a_shared_port_is_the_others_while_one_of_them_drains(serve: Any) -> None:
    """Who had connected is answered; a new connection comes to nobody who refuses it."""

    async def the_first_wait(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        if len(first.engine.contexts) <= 20:
            await trio.sleep_forever()
        yield Delta("b", [2], FinishReason.STOP)

    first = await serve(the_first_wait, reuse_port=True)
    streams = [await first.connect() for _ in range(20)]
    for each in streams:
        await each.send_all(first.post(stream=True))
    await first.wait_for(lambda: len(first.engine.contexts) == 20)
    second = await serve(reuse_port=True, port=first.port)
    late = [await first.connect() for _ in range(20)]
    first.service.stop()
    for each in late:
        first.send_now(each, first.post())
    for each in late:
        assert b" 200 " in await each.receive_some()
    await first.wait_for(lambda: first.service.admission.is_draining)
    before = len(second.engine.requests)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for _ in range(20):
        async with second.client() as client:
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
    assert len(second.engine.requests) == before + 20
    assert first.service.admission.in_flight == 20
    for each in (*streams, *late):
        await each.aclose()


async def test_a_stream_that_does_not_finish_is_stopped_then_killed(serve: Any) -> None:
    running = await serve(one_token_then_sleep, drain_timeout_s=0.02, stop_grace_s=0.02)
    async with running.client() as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            running.service.stop()
            rest = [line async for line in lines if line]
    assert '"code":"frontend_shutdown"' in rest[-1]
    (context,) = running.engine.contexts
    assert context.stop_reason is Reason.FRONTEND_SHUTDOWN
    assert context.kill_reason is Reason.FRONTEND_SHUTDOWN
    await wait_closed(running)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_that_the_shutdown_stopped_does_not_look_whole(
    serve: Any, is_streamed: bool
) -> None:
    """Whatever the engine says at its end: nobody who asked wanted less."""

    async def heed(_: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("first", [1], None, 3)
        await context.wait_stopped()
        yield Delta("last", [2], FinishReason.STOP)

    running = await serve(heed, drain_timeout_s=0.02, stop_grace_s=5.0)
    async with running.client() as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": is_streamed}
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def stop() -> None:
                await running.wait_for(lambda: bool(running.engine.contexts))
                running.service.stop()

            answer = await client.post("/v1/chat/completions", json=body)
    assert '"code":"frontend_shutdown"' in answer.text
    assert "finish_reason" not in answer.text.replace('"finish_reason":null', "")
    if is_streamed:
        assert "[DONE]" not in answer.text
    else:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    await wait_closed(running)
    labels = {"model": "local", "endpoint": "chat", "outcome": "frontend_shutdown"}
    assert running.value("requests_total", **labels) == 1


async def test_an_idle_keep_alive_connection_does_not_hold_the_stop_up(serve: Any) -> None:
    running = await serve()
    stream = await running.connect()
    await stream.send_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    received = b""
    while not received.endswith(b'{"status":"live"}'):
        received += await stream.receive_some()
    running.service.stop()
    with trio.fail_after(120):
        assert await stream.receive_some() == b""
    await stream.aclose()
    await wait_closed(running)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_never_reads_does_not_hold_the_stop_up(
    serve: Any, is_streamed: bool
) -> None:
    async def much(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("x" * 20_000_000, [1], FinishReason.STOP)

    running = await serve(
        tokens_for_ever if is_streamed else much, drain_timeout_s=0.02, stop_grace_s=0.02
    )
    stream = await running.connect()
    await stream.send_all(running.post(stream=is_streamed))
    await running.wait_for(lambda: bool(running.engine.contexts))
    await trio.sleep(0.1)  # until the socket's buffers are full
    running.service.stop()
    await wait_closed(running)
    await stream.aclose()


async def test_cancelling_the_service_closes_everything_at_once(serve: Any) -> None:
    """Also under a blocked send, which hypercorn shields from cancellation."""

    class Engine:
        generate = staticmethod(tokens_for_ever)

    running = await serve()
    service = HttpService.builder().config(running.service.config, port=0).build()
    service.model_manager().add_chat_completions_model("local", Engine())  # pyright: ignore[reportArgumentType]
    async with trio.open_nursery() as nursery:
        port = await nursery.start(service.run)
        running = attrs.evolve(running, service=service, port=port)
        never_reading, idle = [await running.connect() for _ in range(2)]
        body = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
        await never_reading.send_all(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        with trio.fail_after(120):
            while not service.admission.in_flight:
                await trio.sleep(0.001)
        await trio.sleep(0.1)  # until the socket's buffers are full
        nursery.cancel_scope.cancel()
    assert service.admission.in_flight == 0
    assert service.metrics.value("connections", kind="http") == 0
    await trio.aclose_forcefully(never_reading)
    await trio.aclose_forcefully(idle)


async def test_a_service_runs_once(serve: Any) -> None:
    running = await serve()
    with pytest.raises(LocalProtocolError, match="runs once"):
        await running.service.run()

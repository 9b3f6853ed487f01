"""A client that leaves: its request ends at once, whatever the engine and hypercorn are doing."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio
import trio.lowlevel

from tests.runtime.http.running import on_every_server
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest

pytestmark = on_every_server

# Makes a generator of a function that yields nothing.
NO_DELTAS: list[Delta] = []

pytestmark = pytest.mark.parametrize("http_server", ["native", "tls"])


async def sleep_in_prefill(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    for never in NO_DELTAS:
        yield never
    await trio.sleep_forever()


async def one_token_then_sleep(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("first", [1], None, 3)
    await trio.sleep_forever()


async def tokens_for_ever(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    while True:
        yield Delta("x" * 1000, [1])
        await trio.lowlevel.checkpoint()


def reset(stream: trio.SocketStream) -> None:
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("leave", [lambda stream: stream.socket.close(), reset])
async def test_leaving_before_the_first_token_kills_the_request(
    serve: Any, is_streamed: bool, leave: Any
) -> None:
    running = await serve(sleep_in_prefill)
    stream = await running.connect()
    await stream.send_all(running.post(stream=is_streamed))
    await running.wait_for(lambda: running.engine.running == 1)
    leave(stream)
    await running.wait_quiet()
    (context,) = running.engine.contexts
    assert context.kill_reason is Reason.CLIENT_DISCONNECT
    assert running.value("client_disconnects_total", model="local", endpoint="chat") == 1
    assert running.value("cancellations_total", model="local", reason="client_disconnect") == 1
    assert (
        running.value("requests_total", model="local", endpoint="chat", outcome="client_disconnect")
        == 1
    )


@pytest.mark.parametrize("function", [one_token_then_sleep, tokens_for_ever])
@pytest.mark.parametrize("leave", [lambda stream: stream.socket.close(), reset])
async def test_leaving_mid_stream_kills_the_request(serve: Any, function: Any, leave: Any) -> None:
    running = await serve(function)
    stream = await running.connect()
    await stream.send_all(running.post(stream=True))
    assert b"200" in await stream.receive_some()
    leave(stream)
    await running.wait_quiet()
    assert running.engine.contexts[0].kill_reason is Reason.CLIENT_DISCONNECT


async def test_a_pipelined_request_does_not_hide_that_the_client_left(serve: Any) -> None:
    running = await serve(one_token_then_sleep)
    stream = await running.connect()
    await stream.send_all(running.post(stream=True) + running.post(stream=True))
    assert b"200" in await stream.receive_some()
    await stream.aclose()
    await running.wait_quiet()
    assert running.engine.contexts[0].kill_reason is Reason.CLIENT_DISCONNECT


async def test_a_client_that_pipelines_without_end_is_cut_off(serve: Any) -> None:
    """Beyond the read-ahead its FIN could not be seen, so it does not get that far."""
    running = await serve(sleep_in_prefill, write_timeout_s=0.05)
    stream = await running.connect()
    with pytest.raises(trio.BrokenResourceError):
        await stream.send_all(running.post() + b"GET /live HTTP/1.1\r\n\r\n" * 500_000)
    await stream.aclose()
    await running.wait_quiet()
    assert running.engine.contexts[0].kill_reason is Reason.CLIENT_DISCONNECT


async def test_pipelined_requests_are_answered_in_order(serve: Any) -> None:
    running = await serve()
    stream = await running.connect()
    await stream.send_all(running.post(max_tokens=1) + running.post(max_tokens=2))
    received = b""
    with trio.fail_after(120):
        while received.count(b"HTTP/1.1 200") < 2:
            received += await stream.receive_some()
    assert [request.max_tokens for request in running.engine.requests] == [1, 2]
    await stream.aclose()
    await running.wait_quiet()


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_only_closes_its_sending_side_gets_its_answer(
    serve: Any, http_server: str, is_streamed: bool
) -> None:
    """As `nc -N` does. Over TLS it cannot be told from one that left."""
    release = trio.Event()

    async def answer(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        await release.wait()
        yield Delta("Hello", [1], FinishReason.STOP, 3)

    running = await serve(answer)
    stream = await running.connect()
    await stream.send_all(running.post(stream=is_streamed))
    await running.wait_for(lambda: running.engine.running == 1)
    await stream.send_eof()
    got = b""
    with trio.fail_after(120):
        if http_server == "native":
            while b"102 Processing" not in got:
                got += await stream.receive_some()
            release.set()
        while data := await stream.receive_some():
            got += data
    assert (b"200 OK" in got and b"Hello" in got) is (http_server == "native")
    await stream.aclose()
    await running.wait_quiet()


async def test_with_the_stop_policy_the_engine_may_finish(serve: Any) -> None:
    finished: list[bool] = []

    async def finish_when_stopped(
        _: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        await context.wait_stopped()
        assert not context.is_killed
        yield Delta("b", [2], FinishReason.STOP)
        finished.append(True)

    running = await serve(finish_when_stopped, on_disconnect="stop")
    stream = await running.connect()
    await stream.send_all(running.post(stream=True))
    await stream.receive_some()
    await stream.aclose()
    await running.wait_quiet()
    assert finished == [True]
    assert running.engine.contexts[0].stop_reason is Reason.CLIENT_DISCONNECT


async def test_with_the_stop_policy_an_engine_that_will_not_stop_is_killed(serve: Any) -> None:
    running = await serve(one_token_then_sleep, on_disconnect="stop", stop_grace_s=0.01)
    stream = await running.connect()
    await stream.send_all(running.post(stream=True))
    await stream.receive_some()
    await stream.aclose()
    await running.wait_quiet()
    assert running.engine.contexts[0].is_killed


async def test_a_client_that_finished_reading_is_no_disconnect(serve: Any) -> None:
    running = await serve()
    async with running.client() as client:
        for is_streamed in (True, False):
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": is_streamed}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
    await running.wait_quiet()
    assert running.value("client_disconnects_total", model="local", endpoint="chat") == 0
    assert running.value("requests_total", model="local", endpoint="chat", outcome="success") == 2

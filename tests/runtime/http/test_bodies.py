"""The bodies of all requests together: how much of them is held, and who is told to come later."""

from __future__ import annotations

import gc
import gzip
import json
import types
import zlib
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
import trio

from tests.runtime.http.running import on_every_server
from trinamo import HttpService
from trinamo.runtime.context import Context
from trinamo.runtime.errors import OverloadedError
from trinamo.runtime.http.bodies import SMALL_BODY_BYTES, Bodies, Body, _zstd
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
    ModelCard,
)

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)


def test_only_what_is_long_is_counted_and_all_of_it_is_given_back() -> None:
    bodies = Bodies(1000)
    with Body(bodies) as first, Body(bodies) as second:
        first.hold(SMALL_BODY_BYTES)
        assert bodies.bytes_held == 0
        first.hold(SMALL_BODY_BYTES + 600)
        second.check(SMALL_BODY_BYTES + 400)
        with pytest.raises(OverloadedError, match="at most 1000 may be held"):
            second.check(SMALL_BODY_BYTES + 401)
        with pytest.raises(OverloadedError):
            second.hold(SMALL_BODY_BYTES + 401)
        first.hold(SMALL_BODY_BYTES + 100)
        second.hold(SMALL_BODY_BYTES + 900)
        assert bodies.bytes_held == 1000
    assert bodies.bytes_held == 0


def compressed(coding: str, body: bytes) -> bytes:
    if coding == "zstd":
        library = _zstd()
        return b"" if library is None else bytes(library.compress(body))
    if coding == "bare":
        made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        return made.compress(body) + made.flush()
    return gzip.compress(body) if coding == "gzip" else zlib.compress(body)


CODINGS = ["gzip", "deflate", "bare", *(["zstd"] if _zstd() is not None else [])]


@pytest.mark.parametrize("coding", CODINGS)
async def test_a_compressed_body_is_read_within_the_same_bounds(serve: Any, coding: str) -> None:
    running = await serve(body_bytes_max=1 << 16)
    headers = {
        "content-type": "application/json",
        "content-encoding": coding.replace("bare", "deflate").upper(),
    }
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    cases = [
        (compressed(coding, body), 200),
        (compressed(coding, body + b" " * ((1 << 16) - len(body))), 200),
        (compressed(coding, body + b" " * (1 << 16)), 413),
        (compressed(coding, b" " * (16 << 20)), 413),
        (compressed(coding, body)[:-3], 400),
        (b"\x07no such thing", 400),
    ]
    if coding in ("gzip", "zstd"):
        cases.append((compressed(coding, body[:9]) + compressed(coding, body[9:]), 200))
        for empty, status in ((15, 200), (16, 400), (1000, 400)):
            cases.append((compressed(coding, b"") * empty + compressed(coding, body), status))
    async with running.client() as client:
        for data, status in cases:
            answer = await client.post("/v1/completions", content=data, headers=headers)
            assert answer.status_code == status, (answer.text, len(data))
    assert {each.prompt for each in running.engine.requests} == {"a"}


async def test_a_body_that_is_compressed_otherwise_is_refused_by_the_name(serve: Any) -> None:
    running = await serve()
    async with running.client() as client:
        for coding in ("br", "gzip, gzip", "x"):
            headers = {"content-type": "application/json", "content-encoding": coding}
            answer = await client.post("/v1/completions", content=b"{}", headers=headers)
            assert answer.status_code == 415
            assert (
                f"content-encoding is '{coding}'; it must be gzip"
                in answer.json()["error"]["message"]
            )
        headers = {"content-type": "application/json", "content-encoding": "identity"}
        answer = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
        assert answer.status_code == 200


async def start(running: Any, announced: int, sent: int) -> trio.SocketStream:
    stream: trio.SocketStream = await running.connect()
    await stream.send_all(HEAD % announced + b" " * sent)
    return stream


async def read_answer(stream: trio.SocketStream) -> bytes:
    received = b""
    with trio.fail_after(120):
        while b"\r\n\r\n" not in received or b"}}" not in received:
            data = await stream.receive_some()
            assert data, received
            received += data
    return received


async def test_a_long_body_takes_the_room_of_the_oldest_that_has_not_come(serve: Any) -> None:
    """Before: it was a 503, for as long as somebody held half a body."""
    running = await serve(bodies_bytes_max=1_000_000)
    bodies = running.service.admission.bodies
    held = await start(running, 1_000_000, 900_000)
    await running.wait_for(lambda: bodies.bytes_held >= 800_000)
    async with running.client() as client:
        # Short ones find room whatever the long ones hold.
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
        assert bodies.bytes_held >= 800_000
        late = await client.post("/v1/completions", json={"prompt": "a" * 500_000})
    assert late.status_code == 200
    answer = await read_answer(held)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in answer
    assert b'"code":"overloaded"' in answer
    await held.aclose()
    await running.wait_for(lambda: bodies.bytes_held == bodies.arriving.amount == 0)
    await running.wait_quiet()


async def test_what_is_only_announced_keeps_nobody_out(serve: Any) -> None:
    running = await serve(bodies_bytes_max=1_000_000)
    held = [await start(running, 1_000_000, 0) for _ in range(5)]
    await running.wait_for(lambda: running.value("connections", kind="http") == 5)
    async with running.client() as client:
        body = {"prompt": "a" * 500_000}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    for stream in held:
        await stream.aclose()
    await running.wait_quiet()


async def test_chunked_bodies_are_refused_where_they_pass_the_bound(serve: Any) -> None:
    running = await serve(bodies_bytes_max=100_000)

    async def body() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield b" " * 10_000

    async with running.client() as client:
        response = await client.post(
            "/v1/completions", content=body(), headers={"content-type": "application/json"}
        )
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    await running.wait_for(lambda: running.service.admission.bodies.bytes_held == 0)
    await running.wait_quiet()


async def test_a_request_is_counted_until_its_answer_ends_but_not_its_blanks(serve: Any) -> None:
    async def wait(_: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        await context.wait_stopped()
        yield Delta("", [], FinishReason.STOP)

    running = await serve(wait)
    bodies = running.service.admission.bodies
    long = json.dumps({"prompt": "a" * 200_000, "stream": True}).encode()
    blank = json.dumps({"prompt": "a", "stream": True}).encode() + b" " * 200_000
    async with await running.connect() as first, await running.connect() as second:
        await first.send_all(HEAD % len(long) + long)
        await running.wait_for(lambda: running.engine.running == 1)
        assert bodies.bytes_held == 200_002 - SMALL_BODY_BYTES
        await second.send_all(HEAD % len(blank) + blank)
        await running.wait_for(lambda: running.engine.running == 2)
        assert bodies.bytes_held == 200_002 - SMALL_BODY_BYTES
    await running.wait_for(lambda: bodies.bytes_held == 0)
    await running.wait_quiet()


@on_every_server
async def test_half_bodies_keep_nobody_out_and_are_bounded(serve: Any) -> None:
    """Before: each counted as a request, so that a crowd of them made all others a 503."""
    running = await serve(requests_max=2, queue_max=0, bodies_max=5)
    bodies = running.service.admission.bodies
    held = []
    for count in range(1, 8):
        held.append(await start(running, 100, 1))
        await running.wait_for(
            lambda count=count: running.value("connections", kind="http") == count
        )
        await running.wait_for(lambda count=count: bodies.arriving.amount >= min(count, 5) << 16)
    async with running.client() as client:
        response = await client.post("/v1/completions", json={"prompt": "hi"})
        assert response.status_code == 200
    for stream in held[:2]:
        answer = await read_answer(stream)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"on their way" in answer
    assert bodies.arriving.amount <= 5 << 16
    for stream in held:
        await stream.aclose()
    await running.wait_for(lambda: bodies.arriving.amount == 0)
    await running.wait_quiet()


@on_every_server
async def test_a_refused_body_goes_without_the_collector(serve: Any) -> None:
    """Before, from Python 3.12 on: it stayed, uncounted, until the oldest generation was collected."""
    running = await serve(bodies_bytes_max=1_000_000)
    bodies = running.service.admission.bodies
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        first = await start(running, 1_000_000, 900_000)
        await running.wait_for(lambda: bodies.bytes_held >= 800_000)
        second = await start(running, 1_000_000, 900_000)
        assert (await read_answer(first)).startswith(b"HTTP/1.1 503 ")
        for stream in (first, second):
            await stream.aclose()
        await running.wait_for(lambda: bodies.bytes_held == bodies.arriving.amount == 0)
        await running.wait_quiet()
        gc.collect()
        frames = [found for found in gc.garbage if isinstance(found, types.FrameType)]
        assert [frame for frame in frames if frame.f_code.co_name == "read_body"] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_a_prompt_is_measured_against_its_model_s_card() -> None:
    """What no engine could take reaches none: the context is known from discovery."""
    service = HttpService.builder().port(0).build()
    asked: list[GenerateRequest] = []

    class Engine:
        async def generate(
            self, request: GenerateRequest, context: Context
        ) -> AsyncGenerator[Delta, None]:
            asked.append(request)
            yield Delta("ok", [1], FinishReason.STOP)

    card = ModelCard(name="short", endpoint="a/b/c", context_tokens_max=64)
    service.model_manager().add_model(card, Engine())
    async with trio.open_nursery() as nursery:
        port = await nursery.start(service.run)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120
        ) as client:
            for prompt, status in (([1] * 64, 200), ([1] * 65, 400), ("a" * 100_000, 400)):
                response = await client.post("/v1/completions", json={"prompt": prompt})
                assert response.status_code == status, prompt
        service.stop()
    assert len(asked) == 1

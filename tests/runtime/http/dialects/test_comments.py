"""Comments in event streams that are silent, on a virtual clock and on a real socket."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio
import trio.testing

from tests.sse import parse_events
from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import OverloadedError, UnavailableError
from trinamo.runtime.http.bodies import Bodies, Body
from trinamo.runtime.http.comments import Comments
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.http.streaming import AnswerDelivery, EventSink, PassedEvents
from trinamo.runtime.protocol.openai.answers import CompletionAnswer
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest
from trinamo.runtime.protocol.openai.passing import COMMENT

SHORT_S = 0.2
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("completions", {"prompt": "a"}),
    ("responses", {"input": "a"}),
    ("messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
]


class Exchange:
    """What a client has been sent, and when, since the beginning."""

    is_gone = is_finished = has_begun = False
    status = 0

    def __init__(self) -> None:
        self.sent: list[tuple[float, bytes]] = []

    def start(self, status: int, _: Any) -> None:
        assert not self.status
        self.status = status

    def write(self, data: bytes) -> bool:
        assert self.status
        self.has_begun = True
        self.sent.append((trio.current_time(), data))
        return True


async def test_each_silence_has_comments_and_no_other_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    del autojump_clock
    comments, exchange = Comments(8.0), Exchange()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(comments.run)
        with comments.stream(exchange, []) as stream:  # type: ignore[arg-type]
            await trio.sleep(20)
            for _ in range(20):
                exchange.write(b"token")
                stream.written()
                await trio.sleep(5)
            exchange.is_finished = True
            await trio.sleep(50)
        nursery.cancel_scope.cancel()
    times = [at for at, _ in exchange.sent]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert [data for _, data in exchange.sent] == [COMMENT] * 2 + [b"token"] * 20
    assert max(gaps) <= 8


async def test_without_an_interval_there_are_none(autojump_clock: trio.testing.MockClock) -> None:
    del autojump_clock
    comments, exchange = Comments(0), Exchange()
    with trio.move_on_after(1000), comments.stream(exchange, []):  # type: ignore[arg-type]
        await comments.run()
    assert exchange.sent == []


def released() -> tuple[trio.Event, Any]:
    """An engine that answers once its event is set, and then as often as it is asked."""
    event = trio.Event()

    async def answer(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        await event.wait()
        yield Delta("Hello", [1], None, 1)
        yield Delta("", [2], FinishReason.STOP)

    return event, answer


@pytest.mark.parametrize(("path", "body"), PATHS, ids=[path for path, _ in PATHS])
async def test_a_stream_that_waits_has_comments_and_then_its_answer(
    serve: Any, path: str, body: dict[str, Any]
) -> None:
    release, engine = released()
    running = await serve(engine, comment_interval_s=SHORT_S)
    with trio.fail_after(120):
        async with (
            running.client() as client,
            client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as answer,
        ):
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            got = b""
            async for piece in answer.aiter_raw():
                got += piece
                if got.count(COMMENT) >= 2:
                    release.set()
    assert got.startswith(COMMENT)
    assert "Hello" in "".join(event.data for event in parse_events(got))
    await running.wait_quiet()


async def test_a_whole_answer_has_no_comments(serve: Any) -> None:
    release, engine = released()
    running = await serve(engine, comment_interval_s=0.01)
    async with running.client() as client, trio.open_nursery() as nursery:

        async def release_later() -> None:
            await running.wait_for(lambda: running.engine.running == 1)
            await trio.sleep(0.1)
            release.set()

        nursery.start_soon(release_later)
        answer = await client.post(f"/v1/{PATHS[0][0]}", json=PATHS[0][1])
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize(("path", "body"), PATHS, ids=[path for path, _ in PATHS])
async def test_what_fails_behind_a_comment_is_told_as_an_event(
    serve: Any, path: str, body: dict[str, Any]
) -> None:
    failing = trio.Event()

    async def fail(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        await failing.wait()
        if failing.is_set():
            raise UnavailableError("nobody is left")
        yield Delta()

    running = await serve(fail, comment_interval_s=SHORT_S)
    got = b""
    async with (
        running.client() as client,
        client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as answer,
    ):
        async for piece in answer.aiter_raw():
            got += piece
            failing.set()
    assert b"nobody is left" in got
    assert b"[DONE]" not in got


async def test_a_request_that_waits_for_a_place_has_comments_too(serve: Any) -> None:
    """And what ends its waiting is an event."""
    release, engine = released()
    running = await serve(
        engine, comment_interval_s=SHORT_S, requests_max=1, queue_max=1, queue_timeout_s=3600
    )
    async with running.client() as client, trio.open_nursery() as nursery:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await client.post("/v1/completions", json={"prompt": "a"}))

        nursery.start_soon(ask)
        await running.wait_for(lambda: running.engine.running == 1)
        got = b""
        asked = {"prompt": "b", "stream": True}
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            async for piece in answer.aiter_raw():
                got += piece
                release.set()
    assert got.startswith(COMMENT)
    assert "Hello" in "".join(event.data for event in parse_events(got))
    assert answers[0].json()["choices"][0]["text"] == "Hello"
    assert len(running.engine.requests) == 2


# --- an upstream's comments ---


def delivery_to(exchange: Any, record: Any, kept: Body, *, may_wait: bool = True) -> AnswerDelivery:
    return AnswerDelivery(exchange, record, [], kept, HttpConfig(), Context("1"), may_wait=may_wait)


async def test_a_comment_of_an_upstream_is_no_delta_and_no_beginning() -> None:
    """Before the answer it is not sent on: an early failure keeps its status."""
    exchange: Any = Exchange()
    metrics = FrontendMetrics(RealEnv())
    event = b'data: {"choices": []}\n\n'
    with metrics.request("m", "chat") as record, Body(Bodies(1 << 20)) as kept:
        exchange.on_room = lambda _: None
        sink = PassedEvents(delivery_to(exchange, record, kept))
        left = sink._left
        assert sink.take([Delta(raw=COMMENT)])
        assert (exchange.status, sink.has_written, sink._left) == (0, False, left)
        assert sink.take([Delta(raw=COMMENT), Delta(raw=event)])
        assert sink.take([Delta(raw=COMMENT)])
        assert [data for _, data in exchange.sent] == [event, COMMENT]
        assert sink._left == left - 1


async def test_after_a_comment_a_request_may_still_be_sent_back_to_wait() -> None:
    exchange: Any = Exchange()
    exchange.on_gone = exchange.on_room = lambda _: None
    exchange.start(200, [])
    exchange.write(COMMENT)
    metrics = FrontendMetrics(RealEnv())

    async def refuse() -> None:
        raise OverloadedError("no room", bound="running_max", value=1)

    with metrics.request("m", "chat") as record, Body(Bodies(1 << 20)) as kept:
        delivery = delivery_to(exchange, record, kept)
        sink = EventSink(delivery, lambda: CompletionAnswer("1", "m", 0, wants_usage=False))
        await delivery.run(sink, refuse)
    assert record.outcome == "sent_back"
    assert [data for _, data in exchange.sent] == [COMMENT]


async def test_after_a_comment_an_upstreams_refusal_of_many_lines_is_one_event() -> None:
    exchange: Any = Exchange()
    exchange.on_gone = exchange.on_room = lambda _: None
    ends: list[bytes] = []
    exchange.finish = ends.append
    exchange.sent = trio.lowlevel.checkpoint
    exchange.start(200, [])
    metrics = FrontendMetrics(RealEnv())
    refusal = {"error": {"message": "no such tool", "code": 400}}
    body = json.dumps(refusal, indent=2).replace("\n", "\r\n").encode()
    with metrics.request("m", "chat") as record, Body(Bodies(1 << 20)) as kept:
        delivery = delivery_to(exchange, record, kept)
        sink = PassedEvents(delivery)

        async def refuse() -> None:
            half = len(body) // 2
            sink.take([Delta(raw=body[:half], status=400)])
            sink.take([Delta(raw=body[half:], status=400, finish_reason=FinishReason.STOP)])

        await delivery.run(sink, refuse)
    (event,) = parse_events(b"".join(ends))
    assert json.loads(event.data) == refusal

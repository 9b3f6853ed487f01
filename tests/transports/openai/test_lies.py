"""What an upstream says that no server should say: it ends, it is bounded, and it harms nobody else."""

from __future__ import annotations

import gc
import gzip
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
import trio

from tests.transports.openai.fake import (
    STREAM_HEAD,
    Asked,
    chat_chunk,
    chunk,
    events,
    open_fake,
    open_hop,
    says,
    streams,
    texts_of,
    until,
    whole,
)
from trinamo.runtime.config.upstream import UpstreamConfig
from trinamo.runtime.errors import RemoteProtocolError
from trinamo.transports.openai import client, exchange
from trinamo.transports.openai.address import find_address
from trinamo.transports.openai.answers import StreamedAnswer, WholeAnswer
from trinamo.transports.openai.client import Connections

TOO_LONG = {"error": {"message": "the prompt is too long", "code": 400}}
LONG = b"x" * (32 << 20)
"""More than a loopback takes of which nobody reads."""


@asynccontextmanager
async def ask_at(
    serve: Callable[[trio.SocketStream], Awaitable[None]],
) -> AsyncIterator[Connections]:
    """A server whose connections are served so, and what asks it."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/v1"
        yield Connections(find_address(url, UpstreamConfig(url=url)), 5.0, nursery)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TOO_LONG, 400),
        ({"error": {"message": "no such tool", "code": 422}}, 422),
        ({"error": {"message": "no", "code": "bad"}}, 400),
        ({"error": "no"}, 400),
    ],
)
async def test_an_error_in_place_of_a_stream_passes_with_its_words(
    error: dict[str, Any], status: int
) -> None:
    async with (
        open_fake(says(whole(error, content_type="application/json"))) as fake,
        open_hop(fake) as front,
    ):
        answer = await front.chat(stream=True)

    assert (answer.status_code, answer.json()) == (status, error)
    assert exchange.KEPT.bytes_held == 0


async def test_an_error_of_the_server_in_place_of_a_stream_is_asked_of_another() -> None:
    said = whole({"error": {"message": "died", "code": 500}}, content_type="application/json")
    async with open_fake(says(said)) as one, open_fake() as other, open_hop(one, other) as front:
        with trio.fail_after(120):
            while not one.asked:
                assert texts_of((await front.chat(stream=True)).text) == "Hello"
        assert other.asked


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("status", [200, 404])
async def test_an_answer_that_was_encoded_unasked_is_no_body(
    is_streamed: bool, status: int
) -> None:
    """Nobody could read it: the client is not told how it is encoded."""
    said = whole(gzip.compress(json.dumps(TOO_LONG).encode()), status, content_encoding="gzip")
    async with open_fake(says(said)) as fake, open_hop(fake) as front:
        answer = await front.chat(stream=is_streamed)

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "remote_protocol")
    assert "gzip" in answer.json()["error"]["message"]


async def test_a_refusal_that_is_no_json_becomes_an_error_that_quotes_it() -> None:
    page = b"<html><body>Not Found</body></html>" + b" filler" * 1000
    said = whole(page, 404, content_type="text/html")
    async with open_fake(says(said)) as fake, open_hop(fake) as front:
        answers = [await front.chat(stream=is_streamed) for is_streamed in (True, False)]

    for answer in answers:
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json")
        message = answer.json()["error"]["message"]
        assert "Not Found" in message
        assert len(message) < 600


async def test_text_behind_a_finish_does_not_pass_on() -> None:
    said = events(
        chat_chunk("ab"),
        chat_chunk(finish="stop"),
        chat_chunk("AFTER"),
        chat_chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 1}),
    )
    async with open_fake(streams(said)) as fake, open_hop(fake) as front:
        answer = await front.chat(stream=True)

    assert texts_of(answer.text) == "ab"
    assert "usage" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_an_empty_finish_reason_ends_nothing() -> None:
    said = events(chat_chunk("Hel", ""), chat_chunk("lo", ""), chat_chunk(finish="stop"))
    async with open_fake(streams(said)) as fake, open_hop(fake) as front:
        answer = await front.chat(stream=True)

    assert answer.content == said


@pytest.mark.parametrize(("choices", "index"), [(1, 1), (2, -1), (0, 4096)])
def test_choices_that_nobody_asked_for_end_the_answer(choices: int, index: int) -> None:
    answer = StreamedAnswer(1 << 16, choices=choices)  # pyright: ignore[reportCallIssue]
    answer.feed(events(chat_chunk(choices=[{"index": index}]), done=False))

    assert isinstance(answer.error, RemoteProtocolError)


async def test_an_answer_of_ever_new_choices_ends() -> None:
    async def grow(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD)
        for index in range(1 << 20):
            said = [{"index": index, "delta": {"content": "a"}}]
            await stream.send_all(chunk(events(chat_chunk(choices=said), done=False)))

    async with open_fake(grow) as fake, open_hop(fake) as front:
        answer = await front.chat(stream=True, n=2)

    assert answer.text.count('"index"') == 2
    assert '"code":"remote_protocol"' in answer.text


async def test_an_answer_that_is_refused_goes_with_its_request() -> None:
    """Not with the next look for garbage: six bodies of 63 MB cost 450 MB, and the next six again."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    junk = says(head % 600_000 + b"x" * 600_000)
    async with open_fake(junk) as fake, open_hop(fake, http__queue_max="0") as front:
        gc.collect()
        gc.disable()
        try:
            answer = await front.chat()
            await until(lambda: exchange.KEPT.bytes_held == 0)
            frames = [each for each in gc.get_objects() if isinstance(each, FrameType)]
            held = {each.f_code.co_qualname for each in frames if "body" in each.f_code.co_varnames}
            del frames
        finally:
            gc.enable()

    assert answer.json()["error"]["code"] == "remote_protocol"
    assert WholeAnswer.finish.__qualname__ not in held


async def test_whole_answers_have_one_bound_together() -> None:
    """Those that find no room are refused, and not made again; what is kept is given back at the end."""
    said, sent = whole({"choices": [], "filler": "x" * 600_000}), trio.Event()

    async def hold(asked: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(said[:-2])
        await sent.wait()
        await stream.send_all(said[-2:])

    bound = {"worker__upstream__answers_bytes_max": "1000000"}
    async with (
        open_fake(hold) as one,
        open_fake(hold) as other,
        open_hop(one, other, **bound) as front,
        trio.open_nursery() as nursery,
    ):
        found: list[int] = []

        async def ask() -> None:
            found.append((await front.chat()).status_code)

        nursery.start_soon(ask)
        await until(lambda: exchange.KEPT.bytes_held > 500_000)
        refused = await front.chat()
        sent.set()
        with trio.fail_after(120):
            while not found:
                await trio.sleep(0.01)
        await until(lambda: exchange.KEPT.bytes_held == 0)
        after = await front.chat()

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert "retry-after" in refused.headers
    assert (found, after.status_code) == ([200], 200)


@pytest.mark.parametrize(
    ("head", "drip"),
    [
        (STREAM_HEAD, chunk(b": ping\n\n")),
        (STREAM_HEAD, chunk(b"x")),
        (STREAM_HEAD, chunk(b"data:\n\n")),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
    ],
    ids=["comments", "half an event", "empty events", "a body", "a head"],
)
async def test_what_drips_for_ever_ends(head: bytes, drip: bytes) -> None:
    """It proves that the upstream lives, but brings nothing of the answer."""

    async def answer(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(head)
        while True:
            await stream.send_all(drip)
            await trio.sleep(0.02)

    limits = {
        "worker__upstream__first_byte_timeout_s": "0.5",
        "worker__upstream__stall_timeout_s": "60",
        "router__wait_s": "0",
    }
    async with open_fake(answer) as fake, open_hop(fake, **limits) as front:
        with trio.fail_after(120):
            found = await front.chat(stream=head is STREAM_HEAD)

    assert found.status_code == 503
    assert "has stalled" in found.json()["error"]["message"]


async def test_an_upstream_that_changes_the_protocol_is_no_bug_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
    async with open_fake(says(said)) as fake, open_hop(fake) as front:
        answer = await front.chat()

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "remote_protocol")
    assert not [each for each in caplog.records if each.exc_info or each.levelno > logging.WARNING]


@pytest.mark.parametrize("worked_s", [0.0, 0.25])
async def test_a_request_that_was_in_work_is_not_sent_again_unasked(
    worked_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end at once of a used connection is that of an idle one; a later one is a failed attempt."""
    answers = 0
    if not worked_s:
        # However long this process stalls, the end is one at once.
        monkeypatch.setattr(client, "_AT_ONCE_S", 60.0)

    async def answer(_: Asked, stream: trio.SocketStream) -> None:
        nonlocal answers
        answers += 1
        if answers == 2:
            until_s = trio.current_time() + worked_s
            await until(lambda: trio.current_time() >= until_s)
            await trio.aclose_forcefully(stream)
        else:
            await stream.send_all(whole({"choices": []}))

    async with open_fake(answer) as fake, open_hop(fake, router__wait_s="0") as front:
        statuses = [(await front.chat()).status_code for _ in range(2)]

    assert statuses == ([200, 503] if worked_s else [200, 200])
    assert len(fake.asked) == (2 if worked_s else 3)


async def test_a_request_that_was_cut_off_while_it_was_sent_is_sent_again() -> None:
    """The connection was closed as idle; of a long body only a part had gone out."""
    connections = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        is_first = connections == 1
        await stream.receive_some(65536)
        await stream.send_all(whole({}))
        if is_first:
            await trio.lowlevel.wait_readable(stream.socket)
            await trio.aclose_forcefully(stream)
        while not is_first and await stream.receive_some(1 << 20):
            pass

    async with ask_at(serve) as asked:
        connection, response, _ = await asked.request("POST", "/v1/completions", b"{}", {})
        asked.give(connection, response)
        # The last request is long over.
        await trio.sleep(2 * client._AT_ONCE_S)  # pyright: ignore[reportPrivateUsage]
        connection, response, _ = await asked.request("POST", "/v1/completions", LONG, {})
        connection.close()

    assert (response.status, connections) == (200, 2)


async def test_a_refusal_that_comes_before_all_of_a_long_body_is_sent_is_the_answer() -> None:
    """Who refuses it does not read it: the end of the connection cuts the body off, not the answer."""

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(whole(TOO_LONG, 413, connection="close"))
        await stream.send_eof()
        await trio.sleep(0.05)
        await trio.aclose_forcefully(stream)

    async with ask_at(serve) as asked:
        connection, response, begun = await asked.request("POST", "/v1/completions", LONG, {})
        connection.close()

    assert (response.status, json.loads(begun)) == (413, TOO_LONG)


@pytest.mark.parametrize("size", [10, 1 << 20])
async def test_a_long_body_waits_for_a_server_that_is_busy_as_a_short_one_does(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its window is closed meanwhile, which the kernel counts as if the machine had vanished."""
    monkeypatch.setattr(client, "_UNACKNOWLEDGED_MS", 200)
    is_free = trio.Event()

    async def serve(stream: trio.SocketStream) -> None:
        await is_free.wait()
        read = 0
        while read < size:
            read += len(await stream.receive_some(1 << 20))
        await stream.send_all(whole({}))

    async with ask_at(serve) as asked, trio.open_nursery() as nursery:
        found: list[int] = []

        async def ask() -> None:
            connection, response, _ = await asked.request(
                "POST", "/v1/completions", b"x" * size, {}
            )
            connection.close()
            found.append(response.status)

        nursery.start_soon(ask)
        await trio.sleep(1)
        is_free.set()

    assert found == [200]

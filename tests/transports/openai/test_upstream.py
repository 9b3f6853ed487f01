"""One upstream behind a worker: what passes, what its failures become, and who is asked then."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.sse import parse_events
from tests.transports.openai.fake import (
    HELLO,
    STREAM_HEAD,
    Asked,
    FakeUpstream,
    Front,
    chat_chunk,
    chunk,
    events,
    open_cluster,
    open_fake,
    open_two,
    says,
    texts_of,
    whole,
)
from trinamo.runtime.protocol.openai.fields import ENDPOINTS
from trinamo.transports.openai import client

REFUSAL = {"error": {"message": "top_p must be in (0, 1]", "type": "BadRequestError", "code": 400}}


async def test_the_body_reaches_the_upstream_as_the_client_wrote_it() -> None:
    body = (
        b'{ "model": "m", "messages":[{"role":"user","content":[{"type":"image_url",'
        b'"image_url":{"url":"data:x"}}]}], "top_k":3,"n" : 2, "tools":[],"logprobs":true,'
        b'"chat_template_kwargs":{"enable_thinking":false},"stream":true,"seed":1e3}'
    )
    async with open_fake() as fake, open_cluster(fake.url) as front:
        headers = {"content-type": "application/json", "x-request-id": "mine"}
        answer = await front.client.post("/v1/chat/completions", content=body, headers=headers)

    assert answer.content == HELLO
    assert answer.headers["x-request-id"] == "mine"
    (asked,) = fake.asked
    assert asked.body == body
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["x-request-id"].startswith("mine")


async def test_what_it_makes_of_a_number_of_choices_that_no_message_takes_it_says() -> None:
    async with open_fake(says(whole(REFUSAL, 400))) as fake, open_cluster(fake.url) as front:
        answer = await front.chat(n=2**64)

    assert (answer.status_code, answer.json()) == (400, REFUSAL)
    assert fake.asked[0].json["n"] == 2**64


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "m", "input": ["a", "b"], "encoding_format": "base64"}),
        ("/v1/responses", {"model": "m", "input": "hi", "store": False}),
        ("/v1/completions", {"model": "m", "prompt": "hi", "suffix": "!", "best_of": 2}),
        ("/v1/messages", {"model": "m", "messages": [{"role": "x"}], "thinking": {"a": 1}}),
        ("/v1/messages/count_tokens", {"model": "m", "messages": [], "stream": True}),
        ("/tokenize", {"model": "m", "prompt": "hi", "stream": True}),
        ("/detokenize", {"model": "m", "tokens": [1]}),
    ],
)
async def test_other_endpoints_pass_as_well(path: str, body: dict[str, Any]) -> None:
    said = {"object": "list", "model": "m", "data": [{"x": 1.5}], "usage": {"prompt_tokens": 4}}
    async with open_fake(says(whole(said))) as fake, open_cluster(fake.url) as front:
        answer = await front.client.post(path, json=body)

    assert (answer.status_code, answer.json()) == (200, said)
    (asked,) = fake.asked
    assert (asked.path, asked.json) == (path, body)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_client_directs_an_upstream_s_transfers(path: str) -> None:
    body = {"model": "m", "vllm_xargs": {"kv_transfer_params": {"remote_host": "10.0.0.1"}}}
    async with open_fake() as fake, open_cluster(fake.url) as front:
        answer = await front.client.post(path, json=body)

    assert answer.status_code == 400
    assert "vllm_xargs.kv_transfer_params" in answer.json()["error"]["message"]
    assert fake.asked == []


def named(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


MESSAGE = (
    named("message_start", message={"id": "msg_1", "usage": {"input_tokens": 5}})
    + named("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"})
    + named("ping")
)


@pytest.mark.parametrize("is_whole", [True, False])
async def test_messages_pass_event_by_event_up_to_their_own_end(is_whole: bool) -> None:
    """One without `message_stop` was cut, and ends with an error as Anthropic's clients read it."""
    end = named("message_delta", usage={"input_tokens": 5, "output_tokens": 3})
    end += named("message_stop")

    async def answer(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD + chunk(MESSAGE))
        if is_whole:
            await stream.send_all(chunk(end) + chunk(b""))
        await stream.aclose()

    async with open_fake(answer) as fake, open_cluster(fake.url) as front:
        body = {"model": "m", "messages": [], "max_tokens": 9, "stream": True}
        told = await front.client.post("/v1/messages", json=body)

    assert told.content.startswith(MESSAGE)
    rest = told.content.removeprefix(MESSAGE)
    if is_whole:
        assert rest == end
    else:
        (error,) = parse_events(rest)
        assert (error.event, json.loads(error.data)["type"]) == ("error", "error")


async def test_embeddings_are_never_streamed_whatever_the_body_says() -> None:
    said = {"object": "list", "model": "m", "data": [{"x": 1.5}]}
    body = {"model": "m", "input": "hi", "stream": True}
    form = whole(said, content_type="application/json")
    async with open_fake(says(form)) as fake, open_cluster(fake.url) as front:
        answer = await front.client.post("/v1/embeddings", json=body)

    assert (answer.status_code, answer.json()) == (200, said)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_body_that_an_upstream_reads_otherwise_is_the_clients_fault_and_no_ones_else(
    is_streamed: bool,
) -> None:
    """Else one client has every upstream passed over: servers in Go take `STREAM` for `stream`.

    What is an answer in the other form is made one of the form that the client asked for.
    """
    body = events(chat_chunk("a"))
    other_form = (
        whole({"object": "chat.completion"}, content_type="application/json")
        if is_streamed
        else whole(body, content_type="text/event-stream")
    )
    async with open_two() as (front, one, other):
        one.answer = other.answer = says(other_form)
        answer = await front.chat(stream=is_streamed, STREAM=not is_streamed)
        if is_streamed:
            assert answer.status_code == 400
            assert "stream" in answer.json()["error"]["message"]
        else:
            assert answer.json()["choices"][0]["message"]["content"] == "a"
        assert len(one.asked) + len(other.asked) == 1


async def test_the_client_sees_the_name_that_it_asked_for() -> None:
    """The upstream is asked by its own name, and answers carry ours."""
    async with (
        open_fake() as fake,
        open_cluster(fake.url, model="m", model_name="chat") as front,
    ):
        answer = await front.chat(model="chat", stream=True)

    assert fake.asked[0].json["model"] == "m"
    names = [
        json.loads(each[6:])["model"] for each in answer.text.splitlines() if '"model"' in each
    ]
    assert names == ["chat"] * 3


async def test_a_refusal_passes_with_its_status_and_words() -> None:
    async with open_fake(says(whole(REFUSAL, 422))) as fake, open_cluster(fake.url) as front:
        streamed = await front.chat(stream=True)
        answer = await front.chat()

    for each in (streamed, answer):
        assert (each.status_code, each.json()) == (422, REFUSAL)


@pytest.mark.parametrize(
    ("status", "expected", "code"),
    [(429, 429, "rate_limited"), (503, 503, "overloaded")],
)
async def test_too_many_requests_are_passed_on_with_the_time_to_wait(
    status: int, expected: int, code: str
) -> None:
    refusal = whole({"error": {"message": "full"}}, status, retry_after="17")
    async with open_fake(says(refusal)) as fake, open_cluster(fake.url) as front:
        answer = await front.chat(stream=True)

    assert (answer.status_code, answer.headers["retry-after"]) == (expected, "17")
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize(
    "failure",
    [
        whole(b"Internal Server Error", 500),
        whole({"error": {"message": "loading"}}, 503),
        whole({"error": {"message": "slow down"}}, 429),
        whole({"error": {"message": "no such key"}}, 401),
        STREAM_HEAD + b"0\r\n\r\n",
        STREAM_HEAD + chunk(b": ping\n\n") + chunk(b'data: {"cho'),
        STREAM_HEAD + chunk(b'data: {"error": {"message": "died", "code": 500}}\n\n'),
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"SSH-2.0-OpenSSH_9.7\r\n",
        b"",
    ],
    ids=["500", "503", "429", "401", "nothing", "half", "error", "head", "ssh", "closed"],
)
async def test_what_fails_before_the_first_token_is_asked_of_another(failure: bytes) -> None:
    async def fail(_: Asked, stream: trio.SocketStream) -> None:
        if failure:
            await stream.send_all(failure)
        await stream.aclose()

    async with open_two() as (front, one, other):
        one.answer = fail
        with trio.fail_after(120):
            while not one.asked:
                answer = await front.chat(stream=True)
                assert (answer.status_code, answer.content) == (200, HELLO)
        assert other.asked


async def test_an_upstream_that_dies_in_the_middle_ends_the_answer_with_an_error() -> None:
    async def die(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD + chunk(events(chat_chunk("Hel"), done=False)))
        await stream.aclose()

    async with open_fake(die) as fake, open_cluster(fake.url) as front:
        answer = await front.chat(stream=True)

    *_, last = answer.text.strip().splitlines()
    assert texts_of(answer.text) == "Hel"
    assert json.loads(last[6:])["error"]["code"] == "disconnected"


async def test_a_silent_upstream_is_given_up() -> None:
    async def stall(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD + chunk(events(chat_chunk("Hel"), done=False)))
        await trio.sleep_forever()

    limits = {"stall_timeout_s": 0.3, "first_byte_timeout_s": 30.0}
    async with open_fake(stall) as fake, open_cluster(fake.url, **limits) as front:
        answer = await front.chat(stream=True)

    assert texts_of(answer.text) == "Hel"
    assert "has stalled" in answer.text


@pytest.mark.check
async def test_comments_keep_an_answer_alive() -> None:
    async def ping(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD)
        for _number in range(4):
            await trio.sleep(2)
            await stream.send_all(chunk(b": ping\n\n"))
        await stream.send_all(chunk(HELLO) + b"0\r\n\r\n")

    async with open_fake(ping) as fake, open_cluster(fake.url, stall_timeout_s=6) as front:
        answer = await front.chat(stream=True)

    assert answer.content == HELLO


async def test_a_client_that_leaves_ends_the_request_at_the_upstream() -> None:
    gone = trio.Event()

    async def wait_gone(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD + chunk(events(chat_chunk("Hel"), done=False)))
        assert await stream.receive_some(1) == b""
        gone.set()
        await stream.aclose()

    async with open_fake(wait_gone) as fake, open_cluster(fake.url) as front:
        stream = await trio.open_tcp_stream("127.0.0.1", int(front.url.rpartition(":")[2]))
        body = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        async with stream:
            await stream.send_all(head.encode() + body)
            assert b"200" in await stream.receive_some(1024)
        with trio.fail_after(120):
            await gone.wait()


async def test_connections_are_kept_and_a_closed_one_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_IDLE_S", 600.0)
    ports = set()

    async def answer(_: Asked, stream: trio.SocketStream) -> None:
        ports.add(stream.socket.getpeername()[1])
        await stream.send_all(whole({"choices": []}))
        if len(fake.asked) == 3:
            await stream.aclose()

    async with open_fake(answer) as fake, open_cluster(fake.url) as front:
        for _ in range(5):
            assert (await front.chat()).status_code == 200

    assert len(ports) == 2


async def passed_over(front: Front, upstream: FakeUpstream) -> int:
    """Ask until nobody is sent to `upstream` any more; how often it was asked by then."""
    with trio.fail_after(120):
        while True:
            before = len(upstream.asked)
            for _ in range(6):
                assert (await front.chat(stream=True)).content == HELLO
            if len(upstream.asked) == before:
                return before


async def test_nobody_is_sent_to_an_upstream_that_is_not_well() -> None:
    async with open_two() as (front, one, other):
        one.health = 503
        before = await passed_over(front, one)
        one.health = 200
        with trio.fail_after(120):
            while len(one.asked) == before:
                await front.chat(stream=True)
        assert other.asked


async def test_nobody_is_sent_to_an_upstream_that_was_restarted_with_another_model() -> None:
    """Its 404 would pass for the client's own mistake."""
    async with open_two() as (front, one, other):
        listed, one.models = one.models, [{"id": "another"}]
        before = await passed_over(front, one)
        one.models = listed
        with trio.fail_after(120):
            while len(one.asked) == before:
                await front.chat(stream=True)
        assert other.asked


async def test_an_answer_without_a_bound_is_given_up() -> None:
    async def flood(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _number in range(1000):
            await stream.send_all(chunk(b" " * 65536))

    async with (
        open_fake(flood) as fake,
        open_cluster(fake.url, answer_bytes_max=1 << 20) as front,
    ):
        answer = await front.chat()

    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "remote_protocol"


async def test_a_long_answer_comes_whole() -> None:
    said = {"data": [{"embedding": [0.125] * 200_000}]}
    async with open_fake(says(whole(said))) as fake, open_cluster(fake.url) as front:
        answer = await front.client.post("/v1/embeddings", json={"model": "m", "input": "a"})

    assert answer.json() == said

"""Servers that always stream, and servers that never do: a client gets what it asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.sse import parse_events
from tests.transports.openai.fake import (
    HELLO,
    chat_chunk,
    events,
    open_cluster,
    open_fake,
    says,
    streams,
    whole,
)
from trinamo.runtime.errors import (
    DisconnectedError,
    RateLimitedError,
    RemoteProtocolError,
    UpstreamError,
)
from trinamo.transports.openai.conversions import events_of, whole_of

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
CALL = {"name": "f", "arguments": '{"a": 1}'}


def piece(index: int, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish}


def chunk_of(*choices: Any, **more: Any) -> dict[str, Any]:
    return chat_chunk(**more) | {"choices": list(choices)}


def calling(index: int, **call: Any) -> dict[str, Any]:
    return piece(0, tool_calls=[{"index": index, **call}])


CHUNKS = [
    chunk_of(piece(0, role="assistant", content=""), piece(1, role="assistant")),
    chunk_of(piece(0, content="Hel"), piece(1, reasoning_content="Hm")),
    chunk_of(piece(0, content="lo") | {"logprobs": {"content": [{"token": "lo"}]}}),
    chunk_of(calling(0, id="c1", type="function", function={"name": "f", "arguments": ""})),
    chunk_of(calling(0, function={"arguments": '{"a"'})),
    chunk_of(calling(0, function={"arguments": ": 1}"})),
    chunk_of(piece(1, "length", reasoning_content="m")),
    chunk_of(piece(0, "tool_calls")),
    chunk_of(usage=USAGE),
]


def test_a_streamed_chat_becomes_the_whole_one() -> None:
    made = json.loads(whole_of(events(*CHUNKS)) or b"null")
    assert (made["object"], made["id"], made["usage"]) == ("chat.completion", "chatcmpl-up", USAGE)
    first, second = made["choices"]
    assert first["message"]["content"] == "Hello"
    assert first["message"]["tool_calls"] == [{"id": "c1", "type": "function", "function": CALL}]
    assert (first["finish_reason"], first["logprobs"]) == (
        "tool_calls",
        {"content": [{"token": "lo"}]},
    )
    assert second["message"] == {"role": "assistant", "content": None, "reasoning_content": "Hmm"}
    assert second["finish_reason"] == "length"


def test_a_whole_chat_becomes_a_streamed_one_and_that_the_whole_one_again() -> None:
    body = whole_of(events(*CHUNKS))
    assert body is not None
    made = events_of(body)
    assert made is not None
    assert made.endswith(b"data: [DONE]\n\n")
    assert json.loads(whole_of(made) or b"null") == json.loads(body)


def test_a_completion_goes_both_ways() -> None:
    lists = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [0]}
    chunks = [
        {"object": "text_completion", "id": "c", "choices": [{"index": 0, "text": "a", "logprobs": lists}]},
        {"object": "text_completion", "id": "c", "choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]},
    ]  # fmt: skip
    body = whole_of(events(*chunks, done=False))
    assert body is not None
    (choice,) = json.loads(body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("ab", "stop", ["a"])  # fmt: skip
    assert json.loads(whole_of(events_of(body) or b"") or b"null") == json.loads(body)


def test_of_a_streamed_response_the_last_event_has_all() -> None:
    response = {"id": "resp_1", "object": "response", "output": []}
    told = [{"type": "response.created"}, {"type": "response.completed", "response": response}]
    assert json.loads(whole_of(events(*told, done=False)) or b"null") == response


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"object": "list"}', b"{", b"[" * 100_000])
def test_what_is_no_answer_becomes_no_events(body: bytes) -> None:
    assert events_of(body) is None


def test_events_of_another_api_become_nothing() -> None:
    assert whole_of(events({"type": "message_start"}, done=False)) is None
    assert whole_of(b"") is None


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (events(chat_chunk("Hel"), done=False), DisconnectedError),
        (events(chat_chunk("Hel"), {"error": {"message": "no", "code": 500}}), UpstreamError),
        (events(chat_chunk("Hel"), {"error": {"message": "no", "code": 429}}), RateLimitedError),
        (events({"error": "no"}), UpstreamError),
        (b"data: {\n\n", RemoteProtocolError),
        (events(chunk_of(calling(9, function={}))), RemoteProtocolError),
        (events({"object": "chat.completion.chunk", "choices": [1]}), RemoteProtocolError),
        (events({"object": "chat.completion.chunk", "choices": [{"index": []}]}), RemoteProtocolError),
    ],
)  # fmt: skip
def test_a_stream_that_is_not_whole_is_an_error(body: bytes, error: type[Exception]) -> None:
    """So another upstream may be asked: the client has nothing yet."""
    with pytest.raises(error):
        whole_of(body)


async def test_a_server_that_always_streams_answers_a_client_that_wants_no_stream() -> None:
    async with open_fake(streams(HELLO)) as fake, open_cluster(fake.url) as front:
        answer = await front.chat(stream=False)
        streamed = await front.chat(stream=True)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    assert streamed.content == HELLO


async def test_a_server_that_never_streams_answers_a_client_that_wants_a_stream() -> None:
    body = json.loads(whole_of(events(*CHUNKS)) or b"null") | {"model": "theirs"}
    said = says(whole(body, content_type="application/json"))
    async with open_fake(said) as fake, open_cluster(fake.url, model="m") as front:
        answer = await front.chat(stream=True, n=2)
        whole_one = await front.chat(n=2)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *told, done = [event.data for event in parse_events(answer.content)]
    assert done == "[DONE]"
    first, last = map(json.loads, told)
    assert first["choices"][0]["delta"]["content"] == "Hello"
    assert first["choices"][0]["delta"]["tool_calls"][0] | {"id": "c1"} == {
        "index": 0,
        "id": "c1",
        "type": "function",
        "function": CALL,
    }
    assert [each["finish_reason"] for each in last["choices"]] == ["tool_calls", "length"]
    assert last["usage"] == USAGE
    assert whole_one.json()["choices"] == body["choices"]

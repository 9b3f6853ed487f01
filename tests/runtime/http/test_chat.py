"""Both inference endpoints: what a client gets, and what the engine is asked."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
import trio
import trio.lowlevel

from tests.runtime.http.running import PushEngine
from tests.sse import parse_events
from trinamo.runtime.context import Context
from trinamo.runtime.errors import DisconnectedError, UnavailableError
from trinamo.runtime.protocol.openai.answers import (
    DONE_DATA,
    ChatChunk,
    ChatCompletion,
    Completion,
    ErrorBody,
    Usage,
)
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
    ModelCard,
    SamplingDefaults,
)

# Makes a generator of a function that yields nothing.
NO_DELTAS: list[Delta] = []

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def events(body: bytes) -> list[str]:
    return [event.data for event in parse_events(body)]


async def post(running: Any, path: str, body: Any, **headers: str) -> Any:
    async with running.client() as client:
        return await client.post(path, json=body, headers=headers)


async def test_a_chat_is_answered_whole(serve: Any) -> None:
    running = await serve()
    response = await post(running, "/v1/chat/completions", {"model": "local", **HELLO})
    assert response.status_code == 200
    answer = msgspec.json.decode(response.content, type=ChatCompletion)
    assert answer.choices[0].message.content == "Hello ✓"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage == Usage(5, 4, 9)
    assert (answer.model, answer.object) == ("local", "chat.completion")


async def test_a_chat_is_streamed_in_order_and_ends_with_done(serve: Any) -> None:
    running = await serve()
    response = await post(running, "/v1/chat/completions", {"stream": True, **HELLO})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response.content)
    assert done == DONE_DATA.decode()
    decoded = [msgspec.json.decode(chunk, type=ChatChunk) for chunk in chunks]
    assert [chunk.choices[0].delta.content for chunk in decoded] == ["Hel", "lo", " ✓"]
    assert [chunk.choices[0].finish_reason for chunk in decoded] == [None, None, "stop"]
    assert decoded[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in decoded}) == 1
    assert all("usage" not in json.loads(chunk) for chunk in chunks)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_comes_last_and_only_when_asked_for(serve: Any, path: str) -> None:
    running = await serve()
    question = HELLO if "chat" in path else {"prompt": "hi"}
    body = {"stream": True, "stream_options": {"include_usage": True}, **question}
    response = await post(running, path, body)
    *chunks, usage, done = [json.loads(data) for data in events(response.content)[:-1]] + [None]
    assert done is None
    assert [chunk["usage"] for chunk in chunks] == [None, None, None]
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_completion_is_answered_whole_and_streamed(serve: Any) -> None:
    running = await serve()
    whole = await post(running, "/v1/completions", {"prompt": "hi"})
    assert msgspec.json.decode(whole.content, type=Completion).choices[0].text == "Hello ✓"
    streamed = await post(running, "/v1/completions", {"prompt": ["hi"], "stream": True})
    *chunks, done = events(streamed.content)
    assert done == DONE_DATA.decode()
    decoded = [msgspec.json.decode(chunk, type=Completion) for chunk in chunks]
    assert "".join(chunk.choices[0].text for chunk in decoded) == "Hello ✓"
    assert decoded[-1].choices[0].finish_reason == "stop"


async def test_the_engine_gets_what_the_client_asked(serve: Any) -> None:
    running = await serve()
    body = {
        **HELLO,
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "seed": -3,
        "stop": "END",
        "user": "ignored",
    }
    assert (await post(running, "/v1/chat/completions", body)).status_code == 200
    (request,) = running.engine.requests
    assert request.model == "local"
    assert (request.max_tokens, request.temperature, request.top_p) == (7, 0.0, 0.5)
    assert (request.seed, request.stop) == (-3, ["END"])


@pytest.mark.parametrize("model", [None, ""])
async def test_without_a_name_the_default_model_answers(serve: Any, model: str | None) -> None:
    running = await serve()
    response = await post(running, "/v1/chat/completions", {"model": model, **HELLO})
    assert response.json()["model"] == "local"


async def test_deltas_without_text_are_no_chunks_but_are_counted(serve: Any) -> None:
    async def hold_back(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1], None, 2)
        yield Delta("", [2, 3])
        yield Delta("", [], FinishReason.LENGTH)

    running = await serve(hold_back)
    body = {"stream": True, "stream_options": {"include_usage": True}, **HELLO}
    response = await post(running, "/v1/chat/completions", body)
    chunks = [json.loads(data) for data in events(response.content)[:-1]]
    assert [c["choices"][0]["delta"] for c in chunks[:-1]] == [
        {"role": "assistant", "content": "a"},
        {},
    ]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_deltas_that_come_at_once_travel_together(serve: Any) -> None:
    """What an engine hands over in one list is one piece; the last event goes out with the end."""
    running = await serve()
    many = [Delta("x", [i]) for i in range(50)]
    engine = PushEngine([many, [Delta("", [], FinishReason.STOP)]])
    running.service.model_manager().add_model(ModelCard(name="pushed", endpoint="a/b/c"), engine)
    stream = await running.connect()
    await stream.send_all(running.post(model="pushed", stream=True))
    received = b""
    with trio.fail_after(120):
        while b"[DONE]" not in received:
            received += await stream.receive_some()
    # Behind the head each piece has a size line.
    pieces = received.partition(b"\r\n\r\n")[2].split(b"\r\ndata: ")[1:]
    assert [piece.count(b"\n\n") for piece in pieces] == [50, 2]
    await stream.aclose()


async def test_the_first_token_is_sent_before_the_second_exists(serve: Any) -> None:
    may_go_on = trio.Event()

    async def wait_between(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("first", [1])
        await may_go_on.wait()
        yield Delta("second", [2], FinishReason.STOP)

    running = await serve(wait_between)
    async with (
        running.client() as client,
        client.stream("POST", "/v1/chat/completions", json={"stream": True, **HELLO}) as response,
    ):
        lines = response.aiter_lines()
        assert "first" in await anext(lines)
        may_go_on.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_early_failure_has_its_real_status(serve: Any, is_streamed: bool) -> None:
    async def refuse(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        for never in NO_DELTAS:
            yield never
        raise UnavailableError("no live instance")

    running = await serve(refuse)
    response = await post(running, "/v1/chat/completions", {"stream": is_streamed, **HELLO})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"] == {
        "message": "no live instance",
        "type": "server_error",
        "param": None,
        "code": "unavailable",
    }


async def test_a_late_failure_is_the_last_event_and_there_is_no_done(serve: Any) -> None:
    async def break_off(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        raise DisconnectedError("the worker went away")

    running = await serve(break_off)
    response = await post(running, "/v1/chat/completions", {"stream": True, **HELLO})
    assert response.status_code == 200
    first, last = events(response.content)
    assert '"a"' in first
    assert msgspec.json.decode(last, type=ErrorBody).error.code == "disconnected"
    await running.wait_quiet()
    assert (
        running.value("requests_total", model="local", endpoint="chat", outcome="disconnected") == 1
    )


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_without_a_finish_reason_is_no_whole_answer(
    serve: Any, is_streamed: bool
) -> None:
    async def cut_short(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])

    running = await serve(cut_short)
    response = await post(running, "/v1/chat/completions", {"stream": is_streamed, **HELLO})
    assert response.status_code == (200 if is_streamed else 500)
    assert '"code":"engine"' in response.text
    assert "[DONE]" not in response.text


async def test_the_generator_is_read_to_its_end(serve: Any) -> None:
    """Left at the finish reason, a stream would be killed before its Sentinel."""
    ended: list[bool] = []

    async def then_end(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1], FinishReason.STOP)
        await trio.lowlevel.checkpoint()
        ended.append(True)

    running = await serve(then_end)
    for is_streamed in (True, False):
        await post(running, "/v1/chat/completions", {"stream": is_streamed, **HELLO})
    assert ended == [True, True]


async def test_the_client_s_request_id_is_echoed_without_unsafe_characters(serve: Any) -> None:
    running = await serve()
    response = await post(
        running,
        "/v1/chat/completions",
        HELLO,
        **{"x-request-id": "abc-1.2:3_<script>" + "y" * 500},
    )
    echoed = response.headers["x-request-id"]
    assert echoed.startswith("abc-1.2:3_scripty")
    assert len(running.engine.contexts[0].id) <= 128


async def test_a_repeated_request_id_is_unique_inside(serve: Any) -> None:
    """A worker remembers cancelled ids: a client must not cancel its next request with one."""
    running = await serve()
    for _ in range(2):
        response = await post(running, "/v1/chat/completions", HELLO, **{"x-request-id": "same"})
        assert response.headers["x-request-id"] == "same"
    first, second = running.engine.contexts
    assert first.id != second.id


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"", None, "not valid JSON"),
        (b"{", None, "not valid JSON"),
        (b'{"x": ' + b"[" * 100_000, None, "not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', None, "not valid JSON"),
        (b"[]", None, "the body is wrong"),
        (b"{}", "messages", "'messages' is missing"),
        (b'{"messages": []}', "messages", "at least one message"),
    ],
)
async def test_a_bad_body_is_a_400_in_openai_s_form(
    serve: Any, body: bytes, param: str | None, message: str
) -> None:
    running = await serve()
    async with running.client() as client:
        response = await client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
    assert running.engine.requests == []
    assert (
        running.value("requests_total", model="unknown", endpoint="chat", outcome="invalid_request")
        == 1
    )


async def test_an_unknown_model_is_a_404_that_lists_the_models(serve: Any) -> None:
    running = await serve()
    response = await post(running, "/v1/chat/completions", {"model": "nope", **HELLO})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "local" in error["message"]


async def test_requests_over_the_limit_are_told_so(serve: Any) -> None:
    async def sleep(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        for never in NO_DELTAS:
            yield never
        await trio.sleep_forever()

    running = await serve(sleep, requests_max=1, queue_max=0)
    stream = await running.connect()
    await stream.send_all(running.post())
    await running.wait_for(lambda: running.engine.running == 1)
    response = await post(running, "/v1/chat/completions", HELLO)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    await stream.aclose()
    await running.wait_quiet()


@pytest.mark.parametrize(
    "content_type", ["text/plain", "text/plain;charset=UTF-8", "application/jsonx", "", None]
)
async def test_what_does_not_call_itself_json_is_a_415(
    serve: Any, content_type: str | None
) -> None:
    """What a page of another origin can send without being asked (a blind request forgery)."""
    running = await serve()
    headers = {} if content_type is None else {"content-type": content_type}
    async with running.client() as client:
        response = await client.post(
            "/v1/completions", content=b'{"prompt": "hi"}', headers=headers
        )
        asked = await client.options(
            "/v1/completions",
            headers={
                "origin": "http://evil.example",
                "access-control-request-method": "POST",
                "access-control-request-headers": "content-type",
            },
        )
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"
    assert asked.status_code == 405
    assert not [name for name in asked.headers if name.startswith("access-control")]
    assert running.engine.requests == []
    await running.wait_quiet()


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=utf-8", "application/json;"]
)
async def test_json_may_name_its_charset(serve: Any, content_type: str) -> None:
    running = await serve()
    async with running.client() as client:
        response = await client.post(
            "/v1/completions", content=b'{"prompt": "hi"}', headers={"content-type": content_type}
        )
    assert response.status_code == 200


@pytest.mark.parametrize("said", [[7, 7, 7], [2, 0, 7]])
async def test_the_prompt_s_length_is_what_the_engine_said_last(
    serve: Any, said: list[int]
) -> None:
    async def engine(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        for number, prompt_tokens in enumerate(said):
            reason = FinishReason.STOP if number == 2 else None
            yield Delta("a", [number], reason, prompt_tokens)

    running = await serve(engine)
    async with running.client() as client:
        answer = await client.post("/v1/chat/completions", json=HELLO)
    assert answer.json()["usage"]["prompt_tokens"] == 7
    await running.wait_quiet()
    assert running.value("input_tokens_total", model="local", endpoint="chat") == 7


@pytest.mark.parametrize("policy", ["warn", "ignore", "refuse"])
async def test_a_field_that_nobody_knows_is_told_of_as_configured(
    serve: Any, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    running = await serve(unknown_fields=policy)
    answer = await post(running, "/v1/chat/completions", {**HELLO, "min_tokn": 1, "user": "me"})
    told = "min_tokn (did you mean min_tokens?)"
    assert answer.headers.get("x-trinamo-unknown-fields") == (told if policy == "warn" else None)
    assert (told in caplog.text) == (policy == "warn")
    if policy == "refuse":
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (
            400,
            "min_tokn",
            "invalid_request",
        )
        assert told in error["message"]
        assert running.engine.requests == []
    else:
        assert answer.json()["choices"][0]["message"]["content"] == "Hello ✓"
    plain = await post(running, "/v1/chat/completions", {**HELLO, "user": "me"})
    assert plain.status_code == 200
    assert "x-trinamo-unknown-fields" not in plain.headers


FLAT: Any = {"type": "function", "name": "f"}
BESIDE: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {**HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("responses", {"input": "a", "tools": [FLAT]}),
    (
        "messages",
        {
            "messages": HELLO["messages"],
            "max_tokens": 9,
            "tools": [{"name": "f", "input_schema": {}}],
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), BESIDE, ids=[path for path, _ in BESIDE])
async def test_tools_that_other_servers_run_are_left_out_beside_functions(
    serve: Any, path: str, body: dict[str, Any]
) -> None:
    """Or refused, as configured; and where there is no function, whatever is configured."""
    theirs: Any = [{"type": "web_search_2\n"}, {"type": "local_shell"}, {"type": "local_shell"}]
    mixed = body | {"tools": [theirs[0], *body["tools"], *theirs[1:]]}
    for policy in ("drop", "refuse"):
        running = await serve(server_tools=policy)
        answer = await post(running, f"/v1/{path}", mixed)
        if policy == "refuse":
            assert answer.status_code == 400
            assert "'tools[0].type' is 'web_search_2" in answer.json()["error"]["message"]
        else:
            assert answer.headers["x-trinamo-dropped-tools"] == "web_search_2?, local_shell"
            (tool,) = json.loads(running.engine.requests[0].tools)
            assert tool["function"]["name"] == "f"
        plain = await post(running, f"/v1/{path}", body)
        assert (plain.status_code, plain.headers.get("x-trinamo-dropped-tools")) == (200, None)
        alone = await post(running, f"/v1/{path}", body | {"tools": theirs})
        assert alone.status_code == 400


@pytest.mark.parametrize("policy", ["warn", "ignore"])
async def test_what_holds_an_answer_to_a_form_is_never_passed_over(serve: Any, policy: str) -> None:
    running = await serve(unknown_fields=policy)
    manager = running.service.model_manager()
    manager.add_model(ModelCard(name="bare", endpoint="a/b/d"), running.engine)
    for name, value in (("guided_choice", ["a"]), ("regex", "a"), ("structural_tag", "{}")):
        answer = await post(
            running, "/v1/chat/completions", {**HELLO, "model": "bare", name: value}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert running.engine.requests == []


async def test_what_a_request_leaves_out_is_as_the_model_s_card_says(serve: Any) -> None:
    running = await serve()
    card = ModelCard(name="cool", endpoint="a/b/d", sampling=SamplingDefaults(temperature=0.2))
    running.service.model_manager().add_model(card, running.engine)
    for body in ({"model": "cool"}, {"model": "cool", "temperature": 0.7}, {}):
        await post(running, "/v1/chat/completions", {**HELLO, **body})
    assert [each.temperature for each in running.engine.requests] == [0.2, 0.7, 1.0]


async def test_a_bound_that_a_request_leaves_out_is_the_model_s(serve: Any) -> None:
    """Of chats and responses; -1 is none, and no answer is shorter than it must be."""
    running = await serve()
    card = ModelCard(
        name="brief",
        endpoint="a/b/d",
        features=["end_tokens"],
        sampling=SamplingDefaults(max_tokens=600),
    )
    running.service.model_manager().add_model(card, running.engine)

    async def bound(path: str, **body: Any) -> int | None:
        await post(running, path, {"model": "brief", **body})
        found = running.engine.requests[-1].max_tokens
        assert found is None or isinstance(found, int)
        return found

    chat = "/v1/chat/completions"
    assert await bound(chat, **HELLO) == 600
    assert await bound(chat, **HELLO, max_tokens=7) == 7
    assert await bound(chat, **HELLO, max_completion_tokens=-1) is None
    assert await bound(chat, **HELLO, ignore_eos=True, min_tokens=601) == 601
    assert await bound("/v1/responses", input="hi") == 600
    assert await bound("/v1/responses", input="hi", max_output_tokens=7) == 7
    assert await bound("/v1/responses", input="hi", ignore_eos=True, min_tokens=601) == 601
    assert await bound("/v1/completions", prompt="hi") == 16
    async with running.client() as client:
        models = (await client.get("/v1/models")).json()["data"]
    told = {each["id"]: each.get("default_parameters") for each in models}
    assert told["brief"] == {"max_tokens": 600}
    assert told["local"] is None

"""`/v1/messages` of own engines, as whoever reads its answers and its events meets it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.dialects.messages import check_events, fold_events
from tests.runtime.http.dialects.test_responses import (
    CALL,
    end_without_a_reason,
    fail_behind_the_end,
    lose_the_worker,
    says,
)
from tests.runtime.http.running import on_every_server
from tests.sse import parse_events
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import OverloadedError
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest, Task

PATH = "/v1/messages"
HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}


async def post(running: Any, path: str = PATH, headers: Any = None, **body: Any) -> Any:
    body = {"model": "local", "messages": HI, "max_tokens": 9} | body
    async with running.client() as client:
        return await client.post(
            path, json=body, headers={"anthropic-version": "2023-06-01"} | (headers or {})
        )


async def read_events(running: Any, **body: Any) -> list[dict[str, Any]]:
    answer = await post(running, stream=True, **body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = parse_events(answer.content)
    told = [json.loads(event.data) for event in events]
    assert [event.event for event in events] == [each["type"] for each in told]
    return told


@on_every_server
async def test_a_message_is_streamed_as_the_page_says(serve: Any) -> None:
    running = await serve()
    events = await read_events(running)
    check_events(events)
    assert [each["type"] for each in events] == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * 3,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 5
    message = fold_events(events)
    assert message["content"] == [{"type": "text", "text": "Hello ✓"}]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("end_turn", 4)
    assert running.value("requests_total", model="local", endpoint="messages", outcome="success")
    await running.wait_quiet()


async def test_a_whole_message_has_what_a_chat_has(serve: Any) -> None:
    running = await serve()
    answer = await post(running, system="Be short.", top_k=3, stop_sequences=["\n"])
    assert answer.status_code == 200
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    message = answer.json()
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "local")
    assert message["content"] == [{"type": "text", "text": "Hello ✓"}]
    assert message["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 4,
    }
    asked = running.engine.requests[0]
    assert [(turn.role, turn.content) for turn in asked.turns] == [
        ("system", "Be short."),
        ("user", "hi"),
    ]
    assert (asked.max_tokens, asked.top_k, asked.stop) == (9, 3, ["\n"])
    await running.wait_quiet()


async def test_tools_are_used_and_their_results_go_in_again(serve: Any) -> None:
    running = await serve(says("Let me see. ", CALL[:20], CALL[20:]))
    events = await read_events(running, tools=[WEATHER], tool_choice={"type": "any"})
    check_events(events)
    message = fold_events(events)
    text, use = message["content"]
    assert (text["text"], message["stop_reason"]) == ("Let me see. ", "tool_use")
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "weather", {"place": "Bern"})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "rain"}
    history = [
        *HI,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    await post(running, messages=history, tools=[WEATHER])
    assert running.engine.requests[0].tool_choice == "required"
    turns = running.engine.requests[1].turns
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "user"]
    assert (turns[2].tool_call_id, turns[2].content) == (use["id"], "rain")
    await running.wait_quiet()


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (Delta("a", [1], FinishReason.STOP, stop_string="END"), ("stop_sequence", "END")),
        (Delta("a", [1], FinishReason.LENGTH), ("max_tokens", None)),
        (Delta("a", [1], FinishReason.STOP), ("end_turn", None)),
    ],
)
async def test_an_answer_says_why_it_ended(serve: Any, last: Delta, told: Any) -> None:
    async def generate(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield last

    running = await serve(generate)
    message = (await post(running)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == told
    message = fold_events(await read_events(running))
    assert (message["stop_reason"], message["stop_sequence"]) == told


async def test_a_turn_of_an_assistant_that_stands_last_is_gone_on_with(serve: Any) -> None:
    running = await serve()
    await post(running, messages=[*HI, {"role": "assistant", "content": "He"}])
    assert running.engine.requests[0].continue_final_message


async def test_an_assistant_s_turn_may_have_no_content(serve: Any) -> None:
    running = await serve()
    await post(running, messages=[*HI, {"role": "assistant", "content": None}, *HI])
    assert [turn.content for turn in running.engine.requests[0].turns] == ["hi", "", "hi"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "user", "content": None}]}, "'messages[0].content' is missing"),
        ({"messages": [{"role": "system", "content": "a"}]}, "'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search_20250305"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "'x'"),
        ({"stop_sequences": [""]}, "'stop_sequences' holds an empty string"),
        ({"temperature": 3}, "temperature"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)
async def test_what_cannot_be_is_refused_in_anthropic_s_form(
    serve: Any, body: dict[str, Any], words: str
) -> None:
    running = await serve()
    answer = await post(running, **body)
    told = answer.json()
    assert (answer.status_code, told["type"]) == (400, "error")
    assert told["error"]["type"] == "invalid_request_error"
    assert words in told["error"]["message"]
    assert not running.engine.requests


async def test_errors_have_the_type_of_their_status(serve: Any, tmp_path: Path) -> None:
    async def refuse(request: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        if request.messages:
            raise OverloadedError("full", bound="x", value=1)
        yield Delta()

    keys = tmp_path / "keys"
    keys.write_text("alice: secret-of-alice\n")
    running = await serve(refuse, api_keys_file=str(keys), queue_max=0)
    missing = await post(running)
    assert (missing.status_code, missing.json()["error"]["type"]) == (401, "authentication_error")
    key = {"x-api-key": "secret-of-alice"}
    unknown = await post(running, headers=key, model="other")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    full = await post(running, headers=key)
    assert (full.status_code, full.json()["error"]["type"]) == (503, "overloaded_error")
    assert full.json()["request_id"].startswith(full.headers["request-id"])
    async with running.client() as client:
        models = await client.get("/v1/models", headers=key)
        assert models.status_code == 200


@pytest.mark.parametrize("engine", [lose_the_worker, end_without_a_reason, fail_behind_the_end])
async def test_a_cut_message_does_not_look_whole(serve: Any, engine: Any) -> None:
    running = await serve(engine)
    events = await read_events(running)
    check_events(events)
    assert events[-1]["type"] == "error"
    assert "message_stop" not in {each["type"] for each in events}
    await running.wait_quiet()


async def test_a_client_that_leaves_ends_its_message(serve: Any) -> None:
    async def one_then_sleep(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        await trio.sleep_forever()

    running = await serve(one_then_sleep)
    stream = await running.connect()
    await stream.send_all(running.post(PATH, messages=HI, max_tokens=9, stream=True))
    assert await stream.receive_some()
    await stream.aclose()
    await running.wait_for(lambda: running.engine.running == 0)
    assert running.engine.contexts[0].kill_reason is Reason.CLIENT_DISCONNECT
    await running.wait_quiet()


async def test_tokens_of_a_message_are_counted(serve: Any) -> None:
    async def tokenize(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
        assert request.task is Task.TOKENIZE
        yield Delta("", [], FinishReason.STOP, 3, prompt_token_ids=[7, 8, 9])

    running = await serve(tokenize)
    answer = await post(running, f"{PATH}/count_tokens", tools=[WEATHER], stream=True)
    assert answer.json() == {"input_tokens": 3}
    assert running.engine.requests[0].tools
    await running.wait_quiet()

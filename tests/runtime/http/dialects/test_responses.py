"""`/v1/responses` of own engines, as OpenAI's client and whoever reads its events meet it."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import openai
import pydantic
import pytest
import trio

from tests.dialects.responses import ENDS, check_events, fold_events
from tests.runtime.http.running import on_every_server
from tests.runtime.http.test_clients import leaves_generators, trio_client
from tests.sse import parse_events
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import DisconnectedError, RequestError
from trinamo.runtime.protocol.openai.answers import Usage
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
    TokenLogprob,
)
from trinamo.runtime.protocol.openai.responses import ResponsesRequest
from trinamo.runtime.protocol.openai.responses_answer import ResponsesAnswer

PATH = "/v1/responses"
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Bern"}}</tool_call>'
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": False,
}


class Person(pydantic.BaseModel):
    name: str
    age: int


def says(*texts: str, reason: FinishReason = FinishReason.STOP) -> Any:
    """An engine that answers so."""

    async def generate(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        for number, text in enumerate(texts):
            told = [TokenLogprob(text.encode(), -0.5, [(b"x", -1.5)])]
            is_last = number == len(texts) - 1
            yield Delta(text, [number], reason if is_last else None, 0 if number else 5, told)

    return generate


async def read_events(running: Any, **body: Any) -> list[dict[str, Any]]:
    async with running.client() as client:
        answer = await client.post(PATH, json={"model": "local", "stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = parse_events(answer.content)
    told = [json.loads(event.data) for event in events]
    assert [event.event for event in events] == [each["type"] for each in told]
    return told


@on_every_server
async def test_a_response_is_streamed_as_the_page_says(serve: Any) -> None:
    running = await serve()
    events = await read_events(running, input="hi")
    check_events(events)
    whole = fold_events(events)
    assert [each["type"] for each in events] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * 3,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    assert whole["output"][0]["content"][0]["text"] == "Hello ✓"
    assert whole["usage"]["total_tokens"] == 9
    assert running.value("requests_total", model="local", endpoint="responses", outcome="success")
    await running.wait_quiet()


@leaves_generators
async def test_the_official_client_reads_whole_and_streamed_responses(serve: Any) -> None:
    running = await serve()
    async with trio_client(running) as client:
        whole = await client.responses.create(
            model="local", input="hi", instructions="be short", max_output_tokens=9
        )
        assert (whole.output_text, whole.status, whole.instructions) == (
            *("Hello ✓", "completed"),
            "be short",
        )
        assert whole.usage is not None
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (5, 4)
        assert whole.usage.input_tokens_details.cached_tokens == 0
        async with client.responses.stream(model="local", input="hi") as stream:
            text = "".join(
                [
                    event.delta
                    async for event in stream
                    if event.type == "response.output_text.delta"
                ]
            )
            final = await stream.get_final_response()
    assert text == final.output_text == "Hello ✓"
    asked = running.engine.requests[0]
    assert [(turn.role, turn.content) for turn in asked.turns] == [
        ("system", "be short"),
        ("user", "hi"),
    ]
    assert asked.max_tokens == 9
    await running.wait_quiet()


@leaves_generators
async def test_the_official_client_parses_what_a_schema_shaped(serve: Any) -> None:
    running = await serve(says('{"name": "Bob", ', '"age": 5}'))
    async with trio_client(running) as client:
        parsed = await client.responses.parse(model="local", input="who?", text_format=Person)
    assert parsed.output_parsed == Person(name="Bob", age=5)
    assert json.loads(running.engine.requests[0].json_schema)["required"] == ["name", "age"]
    await running.wait_quiet()


@leaves_generators
async def test_calls_of_functions_are_items_and_their_outputs_go_in_again(serve: Any) -> None:
    running = await serve(says("Let me see. ", CALL[:20], CALL[20:]))
    async with trio_client(running) as client:
        async with client.responses.stream(
            model="local", input="weather?", tools=[WEATHER], tool_choice="auto"
        ) as stream:
            final = await stream.get_final_response()
        output: list[Any] = list(final.output)
        message, call = output
        assert (message.type, final.output_text) == ("message", "Let me see. ")
        assert (call.type, call.name) == ("function_call", "weather")
        assert json.loads(call.arguments) == {"place": "Bern"}
        history: Any = [
            {"role": "user", "content": "weather?"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            *final.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ]
        await client.responses.create(model="local", input=history, tools=[WEATHER])
    turns = running.engine.requests[1].turns
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]
    assert (turns[1].content, turns[2].tool_call_id) == ("Let me see. ", call.call_id)
    assert json.loads(turns[1].tool_calls)[0]["id"] == call.call_id
    await running.wait_quiet()


async def test_a_history_may_hold_cut_calls_and_turns_without_content(serve: Any) -> None:
    running = await serve()
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": '}
    items: Any = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "go"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": None},
    ]
    async with running.client() as client:
        answer = await client.post(PATH, json={"model": "local", "input": items})
    assert answer.status_code == 200, answer.text
    turns = running.engine.requests[0].turns
    assert [turn.content for turn in turns] == ["go", "", "go", "", ""]
    assert json.loads(turns[3].tool_calls)[0]["function"]["arguments"] == call["arguments"]


@leaves_generators
async def test_an_answer_that_is_cut_at_its_tokens_is_incomplete(serve: Any) -> None:
    running = await serve(says("a", "b", reason=FinishReason.LENGTH))
    async with trio_client(running) as client:
        whole = await client.responses.create(
            model="local", input="hi", include=["message.output_text.logprobs"], top_logprobs=1
        )
        assert whole.status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        part: Any = whole.output[0]
        assert [each.logprob for each in part.content[0].logprobs] == [-0.5, -0.5]
    events = await read_events(running, input="hi")
    check_events(events)
    assert events[-1]["type"] == "response.incomplete"
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [each["logprobs"][0]["token"] for each in deltas] == ["a", "b"]
    await running.wait_quiet()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "at least one"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "supported"),
        ({"input": "a", "conversation": "c"}, "conversation", "supported"),
        ({"input": "a", "background": True}, "background", "supported"),
        ({"input": "a", "max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"input": "a", "messages": [{}]}, "messages", "use input"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", "only 'function'"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"input": "a", "tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type", "'xml'"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, None, "missing"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "'tool'"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "input_image",
        ),
        ({"input": "a", "temperature": 3}, "temperature", "2"),
        ({"input": "a", "top_logprobs": 30}, "top_logprobs", "20"),
        ({"input": "a", "metadata": {"a": 1}}, None, "metadata"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    serve: Any, body: dict[str, Any], param: str | None, words: str
) -> None:
    running = await serve()
    async with running.client() as client:
        answer = await client.post(PATH, json={"model": "local", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert words in error["message"]
    assert param is None or error["param"] == param
    assert not running.engine.requests


async def lose_the_worker(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("a", [1], None, 5)
    raise DisconnectedError("the worker went away")


async def end_without_a_reason(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("a", [1], None, 5)


async def fail_behind_the_end(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("a", [1], FinishReason.STOP, 5)
    raise DisconnectedError("the worker went away")


@pytest.mark.parametrize("engine", [lose_the_worker, end_without_a_reason, fail_behind_the_end])
async def test_a_cut_response_does_not_look_whole(serve: Any, engine: Any) -> None:
    running = await serve(engine)
    events = await read_events(running, input="hi")
    check_events(events)
    assert events[-1]["type"] == "error"
    assert not set(ENDS) & {each["type"] for each in events}
    await running.wait_quiet()


@leaves_generators
async def test_the_client_raises_on_a_response_that_broke(serve: Any) -> None:
    running = await serve(lose_the_worker)
    async with trio_client(running) as client:
        stream = await client.responses.create(model="local", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="the worker went away"):
            async for _ in stream:
                pass
        await stream.close()
    gc.collect()
    await running.wait_quiet()


async def test_a_client_that_leaves_ends_its_response(serve: Any) -> None:
    async def one_then_sleep(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        await trio.sleep_forever()

    running = await serve(one_then_sleep)
    stream = await running.connect()
    await stream.send_all(running.post(PATH, input="hi", stream=True))
    assert await stream.receive_some()
    await stream.aclose()
    await running.wait_for(lambda: running.engine.running == 0)
    assert running.engine.contexts[0].kill_reason is Reason.CLIENT_DISCONNECT
    await running.wait_quiet()


async def test_a_response_keeps_no_more_than_an_answer_may(serve: Any) -> None:
    """Its last events repeat the text, so a stream counts as much as a whole answer does."""
    running = await serve(says(*["a" * 1000] * 50), answer_bytes_max=20_000)
    events = await read_events(running, input="hi")
    check_events(events)
    assert events[-1]["type"] == "error"
    await running.wait_quiet()
    assert running.service.admission.answers.bytes_held == 0


async def test_chats_that_are_off_are_off_in_every_form(serve: Any) -> None:
    running = await serve(enable_chat_endpoints=False)
    async with running.client() as client:
        for path in (PATH, "/v1/messages"):
            answer = await client.post(path, json={"input": "hi"})
            assert answer.json()["error"]["code"] == "unsupported_endpoint"


@pytest.mark.parametrize(
    "where", ['"text":{"x":%s}', '"tools":[{"type":"function","name":"f","parameters":%s}]']
)
def test_what_is_not_nested_too_deep_to_be_read_can_be_written(where: str) -> None:
    """The answer repeats it from a deeper place than it was read in."""

    def write(told: dict[str, Any], frames: int) -> bytes:
        if frames:
            return write(told, frames - 1)
        answer = ResponsesAnswer(told, "a", "m", 1, calls_max=0)
        answer.add_text(Delta("x", finish_reason=FinishReason.STOP))
        return answer.to_body(Usage())

    written = depth = 0
    for depth in range(0, sys.getrecursionlimit(), 7):
        nested = '{"a":' * depth + "{}" + "}" * depth
        body = f'{{"model":"m","input":"x",{where % nested}}}'
        try:
            request = msgspec.json.decode(body, type=ResponsesRequest)
            told = request.echo(request.to_generate("m"))
        except (RequestError, RecursionError):
            break
        written += nested.encode() in write(told, 40)
    assert written > 50
    assert written == depth // 7

"""A response is the answer to a chat: both ways of writing it mean the same, and its events are legal."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
from hypothesis import given

from properties.dialects.chats import CHATS, DELTAS, answered, told_of_chat
from tests.dialects.responses import check_events, fold_events
from tests.sse import parse_events
from trinamo.runtime.http import endpoints
from trinamo.runtime.protocol.openai.answers import ErrorDetail, Usage
from trinamo.runtime.protocol.openai.generate import Delta
from trinamo.runtime.protocol.openai.responses import ResponsesRequest
from trinamo.runtime.protocol.openai.responses_answer import ResponsesAnswer

USAGE = Usage(3, 4, 7)


def as_response(chat: dict[str, Any]) -> dict[str, Any]:
    """The request of a response that says what `chat` says."""
    told: dict[str, Any] = {
        name: chat[name]
        for name in ("temperature", "top_p", "stop", "seed", "parallel_tool_calls")
        if name in chat
    }
    told["input"] = [item for turn in chat["messages"] for item in _items(turn)]
    if "max_tokens" in chat:
        told["max_output_tokens"] = chat["max_tokens"]
    if "tools" in chat:
        told["tools"] = [{"type": "function"} | tool["function"] for tool in chat["tools"]]
    choice = chat.get("tool_choice")
    if choice is not None:
        told["tool_choice"] = (
            choice if isinstance(choice, str) else {"type": "function"} | choice["function"]
        )
    if "response_format" in chat:
        schema = chat["response_format"]["json_schema"]
        told["text"] = {"format": {"type": "json_schema"} | schema}
    if chat.get("logprobs"):
        told["include"] = ["message.output_text.logprobs"]
        told["top_logprobs"] = chat.get("top_logprobs", 0)
    return told


def _items(turn: dict[str, Any]) -> list[dict[str, Any]]:
    if turn["role"] == "tool":
        return [
            {
                "type": "function_call_output",
                "call_id": turn["tool_call_id"],
                "output": turn["content"],
            }
        ]
    kind = "output_text" if turn["role"] == "assistant" else "input_text"
    parts = [{"type": kind, "text": turn["content"]}]
    items: list[dict[str, Any]] = []
    if turn["content"] or not turn.get("tool_calls"):
        items.append({"type": "message", "role": turn["role"], "content": parts})
    items += [
        {"type": "function_call", "call_id": call["id"], "status": "completed"} | call["function"]
        for call in turn.get("tool_calls", [])
    ]
    return items


@given(chat=CHATS)
def test_what_goes_in_as_a_response_is_what_goes_in_as_a_chat(chat: dict[str, Any]) -> None:
    """The engine is asked the same, whichever of the two says it."""
    asked = endpoints.CHAT.decode(json.dumps(chat).encode()).to_generate("m")
    response = endpoints.RESPONSES.decode(json.dumps(as_response(chat)).encode())
    assert response.to_generate("m") == asked


def make_answer(*, calls_tools: bool) -> ResponsesAnswer:
    request = ResponsesRequest(input=msgspec.Raw(b'"hi"'))
    echo = request.echo(request.to_generate("m"))
    return ResponsesAnswer(echo, "7", "m", 1, calls_max=math.inf if calls_tools else 0)


@given(deltas=DELTAS, calls_tools=...)
def test_what_comes_out_as_a_response_is_what_comes_out_as_a_chat(
    deltas: list[Delta], calls_tools: bool
) -> None:
    """Text, calls, reason and usage are the same; whole and folded from events, too."""
    whole = answered(make_answer(calls_tools=calls_tools), deltas, USAGE)
    streamed = make_answer(calls_tools=calls_tools)
    body = b"".join([*map(streamed.add_event, deltas), streamed.end_events(USAGE)])
    events = [json.loads(event.data) for event in parse_events(body)]
    check_events(events)
    assert fold_events(events) == whole
    text = "".join(part["text"] for item in whole["output"] for part in item.get("content", ()))
    calls = [
        (item["call_id"], item["name"], item["arguments"])
        for item in whole["output"]
        if item["type"] == "function_call"
    ]
    is_cut = whole["status"] == "incomplete"
    chat_text, chat_calls, reason = told_of_chat(deltas, calls_tools=calls_tools)
    assert (text, calls, is_cut) == (chat_text, chat_calls, reason == "length")
    assert whole["usage"]["total_tokens"] == USAGE.total_tokens


@given(deltas=DELTAS, calls_tools=...)
def test_a_response_that_breaks_never_looks_whole(deltas: list[Delta], calls_tools: bool) -> None:
    """Behind any prefix of an answer a failure ends a legal sequence, without what ends a whole one."""
    answer = make_answer(calls_tools=calls_tools)
    body = b"".join(map(answer.add_event, deltas))
    body += answer.error_events(500, ErrorDetail(message="it broke", type="server_error"))
    events = [json.loads(event.data) for event in parse_events(body)]
    check_events(events)
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]

"""A message is the answer to a chat: both ways of writing it mean the same, and its events are legal."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given

from properties.dialects.chats import CHATS, DELTAS, answered, told_of_chat
from tests.dialects.messages import check_events, fold_events
from tests.sse import parse_events
from trinamo.runtime.http import endpoints
from trinamo.runtime.protocol.anthropic.answers import MessagesAnswer
from trinamo.runtime.protocol.openai.answers import ErrorDetail, PromptTokensDetails, Usage
from trinamo.runtime.protocol.openai.generate import Delta

USAGE = Usage(3, 4, 7, PromptTokensDetails(2))
CHOICES: dict[Any, Any] = {"auto": "auto", "required": "any", "none": "none"}


def as_message(chat: dict[str, Any]) -> dict[str, Any]:
    """The request of a message that says what `chat` says."""
    told: dict[str, Any] = {name: chat[name] for name in ("temperature", "top_p") if name in chat}
    told["max_tokens"] = chat["max_tokens"]
    if "stop" in chat:
        told["stop_sequences"] = chat["stop"]
    turns = chat["messages"]
    if turns[0]["role"] == "system":
        told["system"] = [{"type": "text", "text": turns[0]["content"]}]
        turns = turns[1:]
    told["messages"] = [_message(turn) for turn in turns]
    if "tools" in chat:
        functions = [tool["function"] for tool in chat["tools"]]
        told["tools"] = [
            {"name": each["name"], "description": each["description"]}
            | {"input_schema": each["parameters"], "cache_control": {"type": "ephemeral"}}
            for each in functions
        ]
        choice = chat["tool_choice"]
        named = isinstance(choice, dict)
        told["tool_choice"] = (
            {"type": "tool", "name": choice["function"]["name"]}
            if named
            else {"type": CHOICES[choice]}
        ) | {"disable_parallel_tool_use": not chat["parallel_tool_calls"]}
    if "response_format" in chat:
        schema = chat["response_format"]["json_schema"]
        told["output_config"] = {"format": {"type": "json_schema"} | schema}
    return told


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "text", "text": turn["content"]}
    if turn["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": turn["tool_call_id"], "content": [text]}
        return {"role": "user", "content": [result]}
    blocks: list[dict[str, Any]] = [text]
    if turn["role"] == "assistant":
        blocks.insert(0, {"type": "thinking", "thinking": "hm", "signature": ""})
        blocks += [
            {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
            | {"input": json.loads(call["function"]["arguments"])}
            for call in turn.get("tool_calls", ())
        ]
    return {"role": turn["role"], "content": blocks}


@given(chat=CHATS)
def test_what_goes_in_as_a_message_is_what_goes_in_as_a_chat(chat: dict[str, Any]) -> None:
    """The engine is asked the same, whichever of the two says it."""
    chat.setdefault("max_tokens", 9)
    asked = endpoints.CHAT.decode(json.dumps(chat).encode()).to_generate("m")
    message = endpoints.MESSAGES.decode(json.dumps(as_message(chat)).encode())
    assert message.to_generate("m") == asked


@given(deltas=DELTAS, calls_tools=...)
def test_what_comes_out_as_a_message_is_what_comes_out_as_a_chat(
    deltas: list[Delta], calls_tools: bool
) -> None:
    """Text, uses of tools, reason and usage are the same; whole and folded from events, too."""
    whole = answered(
        MessagesAnswer("7", "m", calls_max=math.inf if calls_tools else 0), deltas, USAGE
    )
    streamed = MessagesAnswer("7", "m", calls_max=math.inf if calls_tools else 0)
    body = b"".join([*map(streamed.add_event, deltas), streamed.end_events(USAGE)])
    events = [json.loads(event.data) for event in parse_events(body)]
    check_events(events)
    assert fold_events(events) == whole
    chat_text, chat_calls, reason = told_of_chat(deltas, calls_tools=calls_tools)
    text = "".join(each["text"] for each in whole["content"] if each["type"] == "text")
    used = [(each["name"], each["input"]) for each in whole["content"] if "input" in each]
    called = []
    for _, name, arguments in chat_calls:
        try:
            called.append((name, json.loads(arguments)))
        except ValueError:
            called.append((name, {}))
    assert (text, used) == (chat_text, called)
    reasons = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
    assert whole["stop_reason"] == reasons[reason]
    usage = whole["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, 2)
    assert usage["output_tokens"] == USAGE.completion_tokens


@given(deltas=DELTAS, calls_tools=...)
def test_a_message_that_breaks_never_looks_whole(deltas: list[Delta], calls_tools: bool) -> None:
    """Behind any prefix of an answer a failure ends a legal sequence, without what ends a whole one."""
    answer = MessagesAnswer("7", "m", calls_max=math.inf if calls_tools else 0)
    body = b"".join(map(answer.add_event, deltas))
    body += answer.error_events(503, ErrorDetail(message="it broke", type="server_error"))
    events = [json.loads(event.data) for event in parse_events(body)]
    check_events(events)
    assert events[-1]["error"] == {"type": "overloaded_error", "message": "it broke"}

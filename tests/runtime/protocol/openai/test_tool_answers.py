"""Calls that a model writes, as a client gets them: whatever the model has written."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from trinamo.runtime.http.endpoints import CHAT, MESSAGES, RESPONSES, EndpointKind
from trinamo.runtime.protocol.openai.answers import Usage
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason
from trinamo.runtime.protocol.openai.tool_calls import ToolAnswer, ToolCallParser


def reply_to(text: str) -> dict[str, Any]:
    answer = ToolAnswer("x", "m", 0, wants_usage=False)
    answer.add_text(Delta(text, finish_reason=FinishReason.STOP))
    reply: dict[str, Any] = json.loads(answer.to_body(Usage()))["choices"][0]
    return reply


def streamed(text: str) -> list[dict[str, Any]]:
    answer = ToolAnswer("x", "m", 0, wants_usage=False)
    events = answer.add_event(Delta(text, finish_reason=FinishReason.STOP)).split(b"\n\n")
    return [json.loads(each.removeprefix(b"data: "))["choices"][0] for each in events if each]


NO_NAMES = [
    '{"arguments": {}, "name": ""}',
    '{"arguments": {}, "name": "\\ud800"}',
    '{"arguments": {}, "name": "' + "x" * 65 + '"}',
]


@pytest.mark.parametrize("call", NO_NAMES, ids=["empty", "surrogate", "long"])
def test_a_call_of_nothing_stays_text(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    reply = reply_to(text)

    assert (reply["message"]["content"], reply["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in reply["message"]
    events = streamed(text)
    assert "".join(each["delta"].get("content", "") for each in events) == text
    assert events[-1]["finish_reason"] == "stop"


def test_half_a_character_in_arguments_is_sent_as_a_mark() -> None:
    text = '<tool_call>{"arguments": "a\\ud800", "name": "f"}</tool_call>'

    (call,) = reply_to(text)["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "a?"}
    (called,) = (each["delta"]["tool_calls"] for each in streamed(text)[:1])
    assert called[0]["function"] == call["function"]


def pieces_of(text: str, parser: ToolCallParser) -> list[Any]:
    """What is told before the answer ends, though it comes a character at a time."""
    return [piece for char in text for piece in parser.push(char)]


@pytest.mark.parametrize(
    ("text", "called", "said"),
    [
        (
            '{"arguments": {"a": "</tool_call>"}, "name": "f"}</tool_call>',
            '{"a": "</tool_call>"}',
            "",
        ),
        (
            '{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            '{"a": "</tool_call>"}',
            "",
        ),
        ('{"arguments": {"a": NaN}, "name": "f"}</tool_call>', None, None),
        ("</tool_call> is a tag.", None, None),
        (" Now I know.", None, None),
        ('{"arguments": {"a": 1\n\nSo it is.', None, None),
        ('{"arguments": {"a": "x\n</tool_call> Bye.', None, None),
        ('{"name": "f", "arguments": {"a": 1}\nSo it is.', '{"a": 1}', "So it is."),
        ('{"name": "f", "arguments": {"a": 1}}\nSo it is.', '{"a": 1}', "So it is."),
        ('{"arguments": {"a": 1}, "name": "f"} So it is.', '{"a": 1}', "So it is."),
        ('{"name": "f", "arguments": {"a": 1</tool_call>Bye.', '{"a": 1', "Bye."),
        ('{"name": "f", "arguments": {"a": 1}, "id": 3}</tool_call>Bye.', '{"a": 1}', "Bye."),
    ],
)
def test_a_call_ends_where_its_json_does_and_nothing_waits_for_more(
    text: str, called: str | None, said: str | None
) -> None:
    """A tag may be in a string, and none may ever come; what is no JSON is text, the tag with it."""
    parser = ToolCallParser()
    pieces = pieces_of(f"<tool_call>{text}", parser)
    told = "".join(each for each in pieces if isinstance(each, str))
    arguments = [each.arguments for each in pieces if not isinstance(each, str)]
    assert told == (f"<tool_call>{text}" if said is None else said)
    assert ("".join(arguments) if arguments else None) == called
    assert parser.finish() == []


def test_a_call_behind_text_is_streamed_wherever_the_text_is_cut() -> None:
    """Also where the second event of text has the beginning of the call's tag with it."""
    answer = ToolAnswer("x", "m", 0, wants_usage=False)
    pieces = ["Let", " me see.\n<tool", '_call>{"name": "f", "arguments": {}}</tool_call>']
    events = b"".join(answer.add_event(Delta(each)) for each in pieces).split(b"\n\n")
    deltas = [
        json.loads(each.removeprefix(b"data: "))["choices"][0]["delta"] for each in events[:-1]
    ]
    assert "".join(each.get("content", "") for each in deltas) == "Let me see.\n"
    called = [each["tool_calls"][0]["function"] for each in deltas if "tool_calls" in each]
    assert called == [{"name": "f", "arguments": ""}, {"arguments": "{}"}]


NESTED: Any = {"type": "function", "function": {"name": "f"}}
ASKED: list[tuple[EndpointKind, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [NESTED]}, {}),
    (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f"}]}, {}),
    (
        MESSAGES,
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "max_tokens": 9,
        },
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
]


@pytest.mark.parametrize(("endpoint", "body", "alone"), ASKED, ids=["chat", "response", "message"])
def test_of_calls_that_may_not_be_several_the_first_is_told(
    endpoint: EndpointKind, body: dict[str, Any], alone: dict[str, Any]
) -> None:
    """Where the model may call or not, nothing holds what it writes to one call."""
    text = '<tool_call>{"name": "f", "arguments": {"a": 7}}</tool_call>\n'
    for more, count in (({}, 2), (alone or {"parallel_tool_calls": False}, 1)):
        asked = endpoint.decode(json.dumps(body | more).encode())
        make = endpoint.answer(asked, [asked.to_generate("m")], 100)
        last = Delta(text * 2 + "Bye.", finish_reason=FinishReason.STOP)
        whole, live = make(0, "x", "m", 1), make(0, "x", "m", 1)
        whole.add_text(last)
        events = live.add_event(last) + live.end_events(Usage())
        for told in (whole.to_body(Usage()), events):
            assert b"Bye." in told
            assert len(set(re.findall(rb"(?:call|toolu)_x_\d", told))) == count

"""Calls that a model writes, as a client gets them: whatever the model has written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trinamo.runtime.protocol.openai.answers import Usage
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason
from trinamo.runtime.protocol.openai.tool_calls import ToolAnswer


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

"""Chats that every API can say, and answers as engines give them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from trinamo.runtime.protocol.openai.answers import AnswerFormat, ChatAnswer, Usage
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, TokenLogprob
from trinamo.runtime.protocol.openai.tool_calls import ToolAnswer

texts = st.text(max_size=12)
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
arguments = st.dictionaries(texts, st.integers(-9, 9) | texts, max_size=2)
calls = st.builds(
    lambda name, told, number: {
        "id": f"call_{number}",
        "type": "function",
        "function": {
            "name": name,
            "arguments": json.dumps(told, separators=(",", ":"), ensure_ascii=False),
        },
    },
    names,
    arguments,
    st.integers(0, 9),
)
turns = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, texts.filter(bool)),
    st.builds(
        lambda text, called: (
            {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {})
        ),
        texts,
        st.lists(calls, max_size=2),
    ),
    st.builds(
        lambda text, number: {"role": "tool", "tool_call_id": f"call_{number}", "content": text},
        texts,
        st.integers(0, 9),
    ),
)


def _is_plain(messages: list[dict[str, Any]]) -> bool:
    """No two turns of an assistant follow each other: as items they are one."""
    return all(a["role"] != "assistant" or b["role"] != "assistant" for a, b in pairwise(messages))


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    messages = draw(st.lists(turns, max_size=4).filter(_is_plain))
    if draw(st.booleans()):
        messages = [{"role": "system", "content": draw(texts)}, *messages]
    chat: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": draw(texts)}]}
    optional = {
        "temperature": st.floats(0, 1),
        "top_p": st.floats(0.1, 1),
        "max_tokens": st.integers(1, 99),
        "stop": st.lists(texts.filter(bool), max_size=2),
    }
    for name, values in optional.items():
        if draw(st.booleans()):
            chat[name] = draw(values)
    functions = draw(st.lists(names, max_size=2, unique=True))
    if functions:
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": draw(texts),
                    "parameters": {"type": "object", "properties": {draw(texts): {}}},
                },
            }
            for name in functions
        ]
        named = {"type": "function", "function": {"name": functions[0]}}
        chat["tool_choice"] = draw(st.sampled_from(["auto", "required", "none", named]))
        chat["parallel_tool_calls"] = draw(st.booleans())
    if draw(st.booleans()):
        schema = {"type": "object", "properties": {draw(texts): {"type": "string"}}}
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    return chat


CHATS = chats()

_PIECES = (
    "a", " b", "\n", "✓", "", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ',
    '{"x": [1, "}"]}', "}", '<tool_call>{"name":"g","arguments":{}}</tool_call>',
)  # fmt: skip


@st.composite
def deltas(draw: st.DrawFn) -> list[Delta]:
    """One answer, with log probabilities or without."""
    has_logprobs = draw(st.booleans())
    found = []
    pieces = draw(st.lists(st.sampled_from(_PIECES), max_size=10))
    for number, piece in enumerate(pieces):
        told = [TokenLogprob(piece.encode(), -1.0)] if has_logprobs else []
        found.append(Delta(piece, [1], None, 0 if number else 3, told))
    reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    return [*found, Delta(draw(texts), [1], reason, 0 if pieces else 3)]


DELTAS = deltas()


def answered(form: AnswerFormat, told: list[Delta], usage: Usage) -> dict[str, Any]:
    """The whole answer."""
    for delta in told:
        form.add_text(delta)
    found: dict[str, Any] = json.loads(form.to_body(usage))
    return found


def told_of_chat(
    told: list[Delta], *, calls_tools: bool
) -> tuple[str, list[tuple[str, str, str]], str]:
    """The text of a chat's answer, its calls with their ids, and why it ended."""
    form = (ToolAnswer if calls_tools else ChatAnswer)("7", "m", 1, wants_usage=False)
    choice = answered(form, told, Usage())["choices"][0]
    called = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"].get("tool_calls", ())
    ]
    return choice["message"]["content"] or "", called, choice["finish_reason"]

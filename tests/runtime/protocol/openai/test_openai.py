"""OpenAI's requests: what is accepted, what it means to an engine, what is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.runtime.protocol.openai.asking import CALL, MESSAGES, chat, completion, function
from tests.sse import parse_events
from trinamo.runtime.errors import (
    RequestError,
)
from trinamo.runtime.http import endpoints
from trinamo.runtime.protocol.openai.answers import (
    DONE_DATA,
    ChatAnswer,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionAnswer,
    Usage,
)
from trinamo.runtime.protocol.openai.generate import (
    ChatMessage,
    Delta,
    FinishReason,
    GenerateRequest,
)


def test_the_least_chat_has_openai_s_defaults() -> None:
    assert chat() == GenerateRequest(
        model="m", messages=[ChatMessage("user", "hi")], temperature=1.0, top_p=1.0
    )


def test_null_means_not_given() -> None:
    names = "max_tokens temperature top_p seed stop stream stream_options n tools logprobs user"
    assert chat(**dict.fromkeys(names.split())) == chat()


def test_content_may_be_a_list_of_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts}, *MESSAGES])
    assert request.messages == [ChatMessage("system", "ab"), ChatMessage("user", "hi")]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "reasoning_content": "The user greets."},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": []},
        {"role": "assistant"},
        {"role": "tool", "content": None, "tool_call_id": "c1"},
    ],
    ids=str,
)
def test_a_turn_of_an_assistant_or_a_tool_may_have_no_content(turn: dict[str, Any]) -> None:
    request = chat(messages=[*MESSAGES, turn, *MESSAGES])
    assert request.messages is not None
    assert request.messages[1].content == ""


def test_a_refusal_in_the_history_is_text() -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert chat(messages=[said, *MESSAGES]).turns[0] == ChatMessage("assistant", "no")


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=5).max_tokens == 5


def test_a_completion_s_prompt_has_three_forms() -> None:
    assert completion(prompt="a").prompt == "a"
    assert completion(prompt=["a"]).prompt == "a"
    assert completion(prompt=[1, 2]).token_ids == [1, 2]
    assert completion(prompt=[[1, 2]]).token_ids == [1, 2]
    assert completion(prompt=[1]).prompt is None


def test_a_completion_without_max_tokens_has_openai_s_sixteen() -> None:
    assert completion().max_tokens == 16
    assert completion(max_tokens=2).max_tokens == 2


@pytest.mark.parametrize(("stop", "strings"), [("x", ["x"]), (["x", "y"], ["x", "y"]), ([], [])])
def test_stop_is_a_string_or_a_list(stop: Any, strings: list[str]) -> None:
    assert chat(stop=stop).stop == strings
    assert completion(stop=stop).stop == strings


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    "good",
    [
        {"n": 1},
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop": ["s"] * 32},
        {"max_tokens": 1},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {}},
        {"some_new_field": {"deep": [1]}},
    ],
    ids=str,
)
def test_values_at_the_edge_are_accepted(make: Any, good: dict[str, Any]) -> None:
    assert make(**good).model == "m"


@pytest.mark.parametrize(
    "good",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"logprobs": False},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
    ],
    ids=str,
)
def test_unsupported_parameters_that_change_nothing_are_accepted(good: dict[str, Any]) -> None:
    assert chat(**good) == chat()


SHARED_BAD = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 0}, "n"),
    ({"n": "1"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["s"] * 33}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": 1}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": 1}, "model"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"logit_bias": {"1": 500}}, "logit_bias[...]"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
]


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(("bad", "param"), SHARED_BAD, ids=str)
def test_what_is_wrong_is_named(make: Any, bad: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        make(**bad)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message or param == "n"


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [function("f"), function("f")]}, "tools"),
        ({"tools": [function(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [function("f")], "tool_choice": "never"}, "tool_choice"),
        ({"tools": [function("f")], "tool_choice": function("g")}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
    ids=str,
)
def test_what_is_wrong_in_a_chat_is_named(bad: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**bad)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [[1], [[2]]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
    ids=str,
)
def test_what_is_wrong_in_a_completion_is_named(bad: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**bad)
    assert caught.value.param == param


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RequestError, match="'prompt' is missing") as caught:
        endpoints.COMPLETIONS.decode(b"{}")
    assert caught.value.param == "prompt"


DELTAS = [
    Delta('a "quoted"\n', [1], None, 4),
    Delta("", [2]),
    Delta("✓\u2028\x00", [3, 4]),
    Delta("end", [5], FinishReason.LENGTH),
]
TEXT = 'a "quoted"\n✓\u2028\x00end'
USAGE = Usage(4, 5, 9)


@pytest.mark.parametrize("wants_usage", [True, False])
def test_a_streamed_chat_decodes_to_what_was_generated(wants_usage: bool) -> None:
    answer = ChatAnswer("7", "m", 1, wants_usage=wants_usage)
    body = b"".join([*(answer.add_event(delta) for delta in DELTAS), answer.end_events(USAGE)])
    *events, end = parse_events(body)
    assert end.data == DONE_DATA.decode()
    chunks = [msgspec.json.decode(event.data, type=ChatChunk) for event in events]
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in told) == TEXT
    assert [choice.finish_reason for choice in told] == [None, None, "length"]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-7"}
    if wants_usage:
        assert chunks[-1].usage == Usage(4, 5, 9)
        assert chunks[0].usage is None
    else:
        assert b"usage" not in body


@pytest.mark.parametrize("wants_usage", [True, False])
def test_a_streamed_completion_decodes_to_what_was_generated(wants_usage: bool) -> None:
    answer = CompletionAnswer("7", "m", 1, wants_usage=wants_usage)
    body = b"".join([*(answer.add_event(delta) for delta in DELTAS), answer.end_events(USAGE)])
    *events, end = parse_events(body)
    assert end.data == DONE_DATA.decode()
    chunks = [msgspec.json.decode(event.data, type=Completion) for event in events]
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in told) == TEXT
    assert told[-1].finish_reason == "length"
    assert (chunks[-1].usage == Usage(4, 5, 9)) == wants_usage


def test_whole_answers_decode_to_what_was_generated() -> None:
    chat_answer = ChatAnswer("7", "m", 1, wants_usage=False)
    text_answer = CompletionAnswer("7", "m", 1, wants_usage=False)
    for delta in DELTAS:
        chat_answer.add_text(delta)
        text_answer.add_text(delta)
    whole = msgspec.json.decode(chat_answer.to_body(USAGE), type=ChatCompletion)
    assert (whole.choices[0].message.content, whole.usage) == (TEXT, Usage(4, 5, 9))
    text = msgspec.json.decode(text_answer.to_body(USAGE), type=Completion)
    assert (text.choices[0].text, text.choices[0].finish_reason) == (TEXT, "length")

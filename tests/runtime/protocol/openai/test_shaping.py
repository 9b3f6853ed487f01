"""Parameters that only some models can do: what they mean to an engine, and who refuses them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.runtime.protocol.openai.asking import CALL, chat, completion, function
from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.openai.generate import ChatMessage, Feature, check_features

ASKING: list[tuple[dict[str, Any], str, str]] = [
    ({"presence_penalty": 1}, "penalties", "presence_penalty"),
    ({"frequency_penalty": -1}, "penalties", "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "penalties", "repetition_penalty"),
    ({"logit_bias": {"1": 5}}, "logit_bias", "logit_bias"),
    ({"top_k": 3}, "top_k", "top_k"),
    ({"min_p": 0.1}, "min_p", "min_p"),
    ({"logprobs": True}, "logprobs", "logprobs"),
    ({"response_format": {"type": "json_object"}}, "json_schema", "response_format"),
    ({"tools": [function("f")]}, "tools", "tools"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
        "tools",
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "tool", "content": "1"}]}, "tools", "messages[0].role"),
]


@pytest.mark.parametrize(("asking", "feature", "param"), ASKING, ids=str)
def test_what_a_model_cannot_do_is_refused_by_name(
    asking: dict[str, Any], feature: str, param: str
) -> None:
    """Each by what the client calls it; a model that lists the feature is asked."""
    request = chat(**asking)
    check_features(request, {feature})
    with pytest.raises(RequestError, match="not supported by this model") as caught:
        check_features(request, {each.value for each in Feature} - {feature})
    assert caught.value.param == param
    check_features(chat(), ())


def test_parameters_reach_the_engine_as_they_are_meant() -> None:
    sampled = completion(
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "6": 0},
        logprobs=0,
    )
    assert (sampled.top_k, sampled.min_p, sampled.presence_penalty) == (0, 0.1, 1)
    assert (sampled.repetition_penalty, sampled.logit_bias) == (1.5, {5: -100})
    assert sampled.logprobs == 0
    assert completion(logprobs=False).logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    schema = {"type": "object", "properties": {"é": {}}}
    shaped = chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert json.loads(shaped.json_schema) == schema


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (None, ""),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, "function:f"),
    ],
    ids=str,
)
def test_tools_and_their_choice_reach_the_engine(choice: Any, found: str) -> None:
    request = chat(tools=[function("f")], tool_choice=choice, parallel_tool_calls=False)
    assert json.loads(request.tools) == [function("f")]
    assert (request.tool_choice, request.parallel_tool_calls) == (found, False)


def test_turns_of_tools_reach_the_engine() -> None:
    """An assistant that only calls has no content; a tool says which call it answers."""
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    called, answered = chat(messages=turns).messages or []
    assert (called.role, called.content, json.loads(called.tool_calls)) == ("assistant", "", [CALL])
    assert answered == ChatMessage("tool", "4", tool_call_id="c1")

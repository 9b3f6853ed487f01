"""What is wrong is named as the client wrote it, at every depth and in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trinamo.runtime.errors import RequestError
from trinamo.runtime.http.endpoints import CHAT, MESSAGES, RESPONSES, EndpointKind
from trinamo.runtime.protocol.openai.generate import Feature, check_features

HI = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "a"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "a"}


def chat(**body: Any) -> tuple[EndpointKind, dict[str, Any]]:
    return CHAT, {"messages": [HI], **body}


def turn(content: Any, **more: Any) -> tuple[EndpointKind, dict[str, Any]]:
    return CHAT, {"messages": [HI, {"role": "assistant", "content": content, **more}]}


def response(*items: Any, **body: Any) -> tuple[EndpointKind, dict[str, Any]]:
    return RESPONSES, {"input": list(items) or "a", **body}


def message(*blocks: Any, role: str = "user", **body: Any) -> tuple[EndpointKind, dict[str, Any]]:
    content = list(blocks) or "a"
    return MESSAGES, {"max_tokens": 2, "messages": [{"role": role, "content": content}], **body}


WRONG: list[tuple[tuple[EndpointKind, dict[str, Any]], str]] = [
    (chat(tools=[{"type": "function"}]), "tools[0].function"),
    (chat(tools=[{"type": "function", "function": {}}]), "tools[0].function.name"),
    (chat(tools=[{"function": {"name": "a"}}]), "tools[0].type"),
    (chat(tool_choice={"type": "function", "function": {}}), "tool_choice.function.name"),
    (chat(stream=True, stream_options={"include_usage": 5}), "stream_options.include_usage"),
    (chat(response_format={}), "response_format.type"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": 5}}),
        "response_format.json_schema.schema",
    ),
    (chat(structured_outputs={"choice": 5}), "structured_outputs.choice"),
    (chat(structured_outputs={"choice": [5]}), "structured_outputs.choice[0]"),
    (chat(stop=[1]), "stop[0]"),
    (turn([{"text": "a"}]), "messages[1].content[0].type"),
    (turn([{"type": "text"}]), "messages[1].content[0].text"),
    (turn([{"type": "image_url"}]), "messages[1].content[0].type"),
    (turn(5), "messages[1].content"),
    (
        turn("a", tool_calls=[{"type": "function", "function": {"arguments": ""}}]),
        "messages[1].tool_calls[0].function.name",
    ),
    (response({"role": "user", "content": 5}), "input[0].content"),
    (response({"content": "a"}), "input[0].role"),
    (response(HI, {"role": "king", "content": "a"}), "input[1].role"),
    (response({"type": "function_call_output", "output": "a"}), "input[0].call_id"),
    (response(HI, {**CALL, "arguments": 5}), "input[1].arguments"),
    (response(HI, {**CALL, "name": ""}), "input[1].name"),
    (response({"role": "user", "content": [{"type": "input_text"}]}), "input[0].content[0].text"),
    (response({"role": "user", "content": [{"type": "x"}]}), "input[0].content[0].type"),
    (response({**OUTPUT, "output": [{"type": "x"}]}), "input[0].output[0].type"),
    (
        response(text={"format": {"type": "json_schema", "name": "a", "schema": 5}}),
        "text.format.schema",
    ),
    (response(text={"format": {}}), "text.format.type"),
    (response(tools=[{"type": "function"}]), "tools[0].name"),
    (response(include=[5]), "include[0]"),
    (response(include=[""] * 5000), "include"),
    (message({"type": "text"}), "messages[0].content[0].text"),
    (message({"type": "text", "text": "a"}, {"type": "image"}), "messages[0].content[1].type"),
    (message({"type": "tool_result", "content": "a"}), "messages[0].content[0].tool_use_id"),
    (message(RESULT, {"type": "text"}), "messages[0].content[1].text"),
    (message({**RESULT, "content": [{"type": "x"}]}), "messages[0].content[0].content[0].type"),
    (message({**USE, "name": ""}, role="assistant"), "messages[0].content[0].name"),
    (message({**USE, "input": [1]}, role="assistant"), "messages[0].content[0].input"),
    (message(USE, {"type": "x"}, role="assistant"), "messages[0].content[1].type"),
    (message(system=5), "system"),
    (message(system=[{"type": "text"}]), "system[0].text"),
    (message(tools=[{"input_schema": {}}]), "tools[0].name"),
    (message(tools=[{"name": "a", "input_schema": 5}]), "tools[0].input_schema"),
    (message(tool_choice={"type": "tool"}), "tool_choice.name"),
    (message(tool_choice={"type": "x"}), "tool_choice.type"),
    (message(stop_sequences=[5]), "stop_sequences[0]"),
]


@pytest.mark.parametrize(("asked", "param"), WRONG, ids=[param for _, param in WRONG])
def test_what_is_wrong_is_named_at_every_depth(
    asked: tuple[EndpointKind, dict[str, Any]], param: str
) -> None:
    kind, body = asked
    with pytest.raises(RequestError) as caught:
        kind.decode(json.dumps(body).encode()).to_generate("m")
    assert caught.value.param == param
    if kind is MESSAGES:
        # Its errors have no member for the name.
        assert param.removesuffix(".type") in caught.value.message


UNABLE: list[tuple[tuple[EndpointKind, dict[str, Any]], str]] = [
    (turn("a", tool_calls=[{"function": {"name": "f"}}]), "messages[1].tool_calls"),
    (response(HI, CALL, OUTPUT, instructions="b"), "input[1]"),
    (response(HI, {"role": "assistant", "content": "a"}, CALL), "input[2]"),
    (response({"type": "reasoning"}, OUTPUT), "input[1]"),
    (message({"type": "text", "text": "a"}, RESULT, system="b"), "messages[0].content[1]"),
    (message(USE, role="assistant", system="b"), "messages[0]"),
]


@pytest.mark.parametrize(("asked", "param"), UNABLE, ids=[param for _, param in UNABLE])
def test_a_turn_that_a_model_cannot_read_is_named_by_its_place_in_the_body(
    asked: tuple[EndpointKind, dict[str, Any]], param: str
) -> None:
    """Its number among the turns is another one: what a body holds is not a turn each."""
    kind, body = asked
    request = kind.decode(json.dumps(body).encode())
    generate = request.to_generate("m")
    with pytest.raises(RequestError) as caught:
        check_features(generate, {*Feature} - {Feature.TOOLS}, request.called)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message

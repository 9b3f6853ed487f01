"""JSON schemas as grammars: what is held, what is passed over, what is refused, and dead ends."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests import needs
from trinamo.runtime.errors import EngineError, GrammarDeadEndError, RequestError
from trinamo.runtime.protocol.openai.generate import GenerateRequest

needs.LLAMACPP.imported()
from trinamo.runtime.engines.llamacpp.grammars import (  # noqa: E402
    Compiler,
    Grammar,
    grammar_of,
    place_of,
)
from trinamo.runtime.engines.llamacpp.schemas import FORMATS  # noqa: E402

END = 256
TOKENS = [*(bytes((each,)) for each in range(256)), b"<end>"]
COMPILER = Compiler(TOKENS, lambda text: list(text.encode()), end_ids=[END], special_ids=[END])
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def opened(schema: Any) -> Grammar:
    request = GenerateRequest(model="m", prompt="p", json_schema=json.dumps(schema))
    source, _ = grammar_of(request)
    assert not COMPILER.examine(source)
    return COMPILER.open(COMPILER.compile(source))


def is_whole(schema: Any, text: str) -> bool:
    """Whether `text` is an answer."""
    grammar = opened(schema)
    try:
        grammar.follow(list(text.encode()))
    except EngineError:
        return False
    return bool(grammar.allowed()[END])


def written(schema: Any, rng: random.Random) -> str:
    """An answer of tokens that the grammar allows, which ends as soon as it may."""
    grammar, answer = opened(schema), list[int]()
    while True:
        grammar.follow(answer)
        allowed = [int(each) for each in np.flatnonzero(grammar.allowed())]
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return bytes(answer).decode()
        texts = [each for each in allowed if 32 <= each < 127] or allowed
        closing = [each for each in texts if each in b'"}]']
        answer.append(rng.choice(closing if closing and rng.random() < 0.5 else texts))


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {**closed(a=DIGIT, b={"type": "null"}), "patternProperties": {"^a$": {"minimum": 3}}},
        {**closed(a=DIGIT), "patternProperties": {"^(a|b-c)$": {"type": "integer", "maximum": 4}}},
        {**closed(ab=DIGIT), "patternProperties": {"^a": {"type": "integer", "minimum": 5}}},
        {"type": "object", "patternProperties": {"^(?:a|b)$": DIGIT}, "required": ["b"]},
        {"type": "integer", "exclusiveMinimum": 1, "maximum": 12},
        {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2.5},
        {"allOf": [{"type": "integer", "minimum": 1}, {"exclusiveMinimum": 1, "maximum": 3}]},
        {
            "type": "array",
            "items": {"enum": ["x", 1, True, "x"]},
            "uniqueItems": True,
            "minItems": 2,
        },
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1},
        {"type": "object", "additionalProperties": DIGIT, "required": ["a"], "minProperties": 2},
    ],
    ids=str,
)
def test_each_answer_fits_its_schema_and_none_comes_to_a_dead_end(schema: Any) -> None:
    for seed in range(25):
        jsonschema.validate(json.loads(written(schema, random.Random(seed))), schema)


def test_a_set_of_few_values_has_all_orders() -> None:
    schema = {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True}
    fit = [text for text in ("[]", '["x"]', '["y", "x"]', '["x", "x"]') if is_whole(schema, text)]
    assert fit == ["[]", '["x"]', '["y", "x"]']


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_known_format_is_held(name: str) -> None:
    assert not is_whole({"type": "string", "format": name}, '"?"')


@pytest.mark.parametrize("name", ["path", "int64", "idn-email", "json-string", "x", 5])
def test_an_unknown_format_is_passed_over(name: Any) -> None:
    assert is_whole({"type": "string", "format": name}, '"?"')
    assert is_whole(closed(format={"type": "null"}), '{"format": null}')


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "null"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"items": {"enum": list(range(9))}, "type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({**closed(a=DIGIT), "patternProperties": {"^[a]$": DIGIT}}, "patternProperties"),
        ({"type": "object", "additionalProperties": True, "minProperties": 2}, "minProperties"),
    ],
    ids=str,
)
def test_what_no_grammar_holds_is_refused_by_its_keyword_and_place(
    schema: Any, keyword: str
) -> None:
    """A 500 in the middle of an answer, or an answer that does not fit, says it too late."""
    whole = closed(a={"type": "array", "items": schema})
    with pytest.raises(RequestError) as refused:
        grammar_of(GenerateRequest(model="m", prompt="p", json_schema=json.dumps(whole)))
    assert refused.value.param == "response_format"
    assert f"'{keyword}' at #/properties/a/items" in refused.value.message
    tool = {"type": "function", "function": {"name": "f", "parameters": whole}}
    asked = GenerateRequest(model="m", prompt="p", tools=json.dumps([tool]), tool_choice="required")
    with pytest.raises(RequestError, match="the function 'f' has") as refused:
        grammar_of(asked)
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("function", "is_open"),
    [
        ({}, False),
        ({"parameters": None}, False),
        ({"parameters": {}}, False),
        ({"parameters": {"type": "object", "properties": {}, "required": []}}, False),
        (
            {"parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
            False,
        ),
        ({"parameters": {"type": "object", "additionalProperties": True}}, True),
        ({"parameters": {"type": "object", "required": ["a"]}}, True),
    ],
    ids=str,
)
def test_a_function_without_parameters_is_called_without_arguments(
    function: dict[str, Any], is_open: bool
) -> None:
    tool = {"type": "function", "function": {"name": "f", **function}}
    asked = GenerateRequest(model="m", prompt="p", tools=json.dumps([tool]), tool_choice="required")
    grammar = COMPILER.open(COMPILER.compile(grammar_of(asked)[0]))
    grammar.follow(list(b'<tool_call>\n{"name": "f", "arguments": {'))
    allowed = [int(each) for each in np.flatnonzero(grammar.allowed())]
    assert (allowed != [ord("}")]) is is_open


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"patternProperties": {"^(a|b)$": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(31),
        {"patternProperties": {f"^({'|'.join(map(str, range(3000)))})$": {"enum": ["x" * 10_000]}}},
        {"uniqueItems": True, "items": {"enum": [f"{'x' * 10_000}{n}" for n in range(5)]}},
    ],
    ids=["nested", "names", "orders"],
)
def test_a_schema_that_becomes_much_more_than_it_is_is_refused_at_once(schema: Any) -> None:
    """Written out, the first would be longer than any memory."""
    with pytest.raises(RequestError, match="too large"):
        grammar_of(GenerateRequest(model="m", prompt="p", json_schema=json.dumps(schema)))


def test_functions_are_refused_if_what_they_become_together_is_too_much() -> None:
    functions = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": nested(13)}}
        for number in range(8)
    ]
    asked = GenerateRequest(
        model="m", prompt="p", tools=json.dumps(functions), tool_choice="required"
    )
    with pytest.raises(RequestError, match="too large"):
        grammar_of(asked)
    grammar_of(
        GenerateRequest(
            model="m", prompt="p", tools=json.dumps(functions[:1]), tool_choice="required"
        )
    )


def test_a_name_of_many_patterns_has_all_their_schemas() -> None:
    """As many as there are, side by side: within one another they would be too deep to be written."""
    patterns: dict[str, Any] = {f"^(a|a|n{n})$": {"type": "string"} for n in range(1000)}
    patterns["^a$"] = {"maxLength": 1}
    schema = {"patternProperties": patterns, "additionalProperties": False}
    source, _ = grammar_of(GenerateRequest(model="m", prompt="p", json_schema=json.dumps(schema)))
    assert source.count("maxLength") == 1
    few = {"patternProperties": {"^(a|b)$": {"type": "string"}, "^(a|c)$": {"maxLength": 1}}}
    assert is_whole(few, '{"a": "x"}')
    assert not is_whole(few, '{"a": "xx"}')


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [], "patternProperties": {"^a$": {}}},
        {"properties": None, "patternProperties": {"^a$": {}}},
        {"type": 5, "uniqueItems": True},
        {"uniqueItems": True, "minItems": -1, "items": {"enum": [1, 2]}},
        {"properties": {"a": {}}, "required": [[1]]},
    ],
)
def test_what_is_no_schema_is_an_error_of_its_client(schema: Any) -> None:
    try:
        source, _ = grammar_of(
            GenerateRequest(model="m", prompt="p", json_schema=json.dumps(schema))
        )
    except RequestError:
        return
    assert COMPILER.examine(source)


def test_a_dead_end_is_an_error_that_names_its_place() -> None:
    """One that llguidance makes of a schema which we refuse."""
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    schema = {**closed(a={}, b={}), "patternProperties": {"^[ab]$": {}}, "x-guidance": form}
    rule = {"name": "whole", "lark_grammar": f"start: %json {json.dumps(schema)}"}
    grammar = COMPILER.open(COMPILER.compile(json.dumps({"grammars": [rule]})))
    grammar.follow(list(b'{"b": 3, '))
    with pytest.raises(GrammarDeadEndError, match=r"no way on at \$ of the answer"):
        grammar.allowed()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "$"),
        ('{"a', "$"),
        ('{"a": "x{[', "$.a"),
        ('{"a": [1, {"b": ["x", ', "$.a[1].b[1]"),
        ('{"a": {"b": 1}, "c": ', "$.c"),
        ('<tool_call>\n{"name": "f", "arguments": {"a,\\"": ', '$.arguments.a,\\"'),
        ("]}", "$"),
    ],
)
def test_a_place_in_an_answer_is_told_by_keys_and_indices(text: str, place: str) -> None:
    assert place_of(text.encode()) == place

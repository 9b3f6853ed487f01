"""Whatever JSON schema is asked for: text made of allowed tokens alone parses, and fits it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from hypothesis import assume, given, settings, strategies as st

from tests import needs
from trinamo.runtime.protocol.openai.generate import GenerateRequest
from trinamo.runtime.protocol.openai.tool_calls import ToolCallParser

needs.LLAMACPP.imported()
from trinamo.runtime.engines.llamacpp.grammars import Compiler, grammar_of  # noqa: E402

END = 256
TOKENS = [bytes((each,)) for each in range(256)] + [b"<end>", b'"}', b'": ', b"</tool_call>"]
COMPILER = Compiler(TOKENS, lambda text: list(text.encode()), end_ids=[END], special_ids=[END])
TOKENS_MAX = 600

leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-20, 20).map(lambda n: {"type": "integer", "minimum": n, "maximum": n + 30}),
    st.integers(0, 5).map(lambda n: {"type": "string", "minLength": n // 2, "maxLength": n}),
    st.lists(
        st.text('ab"\\é\n', max_size=3) | st.integers(-(2**53), 2**53), min_size=1, max_size=3
    ).map(lambda values: {"enum": values}),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}$"}),
)
names = st.text('ab "é', min_size=1, max_size=3)


def objects(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(names, st.tuples(schemas, st.booleans()), max_size=3).map(
        lambda fields: {
            "type": "object",
            "properties": {name: schema for name, (schema, _) in fields.items()},
            "required": [name for name, (_, is_required) in fields.items() if is_required],
            "additionalProperties": False,
        }
    )


def containers(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.tuples(schemas, st.integers(0, 2)).map(
        lambda each: {"type": "array", "items": each[0], "minItems": each[1], "maxItems": 3}
    )
    either = st.lists(schemas, min_size=1, max_size=2).map(lambda each: {"anyOf": each})
    return objects(schemas) | lists | either


schemas = st.recursive(leaves, containers, max_leaves=5)


def write(request: GenerateRequest, choices: st.DataObject) -> str:
    """A text that the grammar allows, which ends where it may."""
    source, _ = grammar_of(request)
    assert not COMPILER.examine(source), "what a child would refuse"
    grammar = COMPILER.open(COMPILER.compile(source))
    random = choices.draw(st.randoms(use_true_random=False))
    answer: list[int] = []
    while True:
        grammar.follow(answer)
        allowed = [token for token, is_allowed in enumerate(grammar.allowed()) if is_allowed]
        if END in allowed:
            return b"".join(TOKENS[each] for each in answer).decode()
        # Not too many more of them that begin something.
        closing = [each for each in allowed if TOKENS[each] in (b'"', b"}", b"]", b'"}')]
        answer.append(random.choice(closing if closing and random.random() < 0.6 else allowed))
        assume(len(answer) < TOKENS_MAX)


@settings(deadline=None)
@given(schemas, st.data())
def test_an_answer_by_a_schema_parses_and_fits_it(schema: Any, choices: st.DataObject) -> None:
    """Every text that the grammar lets end is JSON that a validator accepts."""
    text = write(GenerateRequest(model="m", prompt="p", json_schema=json.dumps(schema)), choices)
    jsonschema.validate(json.loads(text), schema)


@settings(deadline=None)
@given(objects(leaves), objects(leaves), st.data())
def test_a_required_call_names_a_tool_and_has_its_arguments(
    first: Any, second: Any, choices: st.DataObject
) -> None:
    """Each call that the parser finds is one of the tools, with arguments by its schema."""
    parameters = {"first": first, "second": second}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in parameters.items()
    ]
    choice = choices.draw(st.sampled_from(["required", "function:second"]))
    request = GenerateRequest(model="m", prompt="p", tools=json.dumps(tools), tool_choice=choice)
    parser = ToolCallParser()
    pieces = [*parser.push(write(request, choices)), *parser.finish()]
    name = next(each.name for each in pieces if not isinstance(each, str) and each.name)
    arguments = "".join(each.arguments for each in pieces if not isinstance(each, str))
    assert parser.call_count == 1
    assert choice == "required" or name == "second"
    jsonschema.validate(json.loads(arguments), parameters[name])

"""The table of fields: it agrees with the structs, and a field that nobody obeys never just vanishes."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from tests.runtime.protocol.openai.asking import MESSAGES, chat, completion
from trinamo.runtime.errors import RequestError
from trinamo.runtime.http import endpoints
from trinamo.runtime.protocol.anthropic.messages import CountTokensRequest, MessagesRequest
from trinamo.runtime.protocol.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    COUNT_FIELDS,
    DETOKENIZE_FIELDS,
    EMBEDDINGS_FIELDS,
    ENDPOINTS,
    FORMS,
    MESSAGES_FIELDS,
    RESPONSES_FIELDS,
    TOKENIZE_FIELDS,
    UNKNOWN_MAX,
    Field,
    UnknownFields,
    Use,
    supported,
)
from trinamo.runtime.protocol.openai.generate import (
    ASKING,
    Feature,
    GenerateRequest,
    SamplingDefaults,
    check_features,
)
from trinamo.runtime.protocol.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
)
from trinamo.runtime.protocol.openai.responses import ResponsesRequest
from trinamo.runtime.protocol.openai.tasks import (
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
)

KINDS: list[tuple[Any, Any]] = [
    (ChatCompletionRequest, CHAT_FIELDS),
    (CompletionRequest, COMPLETION_FIELDS),
    (ResponsesRequest, RESPONSES_FIELDS),
    (MessagesRequest, MESSAGES_FIELDS),
    (CountTokensRequest, COUNT_FIELDS),
    (EmbeddingsRequest, EMBEDDINGS_FIELDS),
    (TokenizeRequest, TOKENIZE_FIELDS),
    (DetokenizeRequest, DETOKENIZE_FIELDS),
]
ALL = {each.value for each in Feature}


def unknown_of(body: dict[str, Any] | bytes) -> UnknownFields | None:
    data = body if isinstance(body, bytes) else json.dumps({"messages": MESSAGES, **body}).encode()
    found: list[UnknownFields] = []
    endpoints.CHAT.decode(data, found.append)
    return found[0] if found else None


@pytest.mark.parametrize(("kind", "fields"), KINDS)
def test_a_body_s_members_are_the_fields_that_the_table_says_are_obeyed(
    kind: Any, fields: dict[str, Field]
) -> None:
    obeyed = {name for name, field in fields.items() if field.use is Use.OBEYED}
    assert set(kind.__struct_fields__) == obeyed


def test_each_parameter_that_asks_for_a_feature_is_in_the_table() -> None:
    for field, _, feature, param in ASKING:
        rows = [
            (name, row)
            for fields in ENDPOINTS.values()
            for name, row in fields.items()
            if name == param and row.use is Use.OBEYED
        ]
        assert rows, param
        assert all(feature in row.features(name) for name, row in rows), field


def test_what_a_field_sets_is_a_field_of_a_request() -> None:
    known = set(GenerateRequest.__struct_fields__)
    for fields in ENDPOINTS.values():
        for name, field in fields.items():
            assert set(field.sets) <= known, name


def test_a_model_s_parameters_are_those_that_its_features_allow() -> None:
    bare, whole = supported((*ENDPOINTS,), frozenset()), supported((*ENDPOINTS,), frozenset(ALL))
    assert {"messages", "prompt", "max_tokens", "temperature", "stop"} <= set(bare)
    assert not {"top_k", "tools", "response_format", "min_tokens", *FORMS} & set(bare)
    assert set(whole) == {
        name
        for fields in ENDPOINTS.values()
        for name, field in fields.items()
        if field.use is Use.OBEYED
    }
    assert "guided_json" in supported((*ENDPOINTS,), frozenset({"json_schema"}))
    assert "guided_regex" not in supported((*ENDPOINTS,), frozenset({"json_schema"}))
    assert "structured_outputs" in supported((*ENDPOINTS,), frozenset({"grammar"}))


REFUSED = [
    (name, field)
    for name, field in CHAT_FIELDS.items()
    if field.use is Use.REFUSED and field.harmless
]


@pytest.mark.parametrize(("name", "field"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_would_change_the_answer_is_refused_unless_it_asks_for_nothing(
    name: str, field: Field
) -> None:
    for value in (None, *field.harmless):
        assert chat(**{name: value}) == chat()
    with pytest.raises(RequestError, match=f"'{name}' is not supported") as caught:
        chat(**{name: {"what": "else"}})
    assert caught.value.param == name
    assert field.about in caught.value.message


LABELS = [name for name, field in CHAT_FIELDS.items() if field.use is Use.LABEL]


@pytest.mark.parametrize("name", LABELS)
def test_a_label_passes_whatever_it_says(name: str) -> None:
    for value in ("x", 1, True, {"a": [1]}, None):
        assert chat(**{name: value}) == chat()
        assert unknown_of({name: value}) is None


def test_a_field_that_nobody_knows_is_told_of_with_the_nearest() -> None:
    found = unknown_of({"min_tokn": 3, "foo": 1, "user": "me", "top_k": 1})
    assert found == UnknownFields(["min_tokn", "foo"], "min_tokn (did you mean min_tokens?), foo")
    assert unknown_of({"temperature": 1}) is None


def test_what_is_told_of_unknown_fields_has_bounds_and_fits_a_header() -> None:
    names = ["a\r\nset-cookie: x", "é" * 1000, *(f"x{i}" for i in range(100))]
    found = unknown_of(dict.fromkeys(names, 1))
    assert found is not None
    assert len(found.names) == UNKNOWN_MAX
    assert found.names[0] == "a??set-cookie??x"
    assert found.sentence.endswith("and 94 more")
    assert found.sentence.isascii()
    assert found.sentence.isprintable()
    assert len(found.sentence) < 2000


def test_looking_at_half_a_million_unknown_fields_makes_none_of_them() -> None:
    many = b",".join(b'"%x":1' % i for i in range(300_000))
    body = b'{"messages": [{"role": "user", "content": "a"}], ' + many + b"}"
    tracemalloc.start()
    try:
        found = unknown_of(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found is not None
    assert found.names == ["0"]
    assert peak < 200_000


def test_a_refused_field_is_refused_beside_unknown_ones_and_behind_any_length() -> None:
    body = {"messages": MESSAGES, "foo": "x" * 100_000, "bad_words": ["x"], "n": 1}
    with pytest.raises(RequestError) as caught:
        endpoints.CHAT.decode(json.dumps(body).encode())
    assert caught.value.param == "bad_words"


def test_a_wrong_value_is_named_beside_unknown_fields() -> None:
    with pytest.raises(RequestError) as caught:
        chat(foo=1, temperature="hot")
    assert caught.value.param == "temperature"
    with pytest.raises(RequestError, match="not valid JSON"):
        endpoints.COMPLETIONS.decode(b'{"foo": 1, "prompt"')


FORMED: list[tuple[str, Any, dict[str, Any]]] = [
    ("structured_outputs", {"json": {"type": "string"}}, {"json_schema": '{"type":"string"}'}),
    ("structured_outputs", {"json": '{"type": "string"}'}, {"json_schema": '{"type":"string"}'}),
    ("structured_outputs", {"json_object": True}, {"json_schema": '{"type":"object"}'}),
    ("structured_outputs", {"regex": "a+"}, {"regex": "a+"}),
    ("structured_outputs", {"choice": ["yes", "no"]}, {"choices": ["yes", "no"]}),
    ("structured_outputs", {"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ("guided_json", {"type": "string"}, {"json_schema": '{"type":"string"}'}),
    ("guided_regex", "a+", {"regex": "a+"}),
    ("guided_choice", ["yes", "no"], {"choices": ["yes", "no"]}),
    ("guided_grammar", 'start: "a"', {"grammar": 'start: "a"'}),
    ("regex", "a+", {"regex": "a+"}),
    ("ebnf", 'start: "a"', {"grammar": 'start: "a"'}),
    ("json_schema", '{"type": "string"}', {"json_schema": '{"type":"string"}'}),
    ("json_schema", {"type": "string"}, {"json_schema": '{"type":"string"}'}),
    ("grammar", 'start: "a"', {"grammar": 'start: "a"'}),
    (
        "response_format",
        {"type": "json_object", "schema": {"type": "string"}},
        {"json_schema": '{"type":"string"}'},
    ),
]


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(("name", "value", "sets"), FORMED, ids=str)
def test_a_form_by_any_name_reaches_the_engine_or_is_refused_by_that_name(
    make: Any, name: str, value: Any, sets: dict[str, Any]
) -> None:
    request: GenerateRequest = make(**{name: value})
    assert {key: getattr(request, key) for key in sets} == sets
    others = {form: None for form in FORMS if form != name}
    whole = json.dumps({"messages": MESSAGES, name: value, **others}).encode()
    called = endpoints.CHAT.decode(whole).called
    check_features(request, ALL, called)
    with pytest.raises(RequestError, match=f"'{name}' is not supported by this model") as caught:
        check_features(request, ALL - {"json_schema", "grammar"}, called)
    assert caught.value.param == name


def test_what_an_echo_asks_for_is_refused_as_the_echo() -> None:
    asked = endpoints.COMPLETIONS.decode(b'{"prompt": "a", "echo": true, "logprobs": 1}')
    with pytest.raises(RequestError, match="'echo' is not supported") as caught:
        check_features(asked.to_generate("m"), {"logprobs"}, asked.called)
    assert caught.value.param == "echo"


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"form": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_choice": ["x" * 70_000]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_json": "no JSON"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"grammar": 'root ::= "yes" | "no"'}, "grammar"),
        ({"ebnf": 'root ::= "yes"\n'}, "ebnf"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"regex": "a", "guided_choice": ["a"]}, "regex"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_what_is_no_form_is_named(bad: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**bad)
    assert caught.value.param == param


def test_a_form_beside_plain_text_is_no_second_one() -> None:
    request = chat(response_format={"type": "text"}, guided_regex="a")
    assert (request.regex, request.json_schema) == ("a", "")


def test_where_an_answer_ends_reaches_the_engine() -> None:
    asked = completion(
        ignore_eos=True, min_tokens=3, max_tokens=5, stop_token_ids=[1, 2], return_token_ids=True
    )
    assert (asked.ignore_eos, asked.min_tokens, asked.stop_token_ids) == (True, 3, [1, 2])
    assert (asked.max_tokens, asked.return_token_ids) == (5, True)
    assert chat(ignore_eos=False, min_tokens=0, stop_token_ids=[]) == chat()
    for bad in (
        {"min_tokens": 6, "max_tokens": 5},
        {"stop_token_ids": [1] * 129},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [1] * 100_000},
    ):
        with pytest.raises(RequestError) as caught:
            completion(**bad)
        assert str(caught.value.param).startswith(next(iter(bad)))


@pytest.mark.parametrize("make", [chat, completion])
def test_a_bound_of_minus_one_is_none_but_the_context(make: Any) -> None:
    assert make(max_tokens=-1).max_tokens is None
    assert chat(max_completion_tokens=-1, max_tokens=3).max_tokens is None
    with pytest.raises(RequestError, match="at least 1, or -1"):
        make(max_tokens=0)


def test_a_chat_that_goes_on_with_its_last_turn() -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    asked = chat(messages=turns, continue_final_message=True, add_generation_prompt=False)
    assert asked.continue_final_message
    assert not chat(messages=turns, add_generation_prompt=True).continue_final_message
    for bad in (
        {"continue_final_message": True},
        {"messages": turns, "continue_final_message": True, "add_generation_prompt": True},
        {"add_generation_prompt": False},
    ):
        with pytest.raises(RequestError, match=r"continue_final_message|add_generation_prompt"):
            chat(**bad)


def test_what_the_template_is_given_reaches_the_engine_as_json() -> None:
    kwargs = {"enable_thinking": False}
    asked = chat(chat_template_kwargs=kwargs)
    assert json.loads(asked.chat_template_kwargs) == kwargs
    assert chat(chat_template_kwargs={}) == chat()
    with pytest.raises(RequestError):
        chat(chat_template_kwargs=[1])


def test_what_a_request_leaves_out_is_the_model_s() -> None:
    """And what it says, zero included, it says: the two ways to one temperature are one request."""
    own = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=40, repetition_penalty=1.1)

    def made(**body: Any) -> GenerateRequest:
        data = json.dumps({"messages": MESSAGES, **body}).encode()
        return endpoints.CHAT.decode(data).to_generate("m", 100, own)

    said = {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    assert made() == made(**said) == chat(**said)
    asked = made(temperature=0, top_k=-1, presence_penalty=1)
    assert (asked.temperature, asked.top_p, asked.top_k) == (0, 0.9, 0)
    assert asked.presence_penalty == 1
    assert made(temperature=None) == made()

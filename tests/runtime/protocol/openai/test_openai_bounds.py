"""Requests that are long: refused by their length, without anything as long being made of them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from trinamo.runtime.errors import RequestError
from trinamo.runtime.http import endpoints
from trinamo.runtime.http.endpoints import EndpointKind
from trinamo.runtime.protocol.openai.generate import (
    STOP_CHARS_MAX,
    STOP_STRINGS_MAX,
    TOKEN_CHARS_MAX,
    ChatMessage,
    Delta,
    GenerateRequest,
    bounded_request_type,
    payload_bytes_max_for,
)

CONTEXT = 100
MEGABYTES = 4 << 20

TOKENS = b'{"prompt": [' + b"1," * (MEGABYTES // 2) + b"1]}"
LONG_COMPLETIONS = {
    "token ids": TOKENS,
    "token ids in a list": b'{"prompt": [ [' + b"1," * (MEGABYTES // 2) + b"1]]}",
    "no token ids": b'{"prompt": [' + b"{}," * (MEGABYTES // 3) + b"{}]}",
    "prompts": b'{"prompt": [' + b'"ab",' * (MEGABYTES // 5) + b'"ab"]}',
    "lists": b'{"prompt": [' + b"[1]," * (MEGABYTES // 4) + b"[1]]}",
    "stop strings": b'{"prompt": "a", "stop": [' + b'"ab",' * (MEGABYTES // 5) + b'"a"]}',
    "logit biases": b'{"prompt": "a", "logit_bias": [' + b"[]," * (MEGABYTES // 3) + b"1]}",
}
LONG_CHATS = {
    "tools": b'{"messages": [{"role": "user", "content": "a"}], "tools": ['
    + b"{}," * (MEGABYTES // 3)
    + b"{}]}",
    "tool calls": b'{"messages": [{"role": "user", "content": "a", "tool_calls": ['
    + b"[]," * (MEGABYTES // 3)
    + b"1]}]}",
}


def complete(body: bytes) -> GenerateRequest:
    return endpoints.COMPLETIONS.decode(body).to_generate("m", CONTEXT)


def chat(body: bytes) -> GenerateRequest:
    return endpoints.CHAT.decode(body).to_generate("m", CONTEXT)


def peak_of_refusing(call: Callable[[], object]) -> int:
    """The bytes that are held at most while `call` comes to its refusal."""
    tracemalloc.start()
    try:
        with pytest.raises((RequestError, msgspec.ValidationError)):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", LONG_COMPLETIONS)
def test_refusing_a_long_completion_takes_less_than_its_body(kind: str) -> None:
    """Each of a million numbers would be an object; they are counted in the bytes instead."""
    body = LONG_COMPLETIONS[kind]
    assert peak_of_refusing(lambda: complete(body)) < len(body) + 100_000


@pytest.mark.parametrize("kind", LONG_CHATS)
def test_refusing_a_long_chat_takes_less_than_its_body(kind: str) -> None:
    body = LONG_CHATS[kind]
    assert peak_of_refusing(lambda: chat(body)) < len(body) + 100_000


def test_a_prompt_of_too_many_token_ids_is_told_how_many() -> None:
    with pytest.raises(
        RequestError, match=r"maximum context length is 100 tokens, .* 101 tokens; shorten"
    ):
        complete(json.dumps({"prompt": [1] * 101}).encode())
    assert complete(json.dumps({"prompt": [1] * 100}, indent=1).encode()).token_ids == [1] * 100


@pytest.mark.parametrize("text", ["a", "\u00e9", "\U0001f600"])
def test_text_that_no_context_of_that_size_can_hold_is_refused(text: str) -> None:
    """In characters, however many bytes they take; what might fit is left to the engine."""
    most = text * (CONTEXT * TOKEN_CHARS_MAX)
    assert complete(json.dumps({"prompt": most}).encode()).prompt == most
    with pytest.raises(RequestError, match="too long for it: 25601 characters") as caught:
        complete(json.dumps({"prompt": most + text}).encode())
    assert caught.value.param == "prompt"
    turns = [{"role": "user", "content": most}, {"role": "user", "content": text}]
    with pytest.raises(RequestError, match="too long for it: 25601 characters") as caught:
        chat(json.dumps({"messages": turns}).encode())
    assert caught.value.param == "messages"


def test_more_messages_than_tokens_are_refused() -> None:
    turn = {"role": "user", "content": ""}
    with pytest.raises(RequestError, match="too long for it: 101 messages"):
        chat(json.dumps({"messages": [turn] * 101}).encode())
    assert len(chat(json.dumps({"messages": [turn] * 100}).encode()).messages or ()) == 100


@pytest.mark.parametrize("blank", ["", " ", "\n\t\r "])
def test_blanks_between_brackets_change_nothing(blank: str) -> None:
    def of(*parts: str) -> GenerateRequest:
        return complete(('{"prompt":' + blank + blank.join(parts) + blank + "}").encode())

    assert of("[", "1", ",", "2", "]").token_ids == [1, 2]
    assert of("[", "[", "1", "]", "]").token_ids == [1]
    assert of("[", '"a,b"', "]").prompt == "a,b"
    assert of('"[1,2]"').prompt == "[1,2]"
    for empty in (("[", "]"), ("[", "[", "]", "]")):
        with pytest.raises(RequestError, match="must not be empty"):
            of(*empty)


def test_the_longest_stop_strings_are_allowed() -> None:
    stops = ["\U0001f600" * (STOP_CHARS_MAX // STOP_STRINGS_MAX)] * STOP_STRINGS_MAX
    assert complete(json.dumps({"prompt": "a", "stop": stops}).encode()).stop == stops


# --- the same at the worker, whose callers are not all frontends -----------------------------

Encode = msgspec.msgpack.Encoder().encode
LONG: list[dict[str, Any]] = [
    {"token_ids": [1] * 1_000_000},
    {"messages": [ChatMessage("user", "")] * 100_000},
    {"prompt": "a" * (CONTEXT * TOKEN_CHARS_MAX + 1)},
    {"prompt": "a", "stop": ["a"] * 1_000_000},
]


@pytest.mark.parametrize("fields", LONG, ids="+".join)
def test_a_worker_measures_before_it_decodes(fields: dict[str, Any]) -> None:
    payload = Encode({"model": "m", **fields})
    decoder = msgspec.msgpack.Decoder(bounded_request_type(CONTEXT))
    assert peak_of_refusing(lambda: decoder.decode(payload)) < 100_000


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(model="m", token_ids=[2**31 - 1] * CONTEXT, seed=2**63 - 1),
        GenerateRequest(model="m", messages=[ChatMessage("user", "")] * CONTEXT, top_p=0.5),
        GenerateRequest(
            model="m",
            prompt="\U0001f600" * (CONTEXT * TOKEN_CHARS_MAX),
            stop=["\U0001f600" * (STOP_CHARS_MAX // STOP_STRINGS_MAX)] * STOP_STRINGS_MAX,
        ),
    ],
    ids=["token ids", "messages", "prompt"],
)
def test_what_is_just_short_enough_decodes_to_what_it_was(request_: GenerateRequest) -> None:
    payload = Encode(request_)
    assert len(payload) <= payload_bytes_max_for(CONTEXT)
    decoded = msgspec.msgpack.decode(payload, type=bounded_request_type(CONTEXT))
    assert isinstance(decoded, GenerateRequest)
    assert Encode(decoded) == payload


@pytest.mark.parametrize("count", [-1, 2**31])
def test_no_answer_has_so_many_prompt_tokens(count: int) -> None:
    """A counter that is told a negative number raises; the edge would say 500."""
    data = Encode(Delta("a", [1], None, count))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=Delta)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (endpoints.COMPLETIONS, "prompt"),
        (endpoints.EMBEDDINGS, "input"),
        (endpoints.TOKENIZE, "prompt"),
        (endpoints.DETOKENIZE, "tokens"),
    ],
)
def test_lists_in_lists_are_refused_at_every_depth(kind: EndpointKind, field: str) -> None:
    """A body can be just shallow enough to be read, and its prompt then too deep."""

    def enter(body: bytes) -> None:
        request = kind.decode(body)
        request.to_choices(request.to_generate("m", CONTEXT), CONTEXT, 64)

    for depth in (2, 3, *range(850, 1001), 2000, 10_000):
        body = f'{{"{field}":{"[" * depth}{"]" * depth}}}'.encode()
        with pytest.raises(RequestError):
            enter(body)


def test_all_stop_strings_together_have_a_bound() -> None:
    stops = ["a" * STOP_CHARS_MAX, "b"]
    with pytest.raises(RequestError, match="'stop' holds 4097 characters; at most 4096"):
        complete(json.dumps({"prompt": "a", "stop": stops}).encode())
    with pytest.raises(RequestError, match="'stop'"):
        GenerateRequest(model="m", prompt="a", stop=stops)


def test_the_input_of_an_earlier_call_is_measured_before_it_is_decoded() -> None:
    block = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": [[]] * (1 << 17)}}
    messages = [{"role": "assistant", "content": [block]}]
    body = json.dumps({"max_tokens": 1, "messages": messages}).encode()
    request = endpoints.MESSAGES.decode(body)
    assert peak_of_refusing(lambda: request.to_generate("m", 1 << 20)) < 100_000

"""What a request must be before any engine reads it, whoever sends it: checked once, at the entrance."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from trinamo.runtime.engines.prompts import check_prompt_fits
from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.openai.generate import (
    ChatMessage,
    GenerateRequest,
    bounded_request_type,
)
from trinamo.runtime.protocol.streams.request import Envelope, RequestKind
from trinamo.runtime.worker.endpoint import Endpoint

USER = {"role": "user", "content": "hello"}


def enter(request: Any) -> Any:
    """As a worker's endpoint takes the bytes of a member."""
    endpoint = Endpoint(
        EndpointName("a", "b", "c"), request_type=bounded_request_type(64), unary=unary
    )
    envelope = Envelope(id="r", kind=RequestKind.UNARY, endpoint="a/b/c")
    return endpoint.accept(envelope, msgspec.msgpack.encode(request))


async def unary(*_: Any) -> None:
    raise AssertionError("nobody calls it")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "messages", "not 0"),
        ({"prompt": "a", "messages": [USER]}, "messages", "not 2"),
        ({"messages": []}, "messages", "empty"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"token_ids": []}, "prompt", "empty"),
        ({"messages": [USER, {"role": "king", "content": "x"}]}, "messages[1].role", "'king'"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", ">= 1"),
        ({"prompt": "a", "temperature": -0.1}, "temperature", ">= 0"),
        ({"prompt": "a", "temperature": 2.1}, "temperature", "<= 2"),
        ({"prompt": "a", "temperature": math.nan}, "temperature", ">= 0"),
        ({"prompt": "a", "top_p": 0}, "top_p", "> 0"),
        ({"prompt": "a", "top_p": 1.5}, "top_p", "<= 1"),
        ({"prompt": "a", "top_p": math.nan}, "top_p", "> 0"),
        ({"prompt": "a", "top_k": -1}, "top_k", ">= 0"),
        ({"prompt": "a", "min_p": math.nan}, "min_p", ">= 0"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "<= 20"),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty", "<= 2"),
        ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty", ">= -2"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "> 0"),
        ({"prompt": "a", "logit_bias": {1: math.inf}}, "logit_bias[...]", "<= 100"),
        ({"prompt": "a", "stop": ["x"] * 33}, "stop", "length <= 32"),
        ({"prompt": "a", "stop": ["x", ""]}, "stop[1]", "length >= 1"),
        ({"prompt": "a", "stop": ["x" * 4097]}, "stop[0]", "length <= 4096"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_parameter(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        enter({"model": "m", **fields})
    assert caught.value.param == param
    assert words in caught.value.message


def test_one_that_a_program_makes_has_exactly_one_prompt() -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"messages": []},
        {"prompt": ""},
        {"prompt": "a", "token_ids": [1]},
    ]
    for fields in wrong:
        with pytest.raises(RequestError, match=r"exactly one|empty"):
            GenerateRequest(model="m", **fields)


def test_a_good_request_enters_as_it_is() -> None:
    for good in (
        GenerateRequest(
            model="m",
            messages=[ChatMessage("user", "hello")],
            temperature=0,
            stop=["x" * 128] * 32,
            logit_bias={1: -100},
        ),
        GenerateRequest(model="m", prompt="a", top_p=0.1, seed=2**64 - 1, max_tokens=1),
    ):
        entered = enter(good)
        assert msgspec.structs.asdict(entered) == msgspec.structs.asdict(good)


@pytest.mark.parametrize("tokens", [0, 8, 9])
def test_a_prompt_must_leave_room_for_one_token(tokens: int) -> None:
    with pytest.raises(RequestError, match=r"empty|shorten"):
        check_prompt_fits(tokens, 8)
    check_prompt_fits(7, 8)

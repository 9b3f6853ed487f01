"""What a request must look like before any engine reads it."""

from __future__ import annotations

import math

import pytest

from trinamo.runtime.engines.validation import check_prompt_fits, check_request
from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.openai.generate import ChatMessage, GenerateRequest

USER = ChatMessage("user", "hello")


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        (GenerateRequest(model="m"), "messages", "not 0"),
        (GenerateRequest(model="m", prompt="a", messages=[USER]), "messages", "not 2"),
        (GenerateRequest(model="m", messages=[]), "messages", "empty"),
        (GenerateRequest(model="m", prompt=""), "prompt", "empty"),
        (GenerateRequest(model="m", token_ids=[]), "prompt", "empty"),
        (
            GenerateRequest(model="m", messages=[USER, ChatMessage("king", "x")]),
            "messages[1].role",
            "'king'",
        ),
        (GenerateRequest(model="m", prompt="a", max_tokens=0), "max_tokens", "at least 1"),
        (GenerateRequest(model="m", prompt="a", temperature=-0.1), "temperature", "from 0 to 2"),
        (GenerateRequest(model="m", prompt="a", temperature=2.1), "temperature", "from 0 to 2"),
        (GenerateRequest(model="m", prompt="a", temperature=math.nan), "temperature", "nan"),
        (GenerateRequest(model="m", prompt="a", top_p=0), "top_p", "above 0"),
        (GenerateRequest(model="m", prompt="a", top_p=1.5), "top_p", "at most 1"),
        (GenerateRequest(model="m", prompt="a", top_p=math.nan), "top_p", "nan"),
        (GenerateRequest(model="m", prompt="a", top_k=-1), "top_k", "from 0"),
        (GenerateRequest(model="m", prompt="a", min_p=math.nan), "min_p", "nan"),
        (GenerateRequest(model="m", prompt="a", logprobs=21), "logprobs", "from 0 to 20"),
        (GenerateRequest(model="m", prompt="a", presence_penalty=3), "presence_penalty", "-2 to 2"),
        (
            GenerateRequest(model="m", prompt="a", repetition_penalty=0),
            "repetition_penalty",
            "above 0",
        ),
        (
            GenerateRequest(model="m", prompt="a", logit_bias={1: math.inf}),
            "logit_bias",
            "-100 to 100",
        ),
        (GenerateRequest(model="m", prompt="a", stop=["x"] * 33), "stop", "at most 32"),
        (GenerateRequest(model="m", prompt="a", stop=["x", ""]), "stop", "1 to 4096"),
        (GenerateRequest(model="m", prompt="a", stop=["x" * 4097]), "stop", "1 to 4096"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_parameter(
    request_: GenerateRequest, param: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(request_)
    assert caught.value.param == param
    assert words in caught.value.message


def test_a_good_request_passes() -> None:
    check_request(GenerateRequest(model="m", messages=[USER], temperature=0, stop=["x"] * 32))


@pytest.mark.parametrize("tokens", [0, 8, 9])
def test_a_prompt_must_leave_room_for_one_token(tokens: int) -> None:
    with pytest.raises(RequestError, match=r"empty|shorten"):
        check_prompt_fits(tokens, 8)
    check_prompt_fits(7, 8)

"""Tokens of a prompt are the same wherever they are made."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trinamo.runtime.engines.exact.engine import ExactEngine
from trinamo.runtime.engines.mocker.engine import MockerEngine
from trinamo.runtime.engines.prompts import tokenizer_of
from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.openai.generate import ChatMessage, GenerateRequest

REQUESTS = [
    GenerateRequest(model="m", prompt="héllo"),
    GenerateRequest(model="m", token_ids=[1, 256]),
    GenerateRequest(model="m", messages=[ChatMessage("system", "a"), ChatMessage("user", "é")]),
]


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("engine", [ExactEngine(), MockerEngine()], ids=["exact", "mocker"])
def test_the_tokenizer_an_engine_names_makes_its_tokens(
    engine: ExactEngine | MockerEngine, request_: GenerateRequest
) -> None:
    tokenizer = tokenizer_of(engine.info.tokenizer)
    assert tokenizer is not None
    assert tokenizer(request_, 100) == engine.encode(request_)


def test_a_prompt_that_is_too_long_and_a_token_of_another_model_are_refused() -> None:
    for name in ("bytes/exact", "bytes/mocker"):
        tokenizer = tokenizer_of(name)
        assert tokenizer is not None
        with pytest.raises(RequestError, match="maximum context length is 4 tokens"):
            tokenizer(GenerateRequest(model="m", prompt="long"), 4)
        with pytest.raises(RequestError, match="token id"):
            tokenizer(GenerateRequest(model="m", token_ids=[261]), 4)


def test_an_unknown_tokenizer_is_none() -> None:
    assert tokenizer_of("") is None


def test_making_tokens_needs_no_numpy() -> None:
    code = "import trinamo.runtime.engines.prompts, sys; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

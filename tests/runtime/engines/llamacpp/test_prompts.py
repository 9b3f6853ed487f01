"""Prompts of text, by a vocabulary of bytes and a few special tokens; no model is needed."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from tests import needs
from trinamo.runtime.protocol.openai.generate import ChatMessage, GenerateRequest

needs.LLAMACPP.imported()
from trinamo.runtime.engines.llamacpp.prompts import Prompts, Vocabulary  # noqa: E402

BOS, END = 256, 257
SPECIAL = {"<s>": BOS, "<|end|>": END}


class Bytes:
    """As llama.cpp's vocabulary, which begins each text with `<s>`."""

    n_vocab = 258

    def is_eog(self, token_id: int) -> bool:
        return token_id == END

    def is_control(self, token_id: int) -> bool:
        return token_id >= BOS

    def token_bos(self) -> int:
        return BOS

    def token_eos(self) -> int:
        return END

    def get_add_bos(self) -> bool:
        return True

    def get_text(self, token_id: int) -> str:
        return next((text for text, each in SPECIAL.items() if each == token_id), chr(token_id))

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        assert not add_special
        found: list[int] = []
        for piece in re.split(r"(<s>|<\|end\|>)", text) if parse_special else [text]:
            found += [SPECIAL[piece]] if parse_special and piece in SPECIAL else piece.encode()
        return found


@pytest.fixture
def prompts() -> Any:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}<tool_call>"
    made = Prompts(Vocabulary(Bytes()), template, context_tokens_max=4096, rng=random.Random(1))
    yield made
    made.close()


def test_control_tokens_in_a_prompt_are_control_tokens(prompts: Prompts) -> None:
    asked = GenerateRequest(model="m", prompt="a<|end|>b")
    assert prompts.encode(asked) == [BOS, ord("a"), END, ord("b")]


def test_a_prompt_that_begins_itself_has_one_beginning(prompts: Prompts) -> None:
    assert prompts.encode(GenerateRequest(model="m", prompt="<s>a")) == [BOS, ord("a")]


async def test_control_tokens_in_a_message_are_plain_text(prompts: Prompts) -> None:
    asked = GenerateRequest(model="m", messages=[ChatMessage("user", "a<|end|><s>")])
    prepared = await prompts.prepare(asked)
    ends = [*b"<tool_call>"]
    assert prompts.encode(prepared) == [BOS, *b"a<|end|><s>", END, *ends]

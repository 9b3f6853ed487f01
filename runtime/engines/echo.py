"""The engine without a model: it says the prompt back, word by word.

For trying the runtime and for tests that need an answer of a known text, a long prefill or a
steady pace. It keeps no KV. For real memory use `engines/exact/engine.py`.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import count, islice

import trio

from ..context import Context
from ..protocol.openai.generate import Delta, Feature, FinishReason, GenerateRequest
from .generation import EngineInfo, GenerationEngine
from .own.serving import GeneratorEngine

_WORD = re.compile(r"\s*\S+|\s+$")


@asynccontextmanager
async def open_echo_engine(
    *,
    model: str = "echo",
    delay_s: float = 0.0,
    prefill_s: float = 0.0,
    context_tokens_max: int = 131_072,
    running_max: int = 4096,
) -> AsyncIterator[GenerationEngine]:
    """An engine that says the last user message back, or the prompt.

    It sleeps `prefill_s` before the first word and `delay_s` before each; Stop wakes it. A word with
    the white space before it is one token; its id is the CRC-32 of its text, since there is no
    vocabulary, and so a prompt of token ids is a `RequestError`. With `ignore_eos` or `min_tokens` it
    says it again until there are as many. More than `running_max` answers at
    once are refused with `OverloadedError`.
    """

    def words_of(request: GenerateRequest) -> list[str]:
        found = _WORD.finditer(request.text)
        # No more than would be too many: the text may be many megabytes.
        return [match[0] for match in islice(found, context_tokens_max)]

    async def say(request: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        words = words_of(request)
        asked = math.inf if request.max_tokens is None else request.max_tokens
        tokens_max = min(asked, context_tokens_max - len(words))
        # The whole prompt is the whole answer, unless it is to be longer: then it is said again.
        wanted = tokens_max if request.ignore_eos else max(len(words), request.min_tokens)
        await _sleep_unless_stopped(prefill_s, context)
        for number in count(1):
            word = words[(number - 1) % len(words)]
            if number > len(words) and not word[0].isspace():
                word = f" {word}"
            if number > len(request.delivered_ids):
                await _sleep_unless_stopped(delay_s, context)
            token_id = zlib.crc32(word.encode())
            if token_id in request.stop_token_ids and number > request.min_tokens:
                yield Delta("", [token_id], FinishReason.STOP)
                return
            # The end is told with the last word, also if there are no more tokens for it.
            is_end = number == len(words) == tokens_max and not request.ignore_eos
            yield Delta(word, [token_id], FinishReason.STOP if is_end else None)
            if number >= wanted:
                return

    await trio.lowlevel.checkpoint()
    info = EngineInfo(
        engine="echo",
        model=model,
        context_tokens_max=context_tokens_max,
        can_resume=True,
        features=frozenset({Feature.END_TOKENS}),
    )
    yield GeneratorEngine(
        info, say, count=lambda request: len(words_of(request)), running_max=running_max
    )


async def _sleep_unless_stopped(seconds: float, context: Context) -> None:
    """Sleep, but wake at Stop. With zero seconds it is still a checkpoint."""
    if seconds <= 0:
        await trio.lowlevel.checkpoint()
        return
    with trio.move_on_after(seconds):
        await context.wait_stopped()

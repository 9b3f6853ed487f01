"""The engine without a model: it says the prompt back, word by word.

For trying the runtime and for tests that need an answer of a known text, a long prefill or a
steady pace. It keeps no KV. For real memory use `engines/exact/engine.py`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice

import trio

from ..context import Context
from ..errors import OverloadedError, RequestError
from ..protocol.openai.generate import Delta, FinishReason, GenerateRequest, check_features
from .generation import EngineInfo, EngineStatistics
from .prompts import check_prompt_fits
from .text import StopMatcher

_WORD = re.compile(r"\s*\S+|\s+$")


class EchoEngine:
    """Answers with the last user message, or the prompt; made by `open_echo_engine`.

    A word with the white space before it is one token; its id is the CRC-32 of its text, since
    there is no vocabulary, and so a prompt of token ids is a `RequestError`.
    """

    def __init__(
        self,
        *,
        model: str,
        delay_s: float,
        prefill_s: float,
        context_tokens_max: int,
        running_max: int,
    ) -> None:
        self.info = EngineInfo(
            engine="echo", model=model, context_tokens_max=context_tokens_max, can_resume=True
        )
        self._delay_s = delay_s
        self._prefill_s = prefill_s
        self._running_max = running_max
        self._running = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cancellations = 0

    def statistics(self) -> EngineStatistics:
        """The gauges and counters now; a step is one word of one answer."""
        return EngineStatistics(
            running=self._running,
            steps=self._completion_tokens,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cancellations=self._cancellations,
        )

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        """Stream the prompt back; see `GenerationEngine.generate`.

        Stop wakes it from the prefill and from the pause before a word.
        """
        check_features(request, self.info.features)
        found = _WORD.finditer(request.text)
        # No more than would be too many: the text may be many megabytes.
        words = [match[0] for match in islice(found, self.info.context_tokens_max)]
        prompt_tokens = len(words)
        check_prompt_fits(prompt_tokens, self.info.context_tokens_max)
        room = self.info.context_tokens_max - prompt_tokens
        tokens_max = room if request.max_tokens is None else min(request.max_tokens, room)
        matcher = StopMatcher(request.stop)
        answer = words[:tokens_max]
        delivered = answer[: len(request.delivered_ids)]
        if [_token_of(word) for word in delivered] != request.delivered_ids:
            raise RequestError("the answer does not begin with these tokens", param="delivered_ids")
        for word in delivered:
            matcher.push(word)
        rest = [] if matcher.is_stopped else answer[len(delivered) :]
        is_truncated = len(words) > tokens_max and not matcher.is_stopped
        with self._place():
            self._prompt_tokens += prompt_tokens
            held_ids: list[int] = []
            await _sleep_unless_stopped(self._prefill_s, context)
            for word in rest:
                await _sleep_unless_stopped(self._delay_s, context)
                if context.is_stopped:
                    break
                self._completion_tokens += 1
                held_ids.append(_token_of(word))
                text = matcher.push(word)
                if matcher.is_stopped:
                    yield Delta(text, held_ids, FinishReason.STOP, prompt_tokens)
                    return
                if text:
                    yield Delta(text, held_ids, None, prompt_tokens)
                    held_ids, prompt_tokens = [], 0
            reason = FinishReason.LENGTH if is_truncated else FinishReason.STOP
            if context.is_stopped:
                reason = FinishReason.STOP
                self._cancellations += 1
            yield Delta(matcher.flush(), held_ids, reason, prompt_tokens)

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._running >= self._running_max:
            raise OverloadedError(
                f"echo answers at most {self._running_max} requests at once",
                bound="running_max",
                value=self._running_max,
            )
        self._running += 1
        try:
            yield
        except (GeneratorExit, trio.Cancelled):
            self._cancellations += 1
            raise
        finally:
            self._running -= 1


@asynccontextmanager
async def open_echo_engine(
    *,
    model: str = "echo",
    delay_s: float = 0.0,
    prefill_s: float = 0.0,
    context_tokens_max: int = 131_072,
    running_max: int = 4096,
) -> AsyncIterator[EchoEngine]:
    """An `EchoEngine` that sleeps `prefill_s` before the first word and `delay_s` before each.

    More than `running_max` answers at once are refused with `OverloadedError`.
    """
    await trio.lowlevel.checkpoint()
    yield EchoEngine(
        model=model,
        delay_s=delay_s,
        prefill_s=prefill_s,
        context_tokens_max=context_tokens_max,
        running_max=running_max,
    )


def _token_of(word: str) -> int:
    return zlib.crc32(word.encode())


async def _sleep_unless_stopped(seconds: float, context: Context) -> None:
    """Sleep, but wake at Stop. With zero seconds it is still a checkpoint."""
    if seconds <= 0:
        await trio.lowlevel.checkpoint()
        return
    with trio.move_on_after(seconds):
        await context.wait_stopped()

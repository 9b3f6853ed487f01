"""The engine behind a generator: what a worker asks, and what goes wrong in it, as one sentence."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import trio

from ...context import Context
from ...errors import EngineError, OverloadedError, TrinamoError
from ...nurseries import is_failure, single
from ...protocol.openai.generate import Delta, GenerateRequest, check_features
from ..generation import EngineInfo, EngineStatistics
from .items import AnswerItems, count_words
from .stalls import Stalls
from .telling import told

_log = logging.getLogger("trinamo.engines")
Answering = Callable[[GenerateRequest, Context], AsyncGenerator[Any, None]]
"""What a program writes: yields `str` or `Delta`."""
Bridge = Callable[[AsyncGenerator[Any, None], Any], AsyncGenerator[Any, None]]


class GeneratorEngine:
    """A `GenerationEngine` that asks `answering` for each answer.

    `bridge` brings the items of a generator from another event loop, `count` says how many tokens a
    prompt has as long as the generator does not, and more than `running_max` answers at once are
    refused. An engine that resumes makes its answer again: what was delivered of it is left out.
    """

    def __init__(
        self,
        info: EngineInfo,
        answering: Answering,
        bridge: Bridge | None = None,
        *,
        count: Callable[[GenerateRequest], int] = count_words,
        running_max: float = math.inf,
    ) -> None:
        self.info = info
        self._answering = answering
        self._bridge = bridge
        self._count, self._running_max = count, running_max
        thread = "trio.to_thread.run_sync" if bridge is None else "asyncio.to_thread"
        self.stalls = Stalls(info.engine, thread)
        """Whoever opens the engine has them watched."""
        self._running: dict[AnswerItems, None] = {}
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cancellations = 0
        self._failures = 0

    def statistics(self) -> EngineStatistics:
        """The gauges and counters now; a step is one token of one answer."""
        completion_tokens = self._completion_tokens + sum(
            each.completion_tokens for each in self._running
        )
        prompt_tokens = self._prompt_tokens + sum(each.prompt_tokens for each in self._running)
        return EngineStatistics(
            running=len(self._running),
            steps=completion_tokens,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cancellations=self._cancellations,
            failures=self._failures,
        )

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        """Stream one answer; see `GenerationEngine.generate`.

        Once `context` is stopped the answer ends with the generator's next item, which is dropped.
        """
        check_features(request, self.info.features)
        if len(self._running) >= self._running_max:
            raise OverloadedError(
                f"{self.info.engine} answers at most {self._running_max} requests at once",
                bound="running_max",
                value=self._running_max,
            )
        tokens_max = self.info.context_tokens_max
        answer = AnswerItems(self.info.engine, request, tokens_max, self._count)
        with self._running_answer(answer):
            async with aclosing(self._items(request, context)) as items:
                async for item in items:
                    if context.is_stopped:
                        break
                    delta = answer.take(item)
                    if delta is None:
                        # Nobody else has a turn in one that yields empty texts and never waits.
                        await trio.lowlevel.checkpoint()
                    else:
                        yield delta
                    if answer.is_over:
                        return
            if not context.is_stopped:
                answer.check_resumed()
            self._cancellations += context.is_stopped
            yield answer.finish()

    def _items(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Any, None]:
        items: Any = self._answering(request, context)
        if not isinstance(items, AsyncGenerator):
            raise EngineError(
                f"engine {self.info.engine} returned {type(items).__name__} instead of yielding:"
                " write it as an async generator"
            )
        if self._bridge is not None:
            return self._bridge(items, self.stalls.next_of)
        return self._measured(items)

    async def _measured(self, items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        async with aclosing(items):
            while True:
                try:
                    item = await self.stalls.next_of(items)
                except StopAsyncIteration:
                    return
                yield item

    @contextmanager
    def _running_answer(self, answer: AnswerItems) -> Iterator[None]:
        self._running[answer] = None
        try:
            yield
        except (GeneratorExit, trio.Cancelled):
            self._cancellations += 1
            raise
        except BaseException as raised:
            if not is_failure(raised):
                raise
            self._failures += 1
            error = single(raised)
            if isinstance(error, TrinamoError):
                if isinstance(error, EngineError):
                    _log.error("%s", error)
                raise error from None
            sentence = f"engine {self.info.engine} raised {told(error)}"
            wants_traceback = _log.isEnabledFor(logging.DEBUG)
            _log.error("%s", sentence, exc_info=raised if wants_traceback else None)
            raise EngineError(sentence) from raised
        finally:
            del self._running[answer]
            self._prompt_tokens += answer.prompt_tokens
            self._completion_tokens += answer.completion_tokens

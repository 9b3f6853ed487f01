"""Engines watched from outside: every attempt at a request, its tokens and its end are noted.

So no line of the runtime knows that it is being checked. What a prompt asks for beside an answer, a
failure after so many tokens, happens here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from typing_extensions import override

from trinamo.runtime.context import Context, State
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.errors import EngineError, TrinamoError
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.runtime.sinks import Sink

__all__ = ["RAISE_WORD", "NotedAttempt", "WatchedEngine", "request_name"]

RAISE_WORD: Final = "raise-after-"
"""A prompt with this word and a number makes the engine raise after so many tokens."""

Note = Callable[..., None]


def request_name(request: GenerateRequest) -> str:
    """The name a load gave its request: the first word of the prompt."""
    return _words(request)[0]


def _words(request: GenerateRequest) -> list[str]:
    text = request.messages[-1].content if request.messages else request.prompt or ""
    return text.split(" ")


def _raise_after(request: GenerateRequest) -> float:
    for word in _words(request):
        if word.startswith(RAISE_WORD):
            return int(word.removeprefix(RAISE_WORD))
    return math.inf


class NotedAttempt:
    """One attempt at a request, noted from where it begins to where it ends."""

    def __init__(self, note: Note, request: GenerateRequest, context: Context) -> None:
        self._note, self._context = note, context
        self._fields = {"request": request_name(request), "attempt": context.id}
        self._raise_after = _raise_after(request)
        self._count = 0

    def __enter__(self) -> Self:
        self.note("engine.begin")
        self._context.on_change(self._on_change)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        outcome = "complete" if error is None else "cancelled"
        if isinstance(error, TrinamoError):
            outcome = error.code
        self._context.off_change(self._on_change)
        self.note("engine.end", outcome=outcome, tokens=self._count)

    def _on_change(self, state: State) -> None:
        kind = "engine.killed" if state is State.KILLED else "engine.stopped"
        self.note(kind, reason=str(self._context.reason))

    def note(self, kind: str, **fields: Any) -> None:
        """Add a fact about this attempt."""
        self._note(kind, **self._fields, **fields)

    def made(self, token: int) -> None:
        """Note a token of the answer."""
        self.note("engine.token", index=self._count, token=token)
        self._count += 1

    def raise_if_asked(self) -> None:
        """Fail as the prompt asks for, once so many tokens were made."""
        if self._count >= self._raise_after:
            raise EngineError(f"the engine was asked to fail after {self._count} tokens")


class WatchedEngine:
    """An engine whose every token, and every end, is noted."""

    def __init__(self, note: Note, engine: EngineHost) -> None:
        self._note, self._engine = note, engine
        self.info, self.kv = engine.info, engine.kv
        self.statistics, self.listen_blocks = engine.statistics, engine.listen_blocks
        # What an engine must have; the worker takes `forward`, and so nobody sees these deltas.
        self.generate = engine.generate

    async def forward(self, request: GenerateRequest, context: Context, sink: Sink[Delta]) -> None:
        """As the engine's, with notes, and with the failure a prompt asks for."""
        with NotedAttempt(self._note, request, context) as attempt:
            attempt.raise_if_asked()
            await self._engine.forward(request, context, _WatchedSink(attempt, sink))


class _WatchedSink(Sink[Delta]):
    """Notes the tokens of one answer on their way to another sink."""

    def __init__(self, attempt: NotedAttempt, sink: Sink[Delta]) -> None:
        super().__init__()
        self._attempt, self._sink = attempt, sink

    @override
    def starts(self, resume: Callable[[], None]) -> None:
        self._sink.starts(resume)

    @override
    def take(self, items: list[Delta]) -> bool:
        for delta in items:
            for token in delta.token_ids:
                self._attempt.made(token)
        has_room = self._sink.take(items)
        self._attempt.raise_if_asked()
        return has_room

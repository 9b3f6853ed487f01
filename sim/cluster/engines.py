"""Engines watched from outside: every attempt at a request, its tokens and its end are noted.

So no line of the runtime knows that it is being checked. An attempt is of one leg of a request: the
whole of it, its prompt alone (`prefill`), or a place kept for what another worker prefills (`decode`).
What a prompt asks for beside an answer, a failure after so many tokens, happens here too.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, Self

from typing_extensions import override

from trinamo.runtime.context import Context, State
from trinamo.runtime.engines.handoff import KeptPrefill, Reservation
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.engines.prompts import START
from trinamo.runtime.errors import EngineError, TrinamoError
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.runtime.sinks import Sink

RAISE_WORD: Final = "raise-after-"
"""A prompt with this word and a number makes the engine raise after so many tokens."""

DEAF_WORD: Final = "deaf"
"""One with this word makes it hear no Stop; Kill ends it all the same."""

Note = Callable[..., None]
Leg = Literal["whole", "prefill", "decode"]


def request_name(request: GenerateRequest) -> str:
    """The name a load gave its request: the first word of the prompt."""
    return _words(request)[0]


def _words(request: GenerateRequest) -> list[str]:
    if request.token_ids is not None:
        # As the mocker makes them: a start token, then the bytes of the turns with their roles.
        text = bytes(token for token in request.token_ids if token < START).decode()
        return text.rpartition(">")[2].split(" ")
    text = request.messages[-1].content if request.messages else request.prompt or ""
    return text.split(" ")


def _raise_after(request: GenerateRequest) -> float:
    for word in _words(request):
        if word.startswith(RAISE_WORD):
            return int(word.removeprefix(RAISE_WORD))
    return math.inf


class NotedAttempt:
    """One attempt at a request, noted from where it begins to where it ends."""

    def __init__(
        self, note: Note, request: GenerateRequest, context: Context, leg: Leg = "whole"
    ) -> None:
        self._note, self._context = note, context
        self._fields = {"request": request_name(request), "attempt": context.id, "leg": leg}
        self._raise_after, self._seed = _raise_after(request), request.seed
        self._began_at = self._count = len(request.delivered_ids)

    def __enter__(self) -> Self:
        self.note("engine.begin", index=self._count, seed=str(self._seed))
        self._context.on_change(self._on_change)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        outcome = "complete" if error is None else "cancelled"
        if isinstance(error, TrinamoError):
            outcome = error.code
        self._context.off_change(self._on_change)
        self.note("engine.end", outcome=outcome, tokens=self._count - self._began_at)

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
    """An engine whose every token, and every end, is noted. Implements `HandsOver`."""

    def __init__(self, note: Note, engine: EngineHost) -> None:
        self._note, self._engine = note, engine
        self.info, self.kv = engine.info, engine.kv
        self.prepare, self.examine = engine.prepare, engine.examine
        self.statistics, self.listen_blocks = engine.statistics, engine.listen_blocks
        # What an engine must have; the worker takes `forward`, and so nobody sees these deltas.
        self.generate = engine.generate

    async def forward(self, request: GenerateRequest, context: Context, sink: Sink[Delta]) -> None:
        """As the engine's, with notes, and with the failure a prompt asks for."""
        with NotedAttempt(self._note, request, context) as attempt:
            attempt.raise_if_asked()
            heard = Context(context.id) if DEAF_WORD in _words(request) else context
            await self._engine.forward(request, heard, _WatchedSink(attempt, sink))

    @asynccontextmanager
    async def prefill_and_keep(
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[KeptPrefill]:
        """As the engine's; each wait for more filled blocks is noted when it ends."""
        with NotedAttempt(self._note, request, context, "prefill") as attempt:
            async with self._engine.prefill_and_keep(request, context) as kept:
                yield _WatchedPrefill(attempt, kept)

    @asynccontextmanager
    async def reserve(
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[Reservation]:
        """As the engine's; what it makes of the adopted blocks is noted as every answer."""
        with NotedAttempt(self._note, request, context, "decode") as attempt:
            async with self._engine.reserve(request, context) as reservation:
                attempt.note("engine.reserved", blocks=len(reservation.block_ids))
                yield _WatchedReservation(attempt, reservation)


class _WatchedPrefill:
    def __init__(self, attempt: NotedAttempt, kept: KeptPrefill) -> None:
        self._attempt, self._kept = attempt, kept
        self.block_ids, self.first_token = kept.block_ids, kept.first_token

    async def wait_filled(self, count: int) -> int:
        filled = await self._kept.wait_filled(count)
        self._attempt.note("engine.filled", blocks=filled)
        return filled


class _WatchedReservation:
    def __init__(self, attempt: NotedAttempt, reservation: Reservation) -> None:
        self._attempt, self._reservation = attempt, reservation
        self.prompt, self.block_ids = reservation.prompt, reservation.block_ids

    async def adopt(self, first_token: int, sink: Sink[Delta]) -> None:
        self._attempt.note("engine.adopted", token=first_token)
        await self._reservation.adopt(first_token, _WatchedSink(self._attempt, sink))


class _WatchedSink(Sink[Delta]):
    """Notes the tokens of one answer on their way to another sink."""

    def __init__(self, attempt: NotedAttempt, sink: Sink[Delta]) -> None:
        super().__init__()
        self._attempt, self._sink = attempt, sink

    @override
    def on_room(self, listener: Callable[[], None]) -> None:
        self._sink.on_room(listener)

    @override
    def take(self, items: list[Delta]) -> bool:
        for delta in items:
            for token in delta.token_ids:
                self._attempt.made(token)
        has_room = self._sink.take(items)
        self._attempt.raise_if_asked()
        return has_room

    @override
    def end(self) -> None:
        self._sink.end()

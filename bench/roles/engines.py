"""What trinamo's workers run in the HTTP benchmarks: engines that compute nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import trio
from http_roles import IDLE_STEP_S, TEXT

from trinamo import Context, Delta, EngineInfo, EngineStatistics, FinishReason, GenerateRequest


class PlainEngine:
    """Each answer is a generator of its own; `temperature` is the pause before every token."""

    info = EngineInfo(engine="bench", model="plain", context_tokens_max=1 << 30)

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        count, pause_s = request.max_tokens or 1, request.temperature
        for number in range(count):
            if pause_s:
                await trio.sleep(pause_s)
            reason = FinishReason.LENGTH if number == count - 1 else None
            yield Delta(TEXT, [number], reason)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics()

    async def run(self) -> None:
        """Nothing runs beside the answers."""


class Answer:
    """One answer of `StepsEngine`: how many tokens are left, and who takes them."""

    def __init__(self, tokens: int, take: Callable[[list[Delta]], bool]) -> None:
        self.left = tokens
        self.take = take
        self.has_room = True
        self.changed = trio.Event()

    def resume(self) -> None:
        self.has_room = True
        self.changed.set()

    def advance(self) -> None:
        """One token."""
        self.left -= 1
        reason = None if self.left else FinishReason.LENGTH
        self.has_room = self.take([Delta(TEXT, [self.left], reason)])
        if not self.left:
            self.changed.set()

    async def flood(self) -> None:
        """As many tokens as there is room for, at once."""
        while self.left:
            if not self.has_room:
                self.changed = trio.Event()
                await self.changed.wait()
            while self.has_room and self.left:
                self.advance()
            await trio.lowlevel.checkpoint()


class StepsEngine(PlainEngine):
    """All answers get one token in the same instant, one step after the other, `temperature` long.

    An answer without a pause is a flood, as fast as its consumer takes it.
    """

    info = EngineInfo(engine="bench", model="steps", context_tokens_max=1 << 30)

    def __init__(self) -> None:
        self.answers: dict[Answer, None] = {}
        self.step_s = 0.0

    async def run(self) -> None:
        due = trio.current_time()
        while True:
            # A step that comes late is made up for, as long as it is not a whole one.
            due = max(due + (self.step_s if self.answers else IDLE_STEP_S), trio.current_time())
            await trio.sleep_until(due)
            for answer in list(self.answers):
                if answer.has_room:
                    answer.advance()
                    if not answer.left:
                        del self.answers[answer]

    async def forward(self, request: GenerateRequest, context: Context, sink: Any) -> None:
        answer = Answer(request.max_tokens or 1, sink.take)
        sink.on_room(answer.resume)
        if not request.temperature:
            await answer.flood()
            return
        self.step_s = request.temperature
        self.answers[answer] = None
        try:
            while answer.left:
                answer.changed = trio.Event()
                await answer.changed.wait()
        finally:
            self.answers.pop(answer, None)

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        if not request.temperature:
            async for delta in super().generate(request, context):
                yield delta
            return
        self.step_s = request.temperature
        deltas: list[Delta] = []
        waiting = trio.Event()

        def take(made: list[Delta]) -> bool:
            deltas.extend(made)
            waiting.set()
            return True

        answer = Answer(request.max_tokens or 1, take)
        self.answers[answer] = None
        try:
            while answer.left or deltas:
                if not deltas:
                    waiting = trio.Event()
                    await waiting.wait()
                made, deltas[:] = deltas[:], ()
                for delta in made:
                    yield delta
        finally:
            self.answers.pop(answer, None)

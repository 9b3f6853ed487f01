"""The real step loop over a model that computes nothing: its sequences get a token each, in step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import trio
from commands import STEP_S, TOKEN

from trinamo import (
    Context,
    Delta,
    EngineInfo,
    GenerateRequest,
    Sink,
    StepItem,
    open_engine_host,
)
from trinamo.runtime.worker.endpoint import PushHandler

CONTEXT_TOKENS = 1 << 16
SEQUENCES_MAX = 4096


class TokenEngine:
    """A `StepEngine` whose every token is the same; one block holds a whole sequence."""

    info = EngineInfo(
        engine="bench",
        model="loop",
        context_tokens_max=CONTEXT_TOKENS,
        block_tokens=CONTEXT_TOKENS,
        block_count=SEQUENCES_MAX,
    )
    end_token_ids: frozenset[int] = frozenset()

    def encode(self, request: GenerateRequest) -> list[int]:
        return [0]

    def token_bytes(self, token_id: int) -> bytes:
        return TOKEN.encode()

    def step(self, items: Sequence[StepItem]) -> list[int | None]:
        return [0] * len(items)

    def release(self, slot: int) -> None: ...

    def recover(self) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class Pace:
    """A hop that lets a step end every `step_s`, as on a device that is always as fast."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.due = trio.current_time()

    async def hop(
        self, step: Callable[[Sequence[StepItem]], list[int | None]], items: Sequence[StepItem]
    ) -> list[int | None]:
        # A step that comes late is made up for, as long as it is not a whole one.
        self.due = max(self.due + self.step_s, trio.current_time())
        await trio.sleep_until(self.due)
        return step(items)


@asynccontextmanager
async def open_loop(
    step_s: float = STEP_S,
) -> AsyncIterator[PushHandler]:
    """A push handler: so many deltas of one token each, in step with those of all other requests."""
    async with open_engine_host(
        TokenEngine(),
        hop=Pace(step_s).hop,
        running_max=SEQUENCES_MAX,
        step_tokens_max=SEQUENCES_MAX,
    ) as host:

        async def loop(count: int, context: Context, sink: Sink[Delta]) -> None:
            await host.forward(
                GenerateRequest(model="loop", prompt="-", max_tokens=count), context, sink
            )

        yield loop

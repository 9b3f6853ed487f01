"""A model whose every answer calls a tool, with an argument that depends on its prompt alone.

A worker opens it as `tools.py:engine`. One token is one byte of the call; its number says which call it
belongs to and which byte it is, so an answer goes on behind any of its tokens, at another worker too.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trinamo
from trinamo.runtime.engines.generation import EngineInfo
from trinamo.runtime.engines.loop.step import StepItem
from trinamo.runtime.protocol.openai.generate import GenerateRequest

MODEL = "caller"
CALL = (
    b'<tool_call>{"name": "weather", "arguments": {"city": "%03d", "unit": "celsius"}}</tool_call>'
)
CALL_TOKENS = len(CALL % 0)
CALLS = 1000
END = CALLS * CALL_TOKENS
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
            },
        },
    }
]


class Caller:
    """A step engine without a model."""

    end_token_ids = frozenset({END})
    info = EngineInfo(
        engine=MODEL,
        model=MODEL,
        context_tokens_max=1024,
        block_tokens=16,
        block_count=256,
        can_resume=True,
        features=frozenset({"tools"}),
    )

    def encode(self, request: GenerateRequest) -> list[int]:
        """The number of the call, behind so many tokens that there is something to compute.

        Tokens that were delivered already come as they are.
        """
        if request.messages is None:
            return list(request.token_ids or ())
        prompt = request.messages[-1].content
        return [END] * len(prompt) + [END + 1 + zlib.crc32(prompt.encode()) % CALLS]

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= END:
            return b""
        call, position = divmod(token_id, CALL_TOKENS)
        return (CALL % call)[position : position + 1]

    def step(self, items: Sequence[StepItem]) -> list[int | None]:
        return [self._next(item.token_ids[-1]) if item.is_sampled else None for item in items]

    def _next(self, token_id: int) -> int:
        if token_id > END:
            return (token_id - END - 1) * CALL_TOKENS
        return token_id + 1 if (token_id + 1) % CALL_TOKENS else END

    def release(self, slot: int) -> None: ...

    def recover(self) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


@trinamo.engine(name=MODEL)
@asynccontextmanager
async def engine() -> AsyncIterator[trinamo.GenerationEngine]:
    async with trinamo.open_engine_host(Caller()) as host:
        yield host

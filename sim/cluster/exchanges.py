"""Workers to which input is streamed, and which answer each item of it as it comes.

Beside its model such a worker serves one more endpoint. Each item holds a token of the right answer to
its request, and comes back, so whoever knows the answer of an engine knows that of an exchange; what
was taken of the input is noted for `checks/inputs.py`. The clients are in `members.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from trinamo.runtime.config.config import Config
from trinamo.runtime.context import Context
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest

from .engines import NotedAttempt

if TYPE_CHECKING:
    from trinamo.runtime.process.runtime import Runtime


ITEM_S: Final = 0.001
"""How long an item keeps its handler busy."""


class InputItem(msgspec.Struct, frozen=True, array_like=True):
    """One item of input: its number, one token, and what makes it long."""

    index: int
    text: str
    padding: bytes = b""


def exchange_endpoint(config: Config) -> EndpointName:
    """Where workers take input, beside the endpoint of their model."""
    section = config.worker
    return EndpointName(section.namespace, section.component, "exchange")


async def serve_exchanges(runtime: Runtime, note: Callable[..., None]) -> None:
    """Have the worker answer exchanges; returns once it can be found."""

    async def answer(
        request: GenerateRequest, context: Context, items: AsyncIterator[InputItem]
    ) -> AsyncGenerator[Delta, None]:
        with NotedAttempt(note, request, context) as attempt:
            async for item in items:
                attempt.note("engine.input", index=item.index)
                await trio.sleep(ITEM_S)
                attempt.made(ord(item.text))
                yield Delta(text=item.text, token_ids=[ord(item.text)])
                attempt.raise_if_asked()
            attempt.note("engine.input_end")
            yield Delta(finish_reason=FinishReason.STOP)

    await runtime.serve_bidirectional(
        exchange_endpoint(runtime.config),
        answer,
        request_type=GenerateRequest,
        input_type=InputItem,
    )

"""A request that streams both ways: the caller sends while the worker answers.

    python examples/exchange.py

The worker dials two connections home, one for each direction, so a slow reader of answers does not
hold up the input. A caller that leaves before `finish` kills the request: half an input never passes
for a whole one. A program that does nothing but serve calls `trinamo.serve_bidirectional`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import trio

from trinamo import Context, EndpointName, Exchange, load_config, open_runtime

ENDPOINT = EndpointName("examples", "speech", "transcribe")
MEMORY = {"control_plane.backend": "memory", "event_plane.backend": "memory"}


async def transcribe(
    language: str, context: Context, sounds: AsyncIterator[bytes]
) -> AsyncGenerator[str, None]:
    heard = 0
    async for sound in sounds:
        heard += len(sound)
        yield f"{heard} bytes of {language}"
    yield "that was all"


async def speak(exchange: Exchange[str]) -> None:
    for _ in range(3):
        await exchange.send(b"\0" * 1000)
    await exchange.finish()


async def main() -> None:
    config = load_config(environ={}, overrides=MEMORY)
    async with open_runtime(config, serving=True) as runtime:
        await runtime.serve_bidirectional(ENDPOINT, transcribe, request_type=str, input_type=bytes)
        client = await runtime.client(ENDPOINT)
        async with (
            client.exchange("Latin", str, timeout_s=30) as exchange,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(speak, exchange)
            async for text in exchange:
                print(text)


if __name__ == "__main__":
    trio.run(main)

"""One question, one answer, and how long it may take: calls without a response stream.

    python examples/unary.py

The answer travels on the request plane itself. What the handler raises arrives as itself. The time that
a caller has travels with its question: both ends know when it is up, and why the question ended.
A program that does nothing but serve calls `trinamo.serve_unary`.
"""

from __future__ import annotations

import msgspec
import trio

from trinamo import Context, EndpointName, TrinamoError, load_config, open_runtime

ENDPOINT = EndpointName("examples", "text", "count")
MEMORY = {"control_plane.backend": "memory", "event_plane.backend": "memory"}


class Text(msgspec.Struct):
    """What the caller asks about."""

    text: str
    delay_s: float = 0.0


async def count_words(request: Text, context: Context) -> int:
    try:
        await trio.sleep(request.delay_s)
    except trio.Cancelled:
        print(f"worker: nobody waits for this one any more: {context.why_left()}")
        raise
    return len(request.text.split())


async def main() -> None:
    config = load_config(environ={}, overrides=MEMORY)
    async with open_runtime(config, serving=True) as runtime:
        await runtime.serve_unary(ENDPOINT, count_words, request_type=Text)
        client = await runtime.client(ENDPOINT)
        print("words:", await client.call(Text("a nursery for every task"), int))
        for request, timeout_s in (({"words": 3}, 30), (Text("too slow", delay_s=60), 1)):
            try:
                await client.call(request, int, timeout_s=timeout_s)
            except TrinamoError as error:
                print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    trio.run(main)

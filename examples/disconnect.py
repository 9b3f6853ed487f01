"""A consumer that leaves: the handler is cancelled at once, also in the middle of a long sleep.

    python examples/disconnect.py

No flag to poll and nothing to clean up by hand: leaving the `async with` is the cancellation, and
it reaches the handler on the worker as an ordinary trio cancellation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import trio

from trinamo import Context, EndpointName, load_config, open_runtime

ENDPOINT = EndpointName("examples", "slow", "generate")
MEMORY = {"control_plane.backend": "memory", "event_plane.backend": "memory"}
LONG_S = 3600.0


async def main() -> None:
    ended = trio.Event()
    left_at = 0.0

    async def generate(request: str, context: Context) -> AsyncGenerator[str, None]:
        try:
            yield "first"
            print("worker: working for an hour")
            await trio.sleep(LONG_S)
            yield "never"
        finally:
            milliseconds = 1000 * (trio.current_time() - left_at)
            print(f"worker: cancelled ({context.reason}), {milliseconds:.1f} ms after that")
            ended.set()

    config = load_config(environ={}, overrides=MEMORY)
    async with open_runtime(config, serving=True) as runtime:
        await runtime.serve(ENDPOINT, generate, request_type=str)
        client = await runtime.client(ENDPOINT)
        async with client.stream("begin", str) as stream:
            print("caller: got", await anext(stream))
            await trio.sleep(0.1)
            left_at = trio.current_time()
            print("caller: leaving")
        with trio.fail_after(60):
            await ended.wait()


if __name__ == "__main__":
    trio.run(main)

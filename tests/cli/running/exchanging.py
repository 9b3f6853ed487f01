"""A process that is streamed to and streams back, or one that asks it: `python exchanging.py serve|ask key=value …`.

Prints one JSON line: that it serves, or what it has heard. One that does not end says where it is, and ends.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator

import trio

from trinamo import Context, EndpointName, load_config, open_runtime

ENDPOINT = EndpointName("tests", "exchange", "words")
LIFE_S = 300


async def repeat(
    end: str, context: Context, words: AsyncIterator[str]
) -> AsyncGenerator[str, None]:
    said = ""
    async for word in words:
        said += word
        yield said
    yield end


async def main() -> None:
    role, *settings = sys.argv[1:]
    faulthandler.dump_traceback_later(LIFE_S, exit=True)
    config = load_config(environ={}, overrides=dict(text.split("=", 1) for text in settings))
    async with open_runtime(config, serving=role == "serve") as runtime:
        if role == "serve":
            with trio.open_signal_receiver(signal.SIGTERM) as signals:
                await runtime.serve_bidirectional(
                    ENDPOINT, repeat, request_type=str, input_type=str
                )
                print(json.dumps({"serves": str(ENDPOINT)}), flush=True)
                async for _ in signals:
                    return
        client = await runtime.client(ENDPOINT)
        async with client.exchange("the end", str, timeout_s=30) as exchange:
            heard = []
            for word in "123":
                await exchange.send(word)
                heard.append(await anext(exchange))
            await exchange.finish()
            heard += [item async for item in exchange]
        print(json.dumps({"heard": heard}), flush=True)


trio.run(main)

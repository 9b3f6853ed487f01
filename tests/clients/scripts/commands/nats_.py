"""nats-py, beside the cluster's own processes: its events, and the token that they want."""

import asyncio
import os
import urllib.request

import nats
from checks import BASE, tried

SERVER = os.environ["CLIENTS_NATS"]
BODY = b'{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 5}'
WAIT_S = 20


def chat() -> None:
    asked = urllib.request.Request(f"{BASE}/chat/completions", BODY)
    asked.add_header("content-type", "application/json")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.read()


async def look() -> None:
    """Until a worker has told of its load, and the frontend of a request."""
    missing = {"trinamo.load.", "trinamo.active."}
    is_whole = asyncio.Event()

    async def note(message) -> None:
        missing.difference_update([each for each in missing if message.subject.startswith(each)])
        if not missing:
            is_whole.set()

    client = await nats.connect(SERVER, token=os.environ["CLIENTS_NATS_TOKEN"])
    await client.subscribe(">", cb=note)
    await client.flush()
    await asyncio.to_thread(chat)
    await is_whole.wait()
    await client.close()


async def main() -> None:
    with tried("a wrong token is refused"):
        connecting = nats.connect(SERVER, token="wrong", allow_reconnect=False)
        (error,) = await asyncio.gather(connecting, return_exceptions=True)
        assert "Authorization Violation" in str(error), error
    with tried("a subscription to all sees loads and active requests"):
        await asyncio.wait_for(look(), WAIT_S)


asyncio.run(main())

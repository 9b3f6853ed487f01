"""Envelopes for a worker, and what it answers to them: for tests."""

from __future__ import annotations

import msgspec

from tests.runtime.endpoints import NAME, Cluster
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.protocol.streams.request import ConnectionInfo, Envelope, StreamType


async def ask(cluster: Cluster, request: object = 3) -> tuple[list[int], TrinamoError | None]:
    """The items of one answer and its terminal."""
    client = await cluster.client()
    items: list[int] = []
    try:
        async with client.stream(request, int) as stream:
            async for item in stream:
                items.append(item)  # noqa: PERF401 -- items before the error count
    except TrinamoError as error:
        return items, error
    return items, None


def envelope(
    request_id: str = "r", *, endpoint: str = str(NAME), instance_id: str = ""
) -> Envelope:
    nobody = ConnectionInfo("127.0.0.1:1", "s", StreamType.RESPONSE)
    return Envelope(id=request_id, endpoint=endpoint, instance_id=instance_id, response=nobody)


PAYLOAD = msgspec.msgpack.encode(1)

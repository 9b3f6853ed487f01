"""A request plane whose workers answer as told, and clients that ask over it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import trio
import trio.testing

from tests.runtime.caller.requests import Posted
from tests.runtime.endpoints import Cluster
from tests.transports.tcp.ends import eventually
from tests.transports.tcp.streams.raw_links import RawStream, raw_worker
from trinamo.runtime.caller.client import Client
from trinamo.runtime.errors import (
    TrinamoError,
)
from trinamo.runtime.planes import PostedRequest, RequestPlane, TakeAnswer
from trinamo.runtime.protocol.discovery.presence import InFlight
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    Envelope,
    RequestAnswer,
    RequestKind,
)

DEAD = "127.0.0.1:1"


class ScriptedPlane:
    """A request plane whose workers answer as told; it stands in for real ones that misbehave.

    Probes are answered while they are `alive`.
    """

    transport = "tcp"
    is_usable = True
    acknowledges = True

    def __init__(self, *answers: AckStatus | TrinamoError | None) -> None:
        self.answers: Sequence[AckStatus | TrinamoError | None] = list(answers)
        self.sent: list[Envelope] = []
        self.waiting = trio.Event()
        self.alive = True
        self.probe_count = 0

    def post(
        self, address: str, envelope: Envelope, payload: bytes, take: TakeAnswer
    ) -> PostedRequest | None:
        return Posted(partial(self._answer, envelope), take)

    async def wait_room(self, address: str) -> None:
        raise AssertionError

    async def _answer(self, envelope: Envelope) -> tuple[RequestAnswer, bytes]:
        await trio.lowlevel.checkpoint()
        if envelope.kind is RequestKind.PROBE:
            self.probe_count += 1
            if not self.alive:
                await trio.sleep_forever()
            return RequestAnswer(
                id=envelope.id, status=AckStatus.ACCEPTED, instance_id=envelope.instance_id
            ), b""
        self.sent.append(envelope)
        answer, *self.answers = self.answers
        if answer is None:
            self.waiting.set()
            await trio.sleep_forever()
            raise AssertionError
        if isinstance(answer, TrinamoError):
            raise answer
        return RequestAnswer(id=envelope.id, status=answer), msgspec.msgpack.encode("done")

    async def hold(self, address: str, on_connected: object, *, instance_id: str = "") -> None:
        await trio.sleep_forever()


async def scripted(
    cluster: Cluster,
    *answers: AckStatus | TrinamoError | None,
    instances: int = 3,
    **settings: Any,
) -> tuple[Client, ScriptedPlane]:
    plane = ScriptedPlane(*answers)
    checked: RequestPlane = plane
    cluster.planes = {"tcp": checked}
    for number in range(instances):
        await cluster.put(f"{number + 1}", {"tcp": DEAD})
    return await cluster.client(**settings), plane


@asynccontextmanager
async def called_home(cluster: Cluster, plane: ScriptedPlane) -> AsyncIterator[RawStream]:
    """The stream of a worker that has opened it and says nothing more."""
    await eventually(lambda: plane.sent)
    asked = plane.sent[-1].response
    assert asked is not None
    async with raw_worker(asked) as worker:
        yield worker


async def who_answers(client: Client) -> str:
    async with client.stream(1, int) as stream:
        assert [item async for item in stream] == [0]
        return stream.instance.id


def under_way(client: Client) -> list[InFlight]:
    """The requests of a client, the oldest first."""
    return [request for record in client.router._known for request in record.requests]

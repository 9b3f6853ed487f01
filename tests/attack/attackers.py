"""Somebody without the cluster's secret on its brokers: what he writes into etcd, and says on NATS."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import attrs
import msgspec
import trio

from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.events.source import event_subject, topic_of
from trinamo.runtime.planes import ControlPlane, EventPlane, Message
from trinamo.runtime.protocol.discovery.instances import INSTANCE_PREFIX, EndpointName
from trinamo.runtime.protocol.events.sequence import SequencedEvent, encode_event
from trinamo.runtime.protocol.streams.codec import encode_frame
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    ConnectionInfo,
    Envelope,
    RequestAnswer,
    RequestKind,
    StreamType,
    encode_answer,
    encode_cancel,
    encode_envelope,
)
from trinamo.transports.nats import open_nats

REQUESTS: Final = "trinamo.requests."
JOBS: Final = re.compile(r"trinamo\.queue\.([\w-]+)\.job\.(\w+)")
HIS: Final = "answers.of.his"
"""Where he waits for answers to what he asks."""


@attrs.define
class Trap:
    """A port of his, to which he would lead others."""

    address: str = ""
    calls: int = 0
    """How often somebody came."""

    async def take(self, stream: trio.SocketStream) -> None:
        self.calls += 1
        await stream.aclose()


@asynccontextmanager
async def open_trap(host: str = "127.0.0.1") -> AsyncIterator[Trap]:
    trap = Trap()
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, trap.take, 0, host=host))
        trap.address = f"{host}:{listeners[0].socket.getsockname()[1]}"
        yield trap
        nursery.cancel_scope.cancel()


async def mislead(store: ControlPlane, events: EventPlane, address: str, number: int) -> None:
    """Put `address` in the place of every worker's, register one of its own, and say that all drain."""
    for entry in (await store.range(INSTANCE_PREFIX)).entries:
        told = json.loads(entry.value.partition(b"\n")[0])
        told["transports"] = {"tcp": address}
        told["metadata"]["status"] = f"http://{address}"
        await store.put(entry.key, json.dumps(told).encode(), lease_id=entry.lease_id)
        mine = told | {"id": "ab" * 8}
        key = f"{INSTANCE_PREFIX}{told['endpoint']}/{mine['id']}"
        await store.put(key, json.dumps(mine).encode())
        topic = topic_of("status", EndpointName.parse(told["endpoint"]))
        body = msgspec.msgpack.encode("draining")
        event = encode_event(SequencedEvent(told["id"], 1 << 50, number, body))
        await events.publish(event_subject(topic, told["id"]), event)


# --- who has the token of NATS -----------------------------------------------------------------------


@attrs.define
class Stranger:
    """Somebody on the broker: what he has heard, and what he says to each message."""

    events: EventPlane
    says: Callable[[Message], Coroutine[Any, Any, None]]
    heard: list[Message] = attrs.field(factory=list)

    async def listen(self, *, task_status: trio.TaskStatus[None]) -> None:
        async with self.events.subscribe(">", pending_max=1 << 16) as messages:
            task_status.started()
            async for message in messages:
                self.heard.append(message)
                await self.says(message)


Says = Callable[[EventPlane, Message], Coroutine[Any, Any, None]]


async def nothing(_: EventPlane, __: Message) -> None:
    """Listen only."""


@asynccontextmanager
async def stranger(url: str, token: str, says: Says = nothing) -> AsyncIterator[Stranger]:
    section = NatsConfig(token=Secret(token), allow_plain_password=True)
    async with open_nats(url, section) as events, trio.open_nursery() as nursery:
        him = Stranger(events, partial(says, events))
        await nursery.start(him.listen)
        yield him
        nursery.cancel_scope.cancel()


@attrs.define
class Meddler:
    """Answers each request in the worker's place, and asks, cancels and repeats in the caller's."""

    address: str
    """Where he would have answers sent."""
    attacked: int = 0
    failed: int = 0

    async def say(self, events: EventPlane, message: Message) -> None:
        if not message.subject.startswith(REQUESTS) or message.reply == HIS:
            return
        accepted = RequestAnswer(id="", status=AckStatus.ACCEPTED)
        home = ConnectionInfo(self.address, "0" * 32, StreamType.RESPONSE)
        envelope = Envelope(id="x", endpoint="trinamo/backend/generate", response=home)
        unary = Envelope(id="y", endpoint=envelope.endpoint, kind=RequestKind.UNARY)
        try:
            if message.reply:
                for payload in (b"", encode_frame(encode_answer(accepted), b"x"), message.payload):
                    await events.publish(message.reply, payload)
                await events.publish(message.reply, b"", headers={"Status": "503"})
            for payload in (
                message.payload,
                message.payload[:-1] + bytes([message.payload[-1] ^ 1]),
                encode_frame(encode_cancel("x")),
                encode_frame(encode_envelope(envelope), b"{}"),
                encode_frame(encode_envelope(unary), b"{}"),
            ):
                await events.publish(message.subject, payload, reply=HIS)
            self.attacked += 1
        except TrinamoError:
            self.failed += 1


@attrs.define
class Swapper:
    """Takes each job out of its queue, and puts another's there, under other ids, and some of his own."""

    jobs: dict[str, bytes] = attrs.field(factory=dict)

    async def say(self, events: EventPlane, message: Message) -> None:
        found = JOBS.fullmatch(message.subject)
        if found is None or found[2] in self.jobs or len(found[2]) < 16:
            return
        queue, job = found.groups()
        self.jobs[job] = message.payload
        stream = f"trinamo-queue-{queue}-jobs"
        query = json.dumps({"last_by_subj": message.subject}).encode()
        reply = await events.request(f"$JS.API.STREAM.MSG.GET.{stream}", query, timeout_s=5)
        stored = json.loads(reply.payload)
        if "message" in stored:
            where = json.dumps({"seq": stored["message"]["seq"]}).encode()
            await events.request(f"$JS.API.STREAM.MSG.DELETE.{stream}", where, timeout_s=5)
        # Another's job under this id, this one under another, and one of his own.
        for at, payload in (
            (job, next(iter(self.jobs.values()))),
            (f"{job[:-1]}{'0' if job[-1] != '0' else '1'}", message.payload),
            (f"his{len(self.jobs)}", b"\x87" + message.payload[1:]),
        ):
            subject = message.subject.rpartition(".")[0] + f".{at}"
            await events.publish(subject, payload)

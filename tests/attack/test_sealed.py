"""Who has NATS's token, and not the cluster's secret: he hears all, says what he likes, and has nothing of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio

from tests.cluster.processes import Cluster
from tests.cluster.test_disaggregation import PROMPTS, alone, answer, disaggregated, metric
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import EventPlane, Message
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

pytestmark = [pytest.mark.slow, pytest.mark.services]
REQUESTS, JOBS = "trinamo.requests.", re.compile(r"trinamo\.queue\.([\w-]+)\.job\.(\w+)")
HIS = "answers.of.his"


@asynccontextmanager
async def closed(directory: Path, mode: str = "decode_first") -> AsyncIterator[Cluster]:
    """Two decode workers and a prefill worker, with a secret, whose requests go by NATS."""
    secret = directory / "cluster.secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    async with disaggregated(
        directory,
        *("decode", "decode", "prefill"),
        disaggregation__mode=mode,
        data_plane__requests="nats",
        router__policy="kv",
        security__secret_file=secret,
    ) as (cluster, _):
        yield cluster


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


async def nothing(_: Message) -> None:
    """Listen only."""


@asynccontextmanager
async def stranger(
    cluster: Cluster,
    says: Callable[[Stranger, Message], Coroutine[Any, Any, None]] | None = None,
) -> AsyncIterator[Stranger]:
    section = NatsConfig(token=Secret(cluster.nats.token))
    async with open_nats(cluster.nats.url, section) as events, trio.open_nursery() as nursery:
        him = Stranger(events, nothing)
        if says is not None:
            him.says = partial(says, him)
        await nursery.start(him.listen)
        yield him
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("mode", ["decode_first", "prefill_first"])
async def test_a_tap_on_the_broker_sees_no_text_and_no_token_id(tmp_path: Path, mode: str) -> None:
    async with closed(tmp_path, mode) as cluster, stranger(cluster) as him:
        answers = [await answer(cluster, text, seed) for seed, text in enumerate(PROMPTS)]
        assert answers == await alone(PROMPTS)
        heard = {each.subject: each for each in him.heard}
    assert sum(each.subject.startswith(REQUESTS) for each in him.heard) >= len(PROMPTS)
    assert any(JOBS.fullmatch(subject) for subject in heard) is (mode == "decode_first")
    said = b"\0".join(
        b"\0".join((each.subject.encode(), each.payload, repr(dict(each.headers)).encode()))
        for each in him.heard
    )
    # The engine's token ids are the bytes of the text, behind one that begins it.
    ids = list(b"abcdefgh abcdefgh")
    words = (b"abcdefgh", json.dumps(ids, separators=(",", ":")).encode()[1:-1], bytes(ids))
    for word in (*words, msgspec.msgpack.encode(ids)[3:], b"token_ids", b"exact"):
        assert word not in said, word
    for text in answers:
        assert text.encode() not in said


async def test_whoever_answers_asks_cancels_and_repeats_on_the_broker_changes_no_answer(
    tmp_path: Path,
) -> None:
    """Before: 83 of 100 requests were answered by him, and inference was done for him."""
    calls = 0
    done: Counter[str] = Counter()

    async def say(him: Stranger, message: Message) -> None:
        if not message.subject.startswith(REQUESTS) or message.reply == HIS:
            return
        accepted = RequestAnswer(id="", status=AckStatus.ACCEPTED)
        home = ConnectionInfo(address, "0" * 32, StreamType.RESPONSE)
        envelope = Envelope(id="x", endpoint="trinamo/backend/generate", response=home)
        unary = Envelope(id="y", endpoint=envelope.endpoint, kind=RequestKind.UNARY)
        try:
            if message.reply:
                for payload in (b"", encode_frame(encode_answer(accepted), b"x"), message.payload):
                    await him.events.publish(message.reply, payload)
                await him.events.publish(message.reply, b"", headers={"Status": "503"})
            for payload in (
                message.payload,
                message.payload[:-1] + bytes([message.payload[-1] ^ 1]),
                encode_frame(encode_cancel("x")),
                encode_frame(encode_envelope(envelope), b"{}"),
                encode_frame(encode_envelope(unary), b"{}"),
            ):
                await him.events.publish(message.subject, payload, reply=HIS)
            done["attacked"] += 1
        except TrinamoError:
            done["failed"] += 1

    async def called(stream: trio.SocketStream) -> None:
        nonlocal calls
        calls += 1
        await stream.aclose()

    async with closed(tmp_path) as cluster, trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, called, 0, host="127.0.0.1"))
        address = f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        async with stranger(cluster, say) as him:
            answers = [await answer(cluster, text, seed) for seed, text in enumerate(PROMPTS)]
            assert answers == await alone(PROMPTS)
            refused = [
                await metric(cluster, each, "event_plane_refused_messages_total")
                for each in cluster.workers
            ]
        nursery.cancel_scope.cancel()
    assert done["attacked"] >= len(PROMPTS) // 2
    assert done["failed"] == calls == 0
    assert sum(refused) >= 4 * done["attacked"]
    assert not [each for each in him.heard if each.subject == HIS]


async def test_whoever_puts_and_changes_jobs_on_the_broker_gets_into_no_cache(
    tmp_path: Path,
) -> None:
    """Before: who asked later for the prompt of another had the answer to the attacker's prompt."""
    jobs: dict[str, bytes] = {}

    async def say(him: Stranger, message: Message) -> None:
        found = JOBS.fullmatch(message.subject)
        if found is None or found[2] in jobs or len(found[2]) < 16:
            return
        queue, job = found.groups()
        jobs[job] = message.payload
        stream = f"trinamo-queue-{queue}-jobs"
        query = json.dumps({"last_by_subj": message.subject}).encode()
        reply = await him.events.request(f"$JS.API.STREAM.MSG.GET.{stream}", query, timeout_s=5)
        stored = json.loads(reply.payload)
        if "message" in stored:
            where = json.dumps({"seq": stored["message"]["seq"]}).encode()
            await him.events.request(f"$JS.API.STREAM.MSG.DELETE.{stream}", where, timeout_s=5)
        # Another's job under this id, this one under another, and one of his own.
        for at, payload in (
            (job, next(iter(jobs.values()))),
            (f"{job[:-1]}{'0' if job[-1] != '0' else '1'}", message.payload),
            (f"his{len(jobs)}", b"\x87" + message.payload[1:]),
        ):
            subject = message.subject.rpartition(".")[0] + f".{at}"
            await him.events.publish(subject, payload)

    async with closed(tmp_path) as cluster:
        async with stranger(cluster, say):
            answers = [await answer(cluster, text, seed) for seed, text in enumerate(PROMPTS)]
            assert answers == await alone(PROMPTS)
        # When he has gone, as well: nothing of his is in a cache.
        answers = [await answer(cluster, text, seed) for seed, text in enumerate(PROMPTS)]
        assert answers == await alone(PROMPTS)
        assert await metric(cluster, cluster.workers[2], "event_plane_refused_messages_total") > 0
    assert len(jobs) >= len(PROMPTS)

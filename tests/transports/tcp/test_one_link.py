"""One link for a caller and a worker: requests, streams and answers beside each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import trio
import trio.testing

from tests.conformance.requests.service import result_of, stream, unary
from tests.conformance.requests.tcp_pairs import connected
from tests.runtime.endpoints import NAME, Cluster, open_cluster
from tests.transports.tcp.ends import eventually, raw_member
from tests.transports.tcp.streams.raw_links import RawLink
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.protocol.streams.control import Opened, Sentinel
from trinamo.runtime.protocol.streams.link_frames import Kind, LinkMessage, Opening, encode_message
from trinamo.runtime.protocol.streams.multiplex import PART_BYTES
from trinamo.runtime.protocol.streams.request import (
    Carrier,
    ConnectionInfo,
    Envelope,
    StreamType,
    encode_cancel,
    encode_envelope,
)
from trinamo.transports.tcp.streams.link import Link

ON_LINK = ConnectionInfo("127.0.0.1:1", "subject", StreamType.RESPONSE, Carrier.MULTIPLEXED, 65536)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as cluster:
        yield cluster


def asked(request_id: str, payload: bytes = b"\x01") -> bytes:
    """A request for a stream of the same link; the address it names is nobody's."""
    envelope = Envelope(id=request_id, endpoint=str(NAME), response=ON_LINK)
    return encode_message(Kind.REQUEST, encode_envelope(envelope), payload)


async def test_the_stream_that_is_opened_is_the_ack_and_an_answer_is_one_send(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is dialled; what a handler has at once leaves with the opening and the end mark."""
    sends: list[int] = []
    send = Link._send

    async def counted(self: Link, data: bytes) -> None:
        sends.append(len(data))
        await send(self, data)

    monkeypatch.setattr(Link, "_send", counted)
    await cluster.serve("1")
    async with raw_member(cluster.addresses["1"]) as end:
        link = RawLink(end)
        await link.write(asked("r1"))
        opened = await link.hear()
        assert opened is not None
        assert isinstance(opened[1], Opening)
        assert opened[1].handshake.subject == "subject"
        assert [await link.hear() for _ in range(3)] == [
            (1, Opened()),
            (1, [b"\x00"]),
            (1, Sentinel()),
        ]
    assert len(sends) == 1
    assert len(cluster.calls["1"].links) == 0


async def test_what_opens_a_stream_does_not_wait_for_the_first_item(cluster: Cluster) -> None:
    """It is the ACK: by it the caller knows that whoever falls silent now had the request."""

    async def silent(_: object, __: Context) -> AsyncGenerator[int, None]:
        await trio.Event().wait()
        yield 0

    await cluster.serve("1", silent)
    async with raw_member(cluster.addresses["1"]) as end:
        link = RawLink(end)
        await link.write(asked("r1"), asked("r2"))
        opened = [await link.hear() for _ in range(2)]
        assert [each and type(each[1]) for each in opened] == [Opening, Opening]
        await link.write(
            *[encode_message(Kind.REQUEST, encode_cancel(n), b"") for n in ("r1", "r2")]
        )


async def test_a_nack_is_a_message_and_opens_nothing(cluster: Cluster) -> None:
    worker = await cluster.serve("1")
    worker.refuse_new()
    async with raw_member(cluster.addresses["1"]) as end:
        link = RawLink(end)
        await link.write(asked("r1"))
        refused = await link.hear()
        assert refused is not None
        assert isinstance(refused[1], LinkMessage)
        assert b"draining" in refused[1].header


async def test_a_request_that_is_cancelled_in_the_same_breath_opens_nothing(
    cluster: Cluster,
) -> None:
    worker = await cluster.serve("1")
    async with raw_member(cluster.addresses["1"]) as end:
        link = RawLink(end)
        cancel = encode_message(Kind.REQUEST, encode_cancel("r1"), b"")
        await link.write(asked("r1"), cancel, asked("r2"))
        opened = await link.hear()
        assert opened is not None
        assert isinstance(opened[1], Opening)
        assert opened[0] == 1
        await eventually(lambda: worker.active_count == 0)


async def test_a_link_that_is_lost_ends_its_requests_at_both_ends(cluster: Cluster) -> None:
    contexts: list[Context] = []

    async def endless(_: object, context: Context) -> AsyncGenerator[int, None]:
        contexts.append(context)
        yield 0
        await trio.sleep_forever()

    await cluster.serve("1", endless)
    client = await cluster.client()
    async with client.stream(1, int) as stream:
        assert await anext(stream) == 0
        for link in list(cluster.home.links):
            link.cancel()
        with pytest.raises(DisconnectedError):
            await anext(stream)
    await eventually(lambda: contexts[0].is_killed)
    assert contexts[0].kill_reason is Reason.CONSUMER_DROPPED


async def test_a_long_request_gives_way_to_short_ones_and_arrives_whole() -> None:
    """No more than a part of it is ahead of what is asked meanwhile."""
    async with connected() as pair:
        await pair.plane.wait_room(pair.address)
        long = pair.plane.post(
            pair.address, unary("long"), bytes(200 * PART_BYTES), lambda *_: None
        )
        assert long is not None
        assert await result_of(pair.plane, pair.address, unary("short"), b"x") == b"re:x"
        await eventually(lambda: pair.service.answered == ["short", "long"])


async def test_a_long_request_that_is_given_up_on_its_way_does_not_run() -> None:
    async with connected() as pair:
        await pair.plane.wait_room(pair.address)
        delivery = pair.plane.post(
            pair.address, unary("long"), bytes(50 * PART_BYTES), lambda *_: None
        )
        assert delivery is not None
        delivery.cancel()
        assert await result_of(pair.plane, pair.address, unary("r2"), b"x") == b"re:x"
        assert pair.service.answered == ["r2"]
        assert pair.service.cancelled == []


async def test_requests_wait_while_as_many_long_ones_are_on_their_way_as_may() -> None:
    """What is posted is bounded, too, be it in parts."""
    async with connected() as pair:
        await pair.plane.wait_room(pair.address)
        for number in range(4):
            ask = unary(f"r{number}")
            posted = pair.plane.post(pair.address, ask, bytes(150_000), lambda *_: None)
            assert posted is not None
        assert pair.plane.post(pair.address, stream("r4"), b"x", lambda *_: None) is None
        await pair.plane.wait_room(pair.address)
        assert pair.plane.post(pair.address, stream("r4"), b"x", lambda *_: None) is not None
        await eventually(lambda: len(pair.service.answered) == 4)


async def test_who_asks_on_without_reading_its_answers_is_read_no_more() -> None:
    async with connected(queue_bytes_max=100_000) as pair, raw_member(pair.address) as end:
        link = RawLink(end)
        big = [
            encode_message(Kind.REQUEST, encode_envelope(unary(f"r{number}", "big")), b"1000000")
            for number in range(20)
        ]
        await link.write(*big)
        await trio.testing.wait_all_tasks_blocked(0.05)
        # One read is under way while the answers are made.
        for name in ("read", "late"):
            await link.write(encode_message(Kind.REQUEST, encode_envelope(unary(name)), b"x"))
            await trio.testing.wait_all_tasks_blocked(0.05)
        assert pair.service.answered == ["read"]
        heard = 0
        while heard < 22:
            assert await link.hear() is not None
            heard += 1
        assert pair.service.answered == ["read", "late"]

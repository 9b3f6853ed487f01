"""A stranger at the TCP ports of a worker and a caller: it runs nothing, learns nothing, stops nobody.

Each test is an attack that once worked, over real sockets, bounded in number.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from tests.runtime.endpoints import NAME, Cluster, open_cluster
from tests.transports.tcp.ends import eventually, raw_connection, raw_member
from trinamo.runtime.caller.client import Client
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.protocol.streams.control import Handshake
from trinamo.runtime.protocol.streams.link_frames import (
    Kind,
    Opening,
    encode_message,
    encode_opening,
)
from trinamo.runtime.protocol.streams.membership import Greeting, Purpose
from trinamo.runtime.protocol.streams.request import (
    ConnectionInfo,
    Envelope,
    StreamType,
    encode_envelope,
)
from trinamo.transports.tcp import open_request_plane
from trinamo.transports.tcp.sockets import split_address

SECRET = b"a secret of these tests only"
SILENT = 200


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Few places for strangers, so that few connections fill them."""
    async with open_cluster(secret=SECRET, ungreeted_max=16, connections_max=32) as cluster:
        yield cluster


async def ask(client: Client) -> list[int]:
    async with client.stream(3, int) as stream:
        return [item async for item in stream]


@asynccontextmanager
async def silent_connections(address: str) -> AsyncIterator[None]:
    streams = [await trio.open_tcp_stream(*split_address(address)) for _ in range(SILENT)]
    yield
    for stream in streams:
        await stream.aclose()


def inference(answers_at: str, subject: str = "s") -> bytes:
    home = ConnectionInfo(answers_at, subject, StreamType.RESPONSE)
    envelope = Envelope(id="x", endpoint=str(NAME), response=home)
    return encode_message(Kind.REQUEST, encode_envelope(envelope), b"\x03")


# --- a worker's request port ---------------------------------------------------------------------


async def test_who_has_no_secret_runs_no_inference_and_is_told_nothing(cluster: Cluster) -> None:
    """Any client could run inference, and choose the address that the answer went to."""
    worker = await cluster.serve("1")
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, raw_connection(cluster.addresses["1"]) as stranger:
        mine = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        await stranger.say(inference(mine))
        assert await stranger.hear_all() == b""
    assert worker.active_count == 0
    assert await ask(await cluster.client()) == [0, 1, 2]


async def test_an_unfinished_first_frame_costs_the_worker_nothing(cluster: Cluster) -> None:
    """Forty connections held 20 MB each, for ever."""
    await cluster.serve("1")
    async with trio.open_nursery() as nursery:
        for _ in range(8):

            @nursery.start_soon
            async def fill() -> None:
                async with raw_connection(cluster.addresses["1"]) as stranger:
                    announced = (100).to_bytes(4, "big") + (32 << 20).to_bytes(4, "big")
                    with pytest.raises(trio.BrokenResourceError):
                        await stranger.say(announced + bytes(20 << 20))

    assert cluster.using.budget.used_bytes == 0
    assert await ask(await cluster.client()) == [0, 1, 2]


async def test_silent_connections_keep_no_caller_from_a_worker(cluster: Cluster) -> None:
    """4,096 of them stayed, and every request of a new frontend took 10 s and was a 502."""
    await cluster.serve("1")
    async with (
        silent_connections(cluster.addresses["1"]),
        open_request_plane(cluster.using, RealEnv(), cluster.home) as fresh,
    ):
        cluster.planes = {"tcp": fresh}
        assert await ask(await cluster.client()) == [0, 1, 2]


async def test_a_frozen_greeting_keeps_no_caller_from_a_worker(cluster: Cluster) -> None:
    """The first half of a greeting is no better than silence."""
    await cluster.serve("1")
    hello = b"trinamo\r\n\r\n\x02\0\0" + bytes(16)
    streams = []
    for _ in range(SILENT):
        stream = await trio.open_tcp_stream(*split_address(cluster.addresses["1"]))
        await stream.send_all(hello)
        streams.append(stream)
    assert await ask(await cluster.client()) == [0, 1, 2]
    for stream in streams:
        await stream.aclose()


# --- a caller's response port --------------------------------------------------------------------


async def test_silent_connections_keep_no_worker_from_calling_home() -> None:
    """Inference stalled for up to 7.8 s."""
    async with open_cluster(secret=SECRET, ungreeted_max=16, streams="dedicated") as cluster:
        await cluster.serve("1")
        client = await cluster.client()
        async with silent_connections(cluster.home.address):
            for _ in range(5):
                assert await ask(client) == [0, 1, 2]
        assert cluster.home.gate.ungreeted_count <= 16


async def test_a_greeting_that_was_overheard_is_of_no_use_again(cluster: Cluster) -> None:
    """Neither with the subject that it was for, nor with any other."""
    async with raw_connection(cluster.home.address) as member:
        greeting = Greeting.dialling(Purpose.STREAMS, SECRET, bytes(16))
        hello = greeting.begin()
        await member.say(hello)
        proof = greeting.receive(bytes(await member.stream.receive_some(19)))
        await member.say(proof)
        while not greeting.is_over:
            greeting.receive(bytes(await member.stream.receive_some(greeting.wanted_bytes)))
    with cluster.home.register(Context("r")) as mine:
        opening = Opening(Handshake(mine.connection.subject, StreamType.RESPONSE), 1)
        async with raw_connection(cluster.home.address) as stranger:
            await stranger.say(hello, proof, encode_opening(1, opening))
            # A challenge of this connection's own, which the proof does not answer.
            assert len(await stranger.hear_all()) in (0, 19)
        assert not mine.is_taken


# --- an address that is somebody else's ----------------------------------------------------------


async def test_a_server_of_another_kind_at_an_instances_address_costs_no_request(
    cluster: Cluster,
) -> None:
    """13 of 40 requests were a 502, and the instance was asked again and again."""
    asked = 0

    async def answer_400(stream: trio.SocketStream) -> None:
        nonlocal asked
        asked += 1
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data:
                more = bytes(await stream.receive_some())
                if not more:
                    return
                data += more
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    await cluster.serve("1")
    listeners = await cluster.nursery.start(trio.serve_tcp, answer_400, 0)
    port = listeners[0].socket.getsockname()[1]
    await cluster.put("2", {"tcp": f"127.0.0.1:{port}"})
    client = await cluster.client()
    for _ in range(40):
        assert await ask(client) == [0, 1, 2]
    assert 1 <= asked < 20


async def test_an_instance_at_the_address_of_another_gets_no_request(cluster: Cluster) -> None:
    first = await cluster.serve("1")
    await cluster.put("2", {"tcp": cluster.addresses["1"]})
    client = await cluster.client()
    for _ in range(10):
        assert await ask(client) == [0, 1, 2]
    await eventually(lambda: first.active_count == 0)


async def test_a_member_with_bad_envelopes_disturbs_no_other(cluster: Cluster) -> None:
    """Ten of them among 200 innocent requests failed 30 innocent ones."""
    await cluster.serve("1")
    client = await cluster.client()
    async with raw_member(cluster.addresses["1"], secret=SECRET) as member:
        for _ in range(50):
            bad = b'{"id":"' + b"x" * 137 + b'","endpoint":"a/b/c"}'
            await member.say(encode_message(Kind.REQUEST, bad, b""))
            assert await ask(client) == [0, 1, 2]
    await eventually(lambda: cluster.home.registered_count == 0)

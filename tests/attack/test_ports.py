"""A stranger at the TCP ports of a worker and a caller: it runs nothing, learns nothing, stops nobody.

Each test is an attack that once worked, over real sockets, bounded in number.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

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
from trinamo.runtime.protocol.streams.membership import Purpose, encode_hello
from trinamo.runtime.protocol.streams.request import (
    ConnectionInfo,
    Envelope,
    StreamType,
    encode_envelope,
)
from trinamo.transports.tcp import open_request_plane
from trinamo.transports.tcp.sockets import split_address

SECRET = b"a secret of these tests, and no other"
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
    hello = encode_hello(Purpose.REQUESTS, sealed=True)
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
    """Said once more, it does not lead in: what follows is sealed with keys of that connection alone."""
    listeners = await cluster.nursery.start(
        trio.serve_tcp, (between := Between(cluster.home.address)).serve, 0
    )
    address = f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
    with cluster.home.register(Context("r")) as mine:
        async with raw_member(address, Purpose.STREAMS, SECRET) as member:
            opening = Opening(Handshake(mine.connection.subject, StreamType.RESPONSE), 1)
            await member.say(encode_opening(1, opening))
            await eventually(lambda: mine.is_taken)
    with cluster.home.register(Context("r")) as mine:
        async with raw_connection(cluster.home.address) as stranger:
            await stranger.say(between.said)
            # It may get as far as the server's own half of a handshake, and its certificate there.
            assert mine.connection.subject.encode() not in await stranger.hear_all()
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


# --- somebody between ------------------------------------------------------------------------------


class Between:
    """Stands at an address that discovery tells of, hands all bytes on, and changes those it can read."""

    def __init__(self, to: str) -> None:
        self.to = to
        self.heard = self.said = b""
        """What came from both ends, and of it what the dialler said."""
        self.count = 0

    async def serve(self, dialler: trio.SocketStream) -> None:
        self.count += 1
        self.dialler = dialler
        listener = await trio.open_tcp_stream(*split_address(self.to))
        async with dialler, listener, trio.open_nursery() as nursery:
            nursery.start_soon(self._hand_on, dialler, listener)
            await self._hand_on(listener, dialler)
            nursery.cancel_scope.cancel()

    async def _hand_on(self, source: trio.SocketStream, to: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            async for data in source:
                self.heard += bytes(data)
                if source is self.dialler:
                    self.said += bytes(data)
                await to.send_all(bytes(data).replace(PROMPT, OTHER_PROMPT).replace(TOLD, LIES))


PROMPT, OTHER_PROMPT = b"what is it that I asked", b"what was never asked at"
TOLD, LIES = b"what the model has told", b"what nobody ever did so"


async def told(request: str, _: Context) -> AsyncGenerator[str, None]:
    """A handler: says what it was asked, then something of its own."""
    yield request
    yield TOLD.decode()


async def test_who_hands_a_greeting_on_reads_and_changes_nothing(cluster: Cluster) -> None:
    """Who may write one key of etcd read and changed 77 of 83 prompts, all answered with 200."""
    await cluster.serve("1", told)
    between = Between(cluster.addresses["1"])
    listeners = await cluster.nursery.start(trio.serve_tcp, between.serve, 0)
    await cluster.put("1", {"tcp": f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"})
    client = await cluster.client()
    for _ in range(10):
        async with client.stream(PROMPT.decode(), str) as stream:
            assert [item async for item in stream] == [PROMPT.decode(), TOLD.decode()]
    assert between.count >= 1
    assert PROMPT not in between.heard
    assert TOLD not in between.heard

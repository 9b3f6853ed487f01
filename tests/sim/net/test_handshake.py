from __future__ import annotations

import math
import socket as stdlib

import pytest
import trio

from tests.sim.net.talk import PORT, echo, swallow, talk
from trinamo.sim import Network, SeedChoices, World


async def _speak_first(stream: trio.SocketStream) -> None:
    await stream.send_all(b"220 ready")
    await swallow(stream)


def test_a_name_nobody_has_and_a_port_nobody_listens_on_fail() -> None:
    async def client(world: World, network: Network) -> None:
        with pytest.raises(stdlib.gaierror):
            await trio.open_tcp_stream("nowhere", PORT)
        with trio.socket.socket() as socket, pytest.raises(ConnectionRefusedError):
            await socket.connect((network.address_of("b"), PORT + 1))

    talk(client, echo)


def test_a_connect_over_a_cut_link_times_out_or_succeeds_after_it_heals() -> None:
    async def client(world: World, network: Network) -> None:
        network.cut("a", "b")
        start = trio.current_time()
        with trio.socket.socket() as socket, pytest.raises(TimeoutError):
            await socket.connect((network.address_of("b"), PORT))
        assert trio.current_time() - start == pytest.approx(10)
        world.after(2, network.heal, "a", "b")
        await trio.open_tcp_stream("b", PORT, happy_eyeballs_delay=math.inf)

    talk(client, echo, connect_timeout_s=10)


def test_a_cancelled_connect_leaves_no_connection() -> None:
    async def client(world: World, network: Network) -> None:
        network.link("a", "b").latency_s = 1
        with trio.move_on_after(1.0001):
            await trio.open_tcp_stream("b", PORT)
        await trio.sleep(3)
        assert network.open_sockets("a") == 0
        assert network.open_sockets("b") == 1

    talk(client, swallow)


@pytest.mark.parametrize("jitter_s", [0.0, 0.01])
def test_a_server_may_speak_first(jitter_s: float) -> None:
    async def client(world: World, network: Network) -> None:
        network.links.shape(jitter_s=jitter_s)
        stream = await trio.open_tcp_stream("b", PORT)
        assert await stream.receive_some() == b"220 ready"

    for _ in range(3):
        talk(client, _speak_first, latency_s=0.001, tear_one_in=0)


def test_a_server_accepts_when_the_last_ack_of_the_handshake_has_come() -> None:
    accepted_s: list[float] = []

    async def serve(stream: trio.SocketStream) -> None:
        accepted_s.append(trio.current_time())
        await swallow(stream)

    async def client(world: World, network: Network) -> None:
        start = trio.current_time()
        await trio.open_tcp_stream("b", PORT)
        await trio.sleep(1)
        assert accepted_s[0] - start == pytest.approx(0.003)

    talk(client, serve, latency_s=0.001)


@pytest.mark.parametrize("after_s", [0.0005, 0.0015, 0.0025])
def test_no_packet_of_a_handshake_passes_a_cut(after_s: float) -> None:
    """SYN, SYN-ACK and ACK each meet a cut that was made while they were on the way."""
    accepted: list[float] = []

    async def serve(stream: trio.SocketStream) -> None:
        accepted.append(trio.current_time())
        await swallow(stream)

    async def client(world: World, network: Network) -> None:
        world.after(after_s, network.cut, "a", "b")
        world.after(5, network.heal, "a", "b")
        with trio.move_on_after(4.9):
            await trio.open_tcp_stream("b", PORT)
            assert after_s > 0.002, "the answer passed a cut"
            await trio.sleep(4)
        assert not accepted
        await trio.sleep(60)
        # Whoever was connected already is so for the server too, once the link is whole.
        assert len(accepted) == (after_s > 0.002)

    talk(client, serve, latency_s=0.001)


def test_a_refusal_does_not_pass_a_cut_either() -> None:
    async def client(world: World, network: Network) -> None:
        world.after(0.0015, lambda: network.cut("b", "a", one_way=True))
        with trio.move_on_after(3) as scope:
            await trio.open_tcp_stream("b", PORT + 1)
        assert scope.cancelled_caught

    talk(client, swallow, latency_s=0.001)


def test_connections_in_the_middle_of_their_handshake_count_as_waiting() -> None:
    """A backlog of two takes two of three that come at once; the third is asked to come again."""
    connected_s: list[float] = []

    async def listen() -> None:
        [listener] = await trio.open_tcp_listeners(PORT, backlog=2)
        await trio.sleep(0.5)
        while True:
            await listener.accept()

    async def connect() -> None:
        await trio.open_tcp_stream("b", PORT)
        connected_s.append(round(trio.current_time(), 1))

    async def main() -> None:
        world.boot("b", listen)
        await trio.sleep(0.1)
        async with trio.open_nursery() as nursery:
            for name in ("a", "c", "d"):
                nursery.start_soon(world.boot(name, connect).ended.wait)

    world = World(SeedChoices(1))
    Network(world)
    world.run(main)
    assert connected_s == [0.1, 0.1, 1.1]

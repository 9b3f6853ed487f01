from __future__ import annotations

import errno
import math
import socket as stdlib

import pytest
import trio

from tests.sim.net.talk import PORT, echo, swallow, talk
from trinamo.sim import Network, ReplayChoices, SeedChoices, World


def test_a_round_trip_takes_the_latency_both_ways() -> None:
    async def client(world: World, network: Network) -> None:
        start = trio.current_time()
        stream = await trio.open_tcp_stream("b", PORT)
        assert trio.current_time() - start == pytest.approx(0.002)
        await stream.send_all(b"x")
        assert await stream.receive_some() == b"x"
        assert trio.current_time() - start == pytest.approx(0.004)

    talk(client, echo, latency_s=0.001)


def test_torn_reads_and_short_writes_change_no_byte() -> None:
    sent = bytes(range(256)) * 200

    async def client(world: World, network: Network) -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        sizes = []

        async def read() -> None:
            got = b""
            while len(got) < len(sent):
                chunk = await stream.receive_some()
                sizes.append(len(chunk))
                got += chunk
            assert got == sent

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await stream.send_all(sent)
        assert len(sizes) > 10

    talk(client, echo, tear_one_in=2, short_one_in=2, window_bytes=4096)


def test_without_dice_reads_and_writes_are_whole() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        await stream.send_all(bytes(5000))
        assert len(await stream.receive_some()) == 5000

    talk(client, echo, tear_one_in=0)


def test_a_network_that_is_told_nothing_tears_a_message_now_and_then() -> None:
    """One read taken for one message is a mistake that has to show without a word about tearing."""
    sizes = []

    async def client(world: World, network: Network) -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        for _ in range(60):
            await stream.send_all(bytes(64))
            got = 0
            while got < 64:
                sizes.append(len(await stream.receive_some()))
                got += sizes[-1]

    talk(client, echo)
    assert sizes.count(64) > 10
    assert len(sizes) > 70


def test_what_is_sent_into_a_cut_arrives_in_order_after_it_heals() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        await stream.send_all(b"0")
        network.cut("a", "b")
        for number in b"123456789":
            await stream.send_all(bytes([number]))
        world.after(3, network.heal, "a", "b")
        got = b""
        while len(got) < 10:
            got += await stream.receive_some()
        assert got == b"0123456789"
        assert trio.current_time() > 3

    talk(client, echo)


def test_a_one_way_cut_lets_the_other_direction_through() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        network.cut("b", "a", one_way=True)
        await stream.send_all(b"x")
        with trio.move_on_after(5) as scope:
            await stream.receive_some()
        assert scope.cancelled_caught
        arrived = [r for r in world.trace.of_kind("arrive") if r.field("source") == "a"]
        assert arrived

    talk(client, echo)


def test_a_reset_reaches_both_ends() -> None:
    broken: list[str] = []

    async def serve(stream: trio.SocketStream) -> None:
        with pytest.raises(trio.BrokenResourceError) as caught:
            await stream.receive_some()
        assert isinstance(caught.value.__cause__, ConnectionResetError)
        broken.append("server")

    async def client(world: World, network: Network) -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        world.after(1, network.reset, "a", "b")
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        broken.append("client")
        assert network.reset("a", "b") == 0
        await trio.sleep(1)

    talk(client, serve)
    assert sorted(broken) == ["client", "server"]


def test_a_killed_process_sends_fin_and_refuses_afterwards() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        world.after(1, world.kill, "b")
        assert await stream.receive_some() == b""
        assert trio.current_time() == pytest.approx(1.1, abs=0.1)
        with pytest.raises(OSError, match="all attempts to connect"):
            await trio.open_tcp_stream("b", PORT)
        assert network.open_sockets("b") == 0

    talk(client, echo)


def test_a_process_killed_with_unread_data_sends_rst() -> None:
    async def sleep(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async def client(world: World, network: Network) -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        await stream.send_all(b"unread")
        world.after(1, world.kill, "b")
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()

    talk(client, sleep)


def test_a_paused_process_keeps_its_connections_and_its_window_fills() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        await trio.sleep(0.1)
        world.pause("b")
        with trio.move_on_after(5) as scope:
            await stream.send_all(bytes(100_000))
        assert scope.cancelled_caught
        world.resume("b")
        await stream.socket.wait_writable()

    talk(client, swallow)


@pytest.mark.parametrize("says_something", [True, False])
def test_a_silent_link_ends_the_connection_as_the_socket_options_say(
    says_something: bool,
) -> None:
    async def client(world: World, network: Network) -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        stream.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, 1)
        stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPIDLE, 5)
        stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPINTVL, 2)
        stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPCNT, 3)
        stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_USER_TIMEOUT, 4000)
        network.cut("a", "b")
        start = trio.current_time()
        if says_something:
            await stream.send_all(b"x")
        with pytest.raises(trio.BrokenResourceError) as caught:
            await stream.receive_some()
        assert isinstance(caught.value.__cause__, TimeoutError)
        # Unacknowledged data: the user timeout. Else the first probe after it, at 5 + 2.
        assert trio.current_time() - start == pytest.approx(4 if says_something else 7)

    talk(client, swallow)


def test_without_keepalive_an_idle_connection_survives_a_long_cut() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        network.cut("a", "b")
        world.after(8000, network.heal, "a", "b")
        await trio.sleep(8001)
        await stream.send_all(b"x")
        assert await stream.receive_some() == b"x"

    talk(client, echo)


def test_ports_are_per_host_and_taken_once() -> None:
    async def client(world: World, network: Network) -> None:
        (listener,) = await trio.open_tcp_listeners(PORT, host="0.0.0.0")
        with pytest.raises(OSError, match="in use") as caught:
            await trio.open_tcp_listeners(PORT, host="0.0.0.0")
        assert caught.value.errno == errno.EADDRINUSE
        await listener.aclose()
        await trio.open_tcp_listeners(PORT, host="0.0.0.0")

    talk(client, echo)


def test_a_socket_bound_to_loopback_is_not_reached_from_another_host() -> None:
    async def client(world: World, network: Network) -> None:
        async def serve_locally() -> None:
            await trio.serve_tcp(echo, PORT, host="127.0.0.1")

        world.boot("c", serve_locally)
        await trio.sleep(1)
        with trio.socket.socket() as socket, pytest.raises(ConnectionRefusedError):
            await socket.connect((network.address_of("c"), PORT))

    talk(client, echo)


def test_other_families_and_kinds_are_refused() -> None:
    async def client(world: World, network: Network) -> None:
        with pytest.raises(OSError, match="IPv4 only"):
            trio.socket.socket(stdlib.AF_INET6)
        with pytest.raises(OSError, match="a stream or takes datagrams"):
            trio.socket.socket(stdlib.AF_INET, stdlib.SOCK_RAW)

    talk(client, echo)


def test_jitter_is_a_recorded_choice_and_dull_means_none() -> None:
    world = World(ReplayChoices([]), virtual_s_max=100)
    network = Network(world, latency_s=1, jitter_s=5)

    async def main() -> None:
        world.boot("b", trio.serve_tcp, echo, PORT)
        await trio.sleep(1)

        async def ask() -> None:
            stream = await trio.open_tcp_stream("b", PORT, happy_eyeballs_delay=math.inf)
            await stream.aclose()

        start = trio.current_time()
        await world.boot("a", ask).ended.wait()
        assert trio.current_time() - start == pytest.approx(2)

    world.run(main)
    assert {choice.label for choice in world.choices.record} == {"jitter"}
    assert network.open_sockets("a") == 0


def test_connections_that_are_over_are_forgotten() -> None:
    async def client(world: World, network: Network) -> None:
        for _ in range(200):
            stream = await trio.open_tcp_stream("b", PORT)
            await stream.aclose()
            await trio.sleep(0.01)
        assert network.reset("a", "b") == 0
        assert len(network.connections) < 100

    network = talk(client, swallow)
    assert len(network._endpoints) < 200


def test_a_process_that_returns_leaves_no_socket_behind() -> None:
    """Its kernel closes what it forgot: the peer reads EOF, and the next process can bind."""

    async def serve_one() -> None:
        listeners = await trio.open_tcp_listeners(PORT)
        kept.append(await listeners[0].accept())
        kept.append(listeners[0])

    async def client() -> None:
        stream = await trio.open_tcp_stream("b", PORT)
        assert await stream.receive_some() == b""

    kept: list[object] = []
    world = World(SeedChoices(1), virtual_s_max=100)
    network = Network(world)

    async def main() -> None:
        for _ in range(2):
            world.boot("b", serve_one)
            await trio.sleep(0.1)
            await world.boot("a", client).ended.wait()
            assert network.open_sockets("b") == 0

    world.run(main)

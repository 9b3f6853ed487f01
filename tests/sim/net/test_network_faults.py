from __future__ import annotations

import errno
import math
import socket as stdlib
from collections.abc import Awaitable, Callable

import pytest
import trio

from trinamo.sim import HostState, Network, SeedChoices, World

PORT = 7000
Client = Callable[[World, Network], Awaitable[None]]


async def _echo(stream: trio.SocketStream) -> None:
    try:
        async for chunk in stream:
            await stream.send_all(chunk)
    except trio.BrokenResourceError:
        pass


async def _serve() -> None:
    await trio.serve_tcp(_echo, PORT)


def _talk(
    client: Client,
    seed: int = 1,
    *,
    serve: Callable[[], Awaitable[None]] = _serve,
    **shape: float,
) -> World:
    """Run `client` on host a against an echo server on host b, over links of this shape."""
    world = World(SeedChoices(seed), virtual_s_max=20_000)
    network = Network(world, latency_s=0.001, jitter_s=0, connect_timeout_s=10)
    network.links.shape(**shape)

    async def main() -> None:
        world.boot("b", serve)
        await trio.sleep(0.1)
        await world.boot("a", client, world, network).ended.wait()

    world.run(main)
    return world


async def _connect() -> trio.SocketStream:
    return await trio.open_tcp_stream("b", PORT, happy_eyeballs_delay=math.inf)


async def _count(stream: trio.SocketStream, size: int) -> float:
    """When `size` bytes have come back."""
    got = 0
    while got < size:
        got += len(await stream.receive_some())
    return trio.current_time()


def test_bandwidth_bounds_the_rate_of_a_connection() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        network.links.shape("a", "b", bytes_per_s=10_000)
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(20_000))
            assert 2 < await _count(stream, 20_000) - start < 2.2

    _talk(client)


def test_two_connections_share_the_bandwidth_of_a_link() -> None:
    async def one(took: list[float]) -> None:
        stream = await _connect()
        start = trio.current_time()
        await stream.send_all(bytes(10_000))
        took.append(await _count(stream, 10_000) - start)

    async def client(world: World, network: Network) -> None:
        network.links.shape("a", "b", bytes_per_s=10_000)
        took: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, took)
            nursery.start_soon(one, took)
        assert max(took) > 2

    _talk(client)


def test_loss_is_felt_as_delay_and_loses_no_byte() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        sent = bytes(range(200))
        for byte in sent:
            await stream.send_all(bytes((byte,)))
        assert await _count(stream, 200) > 0.4

    _talk(client, loss_one_in=4)


def test_patterns_shape_links_to_come_and_links_there_are() -> None:
    world = World(SeedChoices(1))
    links = Network(world, latency_s=1.0).links
    there = links.link("worker1", "store")
    links.shape("worker*", "store", latency_s=2.0)
    links.shape("worker2", latency_s=3.0)
    assert there.latency_s == 2.0
    assert links.link("worker2", "store").latency_s == 3.0
    assert links.link("worker3", "store").latency_s == 2.0
    assert links.link("store", "worker1").latency_s == 1.0


@pytest.mark.parametrize("bad", [{"latency": 1.0}, {"latency_s": -1.0}, {"jitter_s": math.nan}])
def test_a_profile_that_makes_no_sense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"latency|jitter"):
        Network(World(SeedChoices(1))).links.shape(**bad)


def test_a_pattern_cuts_every_link_it_matches() -> None:
    async def client(world: World, network: Network) -> None:
        world.host("b2")
        stream = await _connect()
        network.cut("a", "b*")
        assert network.link("b2", "a").is_cut
        await stream.send_all(b"x")
        with trio.move_on_after(5):
            await stream.receive_some()
            raise AssertionError("the link is cut")
        network.heal("*", "*")
        assert await stream.receive_some() == b"x"

    _talk(client)


def test_a_port_may_refuse_or_ignore_new_connections() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        network.answer_syn("b", "refuse")
        start = trio.current_time()
        with pytest.raises(OSError, match="attempts to connect"):
            await _connect()
        assert trio.current_time() - start < 0.1
        network.answer_syn("b", "ignore", port=PORT)
        with pytest.raises(OSError, match="attempts to connect"):
            await _connect()
        assert trio.current_time() - start > 9
        await stream.send_all(b"x")
        assert await stream.receive_some() == b"x"
        network.answer_syn("b", "accept", port=PORT)
        await _connect()

    _talk(client)


def test_a_proxy_that_goes_away_ends_both_directions() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        assert network.finish("a", "b") == 1
        assert await stream.receive_some() == b""
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"x")

    _talk(client)


def test_a_slow_close_arrives_late_but_after_the_data() -> None:
    async def client(world: World, network: Network) -> None:
        network.links.shape("b", "a", fin_delay_s=5.0)
        stream = await _connect()
        await stream.send_all(b"x")
        await stream.send_eof()
        assert await stream.receive_some() == b"x"
        assert trio.current_time() < 1
        assert await stream.receive_some() == b""
        assert trio.current_time() > 5

    _talk(client)


def test_a_machine_without_power_says_nothing_and_its_next_life_resets() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        world.power_off("b")
        assert world.host("b").state is HostState.OFF
        await stream.send_all(b"into the dark")
        with trio.move_on_after(30):
            await stream.receive_some()
            raise AssertionError("nobody is there")
        with pytest.raises(OSError, match="attempts to connect"):
            await _connect()
        world.boot("b", _serve)
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        assert network.open_sockets("b") == 1
        await (await _connect()).send_all(b"x")

    _talk(client)


def test_keep_alive_finds_a_machine_that_lost_its_power() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        stream.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, 1)
        stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPIDLE, 10)
        stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPINTVL, 1)
        stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPCNT, 3)
        start = trio.current_time()
        world.power_off("b")
        with pytest.raises(trio.BrokenResourceError) as caught:
            await stream.receive_some()
        assert caught.value.__cause__ is not None
        assert getattr(caught.value.__cause__, "errno", 0) == errno.ETIMEDOUT
        assert trio.current_time() - start == pytest.approx(13)

    _talk(client)


def test_an_idle_peer_of_a_machine_that_was_restarted_learns_it_by_its_keep_alive() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        stream.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, 1)
        stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPIDLE, 10)
        world.power_off("b")
        await trio.sleep(1)
        world.boot("b", _serve)
        with pytest.raises(trio.BrokenResourceError) as caught:
            await stream.receive_some()
        assert getattr(caught.value.__cause__, "errno", 0) == errno.ECONNRESET

    _talk(client)


def test_without_keep_alive_an_idle_connection_to_a_restarted_machine_stays_half_open() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        world.power_off("b")
        await trio.sleep(1)
        world.boot("b", _serve)
        with trio.move_on_after(10_000):
            await stream.receive_some()
            raise AssertionError("nobody knows of this connection")
        await stream.send_all(b"x")
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()

    _talk(client)


def test_skew_and_drift_move_a_wall_clock() -> None:
    world = World(SeedChoices(1))
    seen: list[float] = []

    async def look() -> None:
        await trio.sleep(100)
        seen.append(world.wall() - 1_700_000_000)

    async def main() -> None:
        world.skew("a", -5.0, drift=0.01)
        await world.boot("a", look).ended.wait()

    world.run(main)
    assert seen == [pytest.approx(96)]


def test_what_was_read_before_a_cut_counts_as_acknowledged() -> None:
    """No credit was sent for so little, and yet no timeout may run for it."""

    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_USER_TIMEOUT, 2000)
        await stream.send_all(bytes(100))
        await _count(stream, 100)
        network.cut("a", "b")
        await trio.sleep(60)
        network.heal("a", "b")
        await stream.send_all(bytes(100))
        await _count(stream, 100)

    _talk(client)


def test_what_is_sent_into_a_cut_ends_the_connection_after_its_user_timeout() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_USER_TIMEOUT, 2000)
        await stream.send_all(bytes(100))
        await _count(stream, 100)
        network.cut("a", "b")
        await stream.send_all(bytes(1))
        began_s = trio.current_time()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        assert trio.current_time() - began_s == pytest.approx(2)

    _talk(client)


def test_after_a_heal_keep_alive_finds_a_peer_that_gave_up_meanwhile() -> None:
    """One end timed out while the link was cut; its RST was lost, and the other end only reads."""

    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_USER_TIMEOUT, 5000)
        await trio.sleep(0.1)
        network.cut("a", "b")
        await stream.send_all(b"x")
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        assert network.open_sockets("b") == 2
        network.heal("a", "b")
        await trio.sleep(20)
        assert network.open_sockets("b") == 1

    async def serve() -> None:
        async def echo(stream: trio.SocketStream) -> None:
            stream.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, 1)
            stream.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPIDLE, 10)
            await _echo(stream)
            await stream.aclose()

        await trio.serve_tcp(echo, PORT)

    _talk(client, serve=serve)


def test_a_second_cut_does_not_begin_timeouts_anew() -> None:
    async def client(world: World, network: Network) -> None:
        stream = await _connect()
        stream.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, 1)
        for name, value in (("KEEPIDLE", 5), ("KEEPINTVL", 1), ("KEEPCNT", 3)):
            stream.setsockopt(stdlib.IPPROTO_TCP, getattr(stdlib, f"TCP_{name}"), value)
        start = trio.current_time()
        network.cut("a", "b")
        world.after(7, network.cut, "a", "b")
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        assert trio.current_time() - start == pytest.approx(8)

    _talk(client)

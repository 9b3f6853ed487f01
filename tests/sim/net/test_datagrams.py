"""UDP and Unix sockets, for trio, anyio and asyncio."""

from __future__ import annotations

import asyncio
import socket as stdlib
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio
import trio_asyncio

from tests.sim.net.talk import PORT, echo
from trinamo.sim import Choices, Network, ReplayChoices, SeedChoices, World
from trinamo.sim.explore import hints

UDP = stdlib.SOCK_DGRAM


def play(
    server: Callable[[], Awaitable[object]],
    client: Callable[[Network], Awaitable[object]],
    choices: Choices | None = None,
    **profile: float,
) -> World:
    world = World(choices or SeedChoices(1), virtual_s_max=600)
    network = Network(world)
    network.links.shape("*", "*", **profile)

    async def main() -> None:
        world.boot("server", server)
        await trio.sleep(0.1)
        await world.boot("client", client, network).ended.wait()

    world.run(main)
    assert all("nothing ever listened" in hint for hint in hints.hints_of(world, None))
    return world


async def echo_datagrams() -> None:
    with trio.socket.socket(type=UDP) as sock:
        await sock.bind(("", PORT))
        while True:
            data, address = await sock.recvfrom(65536)
            await sock.sendto(data.upper(), address)


# --- UDP ----------------------------------------------------------------------------------------------


def test_a_datagram_goes_to_a_name_and_is_answered_at_the_senders_address() -> None:
    async def client(_: Network) -> None:
        with trio.socket.socket(stdlib.AF_INET, UDP) as sock:
            assert await sock.sendto(b"hello", ("server", PORT)) == 5
            assert await sock.recvfrom(2, stdlib.MSG_PEEK) == (b"HE", ("10.0.0.1", PORT))
            assert await sock.recvfrom(3) == (b"HEL", ("10.0.0.1", PORT))
            await sock.connect(("server", PORT))
            assert sock.getpeername() == ("10.0.0.1", PORT)
            assert sock.getsockname()[0] == "10.0.0.2"
            await sock.send(b"again")
            assert await sock.recv(10) == b"AGAIN"
            with pytest.raises(OSError, match="Message too long"):
                await sock.send(bytes(70_000))

    play(echo_datagrams, client)


def heard(choices: Choices, **profile: float) -> list[int]:
    """Which of thirty datagrams, sent a millisecond apart, arrive, in which order."""
    numbers: list[int] = []

    async def serve() -> None:
        with trio.socket.socket(type=UDP) as sock:
            await sock.bind(("", PORT))
            while True:
                numbers.append((await sock.recv(10))[0])

    async def client(_: Network) -> None:
        with trio.socket.socket(type=UDP) as sock:
            for number in range(30):
                await sock.sendto(bytes([number]), ("server", PORT))
                await trio.sleep(0.001)
            await trio.sleep(1)

    play(serve, client, choices, **profile)
    return numbers


def test_a_link_loses_doubles_and_reorders_as_its_profile_says() -> None:
    whole = [*range(30)]
    assert heard(SeedChoices(1)) == whole
    lost = heard(SeedChoices(1), loss_one_in=3)
    assert lost == sorted(lost)
    assert 10 < len(lost) < 28
    doubled = heard(SeedChoices(1), duplicate_one_in=3)
    assert sorted(set(doubled)) == whole
    assert 33 < len(doubled) < 50
    moved = heard(SeedChoices(1), reorder_one_in=3)
    assert sorted(moved) == whole != moved
    late = heard(SeedChoices(1), jitter_s=0.01)
    assert sorted(late) == whole != late


def test_the_dullest_answers_deliver_each_datagram_once_and_in_order() -> None:
    choices = ReplayChoices([])
    profile = {"loss_one_in": 2, "duplicate_one_in": 2, "reorder_one_in": 2, "jitter_s": 0.1}
    assert heard(choices, **profile) == [*range(30)]
    assert {"loss", "duplicate", "reorder"} <= {choice.label for choice in choices.record}


def test_a_cut_loses_datagrams_and_a_healed_link_passes_them_again() -> None:
    async def client(network: Network) -> None:
        with trio.socket.socket(type=UDP) as sock:
            network.cut("client", "server")
            await sock.sendto(b"lost", ("server", PORT))
            await trio.sleep(1)
            network.heal("client", "server")
            await sock.sendto(b"kept", ("server", PORT))
            assert await sock.recv(10) == b"KEPT"
            with trio.move_on_after(5) as scope:
                await sock.recv(10)
            assert scope.cancelled_caught

    play(echo_datagrams, client)


def test_a_connected_socket_learns_that_nobody_is_there_and_hears_its_peer_only() -> None:
    async def client(_: Network) -> None:
        with trio.socket.socket(type=UDP) as sock, trio.socket.socket(type=UDP) as other:
            await sock.connect(("server", PORT + 1))
            await sock.send(b"x")
            with pytest.raises(ConnectionRefusedError):
                await sock.recv(10)
            await other.sendto(b"not for you", ("localhost", sock.getsockname()[1]))
            with trio.move_on_after(1) as scope:
                await sock.recv(20)
            assert scope.cancelled_caught
            with trio.socket.socket(type=UDP) as late, pytest.raises(OSError, match="in use"):
                await late.bind(("", sock.getsockname()[1]))

    play(echo_datagrams, client)


def test_what_nobody_reads_is_dropped_beyond_the_buffer() -> None:
    async def client(_: Network) -> None:
        with trio.socket.socket(type=UDP) as sock, trio.socket.socket(type=UDP) as other:
            await sock.bind(("", PORT))
            for _turn in range(8):
                await other.sendto(bytes(60_000), ("localhost", PORT))
            await trio.sleep(1)
            for _turn in range(3):
                assert len(await sock.recv(65536)) == 60_000
            assert not sock.is_readable()

    play(echo_datagrams, client)


def asyncio_datagrams(seed: int) -> str:
    class Answers(asyncio.DatagramProtocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: Any) -> None:
            self.transport.sendto(data.upper(), addr)

    class Asks(asyncio.DatagramProtocol):
        def __init__(self) -> None:
            self.got: list[bytes] = []

        def datagram_received(self, data: bytes, addr: Any) -> None:
            self.got.append(data)

    async def serve() -> None:
        async with trio_asyncio.open_loop() as loop:
            place = ("0.0.0.0", PORT)
            open_endpoint = trio_asyncio.aio_as_trio(loop.create_datagram_endpoint)
            transport, _ = await open_endpoint(Answers, place)
            try:
                await trio.sleep_forever()
            finally:
                transport.close()

    async def client(_: Network) -> None:
        async with trio_asyncio.open_loop() as loop:
            transport, protocol = await trio_asyncio.aio_as_trio(loop.create_datagram_endpoint)(
                Asks, remote_addr=("server", PORT)
            )
            for number in range(9):
                transport.sendto(b"n%d" % number)
                await trio.sleep(0.01)
            await trio.sleep(1)
            assert sorted(protocol.got) == [b"N%d" % number for number in range(9)]
            transport.close()

    return play(serve, client, SeedChoices(seed)).trace.digest


def test_asyncios_datagram_endpoints_work_and_replay() -> None:
    assert asyncio_datagrams(1) == asyncio_datagrams(1) != asyncio_datagrams(2)


def test_anyios_udp_sockets_work() -> None:
    async def serve() -> None:
        async with await anyio.create_udp_socket(local_host="0.0.0.0", local_port=PORT) as udp:
            async for data, (host, port) in udp:
                await udp.sendto(data.upper(), host, port)

    async def client(_: Network) -> None:
        async with await anyio.create_connected_udp_socket("server", PORT) as udp:
            await udp.send(b"hello")
            assert await udp.receive() == b"HELLO"

    play(serve, client)


# --- Unix sockets ---------------------------------------------------------------------------------------

PATH = "/run/echo.sock"


async def serve_unix() -> None:
    with trio.socket.socket(stdlib.AF_UNIX) as sock:
        await sock.bind(PATH)
        sock.listen()
        await trio.serve_listeners(echo, [trio.SocketListener(sock)])


def test_a_unix_socket_is_a_path_of_its_host() -> None:
    seen = []

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_unix)
            await trio.sleep(0.05)
            stream = await trio.open_unix_socket(PATH)
            assert stream.socket.getpeername() == PATH
            assert stream.socket.getsockname() == ""
            await stream.send_all(b"hello")
            got = b""
            while len(got) < 5:
                got += await stream.receive_some()
            seen.append(got)
            with (
                trio.socket.socket(stdlib.AF_UNIX) as other,
                pytest.raises(OSError, match="in use"),
            ):
                await other.bind(PATH)

    async def client(_: Network) -> None:
        with trio.socket.socket(stdlib.AF_UNIX) as sock, pytest.raises(FileNotFoundError):
            await sock.connect(PATH)

    play(serve, client)
    assert seen == [b"hello"]


def test_unix_datagrams_are_neither_lost_nor_reordered() -> None:
    async def client(_: Network) -> None:
        with (
            trio.socket.socket(stdlib.AF_UNIX, UDP) as one,
            trio.socket.socket(stdlib.AF_UNIX, UDP) as other,
        ):
            with pytest.raises(FileNotFoundError):
                await one.sendto(b"x", "/run/there")
            with pytest.raises(OSError, match="not supported"):
                one.listen()
            await one.bind("/run/here")
            await other.bind("/run/there")
            for number in range(20):
                await one.sendto(bytes([number]), "/run/there")
            for number in range(20):
                assert await other.recvfrom(9) == (bytes([number]), "/run/here")

    play(serve_unix, client, loss_one_in=2, duplicate_one_in=2, reorder_one_in=2)


def test_asyncio_and_anyio_listen_on_paths() -> None:
    async def serve() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.readline()).upper())
            writer.close()

        async def ask() -> bytes:
            async with await asyncio.start_unix_server(answer, PATH):
                reader, writer = await asyncio.open_unix_connection(PATH)
                writer.write(b"hello\n")
                line = await reader.readline()
                writer.close()
                await writer.wait_closed()
                return line

        async with trio_asyncio.open_loop():
            assert await trio_asyncio.aio_as_trio(ask)() == b"HELLO\n"

    async def client(_: Network) -> None:
        await serve()

    play(trio.sleep_forever, client)

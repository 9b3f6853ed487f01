"""What code meets that makes its sockets with the standard library, or looks below trio's."""

from __future__ import annotations

import contextlib
import errno
import re
import select
import selectors
import socket as stdlib
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import trio
from anyio.abc import SocketAttribute

from tests.sim.net.talk import PORT, echo, talk

# Looked up when called: the run replaces the names.
# ruff: noqa: PLW0108
from trinamo.sim import Escape, Network, SeedChoices, World
from trinamo.sim.explore.hints import hints_of
from trinamo.sim.net.std_sockets import StdSocket


def play(client: Callable[[], Any], serve: Callable[[], Any] | None = None, seed: int = 1) -> World:
    """Run `client` on host `client`, against `serve` or an echo on host `server`."""
    world = World(SeedChoices(seed), virtual_s_max=600)
    Network(world, short_one_in=4)

    async def main() -> None:
        if serve is None:
            world.boot("server", trio.serve_tcp, echo, PORT)
        else:
            world.boot("server", serve)
        await trio.sleep(0.1)
        await world.boot("client", client).ended.wait()

    world.run(main)
    return world


def test_a_port_that_is_given_out_is_bound_by_nobody() -> None:
    seen: list[int] = []

    async def client() -> None:
        with trio.socket.socket() as held:
            await held.bind(("", 40_000))
            for _turn in range(3):
                (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
                seen.append(listener.socket.getsockname()[1])
                await listener.aclose()
            seen.extend(StdSocket.network.free_port() for _turn in range(25_536))

    play(client)
    assert 40_000 not in seen
    assert max(seen) < 65_536


# --- libraries --------------------------------------------------------------------------------------


def anyio_echo(seed: int) -> tuple[str, list[Any]]:
    seen: list[Any] = []

    async def echo_of_anyio(stream: Any) -> None:
        async with stream:
            async for chunk in stream:
                await stream.send(chunk)

    async def serve() -> None:
        listener = await anyio.create_tcp_listener(local_host="0.0.0.0", local_port=PORT)
        seen.append(listener.extra(SocketAttribute.local_port))
        await listener.serve(echo_of_anyio)

    async def client() -> None:
        async with await anyio.connect_tcp("server", PORT) as stream:
            seen.append(stream.extra(SocketAttribute.remote_address))
            seen.append(stream.extra(SocketAttribute.raw_socket).getpeername())
            await stream.send(b"hello")
            got = b""
            while len(got) < 5:
                got += await stream.receive()
            seen.append(got)

    world = play(client, serve, seed)
    assert hints_of(world, None) == []
    return world.trace.digest, seen


def test_anyio_listens_connects_and_asks_for_addresses() -> None:
    digest, seen = anyio_echo(1)
    assert seen == [PORT, ("10.0.0.1", PORT), ("10.0.0.1", PORT), b"hello"]
    assert anyio_echo(1) == (digest, seen)
    assert anyio_echo(2)[0] != digest


def test_a_library_that_looks_for_the_socket_below_finds_one() -> None:
    async def client() -> None:
        stream = await trio.open_tcp_stream("server", PORT)
        below: Any = stream.socket._sock  # type: ignore[attr-defined]
        assert isinstance(below, stdlib.socket)
        assert below.getsockname() == stream.socket.getsockname()
        assert below.getsockopt(stdlib.SOL_SOCKET, stdlib.SO_TYPE) == stdlib.SOCK_STREAM
        assert (below.family, below.type) == (stdlib.AF_INET, stdlib.SOCK_STREAM)
        assert below.fileno() == stream.socket.fileno() > 999_999
        assert stdlib.socket(fileno=below.fileno()) is below

    play(client)


# --- by hand ----------------------------------------------------------------------------------------


def test_a_standard_socket_connects_sends_and_receives_without_blocking() -> None:
    async def client() -> None:
        with stdlib.socket() as sock:
            sock.setblocking(False)
            assert sock.connect_ex(("server", PORT)) == errno.EINPROGRESS
            assert sock.connect_ex(("server", PORT)) == errno.EALREADY
            await trio.lowlevel.wait_writable(sock)
            assert sock.getsockopt(stdlib.SOL_SOCKET, stdlib.SO_ERROR) == 0
            with pytest.raises(BlockingIOError):
                sock.recv(10)
            sock.sendall(b"0123456789")
            got = b""
            while len(got) < 10:
                await trio.lowlevel.wait_readable(sock.fileno())
                peeked = sock.recv(4, stdlib.MSG_PEEK)
                received = sock.recv(10)
                assert peeked.startswith(received) or received.startswith(peeked)
                got += received
            assert got == b"0123456789"

    play(client)


def test_a_connection_that_is_refused_says_so_in_its_option_once() -> None:
    async def client() -> None:
        with stdlib.socket() as sock:
            sock.setblocking(False)
            sock.connect_ex(("server", PORT + 1))
            await trio.lowlevel.wait_writable(sock)
            assert sock.getsockopt(stdlib.SOL_SOCKET, stdlib.SO_ERROR) == errno.ECONNREFUSED
            assert sock.getsockopt(stdlib.SOL_SOCKET, stdlib.SO_ERROR) == 0

    play(client)


def test_waiting_ends_when_trio_is_told_of_closing_and_two_may_not_wait_for_one() -> None:
    ended = []

    async def client() -> None:
        listener = stdlib.create_server(("", PORT))

        async def wait() -> None:
            try:
                await trio.lowlevel.wait_readable(listener)
            except (trio.BusyResourceError, trio.ClosedResourceError) as error:
                ended.append(type(error).__name__)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await trio.sleep(1)
            trio.lowlevel.notify_closing(listener)
            listener.close()

    play(client)
    assert ended == ["BusyResourceError", "ClosedResourceError"]


def test_a_pair_of_sockets_is_connected() -> None:
    async def client() -> None:
        left, right = stdlib.socketpair()
        wrapped, other = trio.socket.from_stdlib_socket(left), trio.socket.from_stdlib_socket(right)
        await wrapped.send(b"x")
        assert await other.recv(1) == b"x"
        wrapped.close()
        assert await other.recv(1) == b""

    play(client)


# --- names ------------------------------------------------------------------------------------------


def test_names_are_found_wherever_they_are_asked_for() -> None:
    async def client() -> None:
        assert stdlib.gethostbyname("server") == "10.0.0.1"
        assert stdlib.gethostbyname_ex("server") == ("server", [], ["10.0.0.1"])
        assert stdlib.gethostbyaddr("10.0.0.1")[0] == "server"
        assert stdlib.getnameinfo(("10.0.0.1", 80), 0) == ("server", "80")
        assert stdlib.getservbyname("https") == 443
        asked = stdlib.getaddrinfo("server", "http", type=stdlib.SOCK_STREAM)
        assert asked == await trio.socket.getaddrinfo("server", "http", type=stdlib.SOCK_STREAM)
        assert [found[4] for found in asked] == [("10.0.0.1", 80)]
        for ask in (stdlib.gethostbyname, lambda name: stdlib.getaddrinfo(name, 80)):
            with pytest.raises(stdlib.gaierror, match=r"no simulated host is called 'nobody'"):
                ask("nobody")
        with pytest.raises(stdlib.gaierror, match="give its port's number"):
            stdlib.getaddrinfo("server", "gopher-plus")

    world = play(client)
    assert "'nobody'" in "".join(hints_of(world, None))


def test_a_socket_connects_by_name_and_binds_by_name() -> None:
    async def client() -> None:
        with trio.socket.socket() as sock:
            await sock.connect(("server", PORT))
            assert sock.getpeername() == ("10.0.0.1", PORT)
        with trio.socket.socket() as sock, pytest.raises(stdlib.gaierror, match="'nobody'"):
            await sock.connect(("nobody", PORT))
        with trio.socket.socket() as sock:
            await sock.bind(("localhost", 0))
            assert sock.getsockname()[0] == "127.0.0.1"

    play(client)


# --- what is not to be had ---------------------------------------------------------------------------


def test_an_unknown_attribute_is_a_hint_however_it_was_swallowed() -> None:
    async def client() -> None:
        stream = await trio.open_tcp_stream("server", PORT)
        for sock in (stream.socket, stdlib.socket()):
            getattr(sock, "flux_capacitor", None)
        with contextlib.suppress(OSError):
            stdlib.socket().sendmsg([b"x"], [(1, 2, b"rights")])
        assert not hasattr(stream.socket, "__nothing__")

    hints = hints_of(play(client), None)
    assert len(hints) == 2
    assert "client asked a simulated socket for 'flux_capacitor', which it has not" in hints[0]
    assert "'sendmsg with ancillary data'" in hints[1]


BLOCKING: dict[str, tuple[Callable[[], Any], str]] = {
    "connect": (lambda: stdlib.create_connection(("server", PORT)), "setblocking(False)"),
    "accept": (lambda: stdlib.create_server(("", 1)).accept(), "setblocking(False)"),
    "select": (lambda: select.select([stdlib.socket()], [], [], 0), "trio.lowlevel.wait_readable"),
    "poll": (lambda: select.poll(), "trio.lowlevel.wait_readable"),
    "a loop of its own": (lambda: selectors.DefaultSelector(), "trio_asyncio.open_loop"),
}


@pytest.mark.parametrize("name", BLOCKING)
def test_what_would_stop_the_simulation_is_an_escape_that_says_what_to_do(name: str) -> None:
    call, advice = BLOCKING[name]
    world = World(SeedChoices(1))
    Network(world)

    async def main() -> None:
        world.boot("server", trio.serve_tcp, echo, PORT)
        await trio.sleep(0.1)
        call()

    with pytest.raises(Escape, match=re.escape(advice)):
        world.run(main)


def test_waiting_for_another_descriptor_is_an_escape_that_says_what_to_do() -> None:
    world = World(SeedChoices(1))
    Network(world)

    async def main() -> None:
        await trio.lowlevel.wait_readable(0)

    with pytest.raises(Escape, match="waiting for descriptor 0, which is none of the simulated"):
        world.run(main)


def test_a_closed_socket_is_no_descriptor() -> None:
    async def client() -> None:
        sock = stdlib.socket()
        number = sock.fileno()
        sock.close()
        assert sock.fileno() == -1
        for fd in (sock, number):
            with pytest.raises(OSError, match="Bad file descriptor"):
                await trio.lowlevel.wait_readable(fd)

    play(client)


def test_after_the_run_all_is_as_before() -> None:
    before = stdlib.socket, stdlib.getaddrinfo, select.select, trio.socket.socket

    async def client(world: World, network: Network) -> None:
        assert stdlib.socket is not before[0]

    talk(client, echo)
    assert (stdlib.socket, stdlib.getaddrinfo, select.select, trio.socket.socket) == before
    stdlib.create_server(("127.0.0.1", 0)).close()

from __future__ import annotations

import socket

import msgspec
import pytest
import trio

from tests.leftovers import open_descriptors
from tests.transports.tcp.ends import eventually, open_home
from trinamo.runtime.context import Context
from trinamo.runtime.errors import ConfigError, ConnectError
from trinamo.transports.tcp import TcpOptions
from trinamo.transports.tcp.sockets import (
    dial,
    format_address,
    open_listener,
    split_address,
    tune,
)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("10.0.0.7:1", ("10.0.0.7", 1)), ("[::1]:65535", ("::1", 65535)), ("host:80", ("host", 80))],
)
def test_an_address_is_split_and_written_alike(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert format_address(*parts) == address


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":80", "host:0", "host:65536", "host:x", "host:²", "host:" + "9" * 5000],
)
def test_a_text_that_is_no_address_is_a_connect_error(address: str) -> None:
    with pytest.raises(ConnectError):
        split_address(address)


@pytest.mark.parametrize(
    "host",
    ["a..b", ".", "x" * 300, "\u2028", "\u0661", "é" * 70, "a\0b", "[::1%\0]", "[fe80::1%nope0]"],
)
async def test_a_host_that_no_name_server_could_know_is_a_connect_error(host: str) -> None:
    """A peer wrote it, so it must not end more than what it was for."""
    with pytest.raises(ConnectError):
        await dial(f"{host}:80", TcpOptions())


async def test_listening_on_what_is_no_host_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no host name"):
        await open_listener(TcpOptions(host="a..b"))


async def test_a_connection_has_no_nagle_delay_and_both_halves_of_half_open_detection() -> None:
    options = TcpOptions(
        keepalive_idle_s=7, keepalive_interval_s=3, keepalive_count=2, user_timeout_s=1.5
    )
    listener, address = await open_listener(options)
    async with listener, await dial(address, options) as ours, await listener.accept() as theirs:
        tune(theirs, options)
        for stream in (ours, theirs):
            tcp = socket.IPPROTO_TCP
            assert stream.getsockopt(tcp, socket.TCP_NODELAY)
            assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert stream.getsockopt(tcp, socket.TCP_KEEPIDLE) == 7
            assert stream.getsockopt(tcp, socket.TCP_KEEPINTVL) == 3
            assert stream.getsockopt(tcp, socket.TCP_KEEPCNT) == 2
            assert stream.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 1500


async def test_tuning_a_connection_that_is_gone_already_is_no_error() -> None:
    async with trio.SocketStream(trio.socket.socket()) as stream:
        tune(stream, TcpOptions())


async def test_a_port_that_is_not_listened_on_is_a_definite_connect_error() -> None:
    listener, address = await open_listener(TcpOptions())
    await listener.aclose()
    with pytest.raises(ConnectError, match="refused") as caught:
        await dial(address, TcpOptions())
    assert caught.value.definite


async def test_the_bound_and_the_advertised_address_are_two_settings() -> None:
    everywhere = TcpOptions(host="0.0.0.0", secret=bytes(16))
    listener, address = await open_listener(
        msgspec.structs.replace(everywhere, advertise_host="gpu-7")
    )
    await listener.aclose()
    assert address.startswith("gpu-7:")
    listener, address = await open_listener(everywhere)
    await listener.aclose()
    assert address.startswith("127.0.0.1:"), "nothing says that there are other machines"


@pytest.mark.parametrize(
    ("servers", "host"),
    [
        (["127.0.0.1:2379"], "127.0.0.1"),
        (["http://127.8.8.8:2379"], "127.0.0.1"),
        (["unix:/tmp/etcd/client:0"], "127.0.0.1"),
        (["no.such.host.invalid:2379", "nonsense", "127.0.0.1:1"], "127.0.0.1"),
    ],
)
async def test_bound_to_every_address_we_are_where_the_store_sees_us(
    servers: list[str], host: str
) -> None:
    """Not where this machine's own table of names has it, which is loopback on many."""
    options = TcpOptions(host="0.0.0.0", secret=bytes(16), towards=tuple(servers))
    listener, address = await open_listener(options)
    await listener.aclose()
    assert address.rpartition(":")[0] == host


async def test_without_a_way_to_the_store_nobody_guesses_an_address() -> None:
    before = open_descriptors()
    options = TcpOptions(host="0.0.0.0", secret=bytes(16), towards=("no.such.host.invalid:1",))
    with pytest.raises(ConfigError, match=r"data_plane\.tcp\.advertise_host"):
        await open_listener(options)
    assert open_descriptors() <= before


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_without_a_secret_only_loopback_is_bound(host: str) -> None:
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"security\.secret_file .*trinamo certs secret"):
        await open_listener(TcpOptions(host=host))
    assert open_descriptors() <= before
    for ours in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        listener, _ = await open_listener(TcpOptions(host=ours))
        await listener.aclose()


def test_the_secret_is_not_in_the_text_of_the_options() -> None:
    assert "sesame" not in repr(TcpOptions(secret=b"open sesame, open sesame"))


async def test_an_interface_may_be_named_and_an_unknown_one_is_a_sentence() -> None:
    listener, address = await open_listener(TcpOptions(interface="lo"))
    await listener.aclose()
    assert address.startswith("127.0.0.1:")
    with pytest.raises(ConfigError, match=r"'nope0' has no usable address; there are: .*lo"):
        await open_listener(TcpOptions(interface="nope0"))


async def test_an_address_that_is_not_ours_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="this machine has no such address"):
        await open_listener(TcpOptions(host="192.0.2.1"))


async def test_a_name_resolves_and_ipv6_works_from_end_to_end() -> None:
    for host in ("localhost", "::1"):
        async with open_home(host=host) as home:
            with home.server.register(Context("r")) as registration:
                async with home.call(registration.connection) as sender:
                    sender.send_nowait(b"x")
                    sender.finish()
                assert [item async for item in registration.channel] == [b"x"]
            await eventually(lambda server=home.server: server.registered_count == 0)  # type: ignore[misc]

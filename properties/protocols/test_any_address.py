"""Whatever text stands where an address should be: dialling it is a connection or a `ConnectError`."""

from __future__ import annotations

import socket

import pytest
import trio
from hypothesis import HealthCheck, example, given, settings, strategies as st

from trinamo.runtime.errors import ConnectError
from trinamo.transports.tcp import TcpOptions
from trinamo.transports.tcp.sockets import dial

hosts = st.one_of(
    st.text(),
    st.text(alphabet="0123456789abcdef:.%[]\0é\u2028-", max_size=40),
    st.ip_addresses().map(str),
    st.builds("{}%{}".format, st.ip_addresses(v=6), st.text(max_size=8)),
)
addresses = st.one_of(
    st.text(),
    st.builds("{}:{}".format, hosts, st.integers(-1, 70_000)),
    st.builds("[{}]:{}".format, hosts, st.integers(0, 65_536)),
)


class NobodyKnown(trio.abc.HostnameResolver):
    """No name reaches a name server."""

    async def getaddrinfo(self, *_: object, **__: object) -> list[object]:  # type: ignore[override]
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    async def getnameinfo(self, sockaddr: object, flags: int) -> tuple[str, str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No packet leaves, whatever address is made up."""

    def connect(_: socket.socket, address: object) -> None:
        raise ConnectionRefusedError(111, f"nobody is at {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(addresses)
@example("[::1%\0]:80")
@example("[fe80::1%nope0]:80")
@example("a\0b:80")
@example("\ud800:80")
@example("host:" + "9" * 5000)
def test_no_address_raises_anything_else(address: str) -> None:
    async def main() -> None:
        trio.socket.set_custom_hostname_resolver(NobodyKnown())
        with pytest.raises(ConnectError):
            await dial(address, TcpOptions())

    trio.run(main)

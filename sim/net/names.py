"""What the names of a world's hosts are, wherever simulated code asks: addresses and ports.

trio asks through its hook for resolvers; everybody else through the functions of `socket`, which
answer at once here, without a thread (`stand_ins.py`). Ports by name come from a table of our own, because a
machine may have none.

What this module does not do: decide which host has which address (`handshake.py`).
"""

from __future__ import annotations

import re
import socket as stdlib
from typing import Any, Final

import trio
from typing_extensions import override

from ..core.host import current_host_name
from .handshake import LOOPBACK, Stack

_ADDRESS = re.compile(r"\d+(\.\d+){3}")
KINDS = ((stdlib.SOCK_STREAM, stdlib.IPPROTO_TCP), (stdlib.SOCK_DGRAM, stdlib.IPPROTO_UDP))
SERVICES: Final = {
    "amqp": 5672, "domain": 53, "ftp": 21, "http": 80, "http-alt": 8080, "https": 443, "imap": 143,
    "imaps": 993, "ldap": 389, "mqtt": 1883, "mysql": 3306, "ntp": 123, "pop3": 110, "postgresql": 5432,
    "redis": 6379, "smtp": 25, "ssh": 22, "submission": 587, "syslog": 514, "telnet": 23,
}  # fmt: skip
UNKNOWN_MAX: Final = 3
"""Names that are told of: a misspelt one is enough, and a peer can be asked for in a loop."""


class Names(Stack, trio.abc.HostnameResolver):
    """The resolver of all hosts: each knows the others by their names, and itself as `localhost`."""

    # --- from names to addresses ---------------------------------------------------------------

    def find(self, host: str | bytes | None) -> str:
        """The IPv4 address of a name or address; `gaierror` if no host is called so."""
        name = "localhost" if host is None else host if isinstance(host, str) else host.decode()
        if name.lower() == "localhost":
            return LOOPBACK
        # URLs are taken in lower case, and names of hosts are equal in any.
        alike = (each for each in self.world.host_names if each.lower() == name.lower())
        if called := name if self.world.knows(name) else next(alike, ""):
            return self.address_of(called)
        if _ADDRESS.fullmatch(name):
            return name
        if len(self.unknown_names) < UNKNOWN_MAX:
            self.unknown_names.setdefault(name, current_host_name())
        known = ", ".join(self.world.host_names) or "none"
        raise stdlib.gaierror(
            stdlib.EAI_NONAME,
            f"no simulated host is called {name!r}; those that were booted are {known}",
        )

    def look_up(
        self,
        host: str | bytes | None,
        port: str | bytes | int | None,
        family: int = 0,
        type: int = 0,  # noqa: A002 -- as the real one
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        """As `socket.getaddrinfo`, at once."""
        name = host.decode() if isinstance(host, bytes) else host
        found: tuple[Any, ...]
        if name is not None and ":" in name:
            # Whoever makes a socket for it is refused, as on a machine without IPv6.
            own, found = stdlib.AF_INET6, (name, port_number(port), 0, 0)
        elif name is None and flags & stdlib.AI_PASSIVE:
            own, found = stdlib.AF_INET, ("0.0.0.0", port_number(port))  # noqa: S104
        elif name is not None and flags & stdlib.AI_NUMERICHOST and not _ADDRESS.fullmatch(name):
            raise stdlib.gaierror(stdlib.EAI_NONAME, "not an address")
        else:
            own, found = stdlib.AF_INET, (self.find(name), port_number(port))
        if family not in (stdlib.AF_UNSPEC, own):
            raise stdlib.gaierror(stdlib.EAI_ADDRFAMILY, f"{name!r} has no address of that family")
        named = name or "" if flags & stdlib.AI_CANONNAME else ""
        return [
            (own, kind, protocol, named, found)
            for kind, protocol in KINDS
            if type in (0, kind) and proto in (0, protocol)
        ]

    @override
    async def getaddrinfo(
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> Any:
        await trio.lowlevel.checkpoint()
        return self.look_up(host, port, family, type, proto, flags)

    # --- and back --------------------------------------------------------------------------------

    def name_and_port(self, sockaddr: Any, flags: int = 0) -> tuple[str, str]:
        """As `socket.getnameinfo`, at once; ports stay numbers."""
        address = str(sockaddr[0])
        known = None if flags & stdlib.NI_NUMERICHOST else self.name_of(address)
        return known or address, str(sockaddr[1])

    @override
    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        await trio.lowlevel.checkpoint()
        return self.name_and_port(sockaddr, flags)

    def with_aliases(self, host: str) -> tuple[str, list[str], list[str]]:
        """As `socket.gethostbyname_ex` and `socket.gethostbyaddr`."""
        address = self.find(host)
        return self.name_of(address) or host, [], [address]


def port_number(port: str | bytes | int | None) -> int:
    """The port that is meant by a number, by its digits or by the name of a service."""
    if isinstance(port, (bytes, str)):
        text = port.decode() if isinstance(port, bytes) else port
        if not text.isdigit():
            if text not in SERVICES:
                raise stdlib.gaierror(
                    stdlib.EAI_SERVICE,
                    f"no service is called {text!r} here; give its port's number",
                )
            return SERVICES[text]
    return int(port or 0)


def port_of_service(service: str, protocol: str = "tcp") -> int:  # noqa: ARG001 -- as the real one
    """As `socket.getservbyname`."""
    if service not in SERVICES:
        raise OSError("service/proto not found")
    return SERVICES[service]

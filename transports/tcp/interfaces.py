"""The address of a network interface by name, as `ip addr` would show it. Linux only."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path
from typing import Final

from trinamo.runtime.errors import ConfigError

_SIOCGIFADDR: Final = 0x8915
_IF_INET6: Final = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE: Final = 0x00


def interface_address(name: str) -> str:
    """The IPv4 address of interface `name`, else its global IPv6 address.

    Link-local addresses are never chosen: peers could not reach them without a scope. Raises
    `ConfigError` naming the interfaces there are.
    """
    address = _ipv4(name) or _ipv6(name)
    if address is None:
        known = ", ".join(sorted(n for _, n in socket.if_nameindex()))
        raise ConfigError(f"network interface {name!r} has no usable address; there are: {known}")
    return address


def _ipv4(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(
                probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
            )
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6(name: str) -> str | None:
    if not _IF_INET6.exists():
        return None
    for line in _IF_INET6.read_text().splitlines():
        packed, _, _, scope, _, interface = line.split()
        if interface == name and int(scope, 16) == _GLOBAL_SCOPE:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))
    return None

"""What may stand in discovery as an address: a port of a host, or a subject of a broker.

Sans-IO, and strict: whoever may write to the store could otherwise make every frontend dial what no
resolver, socket or broker was made for. It says nothing of whether anybody lives there.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

_SUBJECT: Final = re.compile(r"[!-~]{1,255}")
"""Visible ASCII: what any transport may call a place."""
_HOST: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_ZONE: Final = re.compile(r"[A-Za-z0-9_.-]{1,15}")
"""An interface of this machine, as Linux bounds their names."""
_HOST_CHARS_MAX: Final = 253
_PORT: Final = re.compile(r"[0-9]{1,5}")


def is_address(transport: str, address: str) -> bool:
    """Whether `address` can be one of `transport`: for tcp `host:port` or `[v6]:port`."""
    if not _SUBJECT.fullmatch(address):
        return False
    return transport != "tcp" or _is_host_and_port(address)


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        return False
    if host.startswith("[") and host.endswith("]"):
        return _is_v6(host[1:-1])
    return len(host) <= _HOST_CHARS_MAX and _HOST.fullmatch(host) is not None


def _is_v6(host: str) -> bool:
    number, percent, zone = host.partition("%")
    if percent and not _ZONE.fullmatch(zone):
        return False
    try:
        ipaddress.IPv6Address(number)
    except ValueError:
        return False
    return True

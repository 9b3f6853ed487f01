"""Whose requests these are where places, waiting and rates are shared out: the parties.

A party is a tenant, which all keys of one name are, or an address where clients have no keys.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Final

_NETWORK_BITS: Final = 64
"""Of an IPv6 address: whoever has one of them has them all."""


@lru_cache(maxsize=1024)
def party_of(address: str) -> str:
    """The party of a client at `address`, which has no key."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    mapped = parsed.ipv4_mapped
    network = ipaddress.IPv6Network((int(parsed), _NETWORK_BITS), strict=False)
    return str(network if mapped is None else mapped)

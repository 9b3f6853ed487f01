"""Which names a client may call this server by: the check of the Host header.

A page in somebody's browser can give its own name the address of a server that the browser reaches
(DNS rebinding) and then read its answers; the Host header still carries the page's name, so a name
that is not ours is refused. Addresses are always allowed: nobody's name resolves to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from trinamo.runtime.config.keys import LOOPBACK_NAMES, address_of, is_loopback

ANY: Final = "*"


@attrs.frozen
class HostPolicy:
    """The names that are allowed besides addresses and loopback names; None allows every name."""

    names: frozenset[str] | None

    @classmethod
    def make(cls, bound: str, hosts: Sequence[str] | None) -> HostPolicy:
        """The policy of a server that binds `bound`, with the names that an operator gave.

        Without any, a server on loopback allows no other name, and one that faces a network allows
        all: which names lead to it, only its operator knows.
        """
        if ANY in (hosts or ()) or (hosts is None and not is_loopback(bound)):
            return cls(None)
        return cls(frozenset(_normal(name) for name in (bound, *(hosts or ()))))

    def allows(self, header: bytes | None) -> bool:
        """Whether a request with this Host header is for us. HTTP/1.0 need not have one."""
        if self.names is None or header is None:
            return True
        name = _without_port(header.decode("latin-1").strip())
        if address_of(name.removeprefix("[").removesuffix("]")) is not None:
            return True
        name = _normal(name)
        return name in LOOPBACK_NAMES or name in self.names


def _without_port(value: str) -> str:
    name, colon, port = value.rpartition(":")
    return name if colon and (not port or port.isdecimal()) and not value.endswith("]") else value


def _normal(name: str) -> str:
    return name.lower().removesuffix(".")

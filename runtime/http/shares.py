"""Whose requests these are where places, waiting, rates and memory are shared out: the parties.

A party is a tenant, which all keys of one name are, or an address where clients have no keys. A
connection knows no key: what is kept of unread answers is shared by address.
"""

from __future__ import annotations

import ipaddress
import logging
from functools import lru_cache
from typing import Final, Protocol

log = logging.getLogger("trinamo.http")
_NETWORK_BITS: Final = 64
"""Of an IPv6 address: whoever has one of them has them all."""


@lru_cache(maxsize=1024)
def party_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    mapped = parsed.ipv4_mapped
    network = ipaddress.IPv6Network((int(parsed), _NETWORK_BITS), strict=False)
    return str(network if mapped is None else mapped)


class Holder(Protocol):
    """A stream, a connection or a request. Compared and hashed by identity."""

    def give_way(self) -> None:
        """End, and hold nothing any more. Does not wait."""
        ...


class Budget:
    """At most `amount_max` at once, of all parties together.

    Beyond it the party that has most loses what it has held longest, until it fits: a crowd takes
    from itself, and from nobody else.
    """

    def __init__(self, name: str, amount_max: int) -> None:
        self._name = name
        self.amount_max = amount_max
        self.amount = 0
        """Zero at quiescence."""
        self._held: dict[str, dict[Holder, int]] = {}
        """By party, the longest held first. Nothing in it is empty."""
        self._totals: dict[str, int] = {}

    def hold(self, party: str, holder: Holder, amount: int) -> None:
        """`holder` has so much now. It, or others, may be told to give way at once."""
        own = self._held.get(party)
        more = amount if own is None else amount - own.get(holder, 0)
        if not more:
            return
        if own is None:
            own = self._held[party] = {}
        self.amount += more
        self._totals[party] = self._totals.get(party, 0) + more
        if amount:
            own[holder] = amount
        else:
            del own[holder]
            if not own:
                del self._held[party], self._totals[party]
        while self.amount > self.amount_max:
            self.evict()

    def evict(self) -> bool:
        """Let the oldest of the party that has most give way; False: nobody has any."""
        if not self._held:
            return False
        greediest = max(self._totals, key=self._totals.__getitem__)
        oldest = next(iter(self._held[greediest]))
        log.warning("clients hold too much (%s): of who has most, the oldest gives way", self._name)
        self.hold(greediest, oldest, 0)
        oldest.give_way()
        return True

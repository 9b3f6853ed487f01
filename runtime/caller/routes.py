"""By which planes an instance can be reached from here, and which of them a connection has proven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..planes import RequestPlane
from ..protocol.discovery.instances import Instance
from .probes import Way

__all__ = ["Ways"]


class Ways:
    """The request planes of one process, the preferred one first, against instances' addresses."""

    def __init__(self, planes: Mapping[str, RequestPlane]) -> None:
        self._planes = planes
        self._stood: dict[str, set[str]] = {}
        """The transports over which a connection to an instance has stood, by its id."""

    def of(self, instance: Instance) -> Iterator[Way]:
        """Every way to an instance, the preferred one first."""
        for transport, plane in self._planes.items():
            address = instance.transports.get(transport)
            if address is not None:
                yield plane, address

    def best(self, instance: Instance) -> Way | None:
        """The preferred one, unless it can carry nothing now and another can; None without any."""
        ways = list(self.of(instance))
        return next((way for way in ways if way[0].is_usable), ways[0] if ways else None)

    def to_ask(self, instance: Instance) -> list[Way]:
        """Those that requests take or that have stood, and that can carry something now."""
        return [
            way
            for number, way in enumerate(self.of(instance))
            if way[0].is_usable
            # No answer says nothing where the port may simply be closed.
            and (not number or self.has_stood(instance, way))
        ]

    def stands(self, instance: Instance, way: Way) -> None:
        """A connection has been made."""
        self._stood.setdefault(instance.id, set()).add(way[0].transport)

    def has_stood(self, instance: Instance, way: Way) -> bool:
        """Whether a connection has ever been made since the instance came to where it is."""
        return way[0].transport in self._stood.get(instance.id, ())

    def forget(self, instance: Instance) -> None:
        """The instance has left or moved."""
        self._stood.pop(instance.id, None)

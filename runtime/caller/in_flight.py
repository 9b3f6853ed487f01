"""Requests under way, by instance: what a router counts, and whom it tells that a worker is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import attrs
import trio

from ..protocol.discovery.instances import Instance

__all__ = ["Flight", "Flights"]


@attrs.define(eq=False)
class Flight:
    """One request on its way to, or being answered by, one instance."""

    instance: Instance
    on_gone: Callable[[], None] | None = None
    """Called once, synchronously, if the instance leaves. Set to None to stop caring."""
    is_gone: bool = False
    is_waiting: bool = False
    """For its first item: then it is `on_gone` that a deletion leads to."""
    heard: Callable[[], int | None] | None = None
    """How often something has come from the worker; None while its consumer does not read."""
    on_silent: Callable[[str], None] | None = None
    """Called once, synchronously, with why, if it is silent and its worker is taken for lost."""


class Flights:
    """The requests of one endpoint's callers in this process; bounded by those requests."""

    def __init__(self) -> None:
        self._load: dict[str, int] = {}
        self._by_instance: dict[str, dict[Flight, None]] = {}
        self._first: trio.Event | None = None

    @property
    def load(self) -> Mapping[str, int]:
        """How many are under way, by instance id; none where there are none."""
        return self._load

    @property
    def count(self) -> int:
        """All that are under way; zero at quiescence."""
        return sum(self._load.values())

    def of(self, instance_id: str) -> tuple[Flight, ...]:
        """Those to one instance, the oldest first."""
        return tuple(self._by_instance.get(instance_id, ()))

    @contextmanager
    def flight(self, instance: Instance) -> Iterator[Flight]:
        """Count a request as under way to `instance` while inside."""
        flight = Flight(instance)
        self._load[instance.id] = self._load.get(instance.id, 0) + 1
        self._by_instance.setdefault(instance.id, {})[flight] = None
        if self._first is not None:
            self._first.set()
            self._first = None
        try:
            yield flight
        finally:
            flights = self._by_instance[instance.id]
            del flights[flight]
            self._load[instance.id] -= 1
            if not flights:
                # Or the tables would grow with every instance that ever lived.
                del self._by_instance[instance.id], self._load[instance.id]

    async def wait_any(self) -> None:
        """Return once any request is under way. Safe to cancel."""
        while not self._by_instance:
            if self._first is None:
                self._first = trio.Event()
            await self._first.wait()

    def end_waits(self, instance_id: str) -> None:
        """The instance has left: tell every request to it, once."""
        for flight in self.of(instance_id):
            flight.is_gone = True
            if flight.on_gone is not None:
                flight.on_gone()

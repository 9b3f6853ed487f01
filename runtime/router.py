"""Which instance gets a request: watches one endpoint's live set and remembers who failed.

The decisions are `protocol/instances.py` and `protocol/routing.py`; this is the pump that feeds
them, plus the flights: requests under way, by instance, so that an instance which vanishes ends
the waits for it at once, and a stream of it once it is silent too (`protocol/silence.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from .env import Env
from .errors import TransportError, UnavailableError
from .kv.index import KvIndex
from .load import LoadTable
from .metrics import Metrics
from .planes import ControlPlane, Delete, Put, RequestPlane, Resync, Snapshot, WatchEvent
from .protocol.instances import EndpointName, Instance, InstanceChange, LiveSet, Standing
from .protocol.routing import Policy, pick
from .protocol.silence import Vigil

__all__ = ["Flight", "Router"]

_log = logging.getLogger("trinamo.router")
_PROBE_MIN_S: Final = 0.1
_PROBE_MAX_S: Final = 2.0


@attrs.define(eq=False)
class Flight:
    """One request on its way to, or being answered by, one instance."""

    instance: Instance
    on_gone: Callable[[], None] | None = None
    """Called once, synchronously, if the instance leaves discovery. Set to None to stop caring."""
    is_gone: bool = False
    heard: Callable[[], int | None] | None = None
    """How often something has come from the worker; None while its consumer does not read."""
    on_silent: Callable[[], None] | None = None
    """Called once, synchronously, if the instance is gone and nothing has come for the grace."""


class Router:
    """The live set of one endpoint, and the choice among it."""

    def __init__(
        self,
        control: ControlPlane,
        endpoint: EndpointName,
        env: Env,
        *,
        policy: Policy = Policy.ROUND_ROBIN,
        inhibit_s: float = 5.0,
        silence_grace_s: float = 10.0,
        metrics: Metrics | None = None,
        request_planes: Mapping[str, RequestPlane] | None = None,
        loads: LoadTable | None = None,
        kv_index: KvIndex | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.policy = policy
        self.kv_index = kv_index
        """Which instance holds which blocks, where `router.kv_index` says so; no policy asks it."""
        self._control = control
        self._env = env
        self._inhibit_s = inhibit_s
        self._silence_grace_s = silence_grace_s
        self._metrics = metrics
        self._loads = loads
        self._request_planes = request_planes or {}
        self._attending: dict[str, trio.CancelScope] = {}
        self._vigils: dict[str, trio.CancelScope] = {}
        self._live = LiveSet()
        self._load: dict[str, int] = {}
        self._flights: dict[str, dict[Flight, None]] = {}
        self._turn = 0
        self._changed = trio.Event()

    # --- discovery in ---

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow discovery, and each instance's connection, until cancelled.

        Started once the snapshot is in.
        """
        started = False
        try:
            async with (
                trio.open_nursery() as nursery,
                self._control.watch(self.endpoint.key_prefix) as events,
            ):
                async for event in events:
                    self._attend(self.apply(event), nursery)
                    if not started:
                        started = True
                        task_status.started()
        finally:
            if self._metrics is not None:
                self._metrics.endpoint_gone(str(self.endpoint))

    def _attend(self, change: InstanceChange, nursery: trio.Nursery) -> None:
        for instance in (*change.left, *change.moved):
            _cancel(self._attending.pop(instance.id, None))
        for instance in (*change.joined, *change.moved):
            scope = self._attending[instance.id] = trio.CancelScope()
            nursery.start_soon(self._witness, instance, scope)
        for instance in change.joined:
            _cancel(self._vigils.pop(instance.id, None))
        for instance in change.left:
            if instance.id in self._flights:
                scope = self._vigils[instance.id] = trio.CancelScope()
                nursery.start_soon(self._keep_vigil, instance, scope)

    async def _witness(self, instance: Instance, scope: trio.CancelScope) -> None:
        """Watch one instance by its connections; the lease tells too, but only after its TTL.

        A plane that makes none, such as NATS, cannot tell. So where requests take such a plane,
        a connection of another plane that the instance speaks is made all the same.
        """
        with scope:
            async with trio.open_nursery() as nursery:
                for plane, address in self._routes(instance):
                    nursery.start_soon(self._hold, instance, plane, address)

    async def _hold(self, instance: Instance, plane: RequestPlane, address: str) -> None:
        """Suspected at once when the connection breaks, probed since.

        One that requests do not take says nothing until it has stood once: between here and the
        worker that port may simply be closed.
        """
        backoff_s = _PROBE_MIN_S
        has_stood = self.route(instance) == (plane, address)

        def stands() -> None:
            nonlocal has_stood
            has_stood = True
            self._trust(instance)

        while True:
            try:
                await plane.hold(address, stands)
                backoff_s = _PROBE_MIN_S
            except TransportError:
                backoff_s = min(backoff_s * 2, _PROBE_MAX_S)
            if has_stood:
                self._suspect(instance)
            await trio.sleep(backoff_s * self._env.rng.uniform(0.5, 1.5))

    async def _keep_vigil(self, instance: Instance, scope: trio.CancelScope) -> None:
        """Give up requests to an instance that was deleted, once they are silent as well."""
        vigil: Vigil[Flight] = Vigil(self._silence_grace_s)
        with scope:
            while flights := self._flights.get(instance.id):
                heard = {each: each.heard() if each.heard else 0 for each in flights}
                for flight in vigil.look(heard, trio.current_time()):
                    self._give_up(flight)
                await trio.sleep(vigil.wait_s)
        if self._vigils.get(instance.id) is scope:
            del self._vigils[instance.id]

    def _give_up(self, flight: Flight) -> None:
        act, flight.on_silent = flight.on_silent, None
        if act is None:
            return
        _log.warning(
            "instance %s of %s left and has been silent for %g s: a request to it is given up",
            flight.instance.id,
            self.endpoint,
            self._silence_grace_s,
        )
        self._env.note("router.silence", instance=flight.instance.id)
        if self._metrics is not None:
            self._metrics.silent_request(str(self.endpoint))
        act()

    def _suspect(self, instance: Instance) -> None:
        if self._live.suspect(instance.id):
            _log.warning("instance %s of %s: connection lost", instance.id, self.endpoint)
            self._env.note("router.suspect", instance=instance.id)
            self._observe()

    def _trust(self, instance: Instance) -> None:
        if self._live.trust(instance.id):
            _log.info("instance %s of %s is back", instance.id, self.endpoint)
            self._env.note("router.trust", instance=instance.id)
            self._observe()

    def route(self, instance: Instance) -> tuple[RequestPlane, str] | None:
        """The plane and address to reach an instance by; None if no plane here reaches it.

        The preferred one, unless it can carry nothing now and another can.
        """
        ways = list(self._routes(instance))
        return next((way for way in ways if way[0].is_usable), ways[0] if ways else None)

    def _routes(self, instance: Instance) -> Iterator[tuple[RequestPlane, str]]:
        """Every way to an instance, the preferred one first."""
        for transport, plane in self._request_planes.items():
            address = instance.transports.get(transport)
            if address is not None:
                yield plane, address

    def apply(self, event: WatchEvent) -> InstanceChange:
        """Take one watch event. Synchronous: no one sees a half-applied snapshot."""
        change = InstanceChange()
        match event:
            case Snapshot(_, entries) | Resync(_, entries):
                change = self._live.replace((e.key, e.value) for e in entries)
            case Put(entry):
                change = self._live.put(entry.key, entry.value)
            case Delete(key, _):
                change = self._live.delete(key)
        self._announce(change)
        return change

    def _announce(self, change: InstanceChange) -> None:
        for why in change.refused:
            _log.warning("discovery entry refused: %s", why)
            if self._metrics is not None:
                self._metrics.entry_refused("instance")
        for instance in change.joined:
            _log.info("instance %s joined %s", instance.id, self.endpoint)
            self._env.note("instance.join", instance=instance.id)
        for instance in change.left:
            _log.info("instance %s left %s", instance.id, self.endpoint)
            self._env.note("instance.leave", instance=instance.id)
            for flight in self._flights.get(instance.id, ()):
                flight.is_gone = True
                if flight.on_gone is not None:
                    flight.on_gone()
        self._follow(change)
        self._observe()
        if change.joined or change.left:
            self._changed.set()
            self._changed = trio.Event()

    def _follow(self, change: InstanceChange) -> None:
        """Whose reports count, and whose no longer."""
        for table in (self._loads, self.kv_index):
            if table is not None:
                for instance in change.left:
                    table.leave(instance.id)
                for instance in change.joined:
                    table.join(instance.id)

    def _observe(self) -> None:
        if self._metrics is not None:
            inhibited = self._live.inhibited_count(trio.current_time())
            live = len(self._live) - self._live.suspected_count
            self._metrics.live_set(str(self.endpoint), live=live, inhibited=inhibited)

    # --- decisions out ---

    @property
    def instances(self) -> list[Instance]:
        """All live instances, also inhibited and draining ones."""
        return self._live.instances

    def standings(self) -> Iterator[tuple[Instance, Standing, int]]:
        """Every live instance, how it is seen now, and our requests under way to it."""
        now = trio.current_time()
        for instance in self._live.instances:
            yield instance, self._live.standing(instance, now), self._load.get(instance.id, 0)

    @property
    def in_flight(self) -> int:
        """Requests under way; zero at quiescence."""
        return sum(self._load.values())

    def choose(self, *, instance_id: str | None = None, exclude: Collection[str] = ()) -> Instance:
        """Pick an instance, not among `exclude` (those this request has tried).

        Raises `UnavailableError` if there is nobody, or not the one named.
        """
        now = trio.current_time()
        direct = instance_id is not None or self.policy is Policy.DIRECT
        known = self._live.instances if direct else self._live.candidates(now)
        candidates = [i for i in known if i.id not in exclude] if exclude else known
        if not candidates and instance_id is None:
            which = "another live instance" if exclude else "a live instance"
            raise UnavailableError(f"{self.endpoint} does not have {which}")
        chosen = pick(
            self.policy,
            candidates,
            turn=self._turn,
            load=self._known_load(candidates),
            rng=self._env.rng,
            instance_id=instance_id,
        )
        self._turn += 1
        return chosen

    def _known_load(self, candidates: Collection[Instance]) -> Mapping[str, int]:
        """Our own requests, or what the instance itself last said if that is more."""
        if self._loads is None or self.policy is not Policy.LEAST_LOADED:
            return self._load
        return {
            i.id: max(self._load.get(i.id, 0), self._loads.active(i.id) or 0) for i in candidates
        }

    def inhibit(self, instance: Instance) -> None:
        """The instance failed a request: do not choose it for a while, if there is another."""
        _log.warning("instance %s of %s is inhibited", instance.id, self.endpoint)
        self._live.inhibit(instance.id, trio.current_time() + self._inhibit_s)
        self._env.note("router.inhibit", instance=instance.id)
        self._observe()

    def restore(self, instance: Instance) -> None:
        """The instance answered: choose it again."""
        self._live.clear_inhibition(instance.id)

    @contextmanager
    def flight(self, instance: Instance) -> Iterator[Flight]:
        """Count a request as in flight to `instance` while inside."""
        flight = Flight(instance)
        self._load[instance.id] = self._load.get(instance.id, 0) + 1
        self._flights.setdefault(instance.id, {})[flight] = None
        try:
            yield flight
        finally:
            flights = self._flights[instance.id]
            del flights[flight]
            self._load[instance.id] -= 1
            if not flights:
                # Or the tables would grow with every instance that ever lived.
                del self._flights[instance.id], self._load[instance.id]

    async def wait_instances(self, count: int = 1) -> list[Instance]:
        """Return once at least `count` instances are live. Safe to cancel."""
        while len(self._live) < count:
            await self._changed.wait()
        return self._live.instances


def _cancel(scope: trio.CancelScope | None) -> None:
    if scope is not None:
        scope.cancel()

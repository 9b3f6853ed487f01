"""Which instance gets a request: watches one endpoint's live set and remembers who failed.

The decisions are `protocol/instances.py` and `protocol/routing.py`; this is the pump that feeds
them, plus the flights: requests under way, by instance, so that an instance which vanishes ends
the waits for it at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import attrs
import trio

from .env import Env
from .errors import UnavailableError
from .metrics import Metrics
from .planes import ControlPlane, Delete, Put, Resync, Snapshot, WatchEvent
from .protocol.instances import EndpointName, Instance, InstanceChange, LiveSet
from .protocol.routing import Policy, pick

__all__ = ["Flight", "Router"]

_log = logging.getLogger("trinamo.router")


@attrs.define(eq=False)
class Flight:
    """One request on its way to, or being answered by, one instance."""

    instance: Instance
    on_gone: Callable[[], None] | None = None
    """Called once, synchronously, if the instance leaves discovery. Set to None to stop caring."""
    is_gone: bool = False


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
        metrics: Metrics | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.policy = policy
        self._control = control
        self._env = env
        self._inhibit_s = inhibit_s
        self._metrics = metrics
        self._live = LiveSet()
        self._load: dict[str, int] = {}
        self._flights: dict[str, dict[Flight, None]] = {}
        self._turn = 0
        self._changed = trio.Event()

    # --- discovery in ---

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow discovery until cancelled. Started once the snapshot is in."""
        started = False
        try:
            async with self._control.watch(self.endpoint.key_prefix) as events:
                async for event in events:
                    self.apply(event)
                    if not started:
                        started = True
                        task_status.started()
        finally:
            if self._metrics is not None:
                self._metrics.endpoint_gone(str(self.endpoint))

    def apply(self, event: WatchEvent) -> None:
        """Take one watch event. Synchronous: no one sees a half-applied snapshot."""
        match event:
            case Snapshot(_, entries) | Resync(_, entries):
                change = self._live.replace((e.key, e.value) for e in entries)
            case Put(entry):
                change = self._live.put(entry.key, entry.value)
            case Delete(key, _):
                change = self._live.delete(key)
        self._announce(change)

    def _announce(self, change: InstanceChange) -> None:
        for why in change.refused:
            _log.warning("discovery entry refused: %s", why)
        for instance in change.joined:
            _log.info("instance %s joined %s", instance.id, self.endpoint)
        for instance in change.left:
            _log.info("instance %s left %s", instance.id, self.endpoint)
            for flight in self._flights.get(instance.id, ()):
                flight.is_gone = True
                if flight.on_gone is not None:
                    flight.on_gone()
        self._observe()
        if change.joined or change.left:
            self._changed.set()
            self._changed = trio.Event()

    def _observe(self) -> None:
        if self._metrics is not None:
            inhibited = self._live.inhibited_count(trio.current_time())
            self._metrics.live_set(str(self.endpoint), live=len(self._live), inhibited=inhibited)

    # --- decisions out ---

    @property
    def instances(self) -> list[Instance]:
        """All live instances, also inhibited and draining ones."""
        return self._live.instances

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
            load=self._load,
            rng=self._env.rng,
            instance_id=instance_id,
        )
        self._turn += 1
        return chosen

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

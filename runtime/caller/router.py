"""Which instance gets a request: watches one endpoint's live set and remembers who failed.

The decisions are `protocol/discovery/instances.py` and `protocol/discovery/routing.py`; this is the
pump that feeds them, plus the flights: requests under way, by instance, so that an instance which
vanishes ends the waits for it at once. What becomes of requests that are silent is `liveness.py`.

An instance that discovery deletes without a word of leaving, while its connection stands, has not
vanished yet: it lingers while it answers, for `linger_s` at most (decision 0011).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import trio

from ..env import Env
from ..errors import TrinamoError, UnavailableError
from ..events.load import LoadTable
from ..kv.index import KvIndex
from ..logs.instances import InstanceLog
from ..metrics.metrics import Metrics
from ..nurseries import open_nursery
from ..planes import ControlPlane, Delete, Put, RequestPlane, Resync, Snapshot, WatchEvent
from ..protocol.discovery.instances import EndpointName, Instance, InstanceChange, LiveSet, Standing
from ..protocol.discovery.routing import Policy, pick
from ..retries import Retries
from .in_flight import Flight, Flights
from .liveness import SilenceWatch
from .probes import Way, answers
from .routes import Ways

__all__ = ["Router"]

_log = logging.getLogger("trinamo.router")
_PROBE_MIN_S: Final = 0.1
_PROBE_MAX_S: Final = 2.0
_LINGER_PAUSE_S: Final = 1.0
"""Between two probes of an instance that lingers."""


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
        linger_s: float | None = 10.0,
        metrics: Metrics | None = None,
        request_planes: Mapping[str, RequestPlane] | None = None,
        loads: LoadTable | None = None,
        kv_index: KvIndex | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.policy = policy
        self.kv_index = kv_index
        """Which instance holds which blocks, where `router.kv_index` says so; no policy asks it."""
        self._log = InstanceLog(_log, endpoint)
        self._control = control
        self._env = env
        self._inhibit_s = inhibit_s
        self._linger_s = linger_s or 0.0
        self._metrics = metrics
        self._loads = loads
        self._ways = Ways(request_planes or {})
        self._attending: dict[str, trio.CancelScope] = {}
        self._lingers: dict[str, trio.CancelScope] = {}
        self._live = LiveSet(keeps_deleted=linger_s is not None, transports=request_planes)
        self._flights = Flights()
        self._silence = SilenceWatch(
            endpoint,
            self._flights,
            self._live,
            env,
            grace_s=silence_grace_s,
            ways=self._ways.to_ask,
            on_change=self._observe,
            metrics=metrics,
        )
        self._discovery = Retries(_log, f"the instances of {endpoint} are not followed")
        self._turn = 0
        self._change_count = 0
        self._changed = trio.Event()

    # --- discovery in ---

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow discovery, and each instance's connection, until cancelled.

        Started once the snapshot is in, or once the store has refused it: then nobody is live, and
        the store is asked again and again.
        """
        try:
            async with open_nursery() as nursery:
                await nursery.start(self._silence.run)
                attempt = partial(self._discover, nursery)
                await self._discovery.run(attempt, task_status=task_status)
        finally:
            if self._metrics is not None:
                self._metrics.endpoint_gone(str(self.endpoint))

    async def _discover(self, nursery: trio.Nursery, begun: Callable[[], None]) -> None:
        async with self._control.watch(self.endpoint.key_prefix) as events:
            async for event in events:
                self._attend(self.apply(event), nursery)
                begun()

    def _attend(self, change: InstanceChange, nursery: trio.Nursery) -> None:
        for instance in (*change.left, *change.moved):
            _cancel(self._attending.pop(instance.id, None))
            self._ways.forget(instance)
        for instance in (*change.joined, *change.moved):
            scope = self._attending[instance.id] = trio.CancelScope()
            nursery.start_soon(self._witness, instance, scope)
        for instance in (*change.joined, *change.returned):
            self._silence.returned(instance)
            _cancel(self._lingers.pop(instance.id, None))
        for instance in change.lingering:
            scope = self._lingers[instance.id] = trio.CancelScope()
            nursery.start_soon(self._linger, instance, scope)
        for instance in (*change.left, *change.lingering):
            self._silence.vanished(instance)

    async def _witness(self, instance: Instance, scope: trio.CancelScope) -> None:
        """Watch one instance by its connections; the lease tells too, but only after its TTL.

        A plane that makes none, such as NATS, cannot tell. So where requests take such a plane,
        a connection of another plane that the instance speaks is made all the same.
        """
        with scope:
            async with open_nursery() as nursery:
                for way in self._ways.of(instance):
                    nursery.start_soon(self._hold, instance, way)

    async def _hold(self, instance: Instance, way: Way) -> None:
        """Suspected at once when the connection breaks, probed since.

        One that requests do not take says nothing until it has stood once: between here and the
        worker that port may simply be closed.
        """
        plane, address = way
        backoff_s = _PROBE_MIN_S
        is_taken = self.route(instance) == way

        def stands() -> None:
            self._ways.stands(instance, way)
            self._trust(instance)

        while True:
            try:
                await plane.hold(address, stands, instance_id=instance.id)
                backoff_s = _PROBE_MIN_S
            except TrinamoError:
                backoff_s = min(backoff_s * 2, _PROBE_MAX_S)
            except Exception:  # noqa: BLE001 -- one instance must not take the others along
                _log.exception("instance %s of %s cannot be followed", instance.id, self.endpoint)
                backoff_s = _PROBE_MAX_S
            if is_taken or self._ways.has_stood(instance, way):
                self._suspect(instance)
            await trio.sleep(backoff_s * self._env.rng.uniform(0.5, 1.5))

    async def _linger(self, instance: Instance, scope: trio.CancelScope) -> None:
        """Keep an instance that was deleted while it answers, for the grace at most."""
        why = f"it has not registered again within {self._linger_s:g} s"
        with scope:
            with trio.move_on_after(self._linger_s):
                while True:
                    if not await self._answers(instance):
                        why = "it does not answer"
                        break
                    await trio.sleep(_LINGER_PAUSE_S * self._env.rng.uniform(0.5, 1.5))
            self._dismiss(instance, why)

    async def _answers(self, instance: Instance) -> bool:
        route = self.route(instance)
        return route is not None and await answers(route, instance, self._env)

    def _dismiss(self, instance: Instance, why: str) -> None:
        change = self._live.dismiss(instance.id)
        if change.left:
            self._log.warning("instance %s of %s is given up: %s", instance, why)
            _cancel(self._lingers.pop(instance.id, None))
            _cancel(self._attending.pop(instance.id, None))
            self._ways.forget(instance)
            self._announce(change)

    def _suspect(self, instance: Instance) -> None:
        if self._live.is_lingering(instance.id):
            self._dismiss(instance, "its connection is lost")
        elif self._live.suspect(instance.id):
            self._log.warning("instance %s of %s: connection lost", instance)
            self._env.note("router.suspect", instance=instance.id)
            self._observe()

    def _trust(self, instance: Instance) -> None:
        if self._live.trust(instance.id):
            self._log.info("instance %s of %s is back", instance)
            self._env.note("router.trust", instance=instance.id)
            self._observe()

    def route(self, instance: Instance) -> Way | None:
        """The plane and address to reach an instance by; None if no plane here reaches it."""
        return self._ways.best(instance)

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
            self._log.info("instance %s joined %s", instance)
            self._env.note("instance.join", instance=instance.id)
        for instance in (*change.joined, *change.moved):
            if self._live.is_foreign(instance.id):
                spoken = ", ".join(instance.transports)[:80] or "nothing"
                text = "instance %s of %s speaks %s, which is not spoken here: it is passed over"
                self._log.warning(text, instance, spoken)
        for instance in change.lingering:
            self._log.warning(
                "instance %s of %s was deleted from discovery, but its connection stands: it is kept"
                " for up to %g s",
                instance,
                self._linger_s,
            )
            self._env.note("instance.linger", instance=instance.id)
        for instance in change.returned:
            self._log.info("instance %s of %s has registered again", instance)
            self._env.note("instance.return", instance=instance.id)
        for instance in change.left:
            self._log.info("instance %s left %s", instance)
            self._env.note("instance.leave", instance=instance.id)
            self._flights.end_waits(instance.id)
        self._follow(change)
        self._observe()
        if change.joined or change.left or change.draining:
            self._change_count += 1
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
            self._metrics.live_set(
                str(self.endpoint),
                live=live,
                inhibited=inhibited,
                lingering=self._live.lingering_count,
            )

    # --- decisions out ---

    @property
    def instances(self) -> list[Instance]:
        """All live instances, also inhibited, draining and lingering ones."""
        return self._live.instances

    def standings(self) -> Iterator[tuple[Instance, Standing, int]]:
        """Every live instance, how it is seen now, and our requests under way to it."""
        now, load = trio.current_time(), self._flights.load
        for instance in self._live.instances:
            yield instance, self._live.standing(instance, now), load.get(instance.id, 0)

    def has_live(self, among: Container[str] | None = None) -> bool:
        """Whether any instance, of `among` if given, is there and not known to be faulty."""
        now = trio.current_time()
        return any(
            self._live.standing(instance, now) in (Standing.LIVE, Standing.LINGERING)
            for instance in self._live.instances
            if among is None or instance.id in among
        )

    @property
    def in_flight(self) -> int:
        """Requests under way; zero at quiescence."""
        return self._flights.count

    def choose(
        self,
        *,
        instance_id: str | None = None,
        exclude: Collection[str] = (),
        among: Container[str] | None = None,
    ) -> Instance:
        """Pick an instance, not among `exclude` (those this request has tried).

        With `among`, only those ids are chosen from. Raises `UnavailableError` if there is nobody,
        or not the one named.
        """
        now = trio.current_time()
        if instance_id is not None or self.policy is Policy.DIRECT:
            candidates = [
                i
                for i in self._live.instances
                if i.id not in exclude and (among is None or i.id in among)
            ]
        else:
            candidates = self._live.candidates(now, exclude, among)
        if not candidates and instance_id is None:
            which = "another live instance" if exclude else "a live instance"
            why = f": discovery fails, {self._discovery.cause}" if self._discovery.cause else ""
            raise UnavailableError(f"{self.endpoint} does not have {which} that can be asked{why}")
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
        load = self._flights.load
        if self._loads is None or self.policy is not Policy.LEAST_LOADED:
            return load
        return {i.id: max(load.get(i.id, 0), self._loads.active(i.id) or 0) for i in candidates}

    def inhibit(self, instance: Instance, *, is_nonsensical: bool = False) -> None:
        """The instance failed a request: do not choose it for a while, if there is another.

        A connection that is made anew ends this early, unless the instance answered nonsense.
        """
        self._log.warning("instance %s of %s is inhibited", instance)
        until = trio.current_time() + self._inhibit_s
        self._live.inhibit(instance.id, until, is_nonsensical=is_nonsensical)
        self._env.note("router.inhibit", instance=instance.id)
        self._observe()

    def restore(self, instance: Instance) -> None:
        """The instance answered: choose it again."""
        self._live.clear_inhibition(instance.id)

    def flight(self, instance: Instance) -> AbstractContextManager[Flight]:
        """Count a request as in flight to `instance` while inside."""
        return self._flights.flight(instance)

    async def wait_instances(self, count: int = 1) -> list[Instance]:
        """Return once at least `count` instances are live. Safe to cancel."""
        while len(self._live) < count:
            await self._changed.wait()
        return self._live.instances

    async def wait_change(self, since: int) -> int:
        """Return once somebody has joined, left or begun to leave since the call that said `since`.

        The first call, with a negative number, returns at once. Safe to cancel.
        """
        while self._change_count == since:
            await self._changed.wait()
        return self._change_count

    def patience_s(self, instance_id: str) -> float:
        """How long the model cards of an instance may be missing before they are taken for gone.

        0 for one that is not here, or has said that it leaves.
        """
        return self._linger_s if self._live.is_wanted(instance_id) else 0.0


def _cancel(scope: trio.CancelScope | None) -> None:
    if scope is not None:
        scope.cancel()

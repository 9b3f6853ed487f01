"""Which instance gets a request: follows one endpoint in discovery, and chooses among its instances.

What is known of each is in `instances.py`, the task that watches it in `liveness.py`, the choice in
`protocol/discovery/candidates.py`.

An instance that discovery deletes without a word of leaving, while its connection stands, is stale,
not gone: it is kept while it answers, for `stale_grace_s` at most (decision 0011).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

import trio

from ..config.router import RouterConfig
from ..context import Context
from ..env import Env
from ..errors import (
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    SilentError,
    TrinamoError,
    UnavailableError,
)
from ..events.load import BusyLimits, LoadReport
from ..logs.notices import InstanceLog
from ..metrics.metrics import Metrics, entries_refused
from ..nurseries import open_nursery
from ..planes import (
    ControlPlane,
    Delete,
    Entry,
    EventPlane,
    Put,
    RequestPlane,
    Resync,
    Snapshot,
    WatchEvent,
)
from ..planes.retries import Retries
from ..protocol.discovery.candidates import TOLD_LOAD, Group, Policy, Standing, pick
from ..protocol.discovery.instances import EndpointName, Instance, decode_instance
from ..protocol.discovery.presence import InFlight
from ..protocol.kv.names import RoutingHint
from ..protocol.undecodable import Unsigned
from .instances import InstanceReports, Instances
from .kv.routing import KvRouting
from .liveness import Monitor, Route, best_route
from .record import InstanceStatus

_log = logging.getLogger("trinamo.router")
WAITING_MAX: Final = 1000
"""So many requests may wait at one endpoint for an instance to come,"""
WAITING_BYTES_MAX: Final = 64 << 20
"""and so many bytes of them."""


class Router:
    """The instances of one endpoint, and the choice among them.

    With `events`, what instances tell of their load is followed under the policies `TOLD_LOAD`, under
    any if it `follows_load`, and from the first time on that it is told to; the policy
    `kv` needs `kv`, which the caller runs.
    """

    def __init__(
        self,
        control: ControlPlane,
        endpoint: EndpointName,
        env: Env,
        *,
        policy: Policy = Policy.ROUND_ROBIN,
        inhibit_s: float = 5.0,
        errors_max: int = 3,
        silence_grace_s: float = 10.0,
        stale_grace_s: float | None = 10.0,
        metrics: Metrics | None = None,
        request_planes: Mapping[str, RequestPlane] | None = None,
        events: EventPlane | None = None,
        follows_load: bool = False,
        kv: KvRouting | None = None,
        wait_s: float = 0.0,
    ) -> None:
        self.endpoint = endpoint
        self.policy = policy
        self.wait_s = wait_s
        """How long a request that may wait does so where nobody is there (`search.py`)."""
        self._log = InstanceLog(_log, endpoint)
        self._control = control
        self._env = env
        self._inhibit_s = inhibit_s
        self._stale_grace_s = stale_grace_s or 0.0
        metrics = metrics or Metrics(env)
        self._metrics = metrics
        self._refused = entries_refused(metrics)
        self._planes = request_planes or {}
        self._known = Instances(
            endpoint,
            env,
            grace_s=silence_grace_s,
            stale_grace_s=stale_grace_s,
            transports=request_planes,
            metrics=metrics,
            kv=kv,
            errors_max=errors_max,
        )
        self._events = events
        self._follows_load = trio.Event()
        self._monitor = Monitor(self._known, self._planes, env)
        self._discovery = Retries(_log, f"the instances of {endpoint} are not followed")
        self._waiting = metrics.count(
            "router_waiting",
            "Requests that wait for an instance, as nobody is there",
            may_fall=True,
        )
        self.seeking_count = self._waiting_bytes = 0
        self.kv = kv
        """What the policy `kv` knows; None under others."""
        self._turn = 0
        if follows_load or policy in TOLD_LOAD:
            self.follow_load()

    # --- discovery in ---

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow discovery, and each instance's connection, until cancelled.

        Started once the snapshot is in, or once the store has refused it: then nobody is live, and
        the store is asked again and again.
        """
        try:
            async with open_nursery() as nursery:
                if self._known.reports is not None:
                    await nursery.start(self._known.reports.run)
                else:
                    nursery.start_soon(self._follow_once_told)
                attempt = partial(self._discover, nursery)
                await self._discovery.run(attempt, task_status=task_status)
        finally:
            self._metrics.endpoint_gone(str(self.endpoint), self._known.counts)

    async def _follow_once_told(self) -> None:
        await self._follows_load.wait()
        if self._known.reports is not None:
            await self._known.reports.run()

    async def _discover(self, nursery: trio.Nursery, begun: Callable[[], None]) -> None:
        async with self._control.watch(self.endpoint.key_prefix) as events:
            async for event in events:
                self.apply(event)
                while self._known.joined:
                    nursery.start_soon(self._monitor.watch, self._known.joined.pop(0))
                begun()

    def apply(self, event: WatchEvent) -> None:
        """Take one watch event. Synchronous: no one sees a half-applied snapshot."""
        match event:
            case Snapshot(_, entries) | Resync(_, entries):
                self._known.replace({each.key: self._decode(each) for each in entries})
            case Put(entry):
                instance = self._decode(entry)
                if instance is not None:
                    self._known.put(instance)
            case Delete(key, _):
                self._known.delete(key)

    def _decode(self, entry: Entry) -> Instance | None:
        """An entry that makes no sense is refused alone; what its key said before stays in force."""
        try:
            return decode_instance(entry.key, entry.value)
        except RemoteProtocolError as error:
            # What no member has signed is told once for each key, where it is read.
            level = logging.DEBUG if isinstance(entry.value, Unsigned) else logging.WARNING
            _log.log(level, "discovery entry refused: %s", error.message)
            self._refused.tally("instance").value += 1
            return None

    # --- what is known ---

    @property
    def reports(self) -> InstanceReports | None:
        """Where instances say how busy they are and whether they drain; None while nobody wants it."""
        return self._known.reports

    def report(self, instance_id: str) -> LoadReport | None:
        """What an instance said last of its load; None if it has said nothing."""
        record = self._known.get(instance_id)
        return None if record is None else record.report

    def take_report(self, instance_id: str, report: LoadReport) -> None:
        """Note what an instance says of its load, where no event tells it."""
        record = self._known.get(instance_id)
        if record is not None:
            self._known.report(record, report)

    @property
    def instances(self) -> list[Instance]:
        """All that have not left, also inhibited, draining and stale ones."""
        return [each.instance for each in self._known]

    @property
    def instance_count(self) -> int:
        """How many these are."""
        return len(self._known)

    def statuses(self) -> Iterator[tuple[Instance, InstanceStatus, int]]:
        """Each of them, how it is seen now, and our requests under way to it."""
        now = trio.current_time()
        for each in self._known:
            yield each.instance, each.status(now), len(each.requests)

    def gone(self) -> Iterator[tuple[Instance, float]]:
        """See `Instances.gone`."""
        return self._known.gone()

    def has_live(self, among: Collection[str] | None = None) -> bool:
        """Whether any instance, of `among` if given, is there and not known to be faulty."""
        return self._known.choices.has(trio.current_time(), Standing.STALE, among)

    def is_there(self, among: Collection[str] | None = None) -> bool:
        """Whether any instance, of `among` if given, can be reached, faulty or not, and stays."""
        return self._known.choices.has(trio.current_time(), Standing.FAULTY, among)

    def is_busy(self, limits: BusyLimits, among: Collection[str] | None = None) -> bool:
        """Whether each that could be chosen has lately reported a load that reaches `limits`.

        False if there is nobody.
        """
        return self._known.choices.is_busy(trio.current_time(), limits, among)

    @property
    def in_flight(self) -> int:
        """Requests under way; zero at quiescence."""
        return self._known.in_flight

    def route(self, instance: Instance) -> Route:
        """The plane and address to reach an instance by; `UnavailableError` if none here does."""
        route = best_route(self._planes, instance)
        if route is None:
            spoken = ", ".join(instance.transports) or "nothing"
            raise UnavailableError(
                f"instance {instance.id} speaks {spoken}, which is not spoken here"
            )
        return route

    # --- decisions out ---

    def choose(
        self,
        *,
        instance_id: str | None = None,
        exclude: Collection[str] = (),
        among: Collection[str] | None = None,
        hint: RoutingHint | None = None,
    ) -> Instance:
        """Pick an instance, not among `exclude` (those this request has tried).

        With `among`, only those ids are chosen from. `hint` is what is known of the prompt, for the
        policy `kv`. Raises `UnavailableError` if there is nobody,
        or not the one named.
        """
        if instance_id is not None:
            return self._named(instance_id, exclude, among)
        choices = self._known.choices
        group, without = choices.asked(trio.current_time(), exclude, among)
        if len(group) == len(without):
            which = "another live instance" if exclude else "a live instance"
            why = f": discovery fails, {self._discovery.cause}" if self._discovery.cause else ""
            raise UnavailableError(f"{self.endpoint} does not have {which} that can be asked{why}")
        if self.policy is Policy.DIRECT:
            raise RequestError(
                "router.policy is direct: a request must name its instance (over HTTP in the header "
                "X-Trinamo-Worker)",
                param="instance_id",
            )
        if self.kv is not None and self.policy is Policy.KV and hint is not None:
            return self._choose_by_blocks(self.kv, group, without, hint)
        turn, self._turn = self._turn, self._turn + 1
        load, rng = choices.load, self._env.rng
        chosen = pick(self.policy, group, without, turn=turn, load=load, rng=rng)
        return choices.records[chosen].instance

    def _choose_by_blocks(
        self, kv: KvRouting, group: Group, without: list[int], hint: RoutingHint
    ) -> Instance:
        known, records, rng = self._known, self._known.choices.records, self._env.rng

        def find(instance_id: str) -> Instance | None:
            record = known.get(instance_id)
            if record is None or record.number not in group or record.number in without:
                return None
            return record.instance

        return kv.choose(
            hint,
            find=find,
            least=lambda: (
                records[group.least(known.predicted, rng.randrange(len(group)), without)].instance
            ),
            everybody=lambda: [
                records[each].instance for each in group.numbers if each not in without
            ],
        )

    def _named(
        self, instance_id: str, exclude: Collection[str], among: Collection[str] | None
    ) -> Instance:
        self._turn += 1
        record = self._known.get(instance_id)
        is_asked = instance_id not in exclude and (among is None or instance_id in among)
        if record is None or not is_asked:
            raise UnavailableError(f"instance {instance_id} is not live, or does not serve this")
        return record.instance

    def tune(self, section: RouterConfig) -> None:
        """Choose as `section` says from now on."""
        self.policy, self._inhibit_s = Policy(section.policy), section.inhibit_s
        if self.policy in TOLD_LOAD:
            self.follow_load()
        if self.kv is not None:
            self.kv.weigh(section.kv)

    def follow_load(self) -> None:
        """Follow what instances tell of their load from now on, whatever the policy; for good."""
        if self._events is not None:
            self._known.follow(self._events)
            self._follows_load.set()

    def fail(self, instance: Instance, error: TrinamoError, context: Context) -> None:
        """The request of `context` was lost by `error`: pass the instance, if at fault, over for a while.

        That is, while there is another. An error that it answered with, `UpstreamError`, counts only
        with others in a row. A connection that is made anew ends the while early, unless the
        instance answered nonsense. One that fell silent may have done so over the request, which counts.
        """
        context.silence_count += isinstance(error, SilentError)
        record = self._known.get(instance.id)
        if record is not None:
            self._known.fail(record, error, trio.current_time(), self._inhibit_s)

    def is_well(self, instance_id: str) -> bool:
        """Whether an instance is there, reached, and not passed over."""
        record = self._known.get(instance_id)
        return record is not None and record.faulty_until <= trio.current_time()

    def restore(self, instance: Instance) -> None:
        """The instance answered a request: choose it again."""
        record = self._known.get(instance.id)
        if record is not None:
            self._known.answer(record)

    def begin(
        self, instance: Instance, request: InFlight, hint: RoutingHint | None = None
    ) -> int | None:
        """Count `request` as under way to `instance` until `end`, and under `kv` what it will cost.

        Returns how many blocks of its prompt are there, as far as is known; None under other
        policies. Raises `UnavailableError` if the instance has left.
        """
        self._known.begin(instance.id, request)
        if self.kv is None or hint is None:
            return None
        return self.kv.begin(instance.id, request, hint)

    def first_item(self, request: InFlight) -> None:
        """The first item of its answer has come."""
        if self.kv is not None:
            self.kv.first_token(request)

    def end(self, instance: Instance, request: InFlight) -> None:
        """It is under way no more."""
        self._known.end(instance.id, request)
        if self.kv is not None:
            self.kv.end(request)

    def flight(self, instance: Instance, request: InFlight) -> AbstractContextManager[None]:
        """Count `request` as under way to `instance` while inside."""
        return self._known.flight(instance.id, request)

    async def wait_instances(self, count: int = 1) -> list[Instance]:
        """Return once at least `count` instances are there. Safe to cancel."""
        while self.instance_count < count:
            await self._known.changed.wait()
        return self.instances

    async def wait_change(self, since: int) -> int:
        """Return once somebody has joined, left or begun to leave since the call that said `since`.

        The first call, with a negative number, returns at once. Safe to cancel.
        """
        while self._known.change_count == since:
            await self._known.changed.wait()
        return self._known.change_count

    async def wait_joined(self) -> None:
        """Return at the next change that `wait_change` tells of. Safe to cancel."""
        await self._known.changed.wait()

    @contextmanager
    def waiting(self, payload_bytes: int) -> Iterator[None]:
        """Count a request of that size as one that waits for an instance.

        Raises `OverloadedError` if too many wait, or too large ones.
        """
        self._waiting_bytes += payload_bytes
        self.seeking_count += 1
        self._waiting.value += 1
        try:
            if self.seeking_count > WAITING_MAX or self._waiting_bytes > WAITING_BYTES_MAX:
                raise OverloadedError(
                    f"{self.endpoint} has nobody, and enough wait for somebody to come",
                    bound="router_waiting",
                    value=WAITING_MAX,
                )
            yield
        finally:
            self._waiting.value -= 1
            self.seeking_count -= 1
            self._waiting_bytes -= payload_bytes

    def removal_grace_s(self, instance_id: str) -> float:
        """How long the model cards of an instance may be missing before they are taken for gone.

        0 for one that is not here, or has said that it leaves.
        """
        record = self._known.get(instance_id)
        return 0.0 if record is None or record.instance.draining else self._stale_grace_s

"""The instances of one endpoint: one table of records, and what becomes of each.

Everything but `InstanceReports` is synchronous. `router.py` feeds discovery in and chooses, `liveness.py` is the task
of each record (`record.py`); whatever either finds out goes through `Instances`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import trio
from msgspec.structs import replace

from ..env import Env
from ..errors import DisconnectedError, SilentError, TrinamoError, UnavailableError
from ..events.follower import ReportFollower
from ..events.load import LOAD_TOPIC, STATUS_TOPIC, LoadReport, WorkerState
from ..events.source import topic_of
from ..logs.notices import InstanceLog
from ..metrics.metrics import Metrics
from ..nurseries import open_nursery
from ..planes import EventPlane
from ..protocol.discovery.candidates import Measure
from ..protocol.discovery.instances import EndpointName, Instance
from ..protocol.discovery.presence import InFlight, InstanceFault, Presence, Sign
from .choices import Choices
from .kv.routing import KvRouting
from .record import InstanceRecord, InstanceStatus

GONE_S: Final = 900.0
"""For how long an instance that left without draining is named, in seconds."""
GONE_MAX: Final = 64
CAUSES_MAX: Final = 4
"""So many reasons why an instance is not reached does the log tell of one outage."""
_WHY: Final = {
    Sign.LAPSED: ("left", "left discovery and has fallen silent", SilentError),
    Sign.UNANSWERED: ("unanswered", "has fallen silent and does not answer", SilentError),
    Sign.REPLACED: ("replaced", "is silent, and another answers at its address", DisconnectedError),
}
"""What gives a silent request up, as a metric says it, a sentence about the instance, and the error."""
_WHY_LEFT: Final = {
    Sign.DISCONNECTED: "its connection is lost",
    Sign.OUT_OF_GRACE: "it has not registered again in time",
}


class Instances:
    """The records of one endpoint's instances, in the order in which they joined.

    Bounded by what discovery names, and by requests under way to instances that have left.
    `transports` are those spoken here; None is all, as of upstreams. With `stale_grace_s` None, what is deleted has
    left at once.
    """

    def __init__(
        self,
        endpoint: EndpointName,
        env: Env,
        *,
        grace_s: float,
        stale_grace_s: float | None,
        transports: Collection[str] | None = None,
        metrics: Metrics,
        kv: KvRouting | None = None,
        errors_max: int = 1,
    ) -> None:
        self._endpoint, self._env, self._errors_max = endpoint, env, errors_max
        self._grace_s, self._stale_grace_s = grace_s, stale_grace_s
        self._transports = transports
        self._silent = metrics.counts(
            "silent_requests", "Requests given up as silent, by why", "endpoint", "reason"
        )
        self._kv = kv
        self.reports: InstanceReports | None = None
        """What the instances say of themselves, once somebody wants it (`follow`)."""
        self._log = InstanceLog(logging.getLogger("trinamo.router"), endpoint)
        self._records: dict[str, InstanceRecord] = {}
        self._gone: dict[str, tuple[Instance, float]] = {}
        """By id, those that left without draining, and when; the oldest first."""
        self._joined_at: deque[float] = deque(maxlen=GONE_MAX)
        """When instances joined that have replaced none of these."""
        self._joined_count = self._left_count = 0
        self.choices = Choices(self.get)
        """Whom a request may be sent to."""
        self.predicted: Measure = self._predicted
        """What `kv` says of the load of a candidate."""
        if kv is not None:
            kv.tell(self._loads_changed)
        self.change_count = 0
        """How often somebody has joined, left or begun to leave."""
        self.changed = trio.Event()
        """Of the next such change."""
        self.joined: list[InstanceRecord] = []
        """Whose task is to be started."""
        metrics.live_set(str(endpoint), self.counts)

    def __iter__(self) -> Iterator[InstanceRecord]:
        """Those that have not left."""
        for each in self._records.values():
            if each.presence is not Presence.LEFT:
                yield each

    def __len__(self) -> int:
        """How many have not left."""
        return self._joined_count - self._left_count

    def __contains__(self, instance_id: str) -> bool:
        return self.get(instance_id) is not None

    def follow(self, events: EventPlane) -> None:
        """Have `reports`, which the caller runs, from now on."""
        if self.reports is None:
            self.reports = InstanceReports(
                events, self._endpoint, self.get, self.report, self._drains
            )

    def get(self, instance_id: str) -> InstanceRecord | None:
        """The record of an instance that has not left."""
        record = self._records.get(instance_id)
        return None if record is None or record.presence is Presence.LEFT else record

    @property
    def in_flight(self) -> int:
        """Requests under way; zero at quiescence."""
        return sum(len(each.requests) for each in self._records.values())

    def gone(self) -> Iterator[tuple[Instance, float]]:
        """Those that left without draining, and how many seconds ago; for `GONE_S`, or until replaced.

        An instance replaces one that was lost before it joined: after a restart all is well again.
        """
        now = self._env.clock.now()
        for instance_id, (instance, left_at) in list(self._gone.items()):
            if now - left_at < GONE_S:
                yield instance, now - left_at
            else:
                del self._gone[instance_id]

    def counts(self) -> tuple[int, Counter[str]]:
        """How many accept requests, as far as is known, and how many are in each `InstanceStatus`."""
        now = self._env.clock.now()
        statuses = Counter(each.status(now).value for each in self)
        statuses[InstanceStatus.GONE.value] = sum(1 for _ in self.gone())
        return sum(each.is_reached for each in self), statuses

    # --- what discovery says ---

    def replace(self, named: Mapping[str, Instance | None]) -> None:
        """A snapshot or resync, by key: what it does not name is deleted, None is left as it is."""
        for key in [each.instance.key for each in self]:
            if key not in named:
                self.delete(key)
        for instance in named.values():
            if instance is not None:
                self.put(instance)

    def put(self, instance: Instance) -> None:
        """Discovery names an instance. A new registration ends what is held against it."""
        record = self.get(instance.id)
        if record is None:
            self._join(instance)
            return
        if instance.incarnation > record.instance.incarnation:
            # It has registered anew since: who leaves registers as draining.
            record.is_leaving = False
        if record.is_leaving:
            instance = replace(instance, draining=True)
        known, record.instance = record.instance, instance
        is_back = record.presence is Presence.STALE
        if not is_back and known == instance:
            return
        record.step(Sign.REGISTERED, self._env.clock.now())
        record.wake()
        if is_back:
            self._log.info("instance %s of %s has registered again", instance)
            self._env.note("instance.return", instance=instance.id)
        if known.transports != instance.transports:
            # What stands is the connection to where it was.
            record.is_connected = False
            record.connected_once.clear()
            record.causes_told.clear()
            record.moves += 1
            self._check_transports(record)
        self.choices.settle(record)
        if instance.draining and not known.draining:
            self._announce()

    def delete(self, key: str) -> None:
        """Discovery does not name this instance any more."""
        record = self.get(key.rpartition("/")[2])
        if record is None or record.instance.key != key or record.presence is Presence.STALE:
            return
        is_kept = self._stale_grace_s is not None and record.is_kept
        self.step(record, Sign.LAPSED if is_kept else Sign.DELETED)

    def _join(self, instance: Instance) -> None:
        graces = self._grace_s, self._stale_grace_s or 0.0
        self._joined_count += 1
        record = InstanceRecord(instance, self._joined_count, *graces, self._errors_max)
        before = self._records.pop(instance.id, None)
        if before is not None:
            # It comes back while requests go on that it had when it left.
            record.requests = before.requests
            before.is_over = True
            before.wake()
        self._records[instance.id] = record
        # Those whose time is over are named no more, and nothing takes their place.
        if any(self.gone()):
            self._gone.pop(instance.id if instance.id in self._gone else next(iter(self._gone)))
        else:
            self._joined_at.append(self._env.clock.now())
        self.joined.append(record)
        if self._kv is not None:
            self._kv.join(instance)
        self._log.info("instance %s joined %s", instance)
        self._env.note("instance.join", instance=instance.id)
        self._check_transports(record)
        self.choices.settle(record)
        self._announce()

    def _check_transports(self, record: InstanceRecord) -> None:
        spoken = record.instance.transports
        record.is_foreign = self._transports is not None and spoken.keys().isdisjoint(
            self._transports
        )
        if record.is_foreign:
            text = "instance %s of %s speaks %s, which is not spoken here: it is passed over"
            self._log.warning(text, record.instance, ", ".join(spoken)[:80] or "nothing")

    def _drains(self, record: InstanceRecord) -> None:
        """It says so itself, which comes first where the store is away, until it registers anew."""
        record.is_leaving = True
        if not record.instance.draining:
            record.instance = replace(record.instance, draining=True)
            self.choices.settle(record)
            record.wake()
            self._announce()

    def _announce(self) -> None:
        self.change_count += 1
        self.changed.set()
        self.changed = trio.Event()

    # --- what we find out ourselves ---

    def connected(self, record: InstanceRecord, transport: str) -> None:
        """A connection to it has been made, so that what ended with the last one is over."""
        record.is_connected, record.lost_at = True, math.inf
        record.causes_told.clear()
        record.connected_once.add(transport)
        if record.connect():
            self.choices.settle(record)
            self._log.info("instance %s of %s is back", record.instance)
            self._env.note("router.trust", instance=record.instance.id)

    def disconnected(self, record: InstanceRecord, error: TrinamoError | None = None) -> None:
        """A connection to it broke, or, with `error`, cannot be made: each cause is told once for each outage."""
        record.is_connected = False
        if record.presence is Presence.STALE:
            self.step(record, Sign.DISCONNECTED)
            return
        if record.disconnect():
            record.lost_at = self._env.clock.now()
            self.choices.settle(record)
            if error is None or record.connected_once:
                self._log.warning("instance %s of %s: connection lost", record.instance)
            self._env.note("router.suspect", instance=record.instance.id)
        causes = record.causes_told
        if error is not None and error.message not in causes and len(causes) < CAUSES_MAX:
            causes.add(error.message)
            self._log.warning("instance %s of %s: %s", record.instance, error)

    def fail(self, record: InstanceRecord, error: TrinamoError, now: float, lasts_s: float) -> None:
        """A request to it ended with `error`: it may be passed over, while there is another."""
        before = record.faults.get(InstanceFault.FAILED, -math.inf)
        if record.fail(error, now, lasts_s):
            self.choices.settle(record)
            self._env.note("router.inhibit", instance=record.instance.id)
            if before <= now:  # Once, however many streams it took along.
                self._log.warning("instance %s of %s is inhibited", record.instance)

    def look(self, record: InstanceRecord) -> None:
        """See whether requests to it are silent, and end those that must end."""
        before = record.presence
        self._lose(record, record.look(self._env.clock.now()), Sign.LAPSED)
        self._tell(record, before)

    def take(self, record: InstanceRecord, reply: Sign, asked_at: float) -> None:
        """Act on what a probe sent at `asked_at` has brought."""
        self.look(record)
        before = record.presence
        if before is Presence.LISTED:
            # It was asked because it was silent, which it is no more.
            return
        lost = record.take(reply, asked_at, self._env.clock.now())
        self._lose(record, lost, Sign.REPLACED if reply is Sign.REPLACED else Sign.UNANSWERED)
        self._tell(record, before, reply)

    def step(self, record: InstanceRecord, sign: Sign) -> None:
        """Take any other sign of an instance."""
        before = record.presence
        record.step(sign, self._env.clock.now())
        self._tell(record, before, sign)

    def _tell(self, record: InstanceRecord, before: Presence, sign: Sign | None = None) -> None:
        """Say what has become of it, and wake its task, if that is news."""
        self.choices.settle(record)
        instance = record.instance
        if record.presence is before:
            return
        match before, record.presence:
            case _, Presence.LEFT:
                self._leave(record, before, sign)
            case _, Presence.STALE:
                self._log.warning(
                    "instance %s of %s was deleted from discovery, but its connection stands: it"
                    " is kept for up to %g s",
                    instance,
                    self._stale_grace_s,
                )
                self._env.note("instance.stale", instance=instance.id)
            case _, Presence.UNRESPONSIVE:
                text = "instance %s of %s does not answer: it is passed over"
                self._log.warning(text, instance)
            case Presence.UNRESPONSIVE, Presence.SILENT:
                says = "cannot be asked" if sign is Sign.UNASKED else "answers"
                self._log.info("instance %s of %s %s", instance, says)
            case _, Presence.SILENT:
                text = "instance %s of %s has brought nothing for %g s: it is probed"
                self._log.info(text, instance, self._grace_s)
                self._env.note("router.probe", instance=instance.id)
            case _:
                pass
        record.wake()

    def _leave(self, record: InstanceRecord, before: Presence, sign: Sign | None) -> None:
        instance = record.instance
        self._left_count += 1
        if before is Presence.STALE:
            why = _WHY_LEFT.get(sign, "it does not answer") if sign else ""
            self._log.warning("instance %s of %s is given up: %s", instance, why)
        self._log.info("instance %s left %s", instance)
        self._env.note("instance.leave", instance=instance.id)
        # Upstreams speak no transport of workers: what this process no longer offers is not lost.
        if not instance.draining and self._transports is not None:
            self._remember(record)
        lost = SilentError if sign is Sign.UNANSWERED else DisconnectedError
        for request in [each for each in record.requests if each.is_waiting and not each.is_lost]:
            request.is_lost = True
            request.fail(lost(f"instance {instance.id} vanished from discovery"))
        if self.reports is not None:
            self.reports.forget(instance.id)
        if self._kv is not None:
            self._kv.leave(instance.id)
        self._forget_if_over(record)
        self._announce()

    def _remember(self, record: InstanceRecord) -> None:
        """Name it in `gone`, unless an instance that joined since its connection was lost replaces it."""
        if self._joined_at and self._joined_at[-1] > record.lost_at:
            self._joined_at.pop()
            return
        self._gone[record.instance.id] = record.instance, self._env.clock.now()
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]

    def _lose(self, record: InstanceRecord, lost: list[InFlight], sign: Sign) -> None:
        reason, why, kind = _WHY[sign]
        for request in lost:
            self._log.warning(
                "instance %s of %s %s: a request to it that brought nothing for %g s is given up",
                record.instance,
                why,
                self._grace_s,
            )
            self._env.note("router.silence", instance=record.instance.id, reason=reason)
            self._silent.tally(str(self._endpoint), reason).value += 1
            request.fail(kind(f"instance {record.instance.id} {why}"))

    # --- requests ---

    def _predicted(self, number: int) -> float:
        return 0.0 if self._kv is None else self._kv.load(self.choices.records[number].instance.id)

    def _loads_changed(self, instance_id: str | None) -> None:
        record = None if instance_id is None else self._records.get(instance_id)
        if instance_id is None:
            self.choices.forget(self.predicted)
        elif record is not None:
            self.choices.renew(record)

    def begin(self, instance_id: str, request: InFlight) -> None:
        """Count `request` as under way until `end`; `UnavailableError` if the instance has left."""
        record = self.get(instance_id)
        if record is None:
            raise UnavailableError(f"instance {instance_id} has left")
        if record.begin(request):
            self.choices.settle(record)
        self.choices.renew(record)

    def end(self, instance_id: str, request: InFlight) -> None:
        """It is under way no more."""
        # The instance may have left and come back meanwhile.
        record = self._records[instance_id]
        if record.end(request):
            self.choices.settle(record)
        self.choices.renew(record)
        if record.presence is Presence.LEFT:
            self._forget_if_over(record)

    def answer(self, record: InstanceRecord) -> None:
        """It answered a request."""
        record.answer()
        self.choices.settle(record)
        if record.presence is not Presence.LISTED:
            self.step(record, Sign.ACCEPTED)

    def report(self, record: InstanceRecord, said: LoadReport) -> None:
        """It says how busy it is."""
        record.report, record.reported_at = said, trio.current_time()
        self.choices.renew(record)

    @contextmanager
    def flight(self, instance_id: str, request: InFlight) -> Iterator[None]:
        """`begin`, and `end` on leaving."""
        self.begin(instance_id, request)
        try:
            yield
        finally:
            self.end(instance_id, request)

    def _forget_if_over(self, record: InstanceRecord) -> None:
        if record.presence is Presence.LEFT and not record.requests and not record.is_over:
            record.is_over = True
            record.wake()
            del self._records[record.instance.id]


class InstanceReports:
    """What instances say of themselves over the event plane: load, and state.

    Follows those that `find` knows. Only under the policies that ask for it (`TOLD_LOAD`); the worker's
    end is `worker/reports.py`. `on_load` is called with each report, `on_draining` with the record of
    one that has said that it drains.
    """

    def __init__(
        self,
        events: EventPlane,
        endpoint: EndpointName,
        find: Callable[[str], InstanceRecord | None],
        on_load: Callable[[InstanceRecord, LoadReport], None],
        on_draining: Callable[[InstanceRecord], None],
    ) -> None:
        self._find, self._on_load, self._on_draining = find, on_load, on_draining

        def follows(instance_id: str) -> bool:
            return find(instance_id) is not None

        self.loads = ReportFollower(
            events,
            topic_of(LOAD_TOPIC, endpoint),
            LoadReport,
            follows=follows,
            take=self._take_load,
        )
        self.states = ReportFollower(
            events,
            topic_of(STATUS_TOPIC, endpoint),
            WorkerState,
            follows=follows,
            take=self._take_state,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow until cancelled."""
        async with open_nursery() as nursery:
            await nursery.start(self.loads.follower.run)
            await nursery.start(self.states.follower.run)
            task_status.started()

    def forget(self, instance_id: str) -> None:
        """The instance has left."""
        self.loads.follower.forget(instance_id)
        self.states.follower.forget(instance_id)

    def _take_load(self, instance_id: str, report: LoadReport) -> None:
        record = self._find(instance_id)
        if record is not None:
            self._on_load(record, report)

    def _take_state(self, instance_id: str, state: WorkerState) -> None:
        record = self._find(instance_id)
        if record is not None and state is WorkerState.DRAINING:
            self._on_draining(record)

"""What the page is told of one look: a row for each thing that it draws, bounded, without a secret.

Rates are of the time between two looks. What strangers have written is cut here, and escaped by the
page, which writes it as text alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final

import attrs
import msgspec

from ..planes import ControlStatistics, EventStatistics
from ..traces.ring import RequestsView, RequestView
from .facts import (
    ENTRIES_MAX,
    MINUTES_MAX,
    FrontendFacts,
    Minute,
    QueueFacts,
    Rates,
    WorkerFacts,
    cut_text,
    read_facts,
)
from .listing import ModelLook, refusals
from .overview import Overview
from .rows import (
    GROUPS_MAX,
    INSTANCES_MAX,
    RATES_KEPT_S,
    SINGLY_MAX,
    WELL,
    GroupRow,
    InstanceRow,
    InstanceRows,
    group_of,
    grouped,
)
from .survey import FrontendLook, Survey
from .timeline import Event

MODELS_MAX: Final = 128
REQUESTS_MAX: Final = 64
REFUSED_MAX: Final = 16


class FrontendRow(msgspec.Struct, kw_only=True):
    """One frontend."""

    name: str
    pid: int
    url: str
    """Where its API is reached."""
    status: str
    host: str = ""
    """The name of its machine; empty if it told none."""
    problem: str = ""
    in_flight: int = 0
    waiting: int = 0
    """Requests that wait for a place."""
    requests_per_s: float = 0.0
    failures_per_s: float = 0.0
    tokens_per_s: float = 0.0
    streams: dict[str, int] = {}
    """Requests under way by instance id, of the first of them, and"""
    streams_by_group: dict[str, int] = {}
    """of all by the key of the instance's group."""
    first_token: dict[str, int] = {}
    gaps: dict[str, int] = {}
    minutes: list[Minute] = []
    is_own: bool = False


class QueueRow(msgspec.Struct, kw_only=True):
    """One work queue."""

    name: str
    facts: QueueFacts


class ClusterSnapshot(msgspec.Struct, kw_only=True):
    """One look, as the page is told of it."""

    number: int
    at: float
    interval_s: float
    """The time to the next look."""
    cluster: str
    """What `trinamo up` says of it; empty for one started otherwise."""
    etcd_text: str
    away: list[str]
    refused: list[str]
    is_last_known: bool
    control: ControlStatistics | None
    """This frontend's connection to etcd; None if it has none."""
    broker: EventStatistics | None
    """And to NATS."""
    addresses: dict[str, list[str]]
    """Of the servers of both, by name."""
    frontends: list[FrontendRow]
    instances: list[InstanceRow]
    instances_left_out: int
    """How many more there are; `groups` count them, too."""
    groups: list[GroupRow]
    singly_max: int
    """With more instances the page shows the groups first."""
    models: list[ModelLook]
    queues: list[QueueRow]
    under_way: list[RequestView]
    under_way_left_out: int
    failed: list[RequestView]
    requests_max: int
    events: list[Event]


class Snapshots:
    """Makes them, each with what has changed since the one before."""

    def __init__(self) -> None:
        self._rates = Rates()
        self._rows = InstanceRows()
        self._number = 0

    def make(
        self,
        survey: Survey,
        known: Overview | None,
        addresses: dict[str, list[str]],
        events: list[Event],
        *,
        interval_s: float,
        now_s: float,
        wall: float,
    ) -> ClusterSnapshot:
        """The snapshot of `survey`, at `now_s` by the monotonic clock and `wall` by the other.

        `known` is what the process that looks knows of its own connections.
        """
        self._number += 1
        self._rates.forget(now_s - RATES_KEPT_S)
        groups = {each.id: group_of(each) for each in survey.instances}
        frontends = [self._frontend(each, groups, now_s) for each in survey.frontends]
        streams: Counter[str] = Counter()
        for row in frontends:
            streams.update(row.streams)
        every = self._rows.make(survey.instances, streams, now_s)
        shown = every
        if len(every) > INSTANCES_MAX:
            shown = sorted(every, key=lambda row: row.state in WELL)[:INSTANCES_MAX]
        # By name, the shorter one first, as `worker-2` before `worker-10`: one that was started
        # again has another id, and stays where it was.
        instances = sorted(shown, key=lambda row: (row.endpoint, len(row.name), row.name))
        told = [
            (each.name, each.requests)
            for each in sorted(survey.frontends, key=lambda each: not each.is_own)
            if each.requests is not None
        ]
        cluster = survey.cluster or {}
        return ClusterSnapshot(
            number=self._number,
            at=wall,
            interval_s=interval_s,
            cluster=f"trinamo up, pid {cluster['pid']}, {cluster['state']}" if cluster else "",
            etcd_text=cut_text(survey.etcd),
            away=[cut_text(each) for each in survey.away[:ENTRIES_MAX]],
            refused=[cut_text(each) for each in refusals(survey.refused)[:REFUSED_MAX]],
            is_last_known=survey.is_last_known,
            control=None if known is None else known.control,
            broker=None if known is None else known.events,
            addresses=addresses,
            frontends=frontends,
            instances=instances,
            instances_left_out=len(survey.instances) - len(instances),
            groups=grouped(every),
            singly_max=SINGLY_MAX,
            models=[
                attrs.evolve(
                    each,
                    name=cut_text(each.name),
                    aliases=[cut_text(alias) for alias in each.aliases[:ENTRIES_MAX]],
                    engine=cut_text(each.engine),
                    endpoint=cut_text(each.endpoint),
                )
                for each in survey.models[:MODELS_MAX]
            ],
            queues=_queues(survey),
            under_way=_newest(told, lambda view: view.under_way),
            under_way_left_out=sum(view.under_way_left_out for _, view in told),
            failed=_newest(told, lambda view: view.failed),
            requests_max=told[0][1].requests_max if told else 0,
            events=events,
        )

    def _frontend(self, look: FrontendLook, groups: Mapping[str, str], now_s: float) -> FrontendRow:
        facts = read_facts(look.health, FrontendFacts)
        if facts is None:
            return FrontendRow(
                name=look.name,
                pid=look.pid,
                url=cut_text(look.api_url or look.url),
                host=cut_text(look.host),
                status="away",
                problem=cut_text(look.problem or "its answer makes no sense"),
            )
        totals = facts.totals
        by_group: Counter[str] = Counter()
        for instance_id, count in facts.streams.items():
            by_group[groups.get(instance_id, "")] += count

        def rate(what: str, value: float) -> float:
            return round(self._rates.update(f"{look.name} {look.pid} {what}", value, now_s), 2)

        return FrontendRow(
            name=look.name,
            pid=look.pid,
            url=cut_text(look.api_url or look.url),
            host=cut_text(look.host),
            status=cut_text(facts.status),
            in_flight=facts.in_flight,
            waiting=facts.waiting,
            requests_per_s=rate("requests", totals.requests),
            failures_per_s=rate("failures", totals.failures),
            tokens_per_s=rate("tokens", totals.tokens),
            streams=dict(islice(facts.streams.items(), INSTANCES_MAX)),
            streams_by_group=dict(by_group.most_common(GROUPS_MAX)),
            first_token=dict(islice(totals.first_token.items(), ENTRIES_MAX)),
            gaps=dict(islice(totals.gaps.items(), ENTRIES_MAX)),
            minutes=facts.minutes[-MINUTES_MAX:],
            is_own=look.is_own,
        )


def _queues(survey: Survey) -> list[QueueRow]:
    found: dict[str, QueueFacts] = {}
    for look in survey.frontends:
        if look.is_own and (own := read_facts(look.health, FrontendFacts)) is not None:
            found |= own.queues
    for each in survey.instances:
        if (facts := read_facts(each.health, WorkerFacts)) is not None:
            found |= facts.queues
    return [
        QueueRow(name=cut_text(name), facts=facts)
        for name, facts in islice(found.items(), ENTRIES_MAX)
    ]


def _newest(
    told: Sequence[tuple[str, RequestsView]], pick: Callable[[RequestsView], list[RequestView]]
) -> list[RequestView]:
    """The newest requests of all frontends, each with the name of the one that told of it."""
    found = [
        msgspec.structs.replace(
            each, process=name, model=cut_text(each.model), id=cut_text(each.id)
        )
        for name, view in told
        for each in pick(view)[:REQUESTS_MAX]
    ]
    return sorted(found, key=lambda each: each.start, reverse=True)[:REQUESTS_MAX]

"""What the page is told of one look: a row for each thing that it draws, bounded, without a secret.

Rates are of the time between two looks. What strangers have written is cut here, and escaped by the
page, which writes it as text alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

import attrs
import msgspec

from ..planes import ControlStatistics, EventStatistics
from ..traces.ring import RequestsView, RequestView
from .facts import (
    ENTRIES_MAX,
    MINUTES_MAX,
    EngineFacts,
    FrontendFacts,
    Minute,
    QueueFacts,
    Rates,
    WorkerFacts,
    cut_text,
    read_facts,
)
from .listing import InstanceLook, ModelLook
from .overview import AWAY, Overview
from .survey import FrontendLook, Survey
from .timeline import Event

INSTANCES_MAX: Final = 256
"""Asked and shown: who looks again and again must not keep a frontend of a large cluster busy with it."""
MODELS_MAX: Final = 128
REQUESTS_MAX: Final = 64
REFUSED_MAX: Final = 16
RATES_KEPT_S: Final = 60.0


class FrontendRow(msgspec.Struct, kw_only=True):
    """One frontend."""

    name: str
    pid: int
    url: str
    status: str
    problem: str = ""
    in_flight: int = 0
    waiting: int = 0
    """Requests that wait for a place."""
    requests_per_s: float = 0.0
    failures_per_s: float = 0.0
    tokens_per_s: float = 0.0
    streams: dict[str, int] = {}
    first_token: dict[str, int] = {}
    gaps: dict[str, int] = {}
    minutes: list[Minute] = []
    is_own: bool = False


class BackendRow(msgspec.Struct, kw_only=True):
    """KV transfers of one worker over one backend."""

    backend: str
    state: str
    in_flight: int = 0
    done: int = 0
    bytes_per_s: float = 0.0


class InstanceRow(msgspec.Struct, kw_only=True):
    """One instance: a worker's endpoint."""

    id: str
    name: str
    endpoint: str
    model: str
    engine: str
    role: str
    pid: str
    state: str
    """`ready`, `draining`, `away`, … in a word."""
    problem: str = ""
    in_flight: int = 0
    """Of all frontends."""
    active: int | None = None
    """What it says itself, or has told a frontend; None if it says nothing."""
    kv_used: float | None = None
    """The fraction of its KV cache in use, of one that tells no blocks."""
    lease_id: str = ""
    incarnation: int = 0
    addresses: list[str] = []
    engine_facts: EngineFacts | None = None
    blocks_used: int | None = None
    blocks_total: int | None = None
    hit_rate: float | None = None
    """Of its prefix cache, over the last looks that saw prompts, else since its start."""
    tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    backends: list[BackendRow] = []
    moves: dict[str, float] = {}
    """Bytes a second from and to each peer that it has moved blocks from or to, by instance id."""
    fallbacks: int = 0
    quarantined_blocks: int = 0


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
        self._hits: dict[str, tuple[int, int, float | None]] = {}
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
        frontends = [self._frontend(each, now_s) for each in survey.frontends]
        streams: Counter[str] = Counter()
        for row in frontends:
            streams.update(row.streams)
        shown = survey.instances[:INSTANCES_MAX]
        instances = [self._instance(each, streams, now_s) for each in shown]
        # By name, the shorter one first, as `worker-2` before `worker-10`: one that was started
        # again has another id, and stays where it was.
        instances.sort(key=lambda row: (row.endpoint, len(row.name), row.name))
        told = [
            (each.name, each.requests)
            for each in sorted(survey.frontends, key=lambda each: not each.is_own)
            if each.requests is not None
        ]
        cluster = survey.cluster or {}
        shown_keys = {f"{each.id} {each.endpoint}" for each in instances}
        self._hits = {key: each for key, each in self._hits.items() if key in shown_keys}
        return ClusterSnapshot(
            number=self._number,
            at=wall,
            interval_s=interval_s,
            cluster=f"trinamo up, pid {cluster['pid']}, {cluster['state']}" if cluster else "",
            etcd_text=cut_text(survey.etcd),
            away=[cut_text(each) for each in survey.away[:ENTRIES_MAX]],
            refused=[cut_text(each) for each in survey.refused[:REFUSED_MAX]],
            is_last_known=survey.is_last_known,
            control=None if known is None else known.control,
            broker=None if known is None else known.events,
            addresses=addresses,
            frontends=frontends,
            instances=instances,
            instances_left_out=len(survey.instances) - len(instances),
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

    def _frontend(self, look: FrontendLook, now_s: float) -> FrontendRow:
        facts = read_facts(look.health, FrontendFacts)
        if facts is None:
            return FrontendRow(
                name=look.name,
                pid=look.pid,
                url=look.url,
                status="away",
                problem=cut_text(look.problem or "its answer makes no sense"),
            )
        totals = facts.totals

        def rate(what: str, value: float) -> float:
            return round(self._rates.update(f"{look.name} {look.pid} {what}", value, now_s), 2)

        return FrontendRow(
            name=look.name,
            pid=look.pid,
            url=look.url,
            status=cut_text(facts.status),
            in_flight=facts.in_flight,
            waiting=facts.waiting,
            requests_per_s=rate("requests", totals.requests),
            failures_per_s=rate("failures", totals.failures),
            tokens_per_s=rate("tokens", totals.tokens),
            streams=dict(islice(facts.streams.items(), INSTANCES_MAX)),
            first_token=dict(islice(totals.first_token.items(), ENTRIES_MAX)),
            gaps=dict(islice(totals.gaps.items(), ENTRIES_MAX)),
            minutes=facts.minutes[-MINUTES_MAX:],
            is_own=look.is_own,
        )

    def _instance(self, look: InstanceLook, streams: Counter[str], now_s: float) -> InstanceRow:
        metadata = look.metadata
        pid, model = metadata.get("pid", ""), metadata.get("model", "")
        row = InstanceRow(
            id=cut_text(look.id),
            name=cut_text(look.name or look.id[:8]),
            endpoint=cut_text(look.endpoint),
            model=cut_text(model),
            engine=cut_text(metadata.get("engine", "")),
            role=cut_text(role_of(look)),
            pid=cut_text(pid),
            state="away" if look.problem else "draining" if look.is_draining else "registered",
            problem=cut_text(look.problem),
            in_flight=streams.get(look.id, look.in_flight or 0),
            active=look.active,
            kv_used=look.kv_used,
            lease_id=cut_text(look.lease_id),
            incarnation=look.incarnation,
            addresses=[cut_text(f"{name} {address}") for name, address in look.transports.items()][
                :ENTRIES_MAX
            ],
        )
        facts = read_facts(look.health, WorkerFacts)
        if facts is not None:
            self._add_facts(row, facts, model, now_s)
        elif look.seen and not look.problem:
            row.state = look.seen
        return row

    def _add_facts(self, row: InstanceRow, facts: WorkerFacts, model: str, now_s: float) -> None:
        if row.state == "registered":
            row.state = cut_text(facts.status)
        row.active = facts.active
        key = f"{row.id} {row.endpoint}"
        engine = facts.engines.get(model)
        if engine is not None:
            row.engine_facts = engine
            row.blocks_used = engine.blocks_used
            total = engine.blocks_used + engine.blocks_free
            row.blocks_total = (
                facts.blocks.get("total", total) if len(facts.engines) == 1 else total
            )
            hit_rate = self._hit_rate(key, engine)
            row.hit_rate = hit_rate if total else None
            row.tokens_per_s = self._rate(f"{key} tokens", engine.completion_tokens, now_s)
            row.prompt_tokens_per_s = self._rate(f"{key} prompts", engine.prompt_tokens, now_s)
        if facts.transfers is not None:
            row.fallbacks = facts.transfers.fallbacks
            row.quarantined_blocks = facts.transfers.quarantined_blocks
            row.moves = {
                cut_text(peer): self._rate(f"{key} {peer[:32]}", count, now_s)
                for peer, count in islice(facts.transfers.moved_bytes.items(), INSTANCES_MAX)
                if count
            }
            row.backends = [
                BackendRow(
                    backend=cut_text(each.backend),
                    state=cut_text(each.problem or ("open" if each.is_open else "not open")),
                    in_flight=each.in_flight,
                    done=each.done,
                    bytes_per_s=self._rate(f"{key} {each.backend[:32]}", each.done_bytes, now_s),
                )
                for each in facts.transfers.chain[:ENTRIES_MAX]
            ]

    def _rate(self, key: str, value: float, now_s: float) -> float:
        return round(self._rates.update(key, value, now_s), 1)

    def _hit_rate(self, key: str, engine: EngineFacts) -> float | None:
        # What another worker computed was sought here and is neither found nor computed.
        found = engine.hit_tokens
        asked = engine.sought_tokens or found + engine.prompt_tokens
        asked_before, found_before, before = self._hits.get(key, (0, 0, None))
        if asked > asked_before and found >= found_before:
            before = min(1.0, round((found - found_before) / (asked - asked_before), 4))
        self._hits[key] = (asked, found, before)
        return before


def role_of(look: InstanceLook) -> str:
    """`prefill`, `decode`, `upstream`, or nothing for a plain worker."""
    is_upstream = "upstream" in look.metadata or look.seen == AWAY
    return look.metadata.get("role", "") or ("upstream" if is_upstream else "")


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

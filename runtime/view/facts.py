"""What processes say of themselves at `/health`: told here, and taken apart by whoever has asked.

Anybody may have registered a status port: whatever does not make sense is as if it had not been
said; texts are cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import attrs
import msgspec

from ..engines.generation import GenerationEngine, read_statistics
from ..http.metrics import FrontendMetrics
from ..kv.transfer.routes import Count as _Count, TransferStatistics
from ..metrics.metrics import SUCCESS
from ..metrics.tallies import Histogram
from ..queues.queues import QueueTally
from .overview import FrontendView

TEXT_CHARACTERS_MAX: Final = 160
ENTRIES_MAX: Final = 64
"""Of a list or a table that a process tells."""
Minute = tuple[_Count, _Count, _Count, _Count, _Count]
"""When it began, in seconds since the Unix epoch; its requests, failures and tokens, and the most
requests under way in it."""
MINUTES_MAX: Final = 60
T = TypeVar("T")


class EngineFacts(msgspec.Struct, kw_only=True):
    """An engine's gauges and counters: `EngineStatistics`."""

    running: _Count = 0
    paused: _Count = 0
    waiting: _Count = 0
    waiting_tokens: _Count = 0
    blocks_used: _Count = 0
    blocks_free: _Count = 0
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    hit_tokens: _Count = 0
    sought_tokens: _Count = 0
    preemptions: _Count = 0
    failures: _Count = 0


class QueueFacts(msgspec.Struct, kw_only=True):
    """A work queue as a process last read it."""

    ready: _Count = 0
    leased: _Count = 0
    dead: _Count = 0
    oldest_age_s: float = 0.0


class WorkerFacts(msgspec.Struct, kw_only=True):
    """What a worker's status port says."""

    status: str = ""
    active: _Count = 0
    lease_id: str = ""
    incarnation: _Count = 0
    blocks: dict[str, _Count] = {}
    """`used` of `total`, of all its engines."""
    engines: dict[str, EngineFacts] = {}
    """By model."""
    queues: dict[str, QueueFacts] = {}
    transfers: TransferStatistics | None = None


class FrontendTotals(msgspec.Struct, kw_only=True):
    """What a frontend has counted since its start."""

    requests: _Count = 0
    failures: _Count = 0
    tokens: _Count = 0
    first_token: dict[str, _Count] = {}
    """How many requests had their first token within so many seconds, by that bound."""
    gaps: dict[str, _Count] = {}
    """Likewise from one token to the next."""


class FrontendFacts(msgspec.Struct, kw_only=True):
    """What a frontend's status port says."""

    status: str = ""
    in_flight: _Count = 0
    waiting: _Count = 0
    """Requests that wait for a place."""
    totals: FrontendTotals = msgspec.field(default_factory=FrontendTotals)
    streams: dict[str, _Count] = {}
    """Its requests under way, by the instance id of the worker that answers."""
    queues: dict[str, QueueFacts] = {}
    minutes: list[Minute] = []
    """The last hour, the oldest first."""


def read_facts(told: Any, of: type[T]) -> T | None:
    """`told` as `of`; None if it is nothing of the kind."""
    try:
        return msgspec.convert(told, of)
    except (msgspec.ValidationError, RecursionError):
        return None


def cut_text(text: object) -> str:
    found = str(text)
    return found if len(found) <= TEXT_CHARACTERS_MAX else f"{found[:TEXT_CHARACTERS_MAX]}…"


def worker_facts(
    engines: Sequence[GenerationEngine],
    tallies: Mapping[str, QueueTally],
    transfers: TransferStatistics | None,
) -> dict[str, Any]:
    """What a worker says of its engines, queues and KV transfers, as far as it has any.

    Synchronous, and costs some microseconds an engine.
    """
    told: dict[str, Any] = {}
    statistics = {each.info.model: read_statistics(each) for each in engines}
    blocks = {
        each.info.model: {
            "used": statistics[each.info.model].blocks_used,
            "total": each.info.block_count,
        }
        for each in engines
    }
    if total := sum(each["total"] for each in blocks.values()):
        told["blocks"] = {"used": sum(each["used"] for each in blocks.values()), "total": total}
        if len(engines) > 1:
            told["blocks_by_model"] = blocks
    told["engines"] = {model: attrs.asdict(each) for model, each in statistics.items()}
    if queues := queue_facts(tallies):
        told["queues"] = queues
    if transfers is not None:
        told["transfers"] = attrs.asdict(transfers)
    return told


def queue_facts(tallies: Mapping[str, QueueTally]) -> dict[str, QueueFacts]:
    """The work queues of a process, as last read."""
    return {
        name: msgspec.convert(found, QueueFacts, from_attributes=True)
        for name, tally in tallies.items()
        if (found := tally.statistics) is not None
    }


def frontend_facts(
    view: FrontendView,
    metrics: FrontendMetrics,
    tallies: Mapping[str, QueueTally] | None = None,
    engines: Sequence[GenerationEngine] = (),
) -> FrontendFacts:
    """What a frontend says: what it has counted, and to whom its requests are under way.

    `engines` are those of its own process, each an instance that is called as its model.
    """
    streams: Counter[str] = Counter()
    for instance in view.cluster.instances if view.cluster is not None else ():
        streams[instance.id] += instance.in_flight
    for engine in engines:
        statistics = read_statistics(engine)
        streams[engine.info.model] = statistics.running + statistics.waiting
    ended = [(outcome, tally.value) for (*_, outcome), tally in metrics.requests_ended.items()]
    return FrontendFacts(
        status=view.status,
        in_flight=view.in_flight,
        waiting=view.waiting,
        totals=FrontendTotals(
            requests=int(sum(count for _, count in ended)),
            failures=int(sum(count for outcome, count in ended if outcome != SUCCESS)),
            tokens=int(sum(tally.value for _, tally in metrics.tokens_out.items())),
            first_token=_buckets(tally for _, tally in metrics.first_token.items()),
            gaps=_buckets(tally for _, tally in metrics.gaps.items()),
        ),
        streams={name: count for name, count in streams.items() if count or engines},
        queues=queue_facts(tallies or {}),
    )


def _buckets(tallies: Iterable[Histogram]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for tally in tallies:
        found.update({bound: int(count) for bound, count in tally.buckets()})
    return dict(found)


class Rates:
    """Differences per second of counters that only grow; one that shrank began again at zero."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def update(self, name: str, value: float, at_s: float) -> float:
        """The rate of `name` since its last update; 0 the first time."""
        before = self._last.get(name)
        self._last[name] = (value, at_s)
        if before is None or at_s <= before[1]:
            return 0.0
        grown = value - before[0] if value >= before[0] else value
        return grown / (at_s - before[1])

    def forget(self, before_s: float) -> None:
        self._last = {name: each for name, each in self._last.items() if each[1] >= before_s}


class _Held(msgspec.Struct):
    model: str
    sha256: str
    byte_count: _Count


class _Lent(msgspec.Struct):
    taker: str
    sha256: str
    done: _Count
    count: Annotated[int, msgspec.Meta(ge=1)]


class _Weights(msgspec.Struct):
    held: list[_Held] = []
    lent: list[_Lent] = []


class WeightsRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model file of one holder."""

    instance_id: str
    model: str
    sha256: str
    byte_count: int
    takers: list[str]
    """Who takes it now, and how much of it each has."""


def weights_rows(healths: Iterable[tuple[str, dict[str, Any] | None]]) -> Iterator[WeightsRow]:
    """By instance id, what workers' status ports said of model files, once a worker."""
    found: dict[str, _Weights] = {}
    for instance_id, health in healths:
        if (weights := read_facts((health or {}).get("weights"), _Weights)) is not None:
            found[instance_id] = weights
    for instance_id, told in found.items():
        for held in told.held:
            yield WeightsRow(
                instance_id=instance_id,
                model=held.model,
                sha256=held.sha256,
                byte_count=held.byte_count,
                takers=[
                    f"{each.taker or 'a peer'}: {min(each.done, each.count) * 100 // each.count} %"
                    for each in told.lent
                    if each.sha256 == held.sha256
                ],
            )

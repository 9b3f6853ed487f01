"""What processes say of themselves at `/health`: figures of their engines, queues and transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

import attrs

from ..engines.generation import GenerationEngine, read_statistics
from ..http.dashboard.facts import FrontendFacts, FrontendTotals, QueueFacts
from ..http.service import HttpService
from ..http.survey.overview import HasClients, describe_planes
from ..metrics.frontend import FrontendMetrics
from ..metrics.metrics import SUCCESS
from ..metrics.tallies import Histogram
from .runtime import Runtime

STREAMS_MAX: Final = 1024


def worker_facts(runtime: Runtime, engines: Sequence[GenerationEngine]) -> dict[str, Any]:
    """Of a worker: synchronous, and costs some microseconds an engine."""
    return {
        **_describe_blocks(engines),
        "engines": {each.info.model: attrs.asdict(read_statistics(each)) for each in engines},
        **_describe_queues(runtime),
        **_describe_transfers(runtime),
        **describe_planes(runtime),
        "settings": runtime.live.values(),
    }


def frontend_facts(
    runtime: Runtime, service: HttpService, metrics: FrontendMetrics, source: HasClients
) -> FrontendFacts:
    """Of a frontend: what it has counted, and to whom its requests, by `source`, are under way."""
    streams: dict[str, int] = {}
    for client in source.clients:
        for instance, _, in_flight in islice(client.router.statuses(), STREAMS_MAX):
            if in_flight:
                streams[instance.id] = streams.get(instance.id, 0) + in_flight
    return FrontendFacts(
        status=service.status,
        in_flight=service.admission.in_flight,
        waiting=service.admission.queue.length,
        totals=_totals(metrics),
        streams=streams,
        queues=_queues(runtime),
    )


def engines_facts(
    service: HttpService, metrics: FrontendMetrics, engines: Sequence[GenerationEngine]
) -> FrontendFacts:
    """Of a frontend whose engines are in its own process, each an instance called as its model."""
    statistics = {each.info.model: read_statistics(each) for each in engines}
    return FrontendFacts(
        status=service.status,
        in_flight=service.admission.in_flight,
        waiting=service.admission.queue.length,
        totals=_totals(metrics),
        streams={model: each.running + each.waiting for model, each in statistics.items()},
    )


def _totals(metrics: FrontendMetrics) -> FrontendTotals:
    """Over all models."""
    ended = [(outcome, tally.value) for (*_, outcome), tally in metrics.requests_ended.items()]
    return FrontendTotals(
        requests=int(sum(count for _, count in ended)),
        failures=int(sum(count for outcome, count in ended if outcome != SUCCESS)),
        tokens=int(sum(tally.value for _, tally in metrics.tokens_out.items())),
        first_token=_took(tally for _, tally in metrics.first_token.items()),
        gaps=_took(tally for _, tally in metrics.gaps.items()),
    )


def _took(tallies: Iterable[Histogram]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for tally in tallies:
        found.update({bound: int(count) for bound, count in tally.buckets()})
    return dict(found)


def _queues(runtime: Runtime) -> dict[str, QueueFacts]:
    """The work queues of this process, as last read."""
    return {
        name: QueueFacts(
            ready=found.ready,
            leased=found.leased,
            dead=found.dead,
            oldest_age_s=found.oldest_age_s,
        )
        for name, tally in runtime.queues.tallies.items()
        if (found := tally.statistics) is not None
    }


def _describe_queues(runtime: Runtime) -> dict[str, Any]:
    found = _queues(runtime)
    return {"queues": found} if found else {}


def _describe_blocks(engines: Sequence[GenerationEngine]) -> dict[str, Any]:
    """How full the engines' KV memory is, where they have any."""
    total = sum(each.info.block_count for each in engines)
    used = sum(read_statistics(each).blocks_used for each in engines)
    if not total:
        return {}
    found: dict[str, Any] = {"blocks": {"used": used, "total": total}}
    if len(engines) > 1:
        found["blocks_by_model"] = {
            each.info.model: {
                "used": read_statistics(each).blocks_used,
                "total": each.info.block_count,
            }
            for each in engines
        }
    return found


def _describe_transfers(runtime: Runtime) -> dict[str, Any]:
    """The chain of backends and what goes on over it, where the engine has KV memory."""
    transfers = runtime.transfers
    return {} if transfers is None else {"transfers": attrs.asdict(transfers.statistics())}

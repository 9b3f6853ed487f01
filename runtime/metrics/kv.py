"""What `/metrics` shows of engines and KV blocks: an engine's, those told, and what a router knows.

Each counts for itself; here it is only read, when `/metrics` is. The label `endpoint` is its path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import attrs
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ..caller.kv.routing import KvRouting
from ..engines.generation import GenerationEngine, read_statistics
from ..kv.events import KvEventSource
from .metrics import Metrics

_ENGINE_GAUGES: Final = {
    "paused_sequences": "Of the sequences those whose consumers are too slow",
    "waiting_tokens": "Known tokens still to be computed before their sequences decode",
}
_ENGINE_COUNTERS: Final = {
    "prompt_tokens": "Tokens computed in prefill",
    "completion_tokens": "Tokens generated",
    "prefix_hit_tokens": "Prompt tokens not computed, because blocks held them",
    "steps": "Steps of the model",
    "preemptions": "Sequences that gave their blocks to others, to come back later",
    "cancellations": "Requests that were stopped, killed or abandoned",
    "failures": "Requests that an error of the engine ended",
}
_SOURCE_GAUGES: Final = {
    "blocks": "Full blocks that were told as held",
    "waiting_blocks": "Blocks in events that wait to be sent",
}
_SOURCE_COUNTERS: Final = {
    "told": "Events that the engine told",
    "messages": "Messages that the events went out in",
    "dropped": "Messages not sent: a gap to every follower",
    "snapshots": "Snapshots, or parts of one, that were sent",
    "malformed": "Requests for a snapshot that were none",
}
_ROUTING_GAUGES: Final = {
    "active_requests": "Requests under way as predicted, those of other routers included",
    "active_blocks": "Blocks in use as predicted, over all instances",
    "waiting_prefill_tokens": "Prompt tokens that await their prefill, as predicted",
    "routers": "Other routers that tell what they send",
    "recent_blocks": "Blocks thought to be held, because they were sent lately",
}
_ROUTING_COUNTERS: Final = {
    "requests": "Requests sent by the blocks of their prompts",
    "hits": "Requests sent to an instance that had their first block",
    "prompt_blocks": "Full blocks of the prompts sent",
    "overlap_blocks": "Of these, blocks that the instance had already",
}
_INDEX_GAUGES: Final = {
    "instances": "Instances that blocks are known of, or might be",
    "lost": "Instances whose snapshot is awaited",
    "blocks": "Blocks known, over all instances",
}
_INDEX_COUNTERS: Final = {
    "events": "KV events applied",
    "snapshots": "Snapshots taken",
    "gaps": "Times that an event was missing",
    "backwards": "Times that numbers went back",
    "duplicates": "Events that came twice",
    "outdated": "Events and snapshots of an earlier incarnation",
    "restarts": "Incarnations that followed another one",
    "malformed": "Messages that made no sense",
    "unknown": "Events of instances that discovery does not know",
    "ignored": "Events of instances beyond the bound",
    "refused_blocks": "Blocks not kept because a bound was reached",
    "overflowed": "Times that too many events waited for a snapshot",
}


class KvSeries:
    """All KV series of one process; none until something is shown."""

    def __init__(self, metrics: Metrics) -> None:
        self._engines: dict[str, GenerationEngine] = {}
        self._sources: dict[str, KvEventSource] = {}
        self._routings: dict[str, KvRouting] = {}
        self.skipped = metrics.counter(
            "load_reports_skipped", "Load reports that could not be read of the engine", "endpoint"
        )
        metrics.registry.register(self)

    def show_engine(self, endpoint: str, engine: GenerationEngine) -> None:
        """Show the engine's blocks, if it has any, its sequences and its tokens."""
        self._engines[endpoint] = engine

    def show_source(self, endpoint: str, source: KvEventSource) -> None:
        """Show what is told about an engine's blocks."""
        self._sources[endpoint] = source

    @contextmanager
    def showing_routing(self, endpoint: str, routing: KvRouting | None) -> Iterator[None]:
        """Show what is known of the blocks and loads of an endpoint's instances, while inside."""
        if routing is None:
            yield
            return
        self._routings[endpoint] = routing
        try:
            yield
        finally:
            # Another client of the endpoint may have been opened meanwhile.
            if self._routings.get(endpoint) is routing:
                del self._routings[endpoint]

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        if self._engines:
            yield from _engine_series(self._engines)
        told = {name: attrs.asdict(each.statistics()) for name, each in self._sources.items()}
        yield from _series("trinamo_kv_events", told, _SOURCE_GAUGES, _SOURCE_COUNTERS)
        chosen = {name: attrs.asdict(each.statistics()) for name, each in self._routings.items()}
        yield from _series("trinamo_kv_routing", chosen, _ROUTING_GAUGES, _ROUTING_COUNTERS)
        known = {
            name: attrs.asdict(each.index.statistics())
            for name, each in self._routings.items()
            if each.index is not None
        }
        yield from _series("trinamo_kv_index", known, _INDEX_GAUGES, _INDEX_COUNTERS)


def _engine_series(engines: Mapping[str, GenerationEngine]) -> Iterator[Metric]:
    by_state = ["endpoint", "state"]
    blocks = GaugeMetricFamily(
        "trinamo_engine_kv_blocks", "KV blocks of the engine", labels=by_state
    )
    sequences = GaugeMetricFamily("trinamo_engine_sequences", "Sequences held", labels=by_state)
    told = {name: read_statistics(each) for name, each in engines.items()}
    for endpoint, statistics in told.items():
        if engines[endpoint].info.block_count:
            blocks.add_metric([endpoint, "used"], statistics.blocks_used)
            blocks.add_metric([endpoint, "free"], statistics.blocks_free)
        sequences.add_metric([endpoint, "running"], statistics.running)
        sequences.add_metric([endpoint, "waiting"], statistics.waiting)
    yield from (blocks, sequences)
    values = {
        name: {
            **attrs.asdict(each),
            "paused_sequences": each.paused,
            "prefix_hit_tokens": each.hit_tokens,
        }
        for name, each in told.items()
    }
    yield from _series("trinamo_engine", values, _ENGINE_GAUGES, _ENGINE_COUNTERS)


def _series(
    prefix: str,
    found: Mapping[str, Mapping[str, Any]],
    gauges: Mapping[str, str],
    counters: Mapping[str, str],
) -> Iterator[Metric]:
    if not found:
        return
    for kind, texts in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, text in texts.items():
            family = kind(f"{prefix}_{name}", text, labels=["endpoint"])
            for endpoint, values in found.items():
                family.add_metric([endpoint], values[name])
            yield family

"""What a worker tells routers about itself: how busy it is, and which KV blocks it holds.

Both are for routers that want them, so they go by the configuration, which workers and callers must
share: load with `router.policy: least_loaded`, blocks with `router.kv_index`. What travels is in
`events/load.py` and `kv/events.py`.
"""

from __future__ import annotations

import trio

from ..config.config import RouterConfig
from ..engines.generation import GenerationEngine, TellsBlocks
from ..env import Env
from ..events.load import LoadReport, LoadSource
from ..kv.events import KvEventSource
from ..metrics.kv import KvSeries
from ..planes import EventPlane
from ..protocol.discovery.instances import EndpointName
from ..protocol.discovery.routing import Policy
from .worker import Worker

__all__ = ["Reports"]


class Reports:
    """The reports of one process. Their tasks run in `nursery`, until it is cancelled."""

    def __init__(
        self,
        config: RouterConfig,
        env: Env,
        events: EventPlane,
        nursery: trio.Nursery,
        worker: Worker,
        series: KvSeries,
    ) -> None:
        self._config = config
        self._events = events
        self._nursery = nursery
        self._worker = worker
        self._series = series
        self._begun: dict[str, None] = {}
        # New in every process, and growing should one ever come back under the same instance id.
        self._incarnation = int(env.clock.wall() * 1e3)

    def begin(self, endpoint: EndpointName, engine: GenerationEngine | None) -> None:
        """Report on `endpoint` from now on; `engine` is what serves it, if it is known. Synchronous.

        Once an endpoint: another call changes nothing. The blocks of an engine are told for one
        endpoint, the last that was begun.
        """
        if str(endpoint) in self._begun:
            return
        self._begun[str(endpoint)] = None
        if engine is not None:
            self._series.show_engine(str(endpoint), engine)
        if Policy(self._config.policy) is Policy.LEAST_LOADED:
            self._tell_load(endpoint, engine)
        # Two protocols at once are more than mypy can tell apart.
        teller: object = engine
        if self._config.kv_index and isinstance(teller, TellsBlocks):
            self._tell_blocks(endpoint, teller)

    def _tell_load(self, endpoint: EndpointName, engine: GenerationEngine | None) -> None:
        source = LoadSource(
            self._events,
            endpoint,
            instance_id=self._worker.instance_id,
            incarnation=self._incarnation,
            read=lambda: self._load(engine),
        )
        self._nursery.start_soon(source.run)

    def _load(self, engine: GenerationEngine | None) -> LoadReport:
        active = self._worker.active_count
        if engine is None:
            return LoadReport(active)
        return LoadReport(active, engine.statistics().blocks_used, engine.info.block_count)

    def _tell_blocks(self, endpoint: EndpointName, engine: TellsBlocks) -> None:
        source = KvEventSource(
            self._events,
            endpoint,
            instance_id=self._worker.instance_id,
            incarnation=self._incarnation,
        )
        if engine.listen_blocks(source.tell):
            self._series.show_source(str(endpoint), source)
            self._nursery.start_soon(source.run)

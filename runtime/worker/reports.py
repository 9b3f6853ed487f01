"""What a worker tells routers about itself: how busy it is, its state, and which KV blocks it holds.

An engine that keeps blocks for later requests tells all three, whoever routes to it by whatever
policy; its blocks unless `router.kv.events` is false. Others tell load and state to routers that want
them, by the configuration, which workers and callers must share: with `router.policy` `kv`,
`least_loaded` and `power_of_two`, and where frontends shed load. A setting that changes while the
process runs makes it tell its load from then on. What travels is in `events/load.py`
and `kv/events.py`.
"""

from __future__ import annotations

import trio

from ..config.router import RouterConfig
from ..engines.generation import GenerationEngine, StandsBefore, TellsBlocks, show_engine
from ..env import Env
from ..errors import OverloadedError
from ..events.load import LoadReport, LoadSource, StatusSource
from ..kv.events import KvEventSource, show_source
from ..kv.regions import HoldsKv
from ..metrics.metrics import Metrics
from ..planes import EventPlane
from ..protocol.discovery.instances import EndpointName
from ..protocol.kv.names import BlockNames
from .worker import Worker

_BLOCKS_OF_A_FRACTION = 1000
"""What is reported of a server that tells how full its KV cache is, and not of how many blocks."""


def keeps_blocks(engine: GenerationEngine | None) -> bool:
    """Whether routers should know of its load and its blocks, whatever the policy here."""
    return engine is not None and engine.info.has_prefix_cache


class Reports:
    """The reports of one process. Their tasks run in `nursery`, until it is cancelled."""

    def __init__(
        self,
        config: RouterConfig,
        env: Env,
        events: EventPlane,
        nursery: trio.Nursery,
        worker: Worker,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._tells_load = False
        self._events = events
        self._nursery = nursery
        self._worker = worker
        self._metrics = metrics
        self._skipped = metrics.counts(
            "load_reports_skipped", "Load reports that could not be read of the engine", "endpoint"
        )
        self._is_draining = False
        self._begun: dict[str, tuple[EndpointName, GenerationEngine | None]] = {}
        self._sources: dict[str, KvEventSource] = {}
        self._states: list[StatusSource] = []
        # New in every process, and growing should one ever come back under the same instance id.
        self._incarnation = int(env.clock.wall() * 1e3)

    def listen(
        self, endpoint: EndpointName, engine: GenerationEngine | None, names: BlockNames
    ) -> bool | None:
        """Hear of the engine's blocks by `names`, to tell them once `endpoint` is begun; whether they are told.

        None for an engine that keeps none which a prompt's tokens could name. They are told for
        one endpoint, the last that was listened for. Synchronous.
        """
        if not keeps_blocks(engine):
            return None
        # Two protocols at once are more than mypy can tell apart.
        teller: object = engine
        if not self._config.kv.events or not isinstance(teller, TellsBlocks):
            return False
        if str(endpoint) not in self._sources:
            source = KvEventSource(
                self._events,
                endpoint,
                instance_id=self._worker.instance_id,
                incarnation=self._incarnation,
            )
            if not teller.listen_blocks(source.tell, names):
                return None
            self._sources[str(endpoint)] = source
        return True

    def begin(self, endpoint: EndpointName, engine: GenerationEngine | None) -> None:
        """Report on `endpoint` from now on; `engine` is what serves it, if it is known. Synchronous.

        Once an endpoint: another call changes nothing.
        """
        if str(endpoint) in self._begun:
            return
        self._begun[str(endpoint)] = (endpoint, engine)
        if engine is not None:
            show_engine(self._metrics, str(endpoint), engine)
        if self._tells_load or keeps_blocks(engine):
            self._tell_load(endpoint, engine)
        source = self._sources.get(str(endpoint))
        if source is not None:
            show_source(self._metrics, str(endpoint), source)
            self._nursery.start_soon(source.run)

    def tell_load(self) -> None:
        """Tell load and state of every endpoint from now on. Synchronous, for good."""
        if self._tells_load or self._is_draining:
            return
        self._tells_load = True
        for endpoint, engine in self._begun.values():
            if not keeps_blocks(engine):
                self._tell_load(endpoint, engine)

    def drain(self) -> None:
        """Tell that this process takes no more requests. Synchronous, final."""
        self._is_draining = True
        for state in self._states:
            state.drain()

    def _tell_load(self, endpoint: EndpointName, engine: GenerationEngine | None) -> None:
        skipped = self._skipped.tally(str(endpoint))

        def skip() -> None:
            skipped.value += 1

        source = LoadSource(
            self._events,
            endpoint,
            instance_id=self._worker.instance_id,
            incarnation=self._incarnation,
            read=lambda: self._load(engine),
            skipped=skip,
        )
        self._nursery.start_soon(source.run)
        state = StatusSource(
            self._events,
            endpoint,
            instance_id=self._worker.instance_id,
            incarnation=self._incarnation,
        )
        self._states.append(state)
        self._nursery.start_soon(state.run)

    def _load(self, engine: GenerationEngine | None) -> LoadReport:
        active = self._worker.admitted_count
        if engine is None:
            return LoadReport(active)
        standing: object = engine
        if isinstance(standing, StandsBefore):
            requests, kv_used = standing.load()
            used = round(kv_used * _BLOCKS_OF_A_FRACTION)
            return LoadReport(max(active, requests), used, _BLOCKS_OF_A_FRACTION)
        now = engine.statistics()
        kv = standing.kv if isinstance(standing, HoldsKv) else None
        # Blocks that a transfer may touch are in nobody's use, and there is no room in them.
        used = now.blocks_used if kv is None else kv.pool.taken_count
        return LoadReport(active, used, engine.info.block_count, now.waiting_tokens)


def check_waiting_tokens(engine: GenerationEngine, waiting_tokens_max: int) -> None:
    """Raise `OverloadedError` while more than `waiting_tokens_max` tokens wait to be computed.

    What is admitted but has not reached the engine yet is not counted: `worker.requests_max`
    bounds it.
    """
    waiting = engine.statistics().waiting_tokens
    if waiting > waiting_tokens_max:
        raise OverloadedError(
            f"{waiting} prompt tokens wait to be computed, more than worker.waiting_tokens_max"
            f" {waiting_tokens_max}",
            bound="waiting_tokens_max",
            value=waiting_tokens_max,
        )

"""The two roles of disaggregated serving in a process: what each serves, consumes and says.

How they work together is in `runtime/disaggregation/`. A prefill worker serves both modes; which
one is used is the decode workers' configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import trio

from ...caller.client import Client
from ...config.config import Config
from ...disaggregation.decode_first import MODE, QUEUE_LIMITS, DecodeFirst, QueuedPrefills
from ...disaggregation.engine import (
    DecodeHost,
    DisaggregatedEngine,
    DisaggregationLimits,
    Lending,
    PrefillFlow,
)
from ...disaggregation.metrics import DecodeMetrics, PrefillMetrics
from ...disaggregation.prefill_first import KeptPrefills, PrefillFirst
from ...engines import GenerationEngine
from ...engines.handoff import HandsOver
from ...errors import ConfigError, RequestError
from ...kv.transfer.engine import EngineTransfers
from ...planes import CountsEvents
from ...protocol.disaggregation.messages import (
    Claim,
    Pairing,
    PrefillAsk,
    ask_bytes_max_for,
    decode_job,
)
from ...protocol.discovery.instances import Instance
from ...protocol.openai.generate import ONLY_TEXT, GenerateRequest
from ...queues.consumer import ConsumerLimits
from ..runtime import Runtime
from ..settings import PREFILL_TOKENS_LOCAL_MAX, QUEUE_DEPTH_MAX

_DEPTH_INTERVAL_S: Final = 1.0
"""How old the depth of the queue may be that decisions depend on."""


def check_role(config: Config, engines: Sequence[GenerationEngine]) -> None:
    """Raise `ConfigError` if `engines` cannot do what `worker.role` says."""
    role = config.worker.role
    if role == "aggregated":
        return
    if len(engines) != 1:
        raise ConfigError(
            f"worker.role is {role}, and this worker has {len(engines)} models; give each a worker"
            " of its own, or choose role aggregated"
        )
    (engine,) = engines
    # Two protocols at once are more than mypy can tell apart.
    host: object = engine
    kv = host.kv if isinstance(host, HandsOver) else None
    if kv is None:
        raise ConfigError(
            f"worker.role is {role}, and the engine {engine.info.engine} keeps no KV that can leave"
            " it. Choose --engine exact, mocker or llamacpp, or role aggregated; a StepEngine of"
            " your own needs a property `memory`, such as that of trinamo.kv_cache(…)"
        )
    # All engines that leave it empty would pair with one another, and read each other's bytes.
    if not kv.fingerprint:
        raise ConfigError(
            f"worker.role is {role}, and EngineInfo.kv_fingerprint of the engine"
            f" {engine.info.engine} is empty, so no other worker can tell whether its KV fits. Set it"
            " to a text that changes with the weights, the layout of the KV and its data type, or"
            " choose role aggregated"
        )
    assert isinstance(host, HandsOver)
    try:
        host.examine(GenerateRequest(model=engine.info.model, token_ids=[1]))
    except RequestError as error:
        # Any other refusal is of this token; this one means that only texts are encoded.
        if error.message == ONLY_TEXT:
            raise ConfigError(
                f"worker.role is {role}, and `encode` of the engine {engine.info.engine} takes no"
                " token ids, which are all that a prefill worker is sent. Let it return"
                " request.token_ids where there are any, or choose role aggregated"
            ) from None
    if not config.data_plane.transfer.enabled:
        raise ConfigError(
            f"worker.role is {role}, and data_plane.transfer.enabled is false: no block could be"
            " moved; set it to true, or choose role aggregated"
        )


class _Role:
    def __init__(self, runtime: Runtime, engine: GenerationEngine) -> None:
        transfers = runtime.transfers
        assert transfers is not None, "check_role was asked"
        self._runtime = runtime
        self._block_tokens = engine.info.block_tokens
        self._host = cast("DecodeHost", engine)
        self._transfers: EngineTransfers = transfers
        self._section = runtime.config.disaggregation
        self.pairing = Pairing.of(runtime.config.worker.namespace, transfers.kv.fingerprint)


class DecodeRole(_Role):
    """A decode worker, once `run` has started: `forward` is what its endpoint serves."""

    def __init__(self, runtime: Runtime, engine: GenerationEngine) -> None:
        super().__init__(runtime, engine)
        clock = runtime.env.clock
        self._metrics = DecodeMetrics(runtime.metrics, clock, self._section.mode)
        self._prefills: Client | None = None

    async def run(
        self,
        metadata: Mapping[str, str],
        *,
        task_status: trio.TaskStatus[DisaggregatedEngine] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Be ready to have prompts computed elsewhere, until cancelled."""
        runtime, section = self._runtime, self._section
        # Whoever names a decode worker knows of no prefill workers.
        prefills = await runtime.client(self.pairing.prefill_endpoint, chooses=True)
        self._prefills = prefills
        lending = Lending(
            self._transfers.kv.pool,
            block_tokens=self._block_tokens,
            share=section.pool_share_max,
        )
        if section.mode != MODE:
            flow: PrefillFlow = PrefillFirst(
                self._host, self._transfers, prefills, section, lending
            )
            task_status.started(self._engine(flow, prefills))
            await trio.sleep_forever()
        async with runtime.queues.open(
            self.pairing.queue,
            limits=QUEUE_LIMITS,
            read_interval_s=_DEPTH_INTERVAL_S,
            # The leg `queue` is of the put and of the wait.
            has_legs=False,
        ) as queue:
            events = runtime.events
            decode_first = DecodeFirst(
                self._host,
                self._transfers,
                queue,
                section,
                lending,
                runtime.env,
                lambda: not isinstance(events, CountsEvents) or events.statistics().is_connected,
            )
            await runtime.serve(
                self.pairing.handoff_endpoint,
                decode_first.lend,
                request_type=Claim,
                metadata={**metadata, "for": "handoff"},
                for_workers=True,
            )
            task_status.started(self._engine(decode_first, prefills))
            await trio.sleep_forever()

    def _engine(self, flow: PrefillFlow, prefills: Client) -> DisaggregatedEngine:
        return DisaggregatedEngine(
            self._host,
            flow,
            prefills.router,
            self._limits,
            self._runtime.env,
            self._metrics,
        )

    def _limits(self) -> DisaggregationLimits:
        settings, section = self._runtime.settings, self._section
        tokens = settings.get(PREFILL_TOKENS_LOCAL_MAX)
        depth = settings.get(QUEUE_DEPTH_MAX)
        return DisaggregationLimits(
            tokens_local_max=section.prefill_tokens_local_max if tokens < 0 else tokens,
            queue_depth_max=section.queue_depth_max if depth < 0 else depth,
        )

    def describe(self) -> dict[str, Any]:
        """The facts for the status port."""
        router = None if self._prefills is None else self._prefills.router
        return {
            "role": "decode",
            "mode": self._section.mode,
            "prefill_workers": 0 if router is None else router.instance_count,
            "prefills": {reason.value: n for reason, n in self._metrics.counts.items()},
        }


class PrefillRole(_Role):
    """A prefill worker: it computes prompts for decode workers, and answers nobody else."""

    def __init__(self, runtime: Runtime, engine: GenerationEngine) -> None:
        super().__init__(runtime, engine)
        self._engine = engine
        self._metrics = PrefillMetrics(runtime.metrics)
        self._is_leaving = trio.Event()
        self._has_left = trio.Event()

    async def offer(self, nursery: trio.Nursery, metadata: Mapping[str, str]) -> Instance:
        """Serve decode workers that ask, and consume the queue in `nursery`; return once both do."""
        runtime, info = self._runtime, self._engine.info
        # A job says who lends its blocks.
        handoffs = await runtime.client(self.pairing.handoff_endpoint, chooses=False)
        kept = KeptPrefills(self._host, self._transfers, self._metrics)
        await nursery.start(self._consume, handoffs)

        async def leave() -> None:
            self._is_leaving.set()
            await self._has_left.wait()

        runtime.drain_with(leave)
        # Last: decode workers that find it put jobs into the queue.
        return await runtime.serve(
            self.pairing.prefill_endpoint,
            kept.prefill,
            request_type=PrefillAsk,
            payload_bytes_max=ask_bytes_max_for(info.context_tokens_max),
            metadata=metadata,
            engine=self._engine,
        )

    async def _consume(self, handoffs: Client, *, task_status: trio.TaskStatus[None]) -> None:
        queued = QueuedPrefills(
            self._host, self._transfers, handoffs, self._metrics, self._runtime.traces
        )
        limits = ConsumerLimits(
            jobs_max=self._section.jobs_max,
            drain_timeout_s=self._runtime.config.shutdown.drain_timeout_s,
        )
        async with self._runtime.queues.consume(
            self.pairing.queue,
            queued.work,
            decode=decode_job,
            queue_limits=QUEUE_LIMITS,
            limits=limits,
            # A job is a part of a request, and its handler knows which.
            has_legs=False,
        ):
            task_status.started()
            await self._is_leaving.wait()
        self._has_left.set()

    def describe(self) -> dict[str, Any]:
        """The facts for the status port."""
        return {
            "role": "prefill",
            "jobs": {outcome.value: n for outcome, n in self._metrics.counts.items()},
        }


def choose_role(runtime: Runtime, engine: GenerationEngine) -> DecodeRole | PrefillRole | None:
    """What this worker is in disaggregated serving, if anything."""
    match runtime.config.worker.role:
        case "prefill":
            return PrefillRole(runtime, engine)
        case "decode":
            return DecodeRole(runtime, engine)
        case _:
            return None

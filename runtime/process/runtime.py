"""`Runtime`: what a process can do once it is open, and the steps in which it ends, each with its deadline.

`opening.py` opens the planes and makes one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import trio

from ..caller.client import Client
from ..caller.clients import Clients
from ..config.config import KILL_TIMEOUT_S, LEAVE_TIMEOUT_S, REVOKE_TIMEOUT_S, Config
from ..engines.generation import GenerationEngine
from ..env import Env
from ..errors import TrinamoError, UnavailableError
from ..http.transport import HttpTransport
from ..kv.events import share_names
from ..kv.transfer.engine import EngineTransfers
from ..metrics.metrics import Metrics
from ..metrics.planes import show_unsigned
from ..nurseries import open_nursery
from ..planes import ControlPlane, EventPlane
from ..planes.transports import DataPlane
from ..protocol.discovery.candidates import TOLD_LOAD, Policy
from ..protocol.discovery.instances import EndpointName, Instance
from ..protocol.kv.names import BlockNames
from ..queues.queues import Queues
from ..traces.ring import Traces
from ..worker.endpoint import Endpoint, InputHandler, PushHandler, StreamHandler, UnaryHandler
from ..worker.reports import Reports, check_waiting_tokens, keeps_blocks
from ..worker.worker import Worker
from .entries import OwnEntries
from .settings import LiveConfig, Settings

_log = logging.getLogger("trinamo.runtime")


class Runtime:
    """One process of a cluster: it may serve endpoints, call them, or both."""

    def __init__(
        self,
        *,
        config: Config,
        env: Env,
        control: ControlPlane,
        events: EventPlane,
        data: DataPlane,
        http: HttpTransport,
        metrics: Metrics,
        worker: Worker | None,
        control_nursery: trio.Nursery,
        event_nursery: trio.Nursery,
        transfers: EngineTransfers | None = None,
        traces: Traces,
    ) -> None:
        self.config = config
        self.env = env
        self.control = control
        self.events = events
        self._told = data.told or events
        show_unsigned(metrics, control, self._told)
        self.metrics = metrics
        self.worker = worker
        """None in a process that serves nothing."""
        self.instance_id = None if worker is None else worker.instance_id
        """16 hexadecimal digits, or None in a process that serves nothing."""
        self.transfers = transfers
        """None in a process without KV memory, or with `data_plane.transfer.enabled: false`."""
        self.traces = traces
        """What became of the last requests here."""
        self.settings = Settings(control, metrics=metrics)
        """What may change while the cluster runs; followed from the start to the end."""
        self.live = LiveConfig(config, self.settings, metrics=metrics)
        """`config` with what the settings say in its place."""
        self.queues = Queues(events, env, traces=self.traces, metrics=metrics)
        """The work queues this process opens: counted, and shown in `/metrics` while open."""
        self.data = data
        """What carries requests and responses, and where peers are told to find it."""
        self.http = http
        """What speaks HTTP, on either side."""
        self._reports: Reports | None = None
        self._drains: list[Callable[[], Awaitable[None]]] = []
        self._clients = Clients(
            config,
            env,
            control,
            self._told,
            data,
            metrics=metrics,
            traces=self.traces,
            nursery=control_nursery,
        )
        self.live.listen(self._clients.tune)
        self.live.listen(lambda _: self._tell_load())
        self._event_nursery = event_nursery
        if data.keep_certificate is not None:
            event_nursery.start_soon(data.keep_certificate, metrics)
        self._has_shut_down = False
        self._shutting_down = trio.Lock()
        self._entries = OwnEntries(
            control, env, metrics=metrics, lease_ttl_s=config.control_plane.etcd.lease_ttl_s
        )
        self.registrar = self._entries.registrar

    # --- calling ---

    @property
    def clients(self) -> list[Client]:
        """The clients that are open, in the order in which they were asked for."""
        return list(self._clients)

    async def client(self, endpoint: EndpointName, *, chooses: bool | None = None) -> Client:
        """The client of an endpoint; returns once its live set is known, be it empty.

        There is one per endpoint, open until the process ends, or until everybody who asked for it
        has given it to `release`. Where the store refuses to tell the live set it is empty, and
        asked for again and again. Where every request names its instance, nothing has to be chosen:
        one that `chooses` not follows neither loads nor blocks. Where none can, one that `chooses`
        does so under `router.policy: direct`, too.
        """
        return await self._clients.hold(endpoint, chooses=chooses)

    def release(self, client: Client) -> None:
        """Undo one call of `client`; the last one closes it. For endpoints that may not come back.

        What is still under way should have ended: nobody watches over it any more.
        """
        self._clients.release(client)

    # --- serving ---

    async def serve(
        self,
        endpoint: EndpointName,
        handler: StreamHandler,
        *,
        request_type: Any = Any,
        payload_bytes_max: float = math.inf,
        metadata: Mapping[str, str] | None = None,
        engine: GenerationEngine | None = None,
        for_workers: bool = False,
    ) -> Instance:
        """Serve a streaming endpoint and register it; returns once it can be found.

        Cancelled or failed, it serves nothing, and may be called again.

        `engine` is what the handler asks: requests for another model than its own are refused, its
        load and its KV blocks are told to routers (`worker/reports.py`), and `/metrics` shows them.
        A request of more than `payload_bytes_max` bytes is refused before it is decoded. An
        endpoint `for_workers` is what other workers ask of this one: its handler refuses, and neither
        `worker.requests_max` nor an orderly end does; where `security.tls` tells roles apart, others may not ask.
        """
        served = Endpoint(
            endpoint,
            request_type,
            stream=handler,
            payload_bytes_max=payload_bytes_max,
            for_workers=for_workers,
        )
        return await self._serve(served, metadata, engine)

    async def serve_push(
        self,
        endpoint: EndpointName,
        handler: PushHandler,
        *,
        request_type: Any = Any,
        payload_bytes_max: float = math.inf,
        metadata: Mapping[str, str] | None = None,
        engine: GenerationEngine | None = None,
    ) -> Instance:
        """As `serve`, with an async function that hands its items to a sink as they are made.

        It sleeps meanwhile, so that an item costs no switch of tasks, and returns when the answer
        is complete. What it is told of the sink's room it must heed (`Sink`): one that goes on all
        the same is ended with `EngineError`.
        """
        limit = payload_bytes_max
        served = Endpoint(endpoint, request_type, push=handler, payload_bytes_max=limit)
        return await self._serve(served, metadata, engine)

    async def serve_unary(
        self,
        endpoint: EndpointName,
        handler: UnaryHandler,
        *,
        request_type: Any = Any,
        metadata: Mapping[str, str] | None = None,
    ) -> Instance:
        """As `serve`, with an async function that returns the answer to one `Client.call`."""
        return await self._serve(Endpoint(endpoint, request_type, unary=handler), metadata)

    async def serve_bidirectional(
        self,
        endpoint: EndpointName,
        handler: InputHandler,
        *,
        request_type: Any = Any,
        input_type: Any = Any,
        metadata: Mapping[str, str] | None = None,
        for_workers: bool = False,
    ) -> Instance:
        """As `serve`; the handler also takes an iterator over what `Client.exchange` sends."""
        served = Endpoint(
            endpoint,
            request_type,
            bidirectional=handler,
            input_type=input_type,
            for_workers=for_workers,
        )
        return await self._serve(served, metadata)

    async def _serve(
        self,
        served: Endpoint,
        metadata: Mapping[str, str] | None,
        engine: GenerationEngine | None = None,
    ) -> Instance:
        if engine is not None:
            served = attrs.evolve(served, model=engine.info.model)
            bound = self.config.worker.waiting_tokens_max
            if bound is not None:
                served = attrs.evolve(
                    served, check_room=partial(check_waiting_tokens, engine, bound)
                )
        worker = self._serving_worker()
        worker.add(served)
        try:
            return await self.register(served.name, metadata=metadata, engine=engine)
        except BaseException:
            worker.remove(served.name)
            raise

    async def register(
        self,
        endpoint: EndpointName,
        *,
        metadata: Mapping[str, str] | None = None,
        engine: GenerationEngine | None = None,
    ) -> Instance:
        """Make an endpoint that `worker` already serves findable; `metadata` is for people.

        Cancelled or failed, it is not findable, unless it was before.
        """
        worker = self._serving_worker()
        if self._reports is None:
            self._reports = Reports(
                self.config.router,
                self.env,
                self._told,
                self._event_nursery,
                worker,
                self.metrics,
            )
            self._tell_load()
        names = BlockNames()
        if keeps_blocks(engine):
            names = await share_names(self.control, self.env, self.data.secret, endpoint.namespace)
        tells = self._reports.listen(endpoint, engine, names)
        instance = Instance(
            endpoint=str(endpoint),
            id=worker.instance_id,
            transports=self.data.addresses,
            kv_events=tells,
            kv_names=names.mark if tells else "",
            metadata=dict(metadata or {}),
        )
        await self._entries.put_instance(instance)
        self._reports.begin(endpoint, engine)
        return instance

    async def set_draining(self, instance: Instance, *, is_draining: bool) -> None:
        """Have `instance`, which is registered, passed over from now on, or chosen again."""
        await self._entries.set_draining(instance, is_draining=is_draining)

    async def publish(self, key: str, value: bytes) -> None:
        """Put a key, such as a model card, that lives as long as this process serves.

        Cancelled or failed, it is not put, unless it was there before.
        """
        self._serving_worker()
        await self._entries.put_card(key, value)

    def _serving_worker(self) -> Worker:
        if self.worker is None:
            raise UnavailableError("this process was opened without an instance id: it only calls")
        return self.worker

    @property
    def tells_load(self) -> bool:
        """Whether all load is told: to routers whose policy asks for it, and who shed load."""
        config = self.live.config
        return config.http.sheds_load or Policy(config.router.policy) in TOLD_LOAD

    def _tell_load(self) -> None:
        if self._reports is not None and self.tells_load:
            self._reports.tell_load()

    # --- the end, in order ---

    async def shutdown(self) -> None:
        """Leave discovery, refuse, drain, stop, kill, drain transfers, revoke, each in its time.

        Called again it does nothing, or goes on where it was cancelled.
        """
        async with self._shutting_down:
            self._entries.begin_leaving()
            if self.worker is not None and not self._has_shut_down:
                await run_steps(self._steps(self.worker))
            self._has_shut_down = True

    def _steps(self, worker: Worker) -> Iterator[ShutdownStep]:
        limits = self.config.shutdown
        if self._reports is not None:
            self._reports.drain()
        yield ShutdownStep("leave discovery", LEAVE_TIMEOUT_S, self._entries.leave)
        worker.refuse_new()
        self.env.note("drain.begin", active=worker.active_count)
        _log.info("shutdown: new requests are refused; %d in flight", worker.active_count)
        yield ShutdownStep("drain", limits.drain_timeout_s, self._drain)
        if worker.active_count:
            worker.stop_all()
            yield ShutdownStep("stop", limits.stop_timeout_s, worker.wait_idle)
        if worker.active_count:
            worker.kill_all()
            yield ShutdownStep("kill", KILL_TIMEOUT_S, worker.wait_idle)
        self.env.note("drain.end", active=worker.active_count)
        if self.transfers is not None:
            # The lease comes after: a peer that still moves our blocks must not take us for dead.
            yield ShutdownStep("drain transfers", limits.transfer_timeout_s, self.transfers.drain)
        yield ShutdownStep("revoke the lease", REVOKE_TIMEOUT_S, self.registrar.revoke)

    def drain_with(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Have `drain` called when new requests are refused, and waited for as requests are.

        For work that comes by other ways, such as a queue.
        """
        self._drains.append(drain)

    async def _drain(self) -> None:
        async with open_nursery() as nursery:
            for drain in self._drains:
                nursery.start_soon(drain)
            await self._serving_worker().wait_idle()


@attrs.frozen
class ShutdownStep:
    """What is done within `timeout_s`, or given up."""

    name: str
    timeout_s: float
    do: Callable[[], Awaitable[None]]


async def run_steps(steps: Iterable[ShutdownStep]) -> None:
    """Do one after the other; what stands between them in a generator happens between them.

    A step that fails or takes too long is told in the log, and does not stop the ones that follow.
    Cancelled, it leaves the rest undone.
    """
    for step in steps:
        started_at = trio.current_time()
        try:
            with trio.fail_after(step.timeout_s):
                await step.do()
        except trio.TooSlowError:
            _log.warning("shutdown: %s did not finish within %g s", step.name, step.timeout_s)
        except TrinamoError as error:
            _log.warning("shutdown: %s failed: %s", step.name, error)
        except Exception:  # noqa: BLE001 -- a bug in one step must not keep the lease from being revoked
            _log.exception("shutdown: %s failed", step.name)
        else:
            _log.info("shutdown: %s took %.3f s", step.name, trio.current_time() - started_at)

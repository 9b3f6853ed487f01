"""The nurseries that own it all, and the order in which they end.

`open_runtime` opens the planes, then one nursery per plane inside one cancel scope:

    one cancel scope for the process
    ├─ control plane   lease keeper, discovery watches
    ├─ event plane     subscriptions, publishers
    └─ data plane      request listeners, handlers

Leaving the `async with` normally shuts down in order, every step bounded by `config.shutdown` and
visible in the log. Cancelling it instead ends everything at once; what the control plane still
holds then dies with the lease.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Final, Protocol

import attrs
import msgspec
import trio

from .client import Client
from .config import Config
from .env import Env
from .errors import TrinamoError, UnavailableError
from .load import LoadReport, LoadSource, LoadTable
from .metrics import FrontendMetrics, LeaseState as LeaseMetric, Metrics, WorkerMetrics
from .metrics_planes import show_planes
from .planes import CallHome, ControlPlane, EventPlane, RequestPlane, RequestServer, ResponsePlane
from .protocol.instances import EndpointName, Instance, encode_instance
from .protocol.routing import Policy
from .registration import LeaseState, Registrar
from .router import Router
from .worker import StreamHandler, Worker

__all__ = ["DataPlane", "Runtime", "Transports", "open_runtime"]

_log = logging.getLogger("trinamo.runtime")
_ID_BITS: Final = 64


@attrs.frozen(kw_only=True)
class DataPlane:
    """What carries requests and responses, both ends of each."""

    request_planes: Mapping[str, RequestPlane]
    """By transport name, in order of preference."""
    request_servers: Sequence[RequestServer]
    """Empty in a process that serves nothing."""
    response_plane: ResponsePlane
    call_home: CallHome


class Transports(Protocol):
    """Makes concrete planes out of a configuration; `trinamo.cli` has the real one."""

    def open_control(self, config: Config, env: Env) -> AbstractAsyncContextManager[ControlPlane]:
        """The control plane; raises `ConfigError` or `ConnectError` with a sentence."""
        ...

    def open_events(self, config: Config, env: Env) -> AbstractAsyncContextManager[EventPlane]:
        """The event plane."""
        ...

    def open_data(
        self, config: Config, env: Env, events: EventPlane, *, serving: str | None
    ) -> AbstractAsyncContextManager[DataPlane]:
        """The data plane; `serving` is the instance id of a process that takes requests."""
        ...


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
        metrics: Metrics,
        instance_id: str | None,
    ) -> None:
        self.config = config
        self.env = env
        self.control = control
        self.events = events
        self.metrics = metrics
        self.instance_id = instance_id
        """16 hexadecimal digits, or None in a process that serves nothing."""
        self._data = data
        self._clients: dict[str, Client] = {}
        self._instances: dict[str, Instance] = {}
        self._cards: dict[str, None] = {}
        self._told: dict[str, None] = {}
        self._is_shutting_down = False
        self.registrar = Registrar(
            control,
            env,
            ttl_s=config.control_plane.etcd.lease_ttl_s,
            on_change=self._on_lease,
        )
        self.worker: Worker | None = None
        if instance_id is not None:
            assert isinstance(metrics, WorkerMetrics)
            self.worker = Worker(
                data.call_home,
                env,
                instance_id=instance_id,
                requests_max=config.worker.requests_max,
                stop_grace_s=config.worker.stop_grace_s,
                cancelled_ttl_s=config.worker.cancelled_ttl_s,
                metrics=metrics,
            )
        # Bound by `open_runtime`, which owns them.
        self.control_nursery: trio.Nursery
        self.event_nursery: trio.Nursery
        self.data_nursery: trio.Nursery

    def _on_lease(self, state: LeaseState) -> None:
        if state.lease_id:
            self.metrics.lease_state(LeaseMetric.GRANTED)
        else:
            lost = state.lost_count and not self._is_shutting_down
            self.metrics.lease_state(LeaseMetric.LOST if lost else LeaseMetric.NONE)

    # --- calling ---

    async def client(self, endpoint: EndpointName) -> Client:
        """The client of an endpoint; returns once its live set is known, be it empty."""
        key = str(endpoint)
        known = self._clients.get(key)
        if known is not None:
            return known
        loads: LoadTable | None = None
        if Policy(self.config.router.policy) is Policy.LEAST_LOADED:
            loads = LoadTable(self.events, endpoint)
        router = Router(
            self.control,
            endpoint,
            self.env,
            policy=Policy(self.config.router.policy),
            inhibit_s=self.config.router.inhibit_s,
            metrics=self.metrics,
            request_planes=self._data.request_planes,
            loads=loads,
        )
        client = self._clients[key] = Client(
            router,
            self._data.response_plane,
            self.env,
            attempts_max=self.config.router.attempts_max,
            call_home_timeout_s=self.config.data_plane.tcp.handshake_timeout_s,
        )
        if loads is not None:
            await self.event_nursery.start(loads.run)
        await self.control_nursery.start(router.run)
        return client

    # --- serving ---

    async def serve(
        self,
        endpoint: EndpointName,
        handler: StreamHandler,
        *,
        request_type: Any = Any,
        metadata: Mapping[str, str] | None = None,
    ) -> Instance:
        """Serve a streaming endpoint and register it; returns once it can be found."""
        worker = self._serving_worker()
        worker.add_stream(endpoint, handler, request_type=request_type)
        return await self.register(endpoint, metadata=metadata)

    async def register(
        self, endpoint: EndpointName, *, metadata: Mapping[str, str] | None = None
    ) -> Instance:
        """Make an endpoint that `worker` already serves findable; `metadata` is for people."""
        self._serving_worker()
        assert self.instance_id is not None
        instance = Instance(
            endpoint=str(endpoint),
            id=self.instance_id,
            transports={s.transport: s.address for s in self._data.request_servers},
            metadata=dict(metadata or {}),
        )
        self._instances[instance.key] = instance
        await self.registrar.register(instance.key, _renderer(instance))
        await self._tell_load(endpoint)
        return instance

    async def _tell_load(self, endpoint: EndpointName) -> None:
        """Publish how busy we are, for routers that choose by it: they have the same policy."""
        worker = self._serving_worker()
        if (
            Policy(self.config.router.policy) is not Policy.LEAST_LOADED
            or str(endpoint) in self._told
        ):
            return
        self._told[str(endpoint)] = None
        source = LoadSource(
            self.events,
            endpoint,
            instance_id=worker.instance_id,
            incarnation=1,  # The instance id is new in every process.
            read=lambda: LoadReport(worker.active_count),
        )
        await self.event_nursery.start(source.run)

    async def publish(self, key: str, value: bytes) -> None:
        """Put a key, such as a model card, that lives as long as this process serves."""
        self._serving_worker()
        self._cards[key] = None
        await self.registrar.register(key, lambda _: value)

    def _serving_worker(self) -> Worker:
        if self.worker is None:
            raise UnavailableError("this process was opened without an instance id: it only calls")
        return self.worker

    # --- the end, in order ---

    async def shutdown(self) -> None:
        """Leave discovery, refuse, drain, stop, kill, revoke: each step with its deadline."""
        if self._is_shutting_down:
            return
        self._is_shutting_down = True
        limits, worker = self.config.shutdown, self.worker
        if worker is None:
            return
        await self._step("leave discovery", limits.leave_timeout_s, self._leave)
        worker.refuse_new()
        self.env.note("drain.begin", active=worker.active_count)
        _log.info("shutdown: new requests are refused; %d in flight", worker.active_count)
        if not await self._step("drain", limits.drain_timeout_s, worker.wait_idle):
            worker.stop_all()
            if not await self._step("stop", limits.stop_timeout_s, worker.wait_idle):
                worker.kill_all()
                await self._step("kill", limits.kill_timeout_s, worker.wait_idle)
        self.env.note("drain.end", active=worker.active_count)
        await self._step("revoke the lease", limits.revoke_timeout_s, self.registrar.revoke)

    async def _leave(self) -> None:
        """Models go at once; instances stay visible as draining until their work is done."""
        for card in self._cards:
            await self.registrar.withdraw(card)
        for instance in self._instances.values():
            draining = msgspec.structs.replace(instance, draining=True)
            await self.registrar.register(instance.key, _renderer(draining))

    async def _step(self, name: str, timeout_s: float, step: Callable[[], Awaitable[None]]) -> bool:
        started_at = trio.current_time()
        try:
            with trio.fail_after(timeout_s):
                await step()
        except trio.TooSlowError:
            _log.warning("shutdown: %s did not finish within %g s", name, timeout_s)
            return False
        except TrinamoError as error:
            _log.warning("shutdown: %s failed: %s", name, error)
            return False
        _log.info("shutdown: %s took %.3f s", name, trio.current_time() - started_at)
        return True


def _renderer(instance: Instance) -> Callable[[int], bytes]:
    def render(incarnation: int) -> bytes:
        return encode_instance(msgspec.structs.replace(instance, incarnation=incarnation))

    return render


@asynccontextmanager
async def open_runtime(
    config: Config,
    env: Env,
    transports: Transports,
    *,
    serving: bool = False,
    metrics: Metrics | None = None,
) -> AsyncIterator[Runtime]:
    """Open every plane and yield the runtime; leaving it is the orderly shutdown.

    With `serving` the process gets an instance id, request listeners and a lease. Raises
    `ConfigError` or `ConnectError`, with a sentence that says what to do, if a plane cannot be
    opened; nothing is left behind then.
    """
    instance_id = f"{env.rng.getrandbits(_ID_BITS):016x}" if serving else None
    if metrics is None:
        metrics = WorkerMetrics(env) if serving else FrontendMetrics(env)
    async with AsyncExitStack() as planes:
        control = await planes.enter_async_context(transports.open_control(config, env))
        events = await planes.enter_async_context(transports.open_events(config, env))
        data = await planes.enter_async_context(
            transports.open_data(config, env, events, serving=instance_id)
        )
        show_planes(metrics, control, events)
        runtime = Runtime(
            config=config,
            env=env,
            control=control,
            events=events,
            data=data,
            metrics=metrics,
            instance_id=instance_id,
        )
        async with (
            trio.open_nursery() as runtime.control_nursery,
            trio.open_nursery() as runtime.event_nursery,
            trio.open_nursery() as runtime.data_nursery,
        ):
            if runtime.worker is not None:
                await runtime.data_nursery.start(runtime.worker.run)
                for server in data.request_servers:
                    await runtime.data_nursery.start(server.serve, runtime.worker)
                await runtime.control_nursery.start(runtime.registrar.run)
            yield runtime
            await runtime.shutdown()
            for nursery in (runtime.data_nursery, runtime.event_nursery, runtime.control_nursery):
                nursery.cancel_scope.cancel()

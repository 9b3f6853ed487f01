"""`HttpService`: the frontend's HTTP edge as one object, with the seeds' builder.

    service = HttpService.builder().port(8787).host("127.0.0.1").build()
    service.model_manager().add_chat_completions_model("echo", engine)
    port = await nursery.start(service.run)

What it does not do: find models (a watch elsewhere tells the model manager) and signals (the
caller calls `stop()`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import attrs
import trio

from ..context import Reason
from ..env import Env, RealEnv
from ..errors import ConfigError, LocalProtocolError
from ..metrics.metrics import FrontendMetrics
from ..nurseries import open_nursery
from .admission import Admission
from .app import build_app
from .chat import InferenceLimits
from .models.models import DeploymentState, ModelManager
from .overview import Overview
from .server.server import Server
from .streaming import OnDisconnect

__all__ = ["HttpService", "HttpServiceBuilder", "ServiceConfig"]

KILL_GRACE_S = 0.25
"""How long killed requests have to unwind before their connections are cut."""


@attrs.frozen
class ServiceConfig:
    """Everything that can be set; see `HttpServiceBuilder` for the meanings."""

    port: int = 8787
    host: str = "127.0.0.1"
    enable_chat_endpoints: bool = True
    enable_cmpl_endpoints: bool = True
    on_disconnect: OnDisconnect = attrs.field(default=OnDisconnect.KILL, converter=OnDisconnect)
    body_bytes_max: int = 4 << 20
    bodies_bytes_max: int = 256 << 20
    body_timeout_s: float = 30.0
    header_bytes_max: int = 32 << 10
    backlog_bytes_max: int = 1 << 16
    hosts: tuple[str, ...] | None = None
    requests_max: int = 4096
    connections_max: int = 2048
    keep_alive_s: float = 60.0
    write_timeout_s: float = 20.0
    peer_timeout_s: float = 20.0
    drain_timeout_s: float = 30.0
    stop_grace_s: float = 5.0
    request_timeout_s: float | None = None
    engine_error_detail: bool = False


class HttpService:
    """The HTTP service of one frontend. It runs once; make it with `builder()`."""

    def __init__(
        self,
        config: ServiceConfig,
        env: Env,
        metrics: FrontendMetrics,
        look: Callable[[], Overview] | None = None,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.admission = Admission(
            requests_max=config.requests_max, bodies_bytes_max=config.bodies_bytes_max
        )
        self.port: int | None = None
        """The bound port, once `run` has started."""
        self._state = DeploymentState(env, metrics)
        self._manager = ModelManager(self._state)
        self._stopping = trio.Event()
        self._has_run = False
        limits = InferenceLimits(
            body_bytes_max=config.body_bytes_max,
            body_timeout_s=config.body_timeout_s,
            backlog_bytes_max=config.backlog_bytes_max,
            stop_grace_s=config.stop_grace_s,
            request_timeout_s=config.request_timeout_s,
            on_disconnect=config.on_disconnect,
            tells_engine_errors=config.engine_error_detail,
        )
        self.app = build_app(
            self._state,
            self.admission,
            limits,
            has_chat=config.enable_chat_endpoints,
            has_completions=config.enable_cmpl_endpoints,
            look=look,
        )

    @staticmethod
    def builder() -> HttpServiceBuilder:
        """Start configuring a service."""
        return HttpServiceBuilder()

    def model_manager(self) -> ModelManager:
        """Where models are added and removed, before and while the service runs."""
        return self._manager

    def stop(self) -> None:
        """Stop gracefully: `run` drains and returns. Synchronous and idempotent."""
        self.admission.drain()
        self._stopping.set()

    async def run(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop()`; reports the bound port once connections are accepted.

        After `stop()` new work is answered with 503 while streams in flight go on, for
        `drain_timeout_s`; then they are stopped, after `stop_grace_s` killed, and within half a
        second more everything is closed, whatever the clients do. Cancelled, it closes at once.
        Raises `ConfigError` if it cannot listen.
        """
        if self._has_run:
            raise LocalProtocolError("an HttpService runs once; build another")
        self._has_run = True
        config = self.config
        server = Server(
            self.app,
            metrics=self.metrics,
            host=config.host,
            port=config.port,
            hosts=config.hosts,
            connections_max=config.connections_max,
            header_bytes_max=config.header_bytes_max,
            keep_alive_s=config.keep_alive_s,
            write_timeout_s=config.write_timeout_s,
            peer_timeout_s=config.peer_timeout_s,
        )
        async with open_nursery() as nursery:
            self.port = port = await nursery.start(server.serve)
            task_status.started(port)
            await self._stopping.wait()
            await self._drain()
            server.close()

    async def _drain(self) -> None:
        admission = self.admission
        with trio.move_on_after(self.config.drain_timeout_s):
            await admission.wait_idle()
        if admission.in_flight:
            admission.stop(Reason.WORKER_SHUTDOWN)
            with trio.move_on_after(self.config.stop_grace_s):
                await admission.wait_idle()
        if admission.in_flight:
            admission.kill(Reason.WORKER_SHUTDOWN)
            with trio.move_on_after(KILL_GRACE_S):
                await admission.wait_idle()


class HttpServiceBuilder:
    """Each method sets one thing and returns the builder; `build()` checks and makes the service.

    The host is loopback unless set: a service without authentication must not face a network by
    default.
    """

    def __init__(self) -> None:
        self._config = ServiceConfig()
        self._env: Env | None = None
        self._metrics: FrontendMetrics | None = None
        self._look: Callable[[], Overview] | None = None

    def port(self, port: int) -> Self:
        """The port to listen on; 0 takes any free one."""
        return self.config(port=port)

    def host(self, host: str) -> Self:
        """The address or name to listen on, IPv4 or IPv6; `0.0.0.0` or `::` for all."""
        return self.config(host=host)

    def enable_chat_endpoints(self, enabled: bool = True) -> Self:  # noqa: FBT001, FBT002 -- the seeds' builder
        """Whether there is `/v1/chat/completions`."""
        return self.config(enable_chat_endpoints=enabled)

    def enable_cmpl_endpoints(self, enabled: bool = True) -> Self:  # noqa: FBT001, FBT002 -- the seeds' builder
        """Whether there is `/v1/completions`."""
        return self.config(enable_cmpl_endpoints=enabled)

    def env(self, env: Env) -> Self:
        """The world; the real one unless set."""
        self._env = env
        return self

    def metrics(self, metrics: FrontendMetrics) -> Self:
        """Where to count; own metrics unless set."""
        self._metrics = metrics
        return self

    def look(self, look: Callable[[], Overview]) -> Self:
        """What `/status` tells of the cluster, asked once a request; it must not wait."""
        self._look = look
        return self

    def config(self, **changes: Any) -> Self:
        """Set any fields of `ServiceConfig` by name; raises `ConfigError` for one unknown."""
        try:
            self._config = attrs.evolve(self._config, **changes)
        except TypeError as error:
            raise ConfigError(f"unknown HTTP setting: {error}") from error
        except ValueError as error:
            raise ConfigError(f"a wrong HTTP setting: {error}") from error
        return self

    def build(self) -> HttpService:
        """The service; raises `ConfigError` naming the setting that is wrong."""
        config = self._config
        if not 0 <= config.port <= 65535:
            raise ConfigError(f"port {config.port} is out of range; 0 to 65535")
        for field in attrs.fields(ServiceConfig):
            value = getattr(config, field.name)
            if field.name.endswith(("_max", "_s")) and value is not None and value < 0:
                raise ConfigError(f"{field.name} is {value}; it must not be negative")
        env = self._env or RealEnv()
        return HttpService(config, env, self._metrics or FrontendMetrics(env), self._look)

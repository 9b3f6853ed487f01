"""The planes of one host of a simulated cluster: TCP for requests and responses, KV memory, the services.

`SimTransports` is what a host gives to `open_runtime`. The TCP transports are the real ones, on
simulated sockets; store and broker are reached as `services.py` says, memory of peers as `memory.py` does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import attrs

from trinamo.runtime.config.config import Config
from trinamo.runtime.env import Env
from trinamo.runtime.planes import ControlPlane, EventPlane, RequestPlane, RequestServer
from trinamo.runtime.planes.spans import Span, SpanSink
from trinamo.runtime.planes.transports import DataPlane, TransferChain
from trinamo.transports.tcp import (
    TcpClient,
    TcpOptions,
    open_client,
    open_request_plane,
    open_request_server,
    open_stream_server,
)

from .membership import SECRET
from .memory import ClusterMemory
from .services import NotedControlPlane, Services

__all__ = ["SimTransports"]


@attrs.frozen
class _NotedSpans:
    _env: Env

    def take(self, span: Span) -> None:
        self._env.note(
            "span",
            name=span.name,
            request=span.request_id,
            trace=f"{span.trace_id:032x}",
            span=f"{span.span_id:016x}",
            parent=f"{span.parent_id:016x}",
        )


class SimTransports:
    """The planes of one host, as `open_runtime` asks for them.

    Implements `runtime.planes.transports.Transports`. After `open_data` the TCP ends are in `home`, `calls`,
    `requests` and `server`, for whoever takes a census.
    """

    def __init__(self, name: str, services: Services, memory: ClusterMemory) -> None:
        self.name = name
        self.home: Any = None
        self.calls: TcpClient | None = None
        self.requests: Any = None
        self.server: Any = None
        self.control: NotedControlPlane | None = None
        self.memory = memory
        self._services = services

    @asynccontextmanager
    async def open_control(self, config: Config, env: Env) -> AsyncIterator[ControlPlane]:
        """The store, over this host's links; what watches deliver is noted."""
        async with self._services.open_control(self.name, config, env) as plane:
            self.control = NotedControlPlane(plane, env, self.name)
            yield self.control

    def open_events(self, config: Config, env: Env) -> AbstractAsyncContextManager[EventPlane]:
        """The broker, over this host's links."""
        return self._services.open_events(self.name, config, env)

    @asynccontextmanager
    async def open_data(
        self, config: Config, env: Env, events: EventPlane, *, serving: str | None
    ) -> AsyncIterator[DataPlane]:
        """The TCP planes, unmodified, on simulated sockets."""
        options = self._tcp_options(config)
        async with AsyncExitStack() as stack:
            self.home = await stack.enter_async_context(open_stream_server(options, env))
            self.requests = await stack.enter_async_context(open_request_plane(options, env))
            planes: dict[str, RequestPlane] = {self.requests.transport: self.requests}
            servers: list[RequestServer] = []
            if serving:
                self.server = await stack.enter_async_context(
                    open_request_server(options, env, instance_id=serving)
                )
                servers.append(self.server)
            if config.data_plane.requests == "nats":
                # nats-py brings asyncio along, which most worlds never need.
                from trinamo.transports.nats import (  # noqa: PLC0415
                    NatsRequestPlane,
                    NatsRequestServer,
                )

                nats = NatsRequestPlane(events, ack_timeout_s=config.data_plane.tcp.ack_timeout_s)
                planes = {nats.transport: nats, **planes}
                if serving:
                    servers.append(NatsRequestServer(events, f"trinamo.requests.{serving}"))
            self.calls = await stack.enter_async_context(open_client(options, env))
            yield DataPlane(
                request_planes=planes,
                request_servers=servers,
                response_plane=self.home,
                call_home=self.calls,
            )

    @asynccontextmanager
    async def open_spans(
        self, config: Config, env: Env, process: Mapping[str, str]
    ) -> AsyncIterator[SpanSink]:
        """Notes in the trace of the run: no thread, and no collector."""
        del config, process
        yield _NotedSpans(env)

    def open_transfers(
        self, config: Config, env: Env
    ) -> AbstractAsyncContextManager[TransferChain]:
        """One-sided memory on simulated adapters, and TCP on simulated sockets."""
        return self.memory.open_chain(self.name, config, env)

    def _tcp_options(self, config: Config) -> TcpOptions:
        own = {"host": "0.0.0.0", "port": 0, "advertise_host": self.name}  # noqa: S104 -- simulated
        return TcpOptions.of(config.data_plane.tcp, **own, secret=SECRET)

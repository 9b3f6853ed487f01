"""The planes of one host of a simulated cluster: TCP for requests and responses, KV memory, the services.

`SimTransports` is what a host gives to `open_runtime`. The TCP transports are the real ones, on
simulated sockets; store and broker are reached as `services.py` says, memory of peers as `memory.py` does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import attrs

from trinamo.runtime.config.config import Config
from trinamo.runtime.env import Env
from trinamo.runtime.planes import ControlPlane, EventPlane
from trinamo.runtime.planes.transports import DataPlane, TransferChain
from trinamo.runtime.traces.spans import Span, SpanSink
from trinamo.transports.assembly.data import open_data_plane
from trinamo.transports.assembly.http import Http
from trinamo.transports.security.signed import signed_control

from .memory import SECRET, ClusterMemory, fleet_of, sealer_of, tcp_options_of
from .services import NetworkServices, NotedControlPlane


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

    Implements `runtime.process.transports.Transports`. After `open_data` the TCP ends are in `home`, `calls`,
    `requests` and `server`, for whoever takes a census.
    """

    http = Http()
    """The real one, on simulated sockets."""

    def __init__(self, name: str, services: NetworkServices, memory: ClusterMemory) -> None:
        self.name = name
        self.home: Any = None
        self.calls: Any = None
        self.requests: Any = None
        self.server: Any = None
        self.control: NotedControlPlane | None = None
        self.memory = memory
        self._services = services

    @asynccontextmanager
    async def open_control(self, config: Config, env: Env) -> AsyncIterator[ControlPlane]:
        """The store, over this host's links; what watches deliver is noted, signed or not."""
        async with self._services.open_control(config, env) as plane:
            self.control = NotedControlPlane(plane, env, self.name)
            secrets = [SECRET if config.security.secret_file else b""]
            fleet = fleet_of(config, self.name, env)
            yield signed_control(cast("ControlPlane", self.control), env, secrets, fleet)

    def open_events(self, config: Config, env: Env) -> AbstractAsyncContextManager[EventPlane]:
        """The broker, over this host's links."""
        return self._services.open_events(config, env)

    @asynccontextmanager
    async def open_data(
        self, config: Config, env: Env, events: EventPlane, *, serving: str | None
    ) -> AsyncIterator[DataPlane]:
        """The TCP planes, unmodified, on simulated sockets."""
        options, sealer = tcp_options_of(config, self.name, env), sealer_of(config, env)
        async with open_data_plane(config, env, events, options, sealer, serving=serving) as data:
            self.home, self.calls = data.response_plane, data.call_home
            self.requests = data.request_planes["tcp"]
            self.server = next(iter(data.request_servers), None)
            # Names of blocks are made with it, whether links are sealed or not.
            yield attrs.evolve(data, secret=SECRET)

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

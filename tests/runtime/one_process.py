"""A whole cluster in the test's own process: memory planes, real TCP, so that tasks can be counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.kv.regions import KvCache
from trinamo.runtime.planes import ControlPlane, EventPlane
from trinamo.runtime.planes.transports import DataPlane, TransferChain
from trinamo.runtime.process.opening import open_runtime
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.traces.spans import Span, SpanSink
from trinamo.transports.assembly.http import Http
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane
from trinamo.transports.memory.store import MemoryStore
from trinamo.transports.security.sealing import Sealer, sealed_events
from trinamo.transports.security.signed import signed_control
from trinamo.transports.tcp import (
    TcpClient,
    TcpOptions,
    TcpRequestPlane,
    TcpStreamServer,
    open_client,
    open_request_plane,
    open_request_server,
    open_stream_server,
    open_transfer_plane,
)


class OneProcess:
    """A `Transports` whose planes share one store and one broker. Remembers the TCP ends it made.

    With a `secret` its processes seal their connections with it, and sign what they tell each other.
    """

    http = Http()

    def __init__(self, secret: bytes = b"") -> None:
        self.secret = secret
        self.store = MemoryStore()
        self.broker = MemoryBroker()
        self.spans: list[Span] = []
        """Of all its processes."""
        self.homes: list[TcpStreamServer] = []
        self.dialers: list[TcpClient] = []
        self.request_planes: list[TcpRequestPlane] = []

    @asynccontextmanager
    async def open_control(self, config: Config, env: Env) -> AsyncIterator[ControlPlane]:
        yield signed_control(MemoryControlPlane(self.store), env, [self.secret])

    @asynccontextmanager
    async def open_events(self, config: Config, env: Env) -> AsyncIterator[EventPlane]:
        yield MemoryEventPlane(self.broker)

    @asynccontextmanager
    async def open_data(
        self, config: Config, env: Env, events: EventPlane, *, serving: str | None
    ) -> AsyncIterator[DataPlane]:
        # Patient, so that a machine that is busy with something else changes no outcome.
        options = TcpOptions(
            secret=self.secret, connect_timeout_s=60, ack_timeout_s=60, handshake_timeout_s=60
        )
        async with (
            open_stream_server(options, env) as home,
            open_request_plane(options, env, home) as requests,
            open_request_server(options, env, instance_id=serving or "") as server,
            open_client(options, env) as dialer,
        ):
            self.homes.append(home)
            self.dialers.append(dialer)
            self.request_planes.append(requests)
            yield DataPlane(
                request_planes={"tcp": requests},
                request_servers=[server] if serving else [],
                response_plane=home,
                call_home=dialer,
                secret=self.secret,
                told=sealed_events(events, Sealer([self.secret], env.rng)),
            )

    @asynccontextmanager
    async def open_spans(
        self, config: Config, env: Env, process: Mapping[str, str]
    ) -> AsyncIterator[SpanSink]:
        yield self

    def take(self, span: Span) -> None:
        self.spans.append(span)

    @asynccontextmanager
    async def open_transfers(self, config: Config, env: Env) -> AsyncIterator[TransferChain]:
        async with open_transfer_plane(env=env) as tcp:
            yield TransferChain(
                planes=[tcp],
                order=["nixl", "tcp"],
                missing={"nixl": "not here"},
                settlement=tcp.mover,
            )

    @property
    def open_streams(self) -> int:
        """Subjects and call-home connections held by anybody; zero at quiescence."""
        return sum(h.registered_count for h in self.homes) + sum(d.open_count for d in self.dialers)


def config(**overrides: Any) -> Config:
    """Return the defaults, with longer time-outs, and `overrides`: dotted keys written as `a__b`.

    The time-outs outlast a machine that stalls for some seconds.
    """
    patient: dict[str, Any] = {
        "data_plane.tcp.ack_timeout_s": 60.0,
        "data_plane.transfer.probe_timeout_s": 60.0,
    }
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(environ={}, overrides=patient | given)


@asynccontextmanager
async def open_process(
    transports: OneProcess,
    *,
    serving: bool = False,
    kv: KvCache | None = None,
    **overrides: Any,
) -> AsyncIterator[Runtime]:
    """One runtime on the shared planes."""
    async with open_runtime(
        config(**overrides), RealEnv(), transports, serving=serving, kv=kv
    ) as runtime:
        yield runtime


def task_count() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def until_tasks(count: int) -> None:
    """Let tasks that are ending end; a leak makes this time out."""
    with trio.fail_after(120):
        while task_count() > count:
            await trio.sleep(0.005)

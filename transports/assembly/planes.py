"""Which transport carries which plane of a process: control, events, requests and responses.

Everything else sees the interfaces of `trinamo.runtime.planes`. A control or an event plane may be one
that an installed package offers, as an entry point of the group `trinamo.transports`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import trio

from trinamo.runtime.config.config import Config, SecurityConfig, check_files, read_secrets
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import (
    ControlPlaneConfig,
    EtcdConfig,
    EventPlaneConfig,
    NatsConfig,
)
from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import ConfigError, ConnectError, TrinamoError
from trinamo.runtime.planes.transports import DataPlane, TransferChain
from trinamo.transports.security.sealing import Sealer
from trinamo.transports.security.signed import signed_control
from trinamo.transports.tcp import TcpOptions

from .data import open_data_plane
from .http import Http
from .transfers import open_transfer_chain

if TYPE_CHECKING:
    from trinamo.runtime.planes import ControlPlane, EventPlane
    from trinamo.runtime.traces.spans import SpanSink
    from trinamo.transports.security.fleet import Fleet
    from trinamo.transports.servers import EmbeddedServer

S = TypeVar("S", ControlPlaneConfig, EventPlaneConfig)
INSTALLED: Final = "trinamo.transports"
"""The group of entry points by which packages offer transports, by name."""


class RealTransports:
    """A `Transports` that talks to the world."""

    http = Http()

    def __init__(self) -> None:
        self._secrets: tuple[bytes, bytes] | None = None
        self._fleet: Fleet | None = None
        self._sealer: Sealer | None = None

    @asynccontextmanager
    async def open_control(self, config: Config, env: Env) -> AsyncIterator[ControlPlane]:
        """etcd, the memory of this one process, or what a package offers.

        Our own files come first: they need no server.
        """
        self._tcp_options(config, env)
        check_files(config)
        section = config.control_plane
        if section.backend == "memory":
            from trinamo.transports.memory.control import MemoryControlPlane

            yield MemoryControlPlane()
            return
        secrets = self._secrets or ()
        if section.backend != "etcd":
            opening = _installed("control_plane.backend", section.backend, "open_control")
            async with opening(section.options, env) as plane:
                yield signed_control(plane, env, secrets, self._fleet)
            return
        async with AsyncExitStack() as stack:
            endpoints = list(section.etcd.endpoints)
            if section.embedded:
                server = await stack.enter_async_context(embedded_etcd(section.etcd))
                endpoints = [server.endpoint]
            plane = await stack.enter_async_context(open_control_plane(section.etcd, endpoints))
            yield signed_control(plane, env, secrets, self._fleet)

    @asynccontextmanager
    async def open_events(self, config: Config, env: Env) -> AsyncIterator[EventPlane]:
        """NATS, the memory of this one process, or what a package offers."""
        section = config.event_plane
        if section.backend == "memory":
            from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane

            yield MemoryEventPlane(MemoryBroker())
            return
        if section.backend != "nats":
            opening = _installed("event_plane.backend", section.backend, "open_events")
            async with opening(section.options, env) as plane:
                yield plane
            return
        async with AsyncExitStack() as stack:
            servers, nats = list(section.nats.servers), section.nats
            if section.embedded:
                server = await stack.enter_async_context(embedded_nats(nats))
                servers = [server.url]
                nats = msgspec.structs.replace(nats, token=Secret(server.token))
            opening = open_event_plane(nats, servers, self._sealer_of(config, env))
            yield await stack.enter_async_context(opening)

    @asynccontextmanager
    async def open_data(
        self, config: Config, env: Env, events: EventPlane, *, serving: str | None
    ) -> AsyncIterator[DataPlane]:
        """TCP for responses; for requests TCP, and NATS beside it if configured."""
        options, sealer = self._tcp_options(config, env), self._sealer_of(config, env)
        if options.fleet is not None and serving is not None:
            options.fleet.check_serving()
        async with open_data_plane(config, env, events, options, sealer, serving=serving) as data:
            yield data

    @asynccontextmanager
    async def open_spans(
        self, config: Config, env: Env, process: Mapping[str, str]
    ) -> AsyncIterator[SpanSink]:
        """OTLP over HTTP, by the extra `otel`."""
        del env  # The SDK's thread has a clock of its own.
        try:
            from trinamo.transports.otel import open_spans
        except ModuleNotFoundError as error:
            raise ConfigError(
                "tracing.enabled is true, but OpenTelemetry is not installed: pip install"
                " 'trinamo[otel]'"
            ) from error
        async with open_spans(config.tracing, process) as spans:
            yield spans

    def open_transfers(
        self, config: Config, env: Env
    ) -> AbstractAsyncContextManager[TransferChain]:
        """The chain of `data_plane`, without what this machine has no library for."""
        return open_transfer_chain(config.data_plane, env, self._tcp_options(config, env))

    def _sealer_of(self, config: Config, env: Env) -> Sealer:
        """One for all that this process says by brokers."""
        if self._sealer is None:
            options = self._tcp_options(config, env)
            self._sealer = Sealer((options.secret, options.second_secret), env.rng)
        return self._sealer

    def _tcp_options(self, config: Config, env: Env) -> TcpOptions:
        """The secrets are read once: a file that changes later must not leave a process with two."""
        if self._secrets is None:
            self._secrets = read_secrets(config.security)
            self._fleet = open_fleet(config.security, env, self._secrets)
        secret, second = self._secrets
        control = config.control_plane
        has_etcd = control.backend == "etcd" and not control.embedded
        towards = control.etcd.endpoints if has_etcd else ()
        return TcpOptions.of(
            config.data_plane.tcp,
            secret=secret,
            second_secret=second,
            fleet=self._fleet,
            is_clear_allowed=config.security.clear_tcp,
            towards=towards,
        )


def open_fleet(section: SecurityConfig, env: Env, secrets: Sequence[bytes]) -> Fleet | None:
    """What `security.tls` names; None if nothing. `ConfigError` says why it cannot be used."""
    if section.tls.certificate_file is None:
        return None
    # Brings `cryptography` along, which who has no secret never needs.
    from trinamo.transports.security.fleet import Fleet

    return Fleet.of(section.tls, env, secrets)


def _installed(key: str, name: str, opener: str) -> Any:
    """The function by which the transport `name` opens a plane; `ConfigError` lists what there is."""
    offered = {each.name: each for each in entry_points(group=INSTALLED)}
    if name not in offered:
        ours = {"open_control": "etcd", "open_events": "nats"}[opener]
        raise ConfigError(
            f"{key} is {name!r}, which no installed package offers; there are"
            f" {', '.join([ours, 'memory', *sorted(offered)])}. A package offers a transport as an entry"
            f" point of the group {INSTALLED}: docs/write_a_transport.md"
        )
    where = offered[name].value
    try:
        transport = offered[name].load()
    except Exception as error:
        raise ConfigError(f"{key} is {name!r}, and {where} cannot be loaded: {error!r}") from error
    if not callable(found := getattr(transport, opener, None)):
        raise ConfigError(f"{key} is {name!r}, but {where} has no {opener}(options, env)")
    return found


def reach_control(config: Config) -> AbstractAsyncContextManager[ControlPlane]:
    """The control plane of a cluster that runs, for a command beside it: no server is started."""
    section = _of_others("control_plane", config.control_plane)
    beside = msgspec.structs.replace(config, control_plane=section)
    return RealTransports().open_control(beside, RealEnv())


def reach_events(config: Config) -> AbstractAsyncContextManager[EventPlane]:
    """The event plane of a cluster that runs, likewise."""
    section = _of_others("event_plane", config.event_plane)
    beside = msgspec.structs.replace(config, event_plane=section)
    return RealTransports().open_events(beside, RealEnv())


def _of_others(key: str, section: S) -> S:
    if section.backend == "memory":
        raise ConfigError(f"{key}.backend is memory, which no other process can ask")
    return msgspec.structs.replace(section, embedded=False)


def embedded_etcd(section: EtcdConfig) -> AbstractAsyncContextManager[EmbeddedServer]:
    """An etcd of our own while inside, in its directory and with its planned memory."""
    from trinamo.transports.servers import open_etcd_server

    return open_etcd_server(_path(section.data_dir), section.port, memory_bytes=section.memory)


def embedded_nats(section: NatsConfig) -> AbstractAsyncContextManager[EmbeddedServer]:
    """A nats-server of our own while inside, in its directory and with its planned memory."""
    from trinamo.transports.servers import open_nats_server

    return open_nats_server(_path(section.store_dir), section.port, memory_bytes=section.memory)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


@asynccontextmanager
async def open_control_plane(
    section: EtcdConfig, endpoints: list[str]
) -> AsyncIterator[ControlPlane]:
    """etcd, known to answer; `ConnectError` with what to do if it does not."""
    from trinamo.transports.etcd import open_etcd

    async with open_etcd(endpoints, section) as plane:
        where = ", ".join(endpoints)
        advice = (
            f"no etcd answers at {where}. Start one there, name others with --etcd or "
            "control_plane.etcd.endpoints, or let `trinamo up` start everything"
        )
        try:
            with trio.fail_after(section.connect_timeout_s):
                await plane.check_health()
        except trio.TooSlowError:
            late = f"no answer within {section.connect_timeout_s:g} s"
            raise ConnectError(f"{advice} ({late})") from None
        except TrinamoError as error:
            raise ConnectError(f"{advice} ({error})") from error
        yield plane


@asynccontextmanager
async def open_event_plane(
    section: NatsConfig, servers: list[str], sealer: Sealer | None = None
) -> AsyncIterator[EventPlane]:
    """NATS, connected; `ConnectError` with what to do if that fails."""
    from trinamo.transports.nats import open_nats

    where = ", ".join(servers)
    async with AsyncExitStack() as stack:
        try:
            plane = await stack.enter_async_context(open_nats(servers, section, sealer=sealer))
        except ConnectError as error:
            if "Authorization" in error.message:
                raise ConnectError(
                    f"NATS at {where} refuses us: event_plane.nats.token (or username and password,"
                    f" credentials_file, nkey_seed_file) is not what it wants ({error})"
                ) from error
            raise ConnectError(
                f"no NATS answers at {where}. Start one there, name others with --nats or "
                f"event_plane.nats.servers, or let `trinamo up` start everything ({error})"
            ) from error
        yield plane

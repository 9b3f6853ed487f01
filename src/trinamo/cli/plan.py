"""What `trinamo up` is going to start, decided before anything is started.

Only decides; `cluster.py` does it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import attrs

from trinamo.runtime.config import Config, EtcdConfig, NatsConfig
from trinamo.runtime.errors import ConfigError

from .engine import choose_engine
from .options import Sources

__all__ = ["Plan", "check_port", "plan_cluster"]


@attrs.frozen
class Plan:
    """What is to be started."""

    config: Config
    sources: Sources
    workers: int
    engine: str
    engine_reason: str
    has_etcd: bool
    """Whether an etcd of our own is started."""
    has_nats: bool
    """Whether a NATS server of our own is started."""

    def child_environ(
        self, *, etcd: tuple[str, ...], nats: tuple[str, ...], worker_status_port: bool
    ) -> dict[str, str]:
        """The environment of a child that finds the servers at these addresses."""
        overrides = {
            "control_plane__embedded": False,
            "control_plane__etcd__endpoints": etcd,
            "event_plane__embedded": False,
            "event_plane__nats__servers": nats,
            "worker__engine": self.engine,
        }
        if self.config.log.format == "auto":
            # Lines for people: a child writes to a pipe and would choose JSON.
            overrides["log__format"] = "console"
        if worker_status_port and self.workers > 1:
            # Several workers cannot share one port; and the table wants to ask each of them.
            overrides["worker__status_port"] = 0
        return {**_inherited(os.environ), **self.sources.with_overrides(**overrides).environ()}


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    # Python's output must not wait in a buffer for the next line.
    return {**environ, "PYTHONUNBUFFERED": "1"}


def plan_cluster(sources: Sources, *, workers: int) -> Plan:
    """Decide what to start; raises `ConfigError` for what one machine cannot be."""
    config = sources.load()
    control, events = config.control_plane, config.event_plane
    if control.backend == "memory":
        raise ConfigError(
            "control_plane.backend is memory, which processes cannot share; set it to etcd"
        )
    if events.backend == "memory" and config.data_plane.requests == "nats":
        raise ConfigError("data_plane.requests is nats, but event_plane.backend is memory")
    if workers > 1 and config.data_plane.tcp.port:
        raise ConfigError(
            f"data_plane.tcp.port is {config.data_plane.tcp.port}, which {workers} workers on one"
            " machine cannot share; leave it 0"
        )
    choice = choose_engine(config.worker)
    return Plan(
        config=config,
        sources=sources,
        workers=workers,
        engine=choice.engine,
        engine_reason=choice.why,
        has_etcd=_is_ours(
            control.embedded,
            control.etcd.nodes,
            is_named=control.etcd.endpoints != EtcdConfig().endpoints,
        ),
        has_nats=events.backend == "nats"
        and _is_ours(
            events.embedded,
            events.nats.nodes,
            is_named=events.nats.servers != NatsConfig().servers,
        ),
    )


def _is_ours(embedded: bool | None, nodes: int, *, is_named: bool) -> bool:
    """Whether to start a server: as configured, else unless the configuration names others."""
    return embedded if embedded is not None else nodes == 1 and not is_named


def check_port(host: str, port: int) -> None:
    """Raise `ConfigError` if the port is taken: better now than after everything has started."""
    if not port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As the listener does it: a port whose last connections linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {error.strerror or error}; choose another"
                " with --port, or 0 to let the system choose"
            ) from error

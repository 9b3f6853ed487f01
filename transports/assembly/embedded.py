"""The servers that a configuration lets us start: with its directories and planned memory."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from trinamo.runtime.config.planes import EtcdConfig, NatsConfig

if TYPE_CHECKING:
    from trinamo.transports.servers import EmbeddedServer


def embedded_etcd(section: EtcdConfig) -> AbstractAsyncContextManager[EmbeddedServer]:
    """An etcd of our own while inside."""
    from trinamo.transports.servers import open_etcd_server

    return open_etcd_server(_path(section.data_dir), section.port, memory_bytes=section.memory)


def embedded_nats(section: NatsConfig) -> AbstractAsyncContextManager[EmbeddedServer]:
    """A nats-server of our own while inside."""
    from trinamo.transports.servers import open_nats_server

    return open_nats_server(_path(section.store_dir), section.port, memory_bytes=section.memory)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)

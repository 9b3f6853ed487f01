"""The real etcd as a backend of the control-plane suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tests.conformance.control.backends import Link, Server
from tests.processes.proxy import open_proxy
from trinamo.runtime.config.planes import EtcdConfig
from trinamo.runtime.planes import ControlPlane
from trinamo.transports.etcd import open_etcd
from trinamo.transports.servers import EmbeddedServer, open_etcd_server
from trinamo.transports.servers.binaries import free_port

SYSTEM_ETCD = Path("/usr/bin/etcd")
PATIENT: Final = EtcdConfig(attempt_timeout_s=60, request_timeout_s=120)
"""For tests of a server that answers: one that stalls does not have a write sent again."""


class EtcdServer:
    """A private etcd process."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server

    @asynccontextmanager
    async def open_plane(self) -> AsyncIterator[ControlPlane]:
        async with open_etcd(self._server.address, PATIENT) as plane:
            yield plane

    async def kill(self) -> None:
        await self._server.kill()

    async def restart(self) -> None:
        await self._server.restart()

    async def freeze(self) -> None:
        self._server.freeze()

    async def thaw(self) -> None:
        self._server.thaw()


class EtcdBackend:
    """Planes over one etcd of the test session."""

    def __init__(self, endpoint: str, *, binary: Path | None = None) -> None:
        self._endpoint = endpoint
        self._binary = binary

    @asynccontextmanager
    async def open_plane(self) -> AsyncIterator[ControlPlane]:
        async with open_etcd(self._endpoint, PATIENT) as plane:
            yield plane

    @asynccontextmanager
    async def open_linked_plane(self) -> AsyncIterator[tuple[ControlPlane, Link]]:
        async with (
            open_proxy(self._endpoint) as proxy,
            open_etcd(proxy.address, PATIENT) as plane,
        ):
            yield plane, proxy

    @asynccontextmanager
    async def open_server(self, data_dir: Path) -> AsyncIterator[Server]:
        async with open_etcd_server(data_dir / "etcd", binary=self._binary) as server:
            yield EtcdServer(server)

    @asynccontextmanager
    async def open_unreachable(self) -> AsyncIterator[ControlPlane]:
        async with open_etcd(
            f"127.0.0.1:{free_port()}", EtcdConfig(request_timeout_s=0.8)
        ) as plane:
            yield plane

    async def compact(self) -> None:
        async with open_etcd(self._endpoint, PATIENT) as plane:
            await plane.compact()

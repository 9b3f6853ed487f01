"""An etcd and a NATS cluster on a machine of their own, with the members that a configuration names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from tests.machines.machines import Machine
from trinamo.transports.servers.binaries import etcd_command, find_etcd, find_nats_server
from trinamo.transports.servers.embedded import EmbeddedServer
from trinamo.transports.servers.process import etcd_is_ready, nats_is_ready

ETCD_PEER, NATS_PEER = 2380, 6222


@attrs.frozen
class Servers:
    """All of them."""

    etcd: list[EmbeddedServer]
    nats: list[EmbeddedServer]

    async def stop_etcd(self) -> None:
        """All members at once: nobody answers for the cluster."""
        async with trio.open_nursery() as nursery:
            for each in self.etcd:
                nursery.start_soon(each.kill)

    async def start_etcd(self) -> None:
        async with trio.open_nursery() as nursery:
            for each in self.etcd:
                nursery.start_soon(each.start)


def names_of(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Host and port of every server that the file names, etcd's first."""
    etcd = config["control_plane"]["etcd"]["endpoints"]
    nats = config["event_plane"]["nats"]["servers"]
    places = [*etcd, *(url.removeprefix("nats://") for url in nats)]
    return [(host, int(port)) for host, _, port in (each.rpartition(":") for each in places)]


@asynccontextmanager
async def open_servers(
    machine: Machine, addresses: Mapping[str, str], config: Mapping[str, Any]
) -> AsyncIterator[Servers]:
    """Run them on `machine`; `addresses` has that of each name."""
    places = [(host, addresses[host], port) for host, port in names_of(config)]
    count = len(config["control_plane"]["etcd"]["endpoints"])
    etcd, nats = places[:count], places[count:]
    servers = Servers(
        [_etcd(machine, each, etcd) for each in etcd],
        [_nats(machine, each, nats, config["event_plane"]["nats"]) for each in nats],
    )
    everybody = [*servers.etcd, *servers.nats]
    try:
        async with trio.open_nursery() as nursery:
            for each in everybody:
                nursery.start_soon(each.start)
        yield servers
    finally:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for each in everybody:
                    nursery.start_soon(each.stop)


Place = tuple[str, str, int]


def _etcd(machine: Machine, place: Place, cluster: Sequence[Place]) -> EmbeddedServer:
    name, address, port = place
    peers = {each: f"http://{where}:{ETCD_PEER}" for each, where, _ in cluster}
    command = etcd_command(
        find_etcd(),
        data_dir=machine.home / f"{name}-data",
        client_url=f"http://{address}:{port}",
        peer_url=peers[name],
        name=name,
        peers=peers,
    )
    return _server(machine, place, command, etcd_is_ready)


def _nats(
    machine: Machine, place: Place, cluster: Sequence[Place], section: Mapping[str, Any]
) -> EmbeddedServer:
    name, address, port = place
    command = [
        *(str(find_nats_server()), "--addr", address, "--port", str(port), "--jetstream"),
        *("--store_dir", str(machine.home / f"{name}-data")),
    ]
    if "token" in section:
        command += ["--auth", section["token"]]
    if len(cluster) > 1:
        routes = ",".join(f"nats://{where}:{NATS_PEER}" for _, where, _ in cluster)
        command += ["--server_name", name, "--cluster_name", "nats", "--routes", routes]
        command += ["--cluster", f"nats://{address}:{NATS_PEER}"]
    return _server(machine, place, command, nats_is_ready)


def _server(machine: Machine, place: Place, command: list[str], probe: Any) -> EmbeddedServer:
    name, address, port = place
    folder = machine.home / name
    folder.mkdir()
    where = f"{address}:{port}"
    return EmbeddedServer(
        name, machine.command(command), probe, address=where, directory=folder, start_timeout_s=120
    )

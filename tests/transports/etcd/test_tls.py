"""TLS towards etcd, one-sided and mutual, with certificates made for the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio

from tests.certificates import Authority
from tests.conformance.control.backends import eventually
from tests.servers import free_ports, loopback_url
from trinamo.conformance.control import until
from trinamo.runtime.config.planes import EtcdConfig, TlsConfig
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import Put
from trinamo.transports.etcd import open_etcd
from trinamo.transports.servers.binaries import (
    etcd_command,
    find_etcd,
)
from trinamo.transports.servers.process import spawn, terminate


@attrs.define
class TlsEtcd:
    """An etcd behind TLS that wants certificates of its clients, on one port over restarts."""

    command: list[str]
    log_path: Path
    port: int

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        child = spawn(self.command, log_path=self.log_path)
        try:
            yield
        finally:
            await terminate(child, grace_s=3)


def make_server(authority: Authority, directory: Path, *, hosts: tuple[str, ...]) -> TlsEtcd:
    certificate, key = authority.sign("server", hosts=hosts)
    port, peer_port = free_ports(2)
    url = f"https://127.0.0.1:{port}"
    command = etcd_command(
        find_etcd(),
        data_dir=directory / "data",
        client_url=url,
        peer_url=loopback_url(peer_port),
        extra=(
            *("--cert-file", str(certificate), "--key-file", str(key)),
            *("--client-cert-auth", "--trusted-ca-file", str(authority.ca_file)),
        ),
    )
    return TlsEtcd(command, directory / "log", port)


async def test_mutual_tls_holds_a_watch_over_a_restart_and_refuses_strangers(
    tmp_path: Path,
) -> None:
    authority = Authority.make(tmp_path / "ours")
    stranger = Authority.make(tmp_path / "theirs")
    server = make_server(authority, tmp_path, hosts=("localhost", "127.0.0.1"))
    mine, my_key = authority.sign("worker")
    other, other_key = stranger.sign("worker")
    endpoint = f"https://127.0.0.1:{server.port}"
    async with open_etcd(
        endpoint,
        EtcdConfig(
            tls=TlsConfig(
                enabled=True,
                ca_file=str(authority.ca_file),
                cert_file=str(mine),
                key_file=str(my_key),
            )
        ),
    ) as plane:
        async with server.running():
            await eventually(plane.check_health)
            async with plane.watch("k/") as events:
                await anext(events)
                await plane.put("k/a", b"1")
                await anext(events)
                for arguments in (
                    {"ca_file": authority.ca_file},
                    {"ca_file": authority.ca_file, "cert_file": other, "key_file": other_key},
                    {"ca_file": stranger.ca_file, "cert_file": mine, "key_file": my_key},
                    {"cert_file": mine, "key_file": my_key},
                ):
                    tls = TlsConfig(
                        enabled=True, **{name: str(path) for name, path in arguments.items()}
                    )
                    section = EtcdConfig(request_timeout_s=0.6, tls=tls)
                    async with open_etcd(endpoint, section) as refused:
                        with pytest.raises(TrinamoError):
                            await refused.get("k/a")
                async with open_etcd(
                    f"127.0.0.1:{server.port}", EtcdConfig(request_timeout_s=0.6)
                ) as plain:
                    with pytest.raises(TrinamoError):
                        await plain.get("k/a")
        async with server.running(), plane.watch("k/") as events:
            with trio.fail_after(120):
                await anext(events)
                await eventually(lambda: plane.put("k/b", b"2"))
                event = await anext(events)
            assert isinstance(event, Put)
            assert event.entry.key == "k/b"


@pytest.mark.parametrize("several", [False, True])
async def test_the_name_in_the_certificate_is_checked_or_given(
    tmp_path: Path, several: bool
) -> None:
    """Several endpoints are addresses by the time they are dialled; the name is one for all."""
    authority = Authority.make(tmp_path / "ours")
    server = make_server(authority, tmp_path, hosts=("etcd.example",))
    mine, my_key = authority.sign("worker")
    endpoint = f"127.0.0.1:{server.port}"
    endpoints = [endpoint, f"localhost:{server.port}"] if several else [endpoint]
    async with server.running():
        async with open_etcd(
            endpoints,
            EtcdConfig(
                tls=TlsConfig(
                    enabled=True,
                    ca_file=str(authority.ca_file),
                    cert_file=str(mine),
                    key_file=str(my_key),
                    server_name="etcd.example",
                )
            ),
        ) as plane:
            assert "etcd" in await eventually(plane.check_health)
        async with open_etcd(
            endpoints,
            EtcdConfig(
                request_timeout_s=0.6,
                tls=TlsConfig(
                    enabled=True,
                    ca_file=str(authority.ca_file),
                    cert_file=str(mine),
                    key_file=str(my_key),
                ),
            ),
        ) as nameless:
            with pytest.raises(TrinamoError):
                await nameless.get("a")


async def test_several_addresses_are_each_found_in_their_certificate(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "ours")
    server = make_server(authority, tmp_path, hosts=("localhost", "127.0.0.1"))
    mine, my_key = authority.sign("worker")
    endpoints = [f"https://127.0.0.1:{server.port}", f"https://localhost:{server.port}"]
    async with (
        server.running(),
        open_etcd(
            endpoints,
            EtcdConfig(
                tls=TlsConfig(
                    enabled=True,
                    ca_file=str(authority.ca_file),
                    cert_file=str(mine),
                    key_file=str(my_key),
                )
            ),
        ) as plane,
    ):
        assert "etcd" in await eventually(plane.check_health)


async def test_tls_is_spoken_and_checked(tmp_path: Path) -> None:
    """etcd makes a certificate of its own for the test; a client that does not know it refuses."""
    port, peer_port = free_ports(2)
    command = etcd_command(
        find_etcd(),
        data_dir=tmp_path / "data",
        client_url=f"https://127.0.0.1:{port}",
        peer_url=loopback_url(peer_port),
        extra=("--auto-tls",),
    )
    child = spawn(command, log_path=tmp_path / "log")
    try:
        certificate = tmp_path / "data" / "fixtures" / "client" / "cert.pem"
        # What is there may not be whole yet, and whoever reads half of it trusts nobody.
        await until(lambda: certificate.exists() and b"END CERT" in certificate.read_bytes())
        async with open_etcd(
            f"https://127.0.0.1:{port}",
            EtcdConfig(
                attempt_timeout_s=60,
                request_timeout_s=120,
                tls=TlsConfig(enabled=True, ca_file=str(certificate)),
            ),
        ) as plane:
            await eventually(plane.check_health)
            with trio.fail_after(120):
                async with plane.watch("") as events:
                    await anext(events)
                    await plane.put("a", b"1")
                    await anext(events)
        async with open_etcd(
            f"https://127.0.0.1:{port}", EtcdConfig(request_timeout_s=0.5)
        ) as plane:
            with pytest.raises(TrinamoError):
                await plane.get("a")
    finally:
        await terminate(child, grace_s=3)

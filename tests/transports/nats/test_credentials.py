"""Mutual TLS and NKeys towards NATS, over a restart, with keys made for the test."""

from __future__ import annotations

import ssl
from importlib import import_module
from pathlib import Path

import pytest
import trio

from tests.certificates import Authority
from tests.transports.nats.brokers import PATIENT, private_server, wait_away, wait_back
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.errors import ConnectError
from trinamo.transports.nats import open_nats
from trinamo.transports.servers.binaries import find_nats_server


async def test_mutual_tls_reconnects_and_refuses_strangers(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "ours")
    stranger = Authority.make(tmp_path / "theirs")
    certificate, key = authority.sign("server")
    flags = (
        *("--tls", "--tlscert", str(certificate), "--tlskey", str(key)),
        *("--tlsverify", "--tlscacert", str(authority.ca_file)),
    )
    ours = ssl.create_default_context(cafile=str(authority.ca_file))
    ours.load_cert_chain(*authority.sign("worker"))
    theirs = ssl.create_default_context(cafile=str(authority.ca_file))
    theirs.load_cert_chain(*stranger.sign("worker"))
    nobody = ssl.create_default_context(cafile=str(authority.ca_file))
    with private_server(find_nats_server(), *flags) as server:
        url = server.url.replace("nats://", "tls://")
        async with open_nats([url], PATIENT, tls=ours) as plane:
            await plane.check_health()
            for context in (theirs, nobody):
                with pytest.raises(ConnectError):
                    async with open_nats([url], PATIENT, tls=context):
                        pass
            server.kill()
            await wait_away(plane)
            await trio.to_thread.run_sync(server.start)
            await wait_back(plane)
            assert plane.statistics().connections == 2


async def test_an_nkey_is_a_credential(tmp_path: Path) -> None:
    nkeys = import_module("nkeys")
    seeds = [nkeys.encode_seed(bytes([number]) * 32, nkeys.PREFIX_BYTE_USER) for number in (1, 2)]
    public = nkeys.from_seed(bytearray(seeds[0])).public_key.decode()
    settings = tmp_path / "nats.conf"
    settings.write_text(f"authorization {{ users: [ {{ nkey: {public} }} ] }}\n")
    seed_file, other_file = tmp_path / "user.nk", tmp_path / "other.nk"
    seed_file.write_bytes(seeds[0])
    other_file.write_bytes(seeds[1])
    with private_server(find_nats_server(), "--config", str(settings)) as server:
        async with open_nats([server.url], NatsConfig(nkey_seed_file=str(seed_file))) as plane:
            await plane.check_health()
            server.kill()
            await wait_away(plane)
            await trio.to_thread.run_sync(server.start)
            await wait_back(plane)
        for section in (NatsConfig(nkey_seed_file=str(other_file)), NatsConfig()):
            with pytest.raises(ConnectError, match="Authorization"):
                async with open_nats([server.url], section):
                    pass

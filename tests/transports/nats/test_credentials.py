"""Mutual TLS and NKeys towards NATS, over a restart, with keys made for the test."""

from __future__ import annotations

import ssl
from importlib import import_module
from pathlib import Path

import pytest
import trio

from tests.certificates import Authority, needs_openssl
from tests.transports.nats.brokers import private_server, wait_away, wait_back
from trinamo.runtime.errors import ConnectError
from trinamo.transports.nats import open_nats
from trinamo.transports.servers.binaries import find_nats_server

pytestmark = [pytest.mark.services, pytest.mark.slow]


@needs_openssl
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
        async with open_nats([url], tls=ours, reconnect_wait_s=0.05) as plane:
            await plane.check_health()
            for context in (theirs, nobody):
                with pytest.raises(ConnectError):
                    async with open_nats([url], tls=context, connect_timeout_s=1):
                        pass
            server.kill()
            await wait_away(plane)
            await trio.to_thread.run_sync(server.start)
            await wait_back(plane)
            assert plane.statistics().connections == 2


async def test_an_nkey_is_a_credential_as_text_and_as_a_file(tmp_path: Path) -> None:
    nkeys = import_module("nkeys")
    seeds = [nkeys.encode_seed(bytes([number]) * 32, nkeys.PREFIX_BYTE_USER) for number in (1, 2)]
    public = nkeys.from_seed(bytearray(seeds[0])).public_key.decode()
    settings = tmp_path / "nats.conf"
    settings.write_text(f"authorization {{ users: [ {{ nkey: {public} }} ] }}\n")
    seed_file = tmp_path / "user.nk"
    seed_file.write_bytes(seeds[0])
    with private_server(find_nats_server(), "--config", str(settings)) as server:
        async with open_nats([server.url], nkey_seed=seeds[0].decode()) as plane:
            await plane.check_health()
        async with open_nats([server.url], nkey_seed_path=str(seed_file)) as plane:
            await plane.check_health()
            server.kill()
            await wait_away(plane)
            await trio.to_thread.run_sync(server.start)
            await wait_back(plane)
        for options in ({"nkey_seed": seeds[1].decode()}, {}):
            with pytest.raises(ConnectError, match="Authorization"):
                async with open_nats([server.url], **options):
                    pass

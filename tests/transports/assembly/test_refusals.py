"""What keeps a process from its planes is told as what it is, ours before a server's."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

import trinamo
from tests.transports.nats.brokers import private_server
from trinamo import ConfigError, ConnectError
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import NatsConfig
from trinamo.transports.assembly.planes import open_event_plane
from trinamo.transports.servers.binaries import find_nats_server


async def open_nats(section: NatsConfig, url: str) -> None:
    with trio.fail_after(120):
        async with open_event_plane(section, [url]):
            pass


@pytest.mark.parametrize("token", [None, Secret("wrong")])
async def test_a_broker_that_refuses_us_is_no_broker_that_is_silent(token: Secret | None) -> None:
    with (
        private_server(find_nats_server(), "--auth", "right") as server,
        pytest.raises(ConnectError, match=r"refuses us: event_plane\.nats\.token"),
    ):
        await open_nats(NatsConfig(token=token), server.url)
    with pytest.raises(ConnectError, match=r"no NATS answers at .* Start one there"):
        await open_nats(
            NatsConfig(token=token, connect_timeout_s=0.5, start_timeout_s=0.2), server.url
        )


async def test_a_secret_that_cannot_be_read_is_told_before_anybody_is_dialled(
    tmp_path: Path,
) -> None:
    given = {
        "security.secret_file": str(tmp_path / "absent"),
        "control_plane.etcd.endpoints": "127.0.0.1:1",
    }
    with pytest.raises(ConfigError, match="absent"):
        async with trinamo.open_runtime(trinamo.load_config(environ={}, overrides=given)):
            pass

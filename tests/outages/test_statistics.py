"""What an outage leaves in the counts of a plane, in `/metrics`, and in the log."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
import trio

from tests.conformance.control.backends import eventually
from trinamo.conformance.control import until
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import EtcdConfig, NatsConfig
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import OverloadedError
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.metrics.planes import show_planes
from trinamo.runtime.planes import CountsControl, CountsEvents
from trinamo.transports.etcd import open_etcd
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane
from trinamo.transports.nats import open_nats
from trinamo.transports.servers import EmbeddedServer, open_etcd_server, open_nats_server


@pytest.fixture
async def etcd() -> AsyncIterator[EmbeddedServer]:
    async with open_etcd_server() as server:
        yield server


@pytest.fixture
async def nats() -> AsyncIterator[EmbeddedServer]:
    async with open_nats_server() as server:
        yield server


async def test_every_count_of_an_outage_is_in_the_metrics(
    etcd: EmbeddedServer, nats: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trinamo")
    metrics = Metrics(RealEnv())
    section = EtcdConfig(connect_timeout_s=60, request_timeout_s=1)
    async with (
        open_etcd(etcd.address, section) as control,
        open_nats(
            nats.url,
            NatsConfig(token=Secret(nats.token), start_timeout_s=60, outgoing_messages_max=4),
        ) as events,
        control.watch("k/") as changes,
        events.subscribe("n", pending_max=1),
    ):
        assert isinstance(control, CountsControl)
        assert isinstance(events, CountsEvents)
        show_planes(metrics, control, events)
        await anext(changes)
        await eventually(lambda: control.put("k/a", b"1"))
        await anext(changes)
        assert metrics.value("control_plane_connected") == 1
        assert metrics.value("control_plane_watches") == 1
        assert metrics.value("event_plane_connected") == 1
        for _ in range(3):
            await events.publish("n", b"")
        await until(
            lambda: metrics.value("event_plane_dropped_messages_total", direction="in") == 2
        )

        await etcd.kill()
        await nats.kill()
        await until(lambda: metrics.value("control_plane_connected") == 0)
        await until(lambda: metrics.value("event_plane_connected") == 0)
        for number in range(6):
            if number < 4:
                await events.publish("m", b"")
            else:
                with pytest.raises(OverloadedError):
                    await events.publish("m", b"")
        assert metrics.value("event_plane_waiting_messages") == 4
        assert metrics.value("event_plane_dropped_messages_total", direction="out") == 2
        assert metrics.value("control_plane_stream_losses_total") >= 1
        silence_s = metrics.value("control_plane_silence_seconds")
        assert metrics.value("control_plane_silence_seconds") > silence_s > 0

        async with trio.open_nursery() as nursery:
            nursery.start_soon(etcd.start)
            nursery.start_soon(nats.start)
        await eventually(lambda: control.put("k/b", b"2"))
        await anext(changes)
        await until(lambda: metrics.value("event_plane_connections_total") >= 2)
        await until(lambda: metrics.value("event_plane_waiting_messages") == 0)
        assert metrics.value("control_plane_connected") == 1
        assert metrics.value("control_plane_resyncs_total") == 0
    text = metrics.render().decode()

    assert "trinamo_control_plane_connected 0.0" in text
    said = [record.getMessage() for record in caplog.records]
    assert any(f"etcd at {etcd.address} does not answer" in line for line in said)
    assert said.count(f"etcd at {etcd.address} answers") >= 2
    assert any(line.startswith("disconnected: nats-server") for line in said)


async def test_planes_that_do_not_count_have_no_series() -> None:
    metrics = Metrics(RealEnv())

    show_planes(metrics, MemoryControlPlane(), MemoryEventPlane(MemoryBroker()))

    told = [line for line in metrics.render().splitlines() if not line.startswith(b"#")]
    assert [line for line in told if b"_plane_" in line] == []

"""What `/metrics` tells before, in and after an outage of etcd and of NATS: one row a series.

Part of `bench/bench_outages.py`. A server of its own for each plane is killed with -9; the process
that is scraped keeps a watch and a lease on etcd and publishes to NATS ten times a second, with
room for 16 messages that wait.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import trio

from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import OverloadedError, TrinamoError
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.metrics.planes import show_planes
from trinamo.transports.etcd import EtcdControlPlane, open_etcd
from trinamo.transports.nats import open_nats
from trinamo.transports.servers import open_etcd_server, open_nats_server

SERIES: Final[tuple[tuple[str, dict[str, str]], ...]] = (
    ("control_plane_connected", {}),
    ("control_plane_watches", {}),
    ("control_plane_stream_losses_total", {}),
    ("control_plane_resyncs_total", {}),
    ("event_plane_connected", {}),
    ("event_plane_connections_total", {}),
    ("event_plane_waiting_messages", {}),
    ("event_plane_dropped_messages_total", {"direction": "out"}),
)
WAITING_MAX: Final = 16


async def sample_outage(outage_s: float) -> list[list[str]]:
    """Rows of: series, before, in the outage, after."""
    metrics = Metrics(RealEnv())
    samples: list[list[float]] = []

    def scrape() -> None:
        samples.append([metrics.value(name, **labels) for name, labels in SERIES])

    async with (
        open_etcd_server() as etcd,
        open_nats_server() as nats,
        open_etcd(etcd.address) as control,
        open_nats(
            nats.url, NatsConfig(token=Secret(nats.token), outgoing_messages_max=WAITING_MAX)
        ) as events,
        control.watch("k/") as changes,
        trio.open_nursery() as nursery,
    ):
        show_planes(metrics, control, events)
        await anext(changes)
        await control.put("k/a", b"")
        await anext(changes)

        async def publish() -> None:
            while True:
                with suppress(OverloadedError):
                    await events.publish("n", b"")
                await trio.sleep(0.1)

        nursery.start_soon(publish)
        nursery.start_soon(_renew, control)
        await trio.sleep(1)
        scrape()
        await etcd.kill()
        await nats.kill()
        await trio.sleep(outage_s)
        scrape()
        await etcd.start()
        await nats.start()
        await control.put("k/b", b"")
        await anext(changes)
        with trio.move_on_after(20):
            while not events.is_connected or events.statistics().waiting_messages:
                await trio.sleep(0.02)
        scrape()
        nursery.cancel_scope.cancel()
    return [
        [f"`trinamo_{name}{_label(labels)}`", *(f"{each[index]:g}" for each in samples)]
        for index, (name, labels) in enumerate(SERIES)
    ]


async def _renew(control: EtcdControlPlane) -> None:
    lease = await control.grant_lease(5)
    while True:
        with suppress(TrinamoError):
            await control.keep_alive(lease.id)
        await trio.sleep(1)


def _label(labels: dict[str, str]) -> str:
    return "".join(f'{{{name}="{value}"}}' for name, value in labels.items())

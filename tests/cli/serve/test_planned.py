"""What a configuration says of its servers reaches them, or is looked at by `doctor`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conformance.requests.service import ack_of, stream
from trinamo.cli.doctor.examination import spins
from trinamo.runtime.config.config import load_config
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConnectError, DisconnectedError
from trinamo.transports.assembly.planes import RealTransports
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """The folder the kernel would have for the disk of `tmp_path`, whose first partition it is on."""
    number = tmp_path.stat().st_dev
    partition = tmp_path / "sda" / "sda1"
    partition.mkdir(parents=True)
    (partition.parent / "queue").mkdir()
    (tmp_path / f"{os.major(number)}:{os.minor(number)}").symlink_to(partition)
    return partition.parent / "queue" / "rotational"


@pytest.mark.parametrize(("flag", "found"), [("1\n", True), ("0\n", False), (None, False)])
def test_a_disk_that_spins_is_known_by_the_kernel_s_word(
    device: Path, tmp_path: Path, flag: str | None, found: bool
) -> None:
    if flag is not None:
        device.write_text(flag)

    # The directory need not be there yet.
    assert spins(tmp_path / "data" / "etcd", devices=tmp_path) is found


async def test_requests_over_nats_wait_as_long_as_the_event_plane_says() -> None:
    overrides = {
        "data_plane.requests": "nats",
        "event_plane.nats.ack_timeout_s": 0.02,
        "data_plane.tcp.ack_timeout_s": 3600,
    }
    config = load_config(environ={}, overrides=overrides)
    events = MemoryEventPlane(MemoryBroker())

    async with (
        RealTransports().open_data(config, RealEnv(), events, serving=None) as data,
        events.subscribe("a.worker.that.hangs"),
    ):
        with pytest.raises(DisconnectedError, match=r"within 0\.02 s"):
            await ack_of(data.request_planes["nats"], "a.worker.that.hangs", stream("r1"), b"")


async def test_an_embedded_nats_of_one_process_is_closed_and_used() -> None:
    overrides = {"event_plane.embedded": True, "event_plane.nats.jetstream": True}
    config = load_config(environ={}, overrides=overrides)
    async with RealTransports().open_events(config, RealEnv()) as events:
        where = (await events.check_health()).rpartition(" at ")[2].split()[0]
        stranger = load_config(
            environ={}, overrides={"event_plane.nats.servers": f"nats://{where}"}
        )
        with pytest.raises(ConnectError, match="Authorization"):
            async with RealTransports().open_events(stranger, RealEnv()):
                pass

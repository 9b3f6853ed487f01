"""Three etcd members, one of them hurt under writes: nothing acknowledged is lost or told twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import trio

from tests.conformance.control_backends import eventually, until
from tests.outages.histories import History, caught_up, watch_keys, write_keys
from trinamo.runtime.errors import TrinamoError
from trinamo.transports.etcd import EtcdControlPlane, open_etcd
from trinamo.transports.servers import ServerCluster, open_etcd_cluster

pytestmark = [pytest.mark.services, pytest.mark.slow]

SYSTEM_ETCD = Path("/usr/bin/etcd")
WATCHES = 8
WRITES = 10

Hurt = Callable[[ServerCluster], Awaitable[None]]


needs_system_etcd = pytest.mark.skipif(not SYSTEM_ETCD.exists(), reason="no etcd of the system")


async def kill_the_leader(cluster: ServerCluster) -> None:
    await (await cluster.leader()).kill()


async def kill_a_follower(cluster: ServerCluster) -> None:
    await (await cluster.followers())[0].kill()


async def freeze_the_leader(cluster: ServerCluster) -> None:
    (await cluster.leader()).freeze()


async def restart_one_by_one(cluster: ServerCluster) -> None:
    for member in [*await cluster.followers(), await cluster.leader()]:
        await member.restart()


@pytest.mark.parametrize(
    ("hurt", "binary"),
    [
        (kill_the_leader, None),
        (kill_a_follower, None),
        (freeze_the_leader, None),
        (restart_one_by_one, None),
        pytest.param(kill_the_leader, SYSTEM_ETCD, marks=needs_system_etcd),
    ],
)
async def test_a_member_hurt_under_writes_costs_no_watch_a_change(
    hurt: Hurt, binary: Path | None
) -> None:
    """Eight watches on one stream, and a lease that is still alive afterwards."""
    histories = [History() for _ in range(WATCHES)]
    written = History()
    async with (
        open_etcd_cluster(binary=binary) as cluster,
        open_plane(cluster) as writer,
        open_plane(cluster) as plane,
        trio.open_nursery() as nursery,
    ):
        lease = await plane.grant_lease(30)
        for history in histories:
            await nursery.start(watch_keys, plane, "k/", history)
        with trio.CancelScope() as writing:

            async def hurt_under_writes() -> None:
                await until(lambda: len(written.acknowledged) > WRITES)
                await hurt(cluster)
                before = len(written.acknowledged)
                await until(lambda: len(written.acknowledged) > before + WRITES, timeout_s=20)
                writing.cancel()

            nursery.start_soon(hurt_under_writes)
            await write_keys(writer, "k/", written)
        for history in histories:
            history.acknowledged = written.acknowledged
        stored = await caught_up(writer, "k/", histories)
        assert await eventually(lambda: plane.keep_alive(lease.id)) > 0
        nursery.cancel_scope.cancel()

    assert {*written.acknowledged} <= {*stored}
    assert [history.lost(stored) for history in histories] == [set()] * WATCHES
    assert [history.duplicated for history in histories] == [0] * WATCHES
    assert all(history.is_ordered for history in histories)


def open_plane(cluster: ServerCluster) -> AbstractAsyncContextManager[EtcdControlPlane]:
    return open_etcd(cluster.endpoints, timeout_s=5, per_try_timeout_s=0.7, silence_s=2)


async def test_without_a_majority_nothing_is_written_and_with_it_all_goes_on() -> None:
    async with (
        open_etcd_cluster() as cluster,
        open_etcd(cluster.endpoints, timeout_s=1, per_try_timeout_s=0.4) as plane,
    ):
        await plane.put("a", b"1")
        leader, followers = await cluster.leader(), await cluster.followers()
        for follower in followers:
            await follower.kill()
        outcomes = [await refused(plane) for _ in range(2)]
        async with trio.open_nursery() as nursery:
            for follower in followers:
                nursery.start_soon(follower.start)
        await eventually(lambda: plane.put("a", b"3"))
        entry = await plane.get("a")
        assert leader.pid

    assert outcomes == [True, True]
    assert entry is not None
    assert entry.value == b"3"


async def refused(plane: EtcdControlPlane) -> bool:
    try:
        await plane.put("a", b"2")
    except TrinamoError:
        return True
    return False

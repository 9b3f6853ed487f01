"""Three etcd members, one of them hurt under writes: nothing acknowledged is lost or told twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import attrs
import trio

from tests.conformance.control.backends import eventually
from tests.outages.clusters import ServerCluster, open_etcd_cluster
from tests.outages.histories import History, caught_up, watch_keys, write_keys
from trinamo.conformance.control import until
from trinamo.runtime.config.planes import EtcdConfig
from trinamo.runtime.errors import TrinamoError
from trinamo.transports.etcd import EtcdControlPlane, open_etcd

SYSTEM_ETCD = Path("/usr/bin/etcd")
WATCHES = 8
WRITES = 10

Hurt = Callable[[ServerCluster], Awaitable[None]]


async def kill_the_leader(cluster: ServerCluster) -> None:
    await (await cluster.leader()).kill()


async def kill_a_follower(cluster: ServerCluster) -> None:
    await (await cluster.followers())[0].kill()


async def freeze_the_leader(cluster: ServerCluster) -> None:
    (await cluster.leader()).freeze()


async def restart_one_by_one(cluster: ServerCluster) -> None:
    for member in [*await cluster.followers(), await cluster.leader()]:
        await member.restart()


# Each row has a cluster of its own. They wait far more than they work, so some run side by side,
# the slowest first.
ROWS: dict[str, tuple[Hurt, Path | None]] = {
    "leader frozen": (freeze_the_leader, None),
    "restarted one by one": (restart_one_by_one, None),
    "leader killed": (kill_the_leader, None),
    "follower killed": (kill_a_follower, None),
}
if SYSTEM_ETCD.exists():
    ROWS["leader of the system's etcd killed"] = (kill_the_leader, SYSTEM_ETCD)
ROWS_AT_ONCE = 3


@attrs.frozen
class Outcome:
    """What a row cost, over all its watches."""

    unstored: int = 0
    """Writes that were acknowledged and are not in the store."""
    lost: int = 0
    duplicated: int = 0
    is_ordered: bool = True
    has_lease: bool = True


async def test_a_member_hurt_under_writes_costs_no_watch_a_change() -> None:
    """Eight watches on one stream, and a lease that is still alive afterwards."""
    outcomes: dict[str, Outcome] = {}
    slots = trio.CapacityLimiter(ROWS_AT_ONCE)

    async def run_row(name: str) -> None:
        async with slots:
            try:
                outcomes[name] = await outcome_of(*ROWS[name])
            except Exception as error:
                error.add_note(f"in the row: {name}")
                raise

    async with trio.open_nursery() as nursery:
        for name in ROWS:
            nursery.start_soon(run_row, name, name=name)

    assert outcomes == {name: Outcome() for name in ROWS}


async def outcome_of(hurt: Hurt, binary: Path | None) -> Outcome:
    histories = [History() for _ in range(WATCHES)]
    written = History()
    async with (
        open_etcd_cluster(binary=binary) as cluster,
        open_plane(cluster) as writer,
        open_plane(cluster) as plane,
        trio.open_nursery() as nursery,
    ):
        lease = await plane.grant_lease(600)
        for history in histories:
            await nursery.start(watch_keys, plane, "k/", history)
        with trio.CancelScope() as writing:

            async def hurt_under_writes() -> None:
                await until(lambda: len(written.acknowledged) > WRITES)
                await hurt(cluster)
                before = len(written.acknowledged)
                await until(lambda: len(written.acknowledged) > before + WRITES, timeout_s=120)
                writing.cancel()

            nursery.start_soon(hurt_under_writes)
            await write_keys(writer, "k/", written)
        for history in histories:
            history.acknowledged = written.acknowledged
        stored = await caught_up(writer, "k/", histories)
        left_s = await eventually(lambda: plane.keep_alive(lease.id))
        nursery.cancel_scope.cancel()
    return Outcome(
        unstored=len({*written.acknowledged} - {*stored}),
        lost=sum(len(history.lost(stored)) for history in histories),
        duplicated=sum(history.duplicated for history in histories),
        is_ordered=all(history.is_ordered for history in histories),
        has_lease=left_s > 0,
    )


def open_plane(cluster: ServerCluster) -> AbstractAsyncContextManager[EtcdControlPlane]:
    section = EtcdConfig(
        connect_timeout_s=60, request_timeout_s=5, attempt_timeout_s=0.7, silence_s=2
    )
    return open_etcd(cluster.endpoints, section)


async def test_without_a_majority_nothing_is_written_and_with_it_all_goes_on() -> None:
    section = EtcdConfig(connect_timeout_s=60, request_timeout_s=1, attempt_timeout_s=0.4)
    async with open_etcd_cluster() as cluster, open_etcd(cluster.endpoints, section) as plane:
        await eventually(lambda: plane.put("a", b"1"))
        leader, followers = await cluster.leader(), await cluster.followers()
        for follower in followers:
            await follower.kill()
        outcomes = [await refused(plane) for _ in range(2)]
        async with trio.open_nursery() as nursery:
            for follower in followers:
                nursery.start_soon(follower.start)
        await eventually(lambda: plane.put("a", b"3"))
        entry = await eventually(lambda: plane.get("a"))
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

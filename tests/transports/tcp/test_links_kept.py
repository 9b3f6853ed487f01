"""Of more workers than a caller keeps links to, each is asked all the same."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

import pytest
import trio

from tests.runtime.endpoints import Cluster, open_cluster
from tests.transports.tcp.ends import eventually
from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.record import InstanceStatus
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.transports.tcp import TcpRequestPlane, open_request_plane

IDS = ("1", "2", "3")


def plane_of(cluster: Cluster) -> TcpRequestPlane:
    plane = cluster.planes["tcp"]
    assert isinstance(plane, TcpRequestPlane)
    return plane


async def found(cluster: Cluster) -> Client:
    """A client that knows three workers, and the links that there is room for."""
    for each in IDS:
        await cluster.serve(each)
    client = await cluster.client()
    await client.router.wait_instances(len(IDS))
    plane = plane_of(cluster)
    await eventually(lambda: plane.connection_count == cluster.using.links_max)
    return client


async def ask(client: Client, instance_id: str) -> None:
    async with client.stream(2, int, instance_id=instance_id) as stream:
        assert [each async for each in stream] == [0, 1]


async def test_links_are_made_for_requests_and_the_one_idle_longest_is_closed() -> None:
    """Whoever has none counts as live, and so does who had one."""
    async with open_cluster(links_max=2) as cluster:
        client = await found(cluster)
        for each in (*IDS, *reversed(IDS), *IDS):
            await ask(client, each)
            assert plane_of(cluster).connection_count == 2
            assert {status for _, status, _ in client.router.statuses()} == {InstanceStatus.LIVE}


async def test_a_link_with_a_request_on_it_is_not_closed_for_another() -> None:
    going_on = trio.Event()

    async def slow(request: int, _: Context) -> AsyncGenerator[int, None]:
        yield request
        await going_on.wait()
        yield request

    async with open_cluster(links_max=1) as cluster:
        await cluster.serve("5", slow)
        client = await found(cluster)
        async with client.stream(7, int, instance_id="5") as stream:
            assert await anext(stream) == 7
            for each in IDS:
                await ask(client, each)
                # The one in use, and one for who is asked.
                assert plane_of(cluster).connection_count == 2
            going_on.set()
            assert [each async for each in stream] == [7]
        await ask(client, "1")
        assert plane_of(cluster).connection_count == 1


async def test_a_link_that_ends_makes_room_for_one_that_was_closed() -> None:
    async with open_cluster(links_max=2) as cluster:
        client = await found(cluster)
        for each in IDS:
            await ask(client, each)
        plane = plane_of(cluster)
        assert cluster.addresses["1"] not in plane._workers
        await cluster.remove("3")
        worker = plane._workers[cluster.addresses["3"]]
        assert worker.link is not None
        worker.link.cancel()
        await eventually(lambda: cluster.addresses["1"] in plane._workers)


async def test_a_link_that_was_made_for_a_request_is_a_witness_as_well() -> None:
    """That of a worker which was found when there was no room tells of a death, too."""
    async with open_cluster(links_max=1) as cluster:
        client = await found(cluster)

        def is_seen(instance_id: str, status: InstanceStatus) -> bool:
            states = {each.id: status for each, status, _ in client.router.statuses()}
            return states[instance_id] is status

        for each in IDS:
            await ask(client, each)
            (worker,) = plane_of(cluster)._workers.values()
            assert worker.link is not None
            worker.link.cancel()
            await eventually(partial(is_seen, each, InstanceStatus.SUSPECTED))
            await eventually(partial(is_seen, each, InstanceStatus.LIVE))


@pytest.mark.parametrize("links_max", [1, 2])
async def test_who_only_tries_addresses_is_not_held_up_by_the_bound(links_max: int) -> None:
    """As `trinamo status` does: a link that nobody holds any more gives way."""
    async with open_cluster() as cluster:
        for each in IDS:
            await cluster.serve(each)
        using = cluster.using.__class__(links_max=links_max)
        async with open_request_plane(using, RealEnv()) as plane:
            for each in (*IDS, *IDS):
                with trio.CancelScope() as connected:
                    await plane.hold(cluster.addresses[each], connected.cancel, instance_id=each)
                assert connected.cancelled_caught
            assert plane.connection_count <= links_max

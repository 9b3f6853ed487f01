"""Three NATS servers, one of them hurt: what JetStream acknowledged is stored once, in order, and
every job of a work queue is done once.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio

from tests.outages.clusters import ServerCluster, open_nats_cluster
from tests.outages.histories import History, StreamClient
from tests.outages.jobs import open_jobs
from trinamo.conformance.control import until
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.planes import EventPlane, Subscription
from trinamo.transports.nats import open_nats
from trinamo.transports.servers import EmbeddedServer

WRITES = 15

Hurt = Callable[[ServerCluster, EmbeddedServer], Awaitable[None]]


@pytest.fixture
async def cluster() -> AsyncIterator[ServerCluster]:
    async with open_nats_cluster() as cluster:
        yield cluster


async def kill_the_leader(cluster: ServerCluster, leader: EmbeddedServer) -> None:
    await leader.kill()


async def stop_the_leader(cluster: ServerCluster, leader: EmbeddedServer) -> None:
    await leader.stop()


async def kill_a_follower(cluster: ServerCluster, leader: EmbeddedServer) -> None:
    await next(member for member in cluster.members if member is not leader).kill()


async def freeze_the_leader(cluster: ServerCluster, leader: EmbeddedServer) -> None:
    leader.freeze()


async def restart_one_by_one(cluster: ServerCluster, leader: EmbeddedServer) -> None:
    for member in cluster.members:
        await member.restart()
        await cluster.leader()


@pytest.mark.parametrize(
    "hurt",
    [kill_the_leader, stop_the_leader, kill_a_follower, freeze_the_leader, restart_one_by_one],
)
async def test_a_server_hurt_under_writes_costs_no_message_and_no_job(
    cluster: ServerCluster, hurt: Hurt
) -> None:
    """The leader is that of a plain stream and of a queue's jobs at the same time."""
    history = History()
    async with open_nats(cluster.urls, NatsConfig(ping_interval_s=0.5, stream_replicas=3)) as plane:
        stream = StreamClient(plane, "outage")
        await stream.create(replicas=3)
        async with stream.receiving(), open_jobs(plane, "work") as jobs:
            leader = await StreamClient(plane, "trinamo-queue-work-jobs").leader()
            await stream.move_to(leader)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write, history)
                nursery.start_soon(jobs.put)
                await until(lambda: min(len(history.acknowledged), jobs.done.total()) > WRITES)
                await hurt(cluster, next(each for each in cluster.members if each.name == leader))
                acknowledged, done = len(history.acknowledged), jobs.done.total()
                await until(
                    lambda: len(history.acknowledged) > acknowledged + WRITES, timeout_s=120
                )
                await until(lambda: jobs.done.total() > done + WRITES, timeout_s=120)
                nursery.cancel_scope.cancel()
            with trio.fail_after(120):
                await jobs.drained()
        stored = [base64.b64decode(each).decode() for each in await stream.stored()]
        assert await jobs.queue.dead_letters() == []

    assert max(jobs.done.values()) == 1
    assert {*jobs.put_ids} <= {job for job, count in jobs.done.items() if count} | {*jobs.unsettled}
    assert {*jobs.put_ids} <= {*jobs.worked}
    assert {*history.acknowledged} <= {*stored}
    assert len(stored) == len({*stored})
    assert stored == sorted(stored, key=int)
    assert history.is_ordered


async def test_a_plane_goes_to_another_server_and_takes_its_subscriptions_along(
    cluster: ServerCluster,
) -> None:
    """Core messages, without JetStream: at most once, and nothing needs a leader."""
    async with (
        open_nats(cluster.urls, NatsConfig()) as plane,
        open_nats(cluster.urls[::-1], NatsConfig()) as other,
        other.subscribe("news.>") as news,
    ):
        for turn in range(2):
            await until_heard(plane, news, f"{turn}")
            health = await plane.check_health()
            member = next(each for each in cluster.members if each.address in health)
            connections = plane.statistics().connections
            await member.kill()
            await until(lambda least=connections: plane.statistics().connections > least)  # type: ignore[misc]
            await until_heard(plane, news, f"{turn} again")
            await member.restart()
        counts = plane.statistics()

    assert counts.connections == 3
    assert counts.dropped_outgoing == 0


async def until_heard(plane: EventPlane, news: Subscription, text: str) -> None:
    """Publish until it arrives: routes between servers are made after the servers answer."""
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:

            async def publish() -> None:
                while True:
                    await plane.publish("news.today", text.encode())
                    await trio.sleep(0.02)

            nursery.start_soon(publish)
            async for message in news:
                if message.payload == text.encode():
                    break
            nursery.cancel_scope.cancel()

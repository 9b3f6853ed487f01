"""Every wait of a client ends when its instance is gone or silent, or its request is killed."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import trio
import trio.testing

from tests.runtime.caller.scripted import (
    called_home,
    scripted,
    under_way,
)
from tests.runtime.endpoints import Cluster, open_cluster
from tests.transports.tcp.ends import accept_member, eventually
from tests.transports.tcp.streams.raw_links import RawLink
from trinamo.runtime.caller import liveness
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import (
    DeadlineError,
    DisconnectedError,
    KilledError,
)
from trinamo.runtime.protocol.streams.control import Data, Kill, Opened, Sentinel
from trinamo.runtime.protocol.streams.link_frames import LinkMessage
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    RequestKind,
    decode_cancel,
    decode_envelope,
)


async def test_all_that_comes_of_a_worker_is_heard(cluster: Cluster) -> None:
    """Each item counts beside the call and the prologue, or a stream of few would seem silent."""
    await cluster.serve("1")
    client = await cluster.client()
    await client.router.wait_instances()
    async with client.stream(3, int) as stream:
        (request,) = under_way(client)
        items = [item async for item in stream]
        assert items == [0, 1, 2]
        # The call, the prologue, three items or more frames of them, and the end.
        assert (request.heard() or 0) > 2


async def test_an_instance_that_vanishes_ends_the_wait_for_its_ack(cluster: Cluster) -> None:
    client, plane = await scripted(cluster, None, instances=1)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            with pytest.raises(DisconnectedError, match="vanished"):
                async with client.stream(1, int):
                    raise AssertionError

        await plane.waiting.wait()
        await cluster.remove("1")


async def test_an_instance_that_vanishes_ends_the_wait_for_its_call(cluster: Cluster) -> None:
    client, plane = await scripted(cluster, AckStatus.ACCEPTED, instances=1)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            with pytest.raises(DisconnectedError, match="vanished"):
                async with client.stream(1, int):
                    raise AssertionError

        await eventually(lambda: plane.sent)
        await trio.testing.wait_all_tasks_blocked()
        await cluster.remove("1")


async def test_an_instance_that_vanishes_ends_the_wait_for_its_prologue(cluster: Cluster) -> None:
    client, plane = await scripted(cluster, AckStatus.ACCEPTED, instances=1)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            with pytest.raises(DisconnectedError, match="vanished"):
                async with client.stream(1, int):
                    raise AssertionError

        async with called_home(cluster, plane) as worker:
            await trio.testing.wait_all_tasks_blocked(0.01)
            await cluster.remove("1")
            assert await worker.hear() == Kill()


async def test_after_the_prologue_the_connection_tells_better_than_discovery(
    cluster: Cluster,
) -> None:
    """A worker that lost its lease still finishes what it has begun."""
    client, plane = await scripted(cluster, AckStatus.ACCEPTED, instances=1)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            async with client.stream(1, int) as stream:
                assert [item async for item in stream] == [7]

        async with called_home(cluster, plane) as worker:
            (request,) = under_way(client)
            await trio.testing.wait_all_tasks_blocked(0.01)
            # Its call is a sign of life, and so is its prologue; a deletion means less after it.
            assert (request.is_waiting, request.heard()) == (True, 1)
            await worker.say(Opened())
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert (request.is_waiting, request.heard()) == (False, 2)
            await cluster.remove("1")
            await trio.testing.wait_all_tasks_blocked(0.01)
            await worker.say(Data(b"\x07"), Sentinel())
            await eventually(lambda: not under_way(client))


async def test_a_worker_that_lost_its_lease_and_answers_keeps_its_requests_and_gets_new_ones(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways over a real connection: what waits for its first item, and what is asked now."""
    # A worker that a busy machine stalls still answers its probes.
    monkeypatch.setattr(liveness, "_STALE_TIMEOUT_S", 60.0)
    prefilled = trio.Event()

    async def prefill(request: int, context: Context) -> AsyncGenerator[int, None]:
        if request:
            await prefilled.wait()
        yield request

    await cluster.serve("1", prefill)
    client = await cluster.client()
    answers: list[int] = []

    async def ask(request: int) -> None:
        async with client.stream(request, int) as stream:
            answers.extend([item async for item in stream])

    await ask(0)
    await trio.testing.wait_all_tasks_blocked(0.01)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, 7)
        await eventually(lambda: cluster.workers["1"].active_count)
        await cluster.remove("1")
        await eventually(lambda: [s for _, s, _ in client.router.statuses()] == ["stale"])
        await ask(0)
        await cluster.put("1", {"tcp": cluster.addresses["1"]}, incarnation=2)
        await eventually(lambda: [s for _, s, _ in client.router.statuses()] == ["live"])
        prefilled.set()
    assert answers == [0, 0, 7]


async def test_a_worker_that_left_and_is_silent_loses_its_stream_and_is_told(
    cluster: Cluster,
) -> None:
    """A stopped process: its kernel keeps the connection, its lease ran out. It hears Kill, FIN."""
    client, plane = await scripted(cluster, AckStatus.ACCEPTED, instances=1, silence_grace_s=0.05)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            async with client.stream(1, int) as stream:
                assert await anext(stream) == 7
                with pytest.raises(DisconnectedError, match="silent") as caught:
                    await anext(stream)
                assert not caught.value.definite

        async with called_home(cluster, plane) as worker:
            await worker.say(Opened(), Data(b"\x07"))
            await trio.testing.wait_all_tasks_blocked(0.01)
            await cluster.remove("1")
            assert await worker.hear() == Kill()


async def test_a_unary_request_to_a_worker_that_left_and_is_silent_ends(cluster: Cluster) -> None:
    client, plane = await scripted(cluster, None, instances=1, silence_grace_s=0.02)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            with pytest.raises(DisconnectedError, match="silent") as caught:
                await client.call(1, str)
            assert not caught.value.definite

        await plane.waiting.wait()
        await cluster.remove("1")
    assert len(plane.sent) == 1


async def test_a_listed_worker_that_answers_nothing_loses_its_stream_and_is_told(
    cluster: Cluster,
) -> None:
    """A stopped process while the store is away: nobody deletes it, so it is asked."""
    client, plane = await scripted(cluster, AckStatus.ACCEPTED, instances=1, silence_grace_s=1.0)
    plane.alive = False
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            async with client.stream(1, int) as stream:
                assert await anext(stream) == 7
                with pytest.raises(DisconnectedError, match="does not answer") as caught:
                    await anext(stream)
                assert not caught.value.definite

        async with called_home(cluster, plane) as worker:
            await worker.say(Opened(), Data(b"\x07"))
            assert await worker.hear() == Kill()
    assert plane.probe_count >= 4


async def test_before_its_first_item_a_request_to_such_a_worker_goes_elsewhere(
    cluster: Cluster,
) -> None:
    client, plane = await scripted(
        cluster, AckStatus.ACCEPTED, AckStatus.ACCEPTED, instances=2, silence_grace_s=1.0
    )
    plane.alive = False
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            async with client.stream(1, int) as stream:
                assert [item async for item in stream] == [7]

        async with called_home(cluster, plane) as frozen:
            assert await frozen.hear() == Kill()
        await eventually(lambda: len(plane.sent) == 2)
        plane.alive = True
        async with called_home(cluster, plane) as worker:
            await worker.say(Opened(), Data(b"\x07"), Sentinel())
            await eventually(lambda: not under_way(client))
    assert len({envelope.instance_id for envelope in plane.sent}) == 2


async def test_a_unary_request_to_a_listed_worker_that_answers_nothing_ends(
    cluster: Cluster,
) -> None:
    client, plane = await scripted(cluster, None, instances=1, silence_grace_s=0.02)
    plane.alive = False
    with pytest.raises(DisconnectedError, match="does not answer") as caught:
        await client.call(1, str)
    assert not caught.value.definite
    assert len(plane.sent) == 1


async def test_a_worker_that_accepts_and_never_calls_is_given_up(cluster: Cluster) -> None:
    client, _ = await scripted(cluster, AckStatus.ACCEPTED, instances=1, opening_timeout_s=0.02)
    with pytest.raises(DisconnectedError, match="neither opened its stream"):
        async with client.stream(1, int):
            raise AssertionError


@pytest.mark.parametrize("wait", ["ack", "call", "prologue"])
async def test_kill_ends_every_wait_at_once(cluster: Cluster, wait: str) -> None:
    client, plane = await scripted(cluster, None if wait == "ack" else AckStatus.ACCEPTED)
    context = Context("r")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            with pytest.raises(KilledError) as caught:
                async with client.stream(1, int, context=context):
                    raise AssertionError
            assert caught.value.reason == "client_disconnect"

        if wait == "prologue":
            async with called_home(cluster, plane) as worker:
                await trio.testing.wait_all_tasks_blocked(0.01)
                context.kill(Reason.CLIENT_DISCONNECT)
                assert await worker.hear() == Kill(Reason.CLIENT_DISCONNECT)
        else:
            await eventually(lambda: plane.sent)
            await trio.testing.wait_all_tasks_blocked()
            context.kill(Reason.CLIENT_DISCONNECT)
    assert len(plane.sent) == 1


async def test_a_request_cancelled_while_it_waits_for_its_ack_is_cancelled_at_the_worker() -> None:
    """Over the real plane: the cancel follows the request on the same connection."""
    heard: list[str | None] = []
    async with open_cluster() as cluster:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def worker() -> None:
            end = await accept_member(listener, "1")
            async with listener, end.stream:
                link = RawLink(end)
                while (arrival := await link.hear()) is not None:
                    assert isinstance(arrival[1], LinkMessage)
                    header = arrival[1].header
                    cancelled = decode_cancel(header)
                    if cancelled is not None:
                        heard.append(cancelled.request_id)
                    elif (envelope := decode_envelope(header)).kind is RequestKind.STREAM:
                        heard.append(envelope.id)

        cluster.nursery.start_soon(worker)
        host, port = listener.socket.getsockname()
        await cluster.put("1", {"tcp": f"{host}:{port}"})
        client = await cluster.client()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def ask() -> None:
                    async with client.stream(1, int):
                        raise AssertionError

                await eventually(lambda: heard)
                scope.cancel()
        await eventually(lambda: heard.count(heard[0]) == 2)


async def test_a_unary_request_out_of_time_is_a_deadline(cluster: Cluster) -> None:
    client, _ = await scripted(cluster, None)
    with pytest.raises(DeadlineError, match="time is up"):
        await client.call(1, str, timeout_s=0.01)

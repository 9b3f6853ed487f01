"""The client: attempts, typed refusals, and every wait that must end when the instance is gone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from tests.runtime.endpoints import NAME, Cluster, open_cluster
from tests.transports.tcp.ends import RawEnd, accept_member, eventually, handshake
from trinamo.runtime.caller.client import Client
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    DisconnectedError,
    EngineError,
    KilledError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
    UnknownModelError,
)
from trinamo.runtime.logs.fields import current_fields, log_fields
from trinamo.runtime.planes import RequestPlane
from trinamo.runtime.protocol.streams.codec import FrameDecoder
from trinamo.runtime.protocol.streams.control import Data, Kill, Opened, Sentinel
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    Answer,
    Envelope,
    RequestKind,
    decode_cancel,
    decode_envelope,
    encode_envelope,
    raise_for_nack,
)

DEAD = "127.0.0.1:1"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as cluster:
        yield cluster


async def who_answers(client: Client) -> str:
    async with client.stream(1, int) as stream:
        assert [item async for item in stream] == [0]
        return stream.instance.id


class ScriptedPlane:
    """A request plane whose workers answer as told; it stands in for real ones that misbehave.

    Probes are answered while they are `alive`.
    """

    transport = "tcp"
    is_usable = True

    def __init__(self, *answers: AckStatus | TrinamoError | None) -> None:
        self.answers: Sequence[AckStatus | TrinamoError | None] = list(answers)
        self.sent: list[Envelope] = []
        self.waiting = trio.Event()
        self.alive = True
        self.probe_count = 0
        self.raises_nacks = False

    async def send(self, address: str, envelope: Envelope, payload: bytes) -> Answer:
        await trio.lowlevel.checkpoint()
        if envelope.kind is RequestKind.PROBE:
            self.probe_count += 1
            if not self.alive:
                await trio.sleep_forever()
            return Answer(
                id=envelope.id, status=AckStatus.ACCEPTED, instance_id=envelope.instance_id
            )
        self.sent.append(envelope)
        answer, *self.answers = self.answers
        if answer is None:
            self.waiting.set()
            await trio.sleep_forever()
            raise AssertionError
        if isinstance(answer, TrinamoError):
            raise answer
        return Answer(id=envelope.id, status=answer)

    async def call(self, address: str, envelope: Envelope, payload: bytes) -> bytes:
        ack = await self.send(address, envelope, payload)
        if self.raises_nacks:
            raise_for_nack(ack)
        return msgspec.msgpack.encode("done")

    async def hold(self, address: str, on_connected: object, *, instance_id: str = "") -> None:
        await trio.sleep_forever()


async def scripted(
    cluster: Cluster,
    *answers: AckStatus | TrinamoError | None,
    instances: int = 3,
    **settings: Any,
) -> tuple[Client, ScriptedPlane]:
    plane = ScriptedPlane(*answers)
    checked: RequestPlane = plane
    cluster.planes = {"tcp": checked}
    for number in range(instances):
        await cluster.put(f"{number + 1}", {"tcp": DEAD})
    return await cluster.client(**settings), plane


# --- retry elsewhere -----------------------------------------------------------------------------


async def test_a_dead_instance_is_tried_once_then_inhibited_and_another_answers(
    cluster: Cluster,
) -> None:
    await cluster.put("1", {"tcp": DEAD})
    await cluster.serve("2")
    client = await cluster.client()
    await client.router.wait_instances(2)
    assert [await who_answers(client) for _ in range(6)] == ["2"] * 6


async def test_a_request_s_lines_name_its_last_instance_and_those_about_an_instance_name_it(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.put("1", {"tcp": DEAD})
    await cluster.serve("2")
    client = await cluster.client()
    await client.router.wait_instances(2)

    for _ in range(2):
        with log_fields(request_id="r"):
            assert await who_answers(client) == "2"
            assert current_fields()["instance_id"] == "2"

    told = {vars(each)["instance_id"] for each in caplog.records if "inhibited" in each.message}
    assert told == {"1"}


async def test_an_address_that_makes_no_sense_harms_only_who_advertised_it(
    cluster: Cluster,
) -> None:
    """It comes from discovery, where anybody may have written it."""
    for number, address in enumerate(("a..b:1", "\u2028:1", "", ":0", "x" * 300 + ":1")):
        await cluster.put(f"{number + 1:x}", {"tcp": address})
    await cluster.serve("f")
    client = await cluster.client()
    await client.router.wait_instances()
    assert [await who_answers(client) for _ in range(6)] == ["f"] * 6


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (AckStatus.OVERLOADED, OverloadedError),
        (AckStatus.DRAINING, UnavailableError),
        (AckStatus.UNKNOWN_ENDPOINT, UnavailableError),
        (AckStatus.UNKNOWN_MODEL, UnknownModelError),
        (ConnectError("x"), ConnectError),
        (DisconnectedError("x"), DisconnectedError),
        (RemoteProtocolError("x"), RemoteProtocolError),
    ],
)
async def test_what_may_go_better_elsewhere_is_tried_elsewhere_and_nowhere_twice(
    cluster: Cluster, answer: AckStatus | TrinamoError, error: type[TrinamoError]
) -> None:
    client, plane = await scripted(cluster, answer, answer, answer)
    with pytest.raises(error):
        async with client.stream(1, int):
            raise AssertionError
    assert sorted(envelope.instance_id for envelope in plane.sent) == ["1", "2", "3"]
    assert len({envelope.id for envelope in plane.sent}) == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (AckStatus.INVALID, RequestError),
        (EngineError("x"), EngineError),
    ],
)
async def test_what_would_fail_elsewhere_too_is_raised_at_once(
    cluster: Cluster, answer: AckStatus | TrinamoError, error: type[TrinamoError]
) -> None:
    client, plane = await scripted(cluster, answer)
    with pytest.raises(error):
        async with client.stream(1, int):
            raise AssertionError
    assert len(plane.sent) == 1


async def test_attempts_have_a_bound_and_a_named_instance_is_the_only_one(cluster: Cluster) -> None:
    client, plane = await scripted(cluster, *[AckStatus.OVERLOADED] * 3, attempts_max=2)
    with pytest.raises(OverloadedError):
        async with client.stream(1, int):
            raise AssertionError
    assert len(plane.sent) == 2
    with pytest.raises(OverloadedError):
        async with client.stream(1, int, instance_id="3"):
            raise AssertionError
    assert plane.sent[-1].instance_id == "3"
    assert len(plane.sent) == 3


async def test_a_stopped_request_is_not_tried_again(cluster: Cluster) -> None:
    client, plane = await scripted(cluster, AckStatus.OVERLOADED)
    context = Context("r")
    context.stop()
    with pytest.raises(OverloadedError):
        async with client.stream(1, int, context=context):
            raise AssertionError
    assert len(plane.sent) == 1


async def test_nobody_is_unavailable(cluster: Cluster) -> None:
    client = await cluster.client()
    with pytest.raises(UnavailableError):
        async with client.stream(1, int):
            raise AssertionError
    await cluster.put("1", {"carrier_pigeon": "coop-7"})
    await client.router.wait_instances()
    for instance_id, why in ((None, "can be asked"), ("1", "carrier_pigeon")):
        with pytest.raises(UnavailableError, match=why):
            async with client.stream(1, int, instance_id=instance_id):
                raise AssertionError


async def test_a_unary_request_is_repeated_only_if_it_certainly_did_not_run(
    cluster: Cluster,
) -> None:
    client, plane = await scripted(cluster, ConnectError("x"), DisconnectedError("x"))
    unary = Client(client.router, cluster.home, client._env)
    with pytest.raises(DisconnectedError):
        await unary.call(1, str)
    assert len(plane.sent) == 2
    plane.answers = [AckStatus.ACCEPTED]
    assert await unary.call(1, str) == "done"


async def test_a_unary_request_asks_nobody_twice_and_as_many_as_it_may(cluster: Cluster) -> None:
    refused = [AckStatus.OVERLOADED] * 6
    client, plane = await scripted(cluster, *refused, instances=4, attempts_max=3)
    plane.raises_nacks = True
    with pytest.raises(OverloadedError):
        await client.call(1, str)
    assert len({envelope.instance_id for envelope in plane.sent}) == len(plane.sent) == 3


async def test_a_unary_request_passes_over_an_instance_that_no_plane_reaches(
    cluster: Cluster,
) -> None:
    await cluster.put("1", {"carrier_pigeon": "coop-7"})
    client, plane = await scripted(cluster, *[AckStatus.ACCEPTED] * 4, instances=0)
    await cluster.put("2", {"tcp": DEAD})
    await client.router.wait_instances(2)
    assert [await client.call(1, str) for _ in range(4)] == ["done"] * 4
    assert {envelope.instance_id for envelope in plane.sent} == {"2"}


async def test_an_instance_that_answers_is_no_longer_inhibited(cluster: Cluster) -> None:
    for each in ("1", "2"):
        await cluster.serve(each)
    client = await cluster.client()
    await client.router.wait_instances(2)
    client.router.inhibit(client.router.choose(instance_id="1"), is_nonsensical=True)
    assert {await who_answers(client) for _ in range(4)} == {"2"}
    async with client.stream(1, int, instance_id="1") as stream:
        assert [item async for item in stream] == [0]
    assert {await who_answers(client) for _ in range(4)} == {"1", "2"}


async def test_all_that_comes_of_a_worker_is_heard(cluster: Cluster) -> None:
    """Each item counts beside the call and the prologue, or a stream of few would seem silent."""
    await cluster.serve("1")
    client = await cluster.client()
    await client.router.wait_instances()
    async with client.stream(3, int) as stream:
        (flight,) = client.router._flights.of("1")
        assert flight.heard is not None
        items = [item async for item in stream]
        assert items == [0, 1, 2]
        # The call, the prologue, three items or more frames of them, and the end.
        assert (flight.heard() or 0) > 2


async def test_the_ids_of_attempts_fit_whatever_the_request_is_called(cluster: Cluster) -> None:
    client, plane = await scripted(cluster, *[AckStatus.OVERLOADED] * 3)
    with pytest.raises(OverloadedError):
        async with client.stream(1, int, context=Context("long" * 100 + "-end")):
            raise AssertionError
    for envelope in plane.sent:
        assert decode_envelope(encode_envelope(envelope)).id == envelope.id
        assert "-end." in envelope.id
    assert len({envelope.id for envelope in plane.sent}) == 3


async def test_a_result_that_does_not_decode_is_the_worker_s_fault(cluster: Cluster) -> None:
    client, _ = await scripted(cluster, AckStatus.ACCEPTED)
    with pytest.raises(RemoteProtocolError):
        await client.call(1, int)


# --- waits that must end -------------------------------------------------------------------------


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


@asynccontextmanager
async def called_home(cluster: Cluster, plane: ScriptedPlane) -> AsyncIterator[RawEnd]:
    """The connection of a worker that has greeted and says nothing more."""
    await eventually(lambda: plane.sent)
    asked = plane.sent[-1].response
    assert asked is not None
    host, _, port = asked.address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        end = RawEnd(stream)
        await end.say(handshake(asked))
        yield end


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
            await worker.wait_gone()


async def test_after_the_prologue_the_connection_is_the_better_witness(cluster: Cluster) -> None:
    """A worker that lost its lease still finishes what it has begun."""
    client, plane = await scripted(cluster, AckStatus.ACCEPTED, instances=1)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            async with client.stream(1, int) as stream:
                assert [item async for item in stream] == [7]

        async with called_home(cluster, plane) as worker:
            (flight,) = client.router._flights.of("1")
            assert flight.heard is not None
            await trio.testing.wait_all_tasks_blocked(0.01)
            # Its call is a sign of life, and so is its prologue; a deletion means less after it.
            assert (flight.is_waiting, flight.heard()) == (True, 1)
            await worker.say(Opened())
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert (flight.is_waiting, flight.heard()) == (False, 2)
            await cluster.remove("1")
            await trio.testing.wait_all_tasks_blocked(0.01)
            await worker.say(Data(b"\x07"), Sentinel())
            await worker.wait_gone()


async def test_a_worker_that_lost_its_lease_and_answers_keeps_its_requests_and_gets_new_ones(
    cluster: Cluster,
) -> None:
    """Both ways over a real connection: what waits for its first item, and what is asked now."""
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
        await eventually(lambda: [s for _, s, _ in client.router.standings()] == ["lingering"])
        await ask(0)
        await cluster.put("1", {"tcp": cluster.addresses["1"]}, incarnation=2)
        await eventually(lambda: [s for _, s, _ in client.router.standings()] == ["live"])
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
            assert await worker.hear_all() == [Kill()]


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
    client, plane = await scripted(cluster, AckStatus.ACCEPTED, instances=1, silence_grace_s=0.05)
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
            assert await worker.hear_all() == [Kill()]
    assert plane.probe_count >= 4


async def test_before_its_first_item_a_request_to_such_a_worker_goes_elsewhere(
    cluster: Cluster,
) -> None:
    client, plane = await scripted(
        cluster, AckStatus.ACCEPTED, AckStatus.ACCEPTED, instances=2, silence_grace_s=0.05
    )
    plane.alive = False
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            async with client.stream(1, int) as stream:
                assert [item async for item in stream] == [7]

        async with called_home(cluster, plane) as frozen:
            await frozen.wait_gone()
        await eventually(lambda: len(plane.sent) == 2)
        plane.alive = True
        async with called_home(cluster, plane) as worker:
            await worker.say(Opened(), Data(b"\x07"), Sentinel())
            await worker.wait_gone()
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
    client, _ = await scripted(cluster, AckStatus.ACCEPTED, instances=1, call_home_timeout_s=0.02)
    with pytest.raises(DisconnectedError, match="did not call home"):
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
                await worker.wait_gone()
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
            async with listener, (await accept_member(listener, "1")).stream as stream:
                decoder = FrameDecoder()
                async for data in stream:
                    for header, _ in decoder.feed(bytes(data)):
                        cancelled = decode_cancel(header)
                        if cancelled is not None:
                            heard.append(cancelled)
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
    with pytest.raises(DeadlineError, match=str(NAME)):
        await client.call(1, str, timeout_s=0.01)


# --- after the first item ------------------------------------------------------------------------


async def test_an_item_that_does_not_decode_ends_the_stream_typed(cluster: Cluster) -> None:
    await cluster.serve("1")
    client = await cluster.client()
    async with client.stream(3, str) as stream:
        with pytest.raises(RemoteProtocolError):
            await anext(stream)


async def test_a_worker_that_breaks_off_is_inhibited_and_the_stream_is_not_repeated(
    cluster: Cluster,
) -> None:
    async def breaks_off(_: int, context: Context) -> AsyncGenerator[int, None]:
        yield 0
        context.kill(Reason.WORKER_SHUTDOWN)
        await trio.lowlevel.checkpoint()

    await cluster.serve("1", breaks_off)
    client = await cluster.client()
    async with client.stream(1, int) as stream:
        assert await anext(stream) == 0
        with pytest.raises(DisconnectedError):
            await anext(stream)
    await cluster.serve("2")
    await client.router.wait_instances(2)
    assert {await who_answers(client) for _ in range(4)} == {"2"}


async def test_draining_instances_get_nothing_new(cluster: Cluster) -> None:
    first, _ = await cluster.serve("1"), await cluster.serve("2")
    client = await cluster.client()
    await client.router.wait_instances(2)
    first.refuse_new()
    # Discovery has not heard of it yet: the worker's own word sends the request elsewhere.
    assert {await who_answers(client) for _ in range(4)} == {"2"}
    address = client.router.instances[0].transports
    await cluster.put("1", address, draining=True)
    await eventually(lambda: client.router.instances[0].draining)
    assert {await who_answers(client) for _ in range(4)} == {"2"}

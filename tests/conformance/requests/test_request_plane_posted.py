"""Requests that are posted: sent without a wait, their answers taken by a plain function."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import trio
import trio.testing

from tests.conformance.requests.service import ack_of, probe, result_of, stream, unary
from tests.conformance.requests.tcp_pairs import Pair, connected
from tests.leftovers import uncollected
from tests.transports.tcp.ends import accept_member, eventually, options
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    EngineError,
    ImpostorError,
    RequestError,
    TrinamoError,
)
from trinamo.runtime.protocol.streams.request import AckStatus, Envelope, Reason, RequestAnswer
from trinamo.transports.tcp import TcpRequestPlane, open_request_plane


class Taken:
    """What came of one posted request."""

    def __init__(self) -> None:
        self.all: list[tuple[RequestAnswer | TrinamoError, bytes]] = []

    def __call__(self, answer: RequestAnswer | TrinamoError, result: bytes) -> None:
        self.all.append((answer, result))

    @property
    def only(self) -> tuple[RequestAnswer | TrinamoError, bytes]:
        (found,) = self.all
        return found


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with connected() as pair:
        await ack_of(pair.plane, pair.address, stream("first"), b"")
        pair.service.admitted.clear()
        yield pair


async def test_nothing_is_posted_before_the_connection_stands() -> None:
    """What takes a wait is left to those who may wait, and it happens once."""
    async with connected() as pair:
        taken = Taken()
        assert pair.plane.post(pair.address, stream("r1"), b"x", taken) is None
        await pair.plane.wait_room(pair.address)
        assert pair.plane.post(pair.address, stream("r2"), b"x", Taken()) is not None
        assert pair.plane.post(pair.address, stream("r3"), b"x", taken) is not None
        await eventually(lambda: taken.all)
        assert [envelope.id for envelope, _ in pair.service.admitted] == ["r2", "r3"]


async def test_acks_nacks_results_and_errors_are_taken_as_they_come(pair: Pair) -> None:
    ack, nack, result, error = Taken(), Taken(), Taken(), Taken()
    posted: list[tuple[Envelope, Taken]] = [
        (stream("r1"), ack),
        (stream("r2", "overloaded"), nack),
        (unary("r3"), result),
        (unary("r4", "fail"), error),
    ]
    for envelope, taken in posted:
        assert pair.plane.post(pair.address, envelope, b"x", taken) is not None
        assert not taken.all
    await eventually(lambda: all(taken.all for _, taken in posted))
    statuses = [taken.only[0] for taken in (ack, nack, result)]
    assert [each.status for each in statuses if isinstance(each, RequestAnswer)] == [
        AckStatus.ACCEPTED,
        AckStatus.OVERLOADED,
        AckStatus.ACCEPTED,
    ]
    assert result.only[1] == b"re:x"
    answer, _ = error.only
    assert isinstance(answer, RequestAnswer)
    assert answer.error is not None
    assert answer.error.code == EngineError.code


async def test_a_cancelled_delivery_tells_the_worker_and_takes_nothing(pair: Pair) -> None:
    taken = Taken()
    delivery = pair.plane.post(pair.address, unary("r1", "wait"), b"", taken)
    assert delivery is not None
    await eventually(lambda: pair.service.running == 1)
    delivery.cancel(Reason.DEADLINE)
    delivery.cancel()
    await eventually(lambda: pair.service.cancelled == ["r1"])
    assert pair.service.reasons == [Reason.DEADLINE]
    await eventually(lambda: pair.service.running == 0)
    assert await result_of(pair.plane, pair.address, unary("r2"), b"x") == b"re:x"
    assert not taken.all


async def test_a_forgotten_delivery_goes_on_at_the_worker(pair: Pair) -> None:
    taken = Taken()
    delivery = pair.plane.post(pair.address, unary("r1", "wait"), b"", taken)
    assert delivery is not None
    await eventually(lambda: pair.service.running == 1)
    delivery.forget()
    delivery.cancel()
    pair.service.release.set()
    await eventually(lambda: pair.service.running == 0)
    assert await result_of(pair.plane, pair.address, unary("r2"), b"x") == b"re:x"
    assert not taken.all
    assert not pair.service.cancelled


async def test_what_can_be_said_at_once_is_raised_at_once(pair: Pair) -> None:
    taken = Taken()
    with pytest.raises(RequestError, match="a payload of"):
        pair.plane.post(pair.address, stream("r1"), bytes(options().data_bytes_max + 1), taken)
    elsewhere = Envelope(id="r2", endpoint="accepted", instance_id="b2", kind=unary("r").kind)
    with pytest.raises(ImpostorError, match="not b2"):
        pair.plane.post(pair.address, elsewhere, b"", taken)
    assert not taken.all
    assert not pair.service.admitted


async def posted_to_a_mute(plane: TcpRequestPlane, address: str, taken: Taken) -> None:
    """Post to a worker that greets, and then says nothing; the connection has to stand first."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await plane.hold(address, scope.cancel)

            nursery.start_soon(watch)
    assert plane.post(address, stream("r1"), b"", taken) is not None


async def test_a_worker_that_ends_before_it_answers_is_disconnected() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    taken = Taken()
    async with (
        listener,
        open_request_plane(options(), RealEnv()) as plane,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(posted_to_a_mute, plane, address, taken)
        worker = await accept_member(listener)
        await worker.stream.receive_some()
        await worker.stream.aclose()
        await eventually(lambda: taken.all)
        error, _ = taken.only
        assert isinstance(error, DisconnectedError)
        assert plane.connection_count == 0


async def test_a_link_that_was_never_made_is_not_left_to_the_collector() -> None:
    """Those to a worker that died are dialled again and again."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    await listener.aclose()
    with uncollected() as left:
        async with open_request_plane(options(), RealEnv()) as plane:
            with suppress(ConnectError):
                await plane.hold(address, lambda: None)
        assert left(ConnectError) == []


async def test_a_link_that_says_its_last_word_takes_no_request() -> None:
    """It waits for a worker that broke the protocol to hang up; who is asked meanwhile is dialled anew."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    broken, whole = Taken(), Taken()
    async with (
        listener,
        open_request_plane(options(), RealEnv()) as plane,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(posted_to_a_mute, plane, address, broken)
        worker = await accept_member(listener)
        await worker.stream.receive_some()
        link = plane._workers[address]
        await worker.stream.send_all(b"\xff" * 64)
        await eventually(lambda: not link.has_room)
        assert plane.post(address, stream("r2"), b"", whole) is None
        assert not broken.all, "it is still there"
        nursery.start_soon(posted_to_a_mute, plane, address, whole)
        other = await accept_member(listener)
        assert await other.stream.receive_some()
        for each in (worker, other):
            await each.stream.aclose()
        await eventually(lambda: broken.all and whole.all)


async def test_a_probe_that_is_waited_for_no_more_leaves_the_connection_as_it_is() -> None:
    """Whoever probes bounds the wait; then a late answer is for nobody."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    async with (
        listener,
        open_request_plane(options(), RealEnv()) as plane,
        trio.open_nursery() as nursery,
    ):

        @nursery.start_soon
        async def ask() -> None:
            await plane.wait_room(address)
            with trio.move_on_after(0.02) as scope:
                await ack_of(plane, address, probe("p1"), b"")
            assert scope.cancelled_caught

        worker = await accept_member(listener, "a1")
        await eventually(lambda: not nursery.child_tasks)
        assert plane.connection_count == 1
        await worker.stream.aclose()

"""The request plane over TCP: what every request plane does, and what a connection adds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from tests.conformance.requests.service import ack_of, probe, result_of, stream, unary
from tests.conformance.requests.tcp_pairs import Pair, connected
from tests.transports.tcp.ends import eventually
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    EngineError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from trinamo.runtime.planes import RequestPlane, RequestServer
from trinamo.runtime.protocol.streams.request import AckStatus, Reason, RequestAnswer
from trinamo.transports.tcp import open_request_plane


@pytest.fixture(params=[b"", bytes(range(32))], ids=["clear", "sealed"])
async def pair(request: Any) -> AsyncIterator[Pair]:
    async with connected(secret=request.param) as pair:
        yield pair


async def test_they_are_the_interfaces_of_the_runtime(pair: Pair) -> None:
    server: RequestServer = pair.server
    plane: RequestPlane = pair.plane
    assert server.transport == plane.transport == "tcp"


async def test_an_accepted_request_arrives_whole_and_is_acknowledged(pair: Pair) -> None:
    envelope = stream("r1")
    ack = await ack_of(pair.plane, pair.address, envelope, bytes(range(256)))
    assert ack == RequestAnswer(id="r1", status=AckStatus.ACCEPTED, message="it is accepted")
    assert pair.service.admitted == [(envelope, bytes(range(256)))]


@pytest.mark.parametrize("status", [each for each in AckStatus if each is not AckStatus.ACCEPTED])
async def test_every_nack_reaches_the_caller_as_itself(pair: Pair, status: AckStatus) -> None:
    ack = await ack_of(pair.plane, pair.address, stream("r1", status.value), b"")
    assert ack == RequestAnswer(id="r1", status=status, message=f"it is {status}")


async def test_a_probe_is_decided_like_a_request_that_streams_and_says_who_answers(
    pair: Pair,
) -> None:
    for status in (AckStatus.ACCEPTED, AckStatus.DRAINING):
        ack = await ack_of(pair.plane, pair.address, probe("p1", status.value), b"")
        assert ack == RequestAnswer(
            id="p1", status=status, message=f"it is {status}", instance_id="a1"
        )
    assert pair.service.answered == []


async def test_unary_requests_at_once_share_a_connection_and_get_their_own_results(
    pair: Pair,
) -> None:
    results: dict[int, bytes] = {}

    async def call(number: int) -> None:
        results[number] = await result_of(
            pair.plane, pair.address, unary(f"r{number}"), b"%d" % number
        )

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(call, number)
    assert results == {number: b"re:%d" % number for number in range(200)}
    assert pair.plane.connection_count == 1


async def test_answers_may_overtake_each_other(pair: Pair) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(result_of, pair.plane, pair.address, unary("slow", "wait"), b"")
        await eventually(lambda: pair.service.running == 1)
        assert await result_of(pair.plane, pair.address, unary("fast"), b"x") == b"re:x"
        pair.service.release.set()


async def test_a_typed_error_of_the_handler_is_raised_at_the_caller(pair: Pair) -> None:
    with pytest.raises(EngineError, match="out of luck") as failed:
        await result_of(pair.plane, pair.address, unary("r1", "fail"), b"")
    assert not failed.value.definite
    with pytest.raises(UnavailableError, match="draining"):
        await result_of(pair.plane, pair.address, unary("r2", "drain"), b"")


async def test_a_port_nobody_listens_on_is_a_connect_error_and_later_requests_dial_again(
    pair: Pair,
) -> None:
    for _ in range(2):
        with pytest.raises(ConnectError) as caught:
            await ack_of(pair.plane, "127.0.0.1:1", stream("r1"), b"")
        assert caught.value.definite
    assert pair.plane.connection_count == 0


async def test_a_caller_that_is_cancelled_tells_the_worker(pair: Pair) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            context = Context("r1")
            context.stop(Reason.CLIENT_DISCONNECT)
            call = partial(result_of, pair.plane, context=context)
            nursery.start_soon(call, pair.address, unary("r1", "wait"), b"")
            await eventually(lambda: pair.service.running == 1)
            scope.cancel()
    await eventually(lambda: pair.service.cancelled == ["r1"])
    assert pair.service.reasons == [Reason.CLIENT_DISCONNECT]
    await eventually(lambda: pair.service.running == 0)
    assert pair.service.answered == []
    assert await result_of(pair.plane, pair.address, unary("r2"), b"x") == b"re:x"


async def test_a_caller_that_goes_away_cancels_its_unary_requests(pair: Pair) -> None:
    async with (
        open_request_plane(pair.plane.options, RealEnv()) as theirs,
        trio.open_nursery() as nursery,
    ):

        @nursery.start_soon
        async def call() -> None:
            with pytest.raises(DisconnectedError):
                await result_of(theirs, pair.address, unary("r1", "wait"), b"")

        await eventually(lambda: pair.service.running == 1)
        theirs._nursery.cancel_scope.cancel()
    await eventually(lambda: pair.service.running == 0)


async def test_what_is_larger_than_a_frame_is_refused_before_it_costs_the_connection() -> None:
    async with connected(data_bytes_max=1000, header_bytes_max=1000) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(result_of, pair.plane, pair.address, unary("slow", "wait"), b"")
            await eventually(lambda: pair.service.running == 1)
            with pytest.raises(RequestError, match="payload of 1001 bytes"):
                await result_of(pair.plane, pair.address, unary("r1"), b"x" * 1001)
            with pytest.raises(RequestError, match="envelope of"):
                await result_of(pair.plane, pair.address, unary("r2", "x" * 1000), b"")
            with pytest.raises(EngineError, match="result of 1001 bytes"):
                await result_of(pair.plane, pair.address, unary("r3", "big"), b"1001")
            assert (
                await result_of(pair.plane, pair.address, unary("r4", "big"), b"1000")
                == b"x" * 1000
            )
            pair.service.release.set()
        assert pair.server.malformed_count == 0


async def test_more_unary_requests_than_the_bound_are_overloaded(pair: Pair) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(1024):
            nursery.start_soon(
                result_of, pair.plane, pair.address, unary(f"r{number}", "wait"), b""
            )
        await eventually(lambda: pair.service.running == 1024)
        with pytest.raises(OverloadedError):
            await result_of(pair.plane, pair.address, unary("one more"), b"")
        pair.service.release.set()

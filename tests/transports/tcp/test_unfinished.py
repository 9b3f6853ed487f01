"""Frames that are not whole: what they may hold together, who waits, and who is ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

import pytest
import trio
import trio.testing

from tests.conformance.requests.service import Service, result_of, unary
from tests.transports.tcp.ends import (
    PATIENCE_S,
    RawEnd,
    accept_member,
    eventually,
    lone_client,
    open_home,
    options,
    raw_member,
)
from tests.transports.tcp.streams.raw_links import RawLink, raw_caller, raw_worker
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import OverloadedError, RemoteProtocolError
from trinamo.runtime.protocol.streams.codec import FrameDecoder, encode_frame
from trinamo.runtime.protocol.streams.control import Kill, Opened, Refused
from trinamo.runtime.protocol.streams.link_frames import (
    Kind,
    LinkMessage,
    encode_item,
    encode_message,
)
from trinamo.runtime.protocol.streams.multiplex import PART_BYTES, Multiplexer
from trinamo.runtime.protocol.streams.request import AckStatus, decode_answer, encode_envelope
from trinamo.transports.sockets.wire import Wire
from trinamo.transports.tcp import (
    TcpOptions,
    TcpRequestServer,
    open_request_plane,
    open_request_server,
)
from trinamo.transports.tcp.unfinished import FREE_BYTES, ByteBudget, Unfinished

MB = 1 << 20


def in_parts(kind: Kind, header: bytes, payload_bytes: int) -> bytes:
    """A message of a link as it is sent."""
    mux, sent = Multiplexer(), b""
    mux.add_message(kind, header, bytes(payload_bytes))
    while not mux.is_empty:
        sent += mux.take()[0]
    return sent


def request(number: int, payload_bytes: int) -> bytes:
    return in_parts(Kind.REQUEST, encode_envelope(unary(f"r{number}")), payload_bytes)


async def test_room_that_comes_back_is_everybody_s_though_one_is_favoured() -> None:
    """That one may hold more than there is, until its frame is whole: nobody waits for it beside room."""
    budget, favoured, waits = ByteBudget(10), object(), object()
    with trio.fail_after(PATIENCE_S):
        await budget.grow("first", 8)
        await budget.grow(favoured, 8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(budget.grow, waits, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert len(budget._waiting) == 1
            budget.give_back("first", 8)


@asynccontextmanager
async def serving(**changes: float) -> AsyncIterator[tuple[TcpRequestServer, Service, TcpOptions]]:
    using, service = options(**changes), Service()
    with trio.fail_after(PATIENCE_S):
        async with (
            open_request_server(using, RealEnv(), instance_id="a1") as server,
            trio.open_nursery() as nursery,
        ):
            await nursery.start(server.serve, service)
            yield server, service, using
            nursery.cancel_scope.cancel()
        assert (using.budget.used_bytes, using.payloads.used_bytes) == (0, 0)
        assert len(using.budget._waiting) == 0


async def answer(end: RawEnd) -> AckStatus | None:
    """What a request has brought; None: the link is ended."""
    arrival = await RawLink(end).hear()
    assert arrival is not None
    if isinstance(arrival[1], Refused):
        return None
    assert isinstance(arrival[1], LinkMessage)
    return decode_answer(arrival[1].header).ack.status


async def test_unfinished_frames_of_many_connections_hold_no_more_than_the_budget() -> None:
    """Attack row 7: forty connections with 20 MB each of a frame that never becomes whole."""
    async with (
        serving(unfinished_bytes_max=4 * MB) as (server, service, using),
        AsyncExitStack() as stack,
    ):
        ends = [await stack.enter_async_context(raw_member(server.address)) for _ in range(12)]
        async with trio.open_nursery() as nursery:
            for number, end in enumerate(ends):
                nursery.start_soon(end.say, request(number, 2 * MB)[:-1])
            await eventually(lambda: len(using.budget._waiting))
            await trio.testing.wait_all_tasks_blocked(0.1)
            # Each may have read one buffer more before it found the budget spent, and one is favoured.
            most = 4 * MB + 2 * MB + len(ends) * (FREE_BYTES + using.buffer_bytes)
            assert using.budget.used_bytes <= most
            # Small requests are not concerned.
            small = await stack.enter_async_context(raw_member(server.address))
            await small.say(request(99, 10))
            assert await answer(small) is AckStatus.ACCEPTED
            nursery.cancel_scope.cancel()
        assert service.answered == ["r99"]


async def test_frames_that_all_wait_for_the_rest_become_whole_one_after_the_other() -> None:
    async with (
        serving(unfinished_bytes_max=3 * MB) as (server, service, _),
        AsyncExitStack() as stack,
    ):
        ends = [await stack.enter_async_context(raw_member(server.address)) for _ in range(6)]
        async with trio.open_nursery() as nursery:
            for number, end in enumerate(ends):
                nursery.start_soon(end.say, request(number, MB))
        assert {await answer(end) for end in ends} == {AckStatus.ACCEPTED}
        assert len(service.answered) == 6


async def test_a_large_frame_that_does_not_become_whole_in_time_ends_its_connection() -> None:
    async with (
        serving(frame_timeout_s=0.1) as (server, _, using),
        raw_member(server.address) as end,
        raw_member(server.address) as patient,
    ):
        await end.say(request(1, MB)[:-1])
        assert await answer(end) is None
        await end.wait_gone()
        # A small part of a frame costs next to nothing, and may be waited for.
        whole = request(2, 100)
        await patient.say(whole[:50])
        await trio.sleep(0.15)
        await patient.say(whole[50:])
        assert await answer(patient) is AckStatus.ACCEPTED
        assert using.budget.used_bytes == 0


async def test_an_announcement_costs_nothing() -> None:
    """What was promised is not reserved: 200 announcements of the longest frame, and nothing after them."""
    async with serving() as (server, _, using), AsyncExitStack() as stack:
        head = encode_message(Kind.REQUEST, encode_envelope(unary("r")), b"")
        announced = head[:4] + (MB // 2).to_bytes(4, "big") + head[8:]
        for _ in range(200):
            end = await stack.enter_async_context(raw_member(server.address))
            await end.say(announced)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert using.budget.used_bytes == 0


async def test_payloads_of_unary_requests_under_way_are_bounded_in_bytes() -> None:
    """1,024 of them on one connection were bounded only in number."""
    async with serving(unfinished_bytes_max=10 * MB) as (server, service, using):
        async with open_request_plane(using, RealEnv()) as plane, trio.open_nursery() as nursery:
            for number in range(4):
                ask = unary(f"r{number}", "wait")
                nursery.start_soon(result_of, plane, server.address, ask, bytes(2 * MB))
            await eventually(lambda: service.running == 4)
            with pytest.raises(OverloadedError):
                await result_of(plane, server.address, unary("one more"), bytes(3 * MB))
            assert await result_of(plane, server.address, unary("small"), b"x") == b"re:x"
            service.release.set()
        await eventually(lambda: using.payloads.used_bytes == 0)


async def test_a_budget_favours_who_has_waited_longest_and_takes_its_turn_back() -> None:
    budget, grown = ByteBudget(100), list[str]()

    async def grow(name: str, count: int) -> None:
        await budget.grow(name, count)
        grown.append(name)

    async with trio.open_nursery() as nursery:
        await grow("a", 60)
        nursery.start_soon(grow, "b", 60)
        await trio.testing.wait_all_tasks_blocked()
        # Over the bound, but nobody was favoured yet.
        assert grown == ["a", "b"]
        nursery.start_soon(grow, "a", 1)
        await trio.testing.wait_all_tasks_blocked()
        assert (grown, len(budget._waiting)) == (["a", "b"], 1)
        await grow("b", 50)
        budget.give_back("b", 110)
        await trio.testing.wait_all_tasks_blocked()
        assert grown == ["a", "b", "b", "a"]
        assert budget.take_nowait(39)
        assert not budget.take_nowait(1)
        budget.give_back("a", 61)
        budget.give_back("c", 39)
    assert budget.used_bytes == 0


async def test_who_stops_waiting_is_not_favoured() -> None:
    budget = ByteBudget(10)
    await budget.grow("a", 20)
    with trio.move_on_after(0):
        await budget.grow("b", 5)
    assert len(budget._waiting) == 0
    budget.give_back("b", 5)
    budget.give_back("a", 20)
    assert budget.take_nowait(10)


# --- the other connections -----------------------------------------------------------------------


async def test_an_item_that_does_not_become_whole_in_time_ends_its_link_only() -> None:
    async with open_home(frame_timeout_s=0.1) as home:
        with (
            home.server.register(Context("r")) as mine,
            home.server.register(Context("o")) as other,
        ):
            part = encode_item(1, bytes(PART_BYTES), is_last=False)
            async with raw_worker(mine.connection, Opened(), *[part] * 64) as worker:
                with pytest.raises(RemoteProtocolError, match="not whole within"):
                    await anext(mine.channel)
                assert await worker.hear() == Kill(Reason.PROTOCOL_ERROR)
            async with home.call(other.connection) as good:
                # Less than what is timed, as this one may stall.
                good.send_nowait(bytes(FREE_BYTES // 2))
                good.finish()
                assert [len(item) async for item in other.channel] == [FREE_BYTES // 2]
        assert home.server.options.budget.used_bytes == 0


async def test_an_answer_that_does_not_become_whole_in_time_ends_its_connection() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    using = options(frame_timeout_s=0.1)
    with trio.fail_after(PATIENCE_S):
        async with listener, open_request_plane(using, RealEnv()) as plane:
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def ask() -> None:
                    with pytest.raises(RemoteProtocolError, match="not whole within"):
                        await result_of(plane, address, unary("r1"), b"")

                worker = await accept_member(listener)
                await worker.say(in_parts(Kind.ANSWER, b'{"id":"r1","status":"accepted"}', MB)[:-1])
            await worker.stream.aclose()
        assert using.budget.used_bytes == 0


async def test_a_caller_that_sends_a_worker_items_is_told_by_its_announcement() -> None:
    """It has words to say: 32 MiB of anything else were buffered first."""
    mine = Context("w")
    with trio.fail_after(PATIENCE_S):
        async with raw_caller() as caller, trio.open_nursery() as nursery:

            @nursery.start_soon
            async def answer_it() -> None:
                async with lone_client().call_home(caller.connection(), mine) as sender:
                    sender.open()
                    await eventually(lambda: mine.is_killed)

            end = await caller.accept()
            await end.say(encode_item(1, bytes(MB))[:8])
            await eventually(lambda: mine.is_killed)
            await end.stream.aclose()
    assert mine.reason is Reason.PROTOCOL_ERROR


class Trickle:
    """A connection on which a piece comes every `pause_s`."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    async def receive(self, count: int) -> bytes:
        await trio.sleep(self.pause_s)
        return bytes(min(count, 1000))


async def test_a_frame_that_trickles_is_counted_as_it_comes_and_ended_in_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Each piece is in time, and the whole is not; waiting for the consumer does not count."""
    decoder, budget = FrameDecoder(), ByteBudget(MB)
    decoder.feed(encode_frame(b"", bytes(MB))[: FREE_BYTES + 500])
    unfinished = Unfinished(decoder, budget, buffer_bytes=65536, timeout_s=30)
    wire = cast("Wire", Trickle(4.0))
    began, pieces = trio.current_time(), 0

    async def take() -> None:
        nonlocal pieces
        while True:
            decoder.feed(await unfinished.receive(wire))
            pieces += 1
            assert budget.used_bytes == decoder.pending_bytes - FREE_BYTES - 1000
            await trio.sleep(10)

    with pytest.raises(RemoteProtocolError, match="73036 bytes had come was not whole within 30 s"):
        await take()
    assert (pieces, trio.current_time() - began) == (7, 7 * 14 + 2)
    unfinished.close()
    assert budget.used_bytes == 0

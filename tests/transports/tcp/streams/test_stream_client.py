"""The worker's end of a response stream against callers that break the rules, or die."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
import trio.testing

from tests.conformance.requests.collecting import wait_room
from tests.leftovers import open_descriptors
from tests.transports.tcp.ends import (
    PATIENCE_S,
    eventually,
    lone_client,
    options,
)
from tests.transports.tcp.streams.raw_links import RawStream, meeting, raw_caller
from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import EngineError, LocalProtocolError
from trinamo.runtime.protocol.streams.codec import encode_frame
from trinamo.runtime.protocol.streams.control import (
    Control,
    Data,
    Declined,
    Failed,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.link_frames import Kind, encode_credit
from trinamo.transports.tcp import TcpOptions
from trinamo.transports.tcp.streams.linked import TcpResponseSender

OVERSIZE = b"\0\0\0\0\xff\xff\xff\xff"


def head(kind: int, rest: bytes = b"") -> bytes:
    """Of a frame of the first stream."""
    return b"\0\0\0\1" + bytes([kind]) + rest


@attrs.frozen
class Call:
    """A worker's call to a raw caller."""

    context: Context
    caller: RawStream
    sender: TcpResponseSender


@asynccontextmanager
async def calling(using: TcpOptions | None = None) -> AsyncIterator[Call]:
    """The worker has called home and its handler has started; afterwards nothing is left."""
    client, context = lone_client(using), Context("w")
    with trio.fail_after(PATIENCE_S):
        before = open_descriptors()
        async with (
            raw_caller() as port,
            meeting(port, client.call_home(port.connection(), context)) as (caller, sender),
        ):
            sender.open()
            assert await caller.hear() == Opened()
            yield Call(context, caller, sender)
        assert client.open_count == 0
        await eventually(lambda: len(client.links) == 0)
        await eventually(lambda: open_descriptors() <= before)


async def test_the_worker_opens_streams_and_says_sentinel() -> None:
    async with calling() as call:
        call.sender.send_nowait(b"a")
        call.sender.send_nowait(b"b")
        call.sender.finish()
        said = [await call.caller.hear() for _ in range(3)]
        assert said == [Data(b"a"), Data(b"b"), Sentinel()]


@pytest.mark.parametrize("ending", ["finish", "fail"])
async def test_after_its_last_word_the_worker_sends_fin(ending: str) -> None:
    heard: list[Control] = []
    async with raw_caller() as port, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def caller() -> None:
            end = await port.accept()
            async with end.stream:
                heard.extend(await end.hear_all())

        async with lone_client().call_home(port.connection(), Context("w")) as sender:
            sender.open()
            if ending == "finish":
                sender.finish()
            else:
                sender.fail(EngineError("x"))
    assert [type(event) for event in heard] == [Opened, Sentinel if ending == "finish" else Failed]


async def test_a_declining_prologue_is_followed_by_fin() -> None:
    heard: list[Control] = []
    async with raw_caller() as port, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def caller() -> None:
            end = await port.accept()
            async with end.stream:
                heard.extend(await end.hear_all())

        async with lone_client().call_home(port.connection(), Context("w")) as sender:
            sender.fail(EngineError("x"))
    assert [type(event) for event in heard] == [Declined]


async def test_a_caller_that_never_hangs_up_is_not_waited_for_longer_than_the_linger() -> None:
    client = lone_client(options(linger_s=0.02))
    async with raw_caller() as port:
        call = client.call_home(port.connection(), Context("w"))
        async with meeting(port, call) as (caller, sender):
            sender.fail(EngineError("x"))
            await call.__aexit__(None, None, None)
            assert isinstance(await caller.hear(), Declined)
            assert await caller.hear() is None
            await eventually(lambda: len(client.links) == 0)


async def test_stop_reaches_the_context_and_the_answer_goes_on() -> None:
    async with calling() as call:
        await call.caller.say(Stop())
        await call.context.wait_stopped()
        assert call.context.state is State.STOPPED
        call.sender.send_nowait(b"rest")
        call.sender.finish()
        assert [await call.caller.hear() for _ in range(2)] == [Data(b"rest"), Sentinel()]


@pytest.mark.parametrize("reason", Reason)
async def test_a_stop_and_a_kill_bring_their_reasons(reason: Reason) -> None:
    async with calling() as call:
        await call.caller.say(Stop(reason), Kill(reason))
        await run_into_the_end(call)
    assert (call.context.stop_reason, call.context.kill_reason) == (reason, reason)


async def test_after_a_kill_nothing_more_is_said_and_no_sentinel() -> None:
    async with calling() as call:
        await call.caller.say(Kill())
        with call.context.scope:
            try:
                await trio.sleep_forever()
            finally:
                # The handler need not look at the context.
                assert call.context.reason is Reason.CONSUMER_DROPPED
                assert not call.sender.send_nowait(b"dropped")
                call.sender.finish()
        # The worker has nothing more to say, and hangs up.
        assert await call.caller.hear_all() == []
    assert call.context.is_killed


async def run_into_the_end(call: Call) -> None:
    """Sleep, as a handler may, until a Kill cancels it."""
    with call.context.scope:
        await trio.sleep_forever()
    assert call.context.is_killed


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_caller_that_dies_is_a_kill(how: str) -> None:
    async with calling() as call:
        if how == "RST":
            call.caller.link.end.reset()
        else:
            await call.caller.stream.send_eof()
        await run_into_the_end(call)
    assert call.context.reason is Reason.CONSUMER_DROPPED


async def test_a_caller_that_dies_while_the_worker_is_blocked_writing_is_a_kill() -> None:
    async with calling() as call:
        while call.sender.send_nowait(b"x" * 100_000):
            pass
        call.caller.link.end.reset()
        await run_into_the_end(call)
    assert call.context.reason is Reason.CONSUMER_DROPPED


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([Sentinel()], id="sentinel"),
        pytest.param([Data(b"x")], id="data"),
        pytest.param([Opened()], id="prologue"),
        pytest.param([encode_frame(head(Kind.OPEN, bytes(5)), b"s")], id="an opening"),
        pytest.param([Failed(EngineError(""))], id="failed"),
        pytest.param([Stop(), Stop()], id="stop twice"),
        pytest.param([Stop(), Refused("", "")], id="refused after stop"),
        pytest.param([encode_frame(head(99))], id="an unknown kind"),
        pytest.param([encode_frame(head(Kind.REFUSED), b"\xff")], id="no JSON"),
        pytest.param([encode_frame(head(Kind.CLOSED), b"data")], id="closed with data"),
        pytest.param([OVERSIZE], id="oversize"),
        pytest.param([b"HTTP/1.1 400 Bad Request\r\n\r\n"], id="not frames at all"),
    ],
)
async def test_a_caller_that_breaks_the_protocol_kills_its_own_request_only(
    words: list[Control | bytes],
) -> None:
    async with calling() as other:
        async with calling() as call:
            await call.caller.say(*words)
            await run_into_the_end(call)
        assert call.context.kill_reason is Reason.PROTOCOL_ERROR
        assert other.context.state is State.LIVE
        other.sender.finish()
        assert await other.caller.hear() == Sentinel()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("unknown_subject", Reason.CONSUMER_DROPPED),
        ("taken_subject", Reason.CONSUMER_DROPPED),
        ("bad_handshake", Reason.PROTOCOL_ERROR),
    ],
)
async def test_a_refusal_kills_the_handler(code: str, reason: Reason) -> None:
    async with calling() as call:
        await call.caller.say(Refused(code, "no"))
        await run_into_the_end(call)
    assert call.context.reason is reason


async def test_a_worker_killed_from_within_says_its_last_word_first() -> None:
    """A shutdown or a deadline is the worker's doing: the caller learns the typed reason."""
    async with calling() as call:
        call.sender.send_nowait(b"a")
        call.context.kill(Reason.WORKER_SHUTDOWN)
        call.sender.fail(EngineError("shut down"))
        said = [await call.caller.hear() for _ in range(2)]
        assert said[0] == Data(b"a")
        assert isinstance(said[1], Failed)


async def test_there_is_room_again_when_the_caller_has_read() -> None:
    async with calling() as call:
        while call.sender.send_nowait(b"x" * 100_000):
            pass
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_room, call.sender)
            await trio.testing.wait_all_tasks_blocked(0.01)
            while nursery.child_tasks:
                item = await call.caller.hear()
                assert isinstance(item, Data)
                await call.caller.say(encode_credit(1, len(item.payload)))
                await trio.testing.wait_all_tasks_blocked(0.01)


async def test_items_out_of_turn_are_our_own_bug() -> None:
    async with (
        raw_caller() as port,
        meeting(port, lone_client().call_home(port.connection(), Context("w"))) as (_, sender),
    ):
        with pytest.raises(LocalProtocolError):
            sender.send_nowait(b"before the prologue")
        sender.open()
        with pytest.raises(AssertionError):
            sender.send_nowait(b"")
        sender.finish()
        with pytest.raises(LocalProtocolError):
            sender.send_nowait(b"after the end")

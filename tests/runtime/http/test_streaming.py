"""The answer writer alone, over an ASGI client that reads and leaves when the dice say so.

On a virtual clock, so that every interleaving is cheap and repeats.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, MutableMapping
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings, strategies as st

from trinamo.runtime.config.config import HttpConfig
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import UnavailableError
from trinamo.runtime.http.exchange import UNKNOWN_CONNECTION, ConnectionExtension
from trinamo.runtime.http.streaming import AnswerWriter
from trinamo.runtime.metrics.metrics import SUCCESS, FrontendMetrics
from trinamo.runtime.protocol.openai.sse import DONE


@attrs.define
class AsgiClient:
    """Takes `read_s` for each message, and leaves at `leave_at` if that is not None."""

    read_s: float
    leave_at: float | None
    messages: list[MutableMapping[str, Any]] = attrs.field(factory=list)
    in_send: bool = False
    takes: Callable[[], bool] = bool
    """Whether it takes a piece without a checkpoint now."""
    taken: int = 0
    is_cut: bool = False
    """Whether the server ended the connection because it did not take a piece in time."""

    async def receive(self) -> MutableMapping[str, Any]:
        if self.leave_at is None:
            await trio.sleep_forever()
            raise AssertionError
        await trio.sleep_until(self.leave_at)
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        assert not self.in_send, "two tasks write at once"
        self.in_send = True
        try:
            await trio.sleep(self.read_s)
        finally:
            self.in_send = False
        self.messages.append(message)

    @property
    def connection(self) -> ConnectionExtension:
        return {"send_now": self.send_now, "is_cut": lambda: self.is_cut}

    def send_now(self, body: bytes) -> bool:
        assert not self.in_send, "two tasks write at once"
        assert self.messages[-1].get("more_body"), "outside of a body under way"
        if not self.takes():
            return False
        self.taken += 1
        self.messages.append({"type": "http.response.body", "body": body, "more_body": True})
        return True

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


times = st.sampled_from([0, 0.001, 0.01, 0.1])


@pytest.mark.slow
@settings(deadline=None)
@given(
    gaps=st.lists(times, max_size=8),
    fails=st.booleans(),
    read_s=times,
    leave_at=st.none() | st.floats(min_value=0, max_value=0.5),
    config=st.builds(
        HttpConfig,
        on_disconnect=st.sampled_from(["kill", "stop"]),
        backlog_bytes_max=st.sampled_from([1, 4, 1 << 16]),
    ),
    takes=st.none() | st.lists(st.booleans(), max_size=8),
)
def test_a_client_gets_a_prefix_and_exactly_one_end_or_has_left(
    *,
    gaps: list[float],
    fails: bool,
    read_s: float,
    leave_at: float | None,
    config: HttpConfig,
    takes: list[bool] | None,
) -> None:
    """What the client reads is a gapless prefix of the events; `[DONE]` means all of them.

    A client that stays sees exactly one end: `[DONE]`, an error event, or an error status if
    nothing came before. Whatever happens, the generator is closed and the books say how it ended.
    """
    events = [b"data: %d\n\n" % i for i in range(len(gaps))]
    metrics = FrontendMetrics(RealEnv())
    dice = iter(takes or [])
    client = AsgiClient(read_s, leave_at, takes=lambda: next(dice, True))
    context = Context("1")
    is_closed = False

    async def generate() -> AsyncGenerator[bytes, None]:
        nonlocal is_closed
        try:
            for gap, event in zip(gaps, events, strict=True):
                await trio.sleep(gap)
                yield event
            if fails:
                raise UnavailableError("no live instance")
        finally:
            is_closed = True

    async def main() -> str:
        with metrics.request("m", "chat") as record:
            writer = AnswerWriter(
                client.receive,
                client.send,
                context,
                record,
                config,
                headers=[],
                connection=UNKNOWN_CONNECTION if takes is None else client.connection,
            )
            await writer.stream(generate(), bytes)
        return record.outcome

    outcome = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert is_closed or not client.messages
    whole = b"".join(events)
    told = client.body.removesuffix(DONE)
    is_done = told != client.body
    is_error = b'"error"' in told
    if is_error and client.messages[0]["status"] == 200:
        told = told[: told.index(b"data: {")]
    if outcome == SUCCESS:
        assert client.body == whole + DONE
    elif outcome == Reason.CLIENT_DISCONNECT:
        assert leave_at is not None
        assert whole.startswith(told)
        assert not is_error
        assert context.reason is Reason.CLIENT_DISCONNECT
    else:
        assert (outcome, is_error, is_done) == ("unavailable", True, False)
        assert client.messages[0]["status"] == (200 if events else 503)
        assert told == whole or not events
    if leave_at is None:
        assert outcome == ("unavailable" if fails else SUCCESS)
        assert client.messages[-1]["more_body"] is False
    assert metrics.value("requests_in_flight", model="m", endpoint="chat") == 0


@given(leave_at=st.floats(min_value=0, max_value=0.02))
@settings(deadline=None)
def test_a_client_that_waits_for_a_whole_answer_kills_it_by_leaving(*, leave_at: float) -> None:
    """A unary request ends when its client leaves, at any moment before the answer is sent."""
    client = AsgiClient(0, leave_at)
    context = Context("1")
    metrics = FrontendMetrics(RealEnv())

    async def make_body() -> bytes:
        await trio.sleep(0.01)
        return b"{}"

    async def main() -> str:
        with metrics.request("m", "chat") as record:
            writer = AnswerWriter(
                client.receive, client.send, context, record, HttpConfig(), headers=[]
            )
            await writer.whole(make_body)
        return record.outcome

    outcome = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    if client.messages:
        assert (client.body, outcome, context.is_killed) == (b"{}", SUCCESS, False)
    else:
        assert (outcome, context.kill_reason) == (
            Reason.CLIENT_DISCONNECT,
            Reason.CLIENT_DISCONNECT,
        )


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_not_made_in_time_is_ended_as_a_deadline(
    autojump_clock: trio.testing.MockClock, *, is_streamed: bool
) -> None:
    """The last bound there is when a worker hangs and discovery cannot say that it is gone."""
    client, context, metrics = AsgiClient(0, None), Context("1"), FrontendMetrics(RealEnv())

    async def hang() -> AsyncGenerator[bytes, None]:
        yield b"data: 0\n\n"
        await trio.sleep_forever()

    with metrics.request("m", "chat") as record:
        writer = AnswerWriter(
            client.receive,
            client.send,
            context,
            record,
            HttpConfig(request_timeout_s=60),
            headers=[],
        )
        if is_streamed:
            await writer.stream(hang(), bytes)
        else:
            await writer.whole(trio.sleep_forever)
    assert trio.current_time() == 60
    assert (record.outcome, context.kill_reason) == (Reason.DEADLINE, Reason.DEADLINE)
    assert client.messages[0]["status"] == (200 if is_streamed else 504)
    assert b'"code":"deadline"' in client.body
    assert not client.body.endswith(DONE)


async def test_an_answer_made_in_time_is_not_cut_off_by_its_slow_reader(
    autojump_clock: trio.testing.MockClock,
) -> None:
    client, context, metrics = AsgiClient(6, None), Context("1"), FrontendMetrics(RealEnv())

    async def quick() -> AsyncGenerator[bytes, None]:
        yield b"data: 0\n\n"

    with metrics.request("m", "chat") as record:
        writer = AnswerWriter(
            client.receive,
            client.send,
            context,
            record,
            HttpConfig(request_timeout_s=5),
            headers=[],
        )
        await writer.stream(quick(), bytes)
    assert (record.outcome, context.reason) == (SUCCESS, None)
    assert client.body.endswith(DONE)


async def write(
    client: AsgiClient, items: AsyncGenerator[bytes, None], context: Context | None = None
) -> str:
    """Stream `items` to a client that takes pieces without a checkpoint; the outcome."""
    with FrontendMetrics(RealEnv()).request("m", "chat") as record:
        writer = AnswerWriter(
            client.receive,
            client.send,
            context or Context("1"),
            record,
            HttpConfig(),
            headers=[],
            connection=client.connection,
        )
        await writer.stream(items, bytes)
    return record.outcome


async def test_single_events_are_sent_where_they_are_made(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """All but the first, which brings the status, and the end."""

    async def paced() -> AsyncGenerator[bytes, None]:
        for number in range(10):
            yield b"%d " % number
            await trio.sleep(0.02)

    client = AsgiClient(0, None, takes=lambda: True)
    assert await write(client, paced()) == SUCCESS
    assert client.body == b"0 1 2 3 4 5 6 7 8 9 " + DONE
    assert client.taken == 9


async def test_a_burst_goes_out_in_one_send(autojump_clock: trio.testing.MockClock) -> None:
    """Of what is there at once only the first is a single event."""

    async def bursts() -> AsyncGenerator[bytes, None]:
        for number in range(30):
            if number % 10 == 0:
                await trio.sleep(0.02)
            yield b"%d " % number

    client = AsgiClient(0, None, takes=lambda: True)
    assert await write(client, bursts()) == SUCCESS
    assert client.body == b"".join(b"%d " % number for number in range(30)) + DONE
    assert client.taken == 2
    # The head, one piece of each burst but the first, the rest of each, and the end.
    assert len(client.messages) == 1 + 2 + 3 + 1


async def test_an_engine_that_never_waits_lets_the_others_run(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It computes, so time passes, but it has no checkpoint; nor has a client that takes it all.

    Every so many events the others have their turn, and Kill its effect.
    """
    context, turns, made = Context("1"), 0, 0
    is_busy = trio.Event()

    async def busy() -> AsyncGenerator[bytes, None]:
        nonlocal made
        yield b"first "
        await trio.sleep(1)
        is_busy.set()
        while made < 10_000:
            made += 1
            autojump_clock.jump(0.001)
            yield b"x"

    async def count() -> None:
        nonlocal turns
        await is_busy.wait()
        while turns < 10:
            turns += 1
            await trio.lowlevel.checkpoint()
        context.kill(Reason.STOP_REQUESTED)

    client = AsgiClient(0, None, takes=lambda: True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        outcome = await write(client, busy(), context)
    assert outcome == Reason.STOP_REQUESTED
    assert client.taken > 100
    assert made < 1000


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_whose_connection_was_cut_is_no_success(*, is_streamed: bool) -> None:
    """A connection that was cut lets `send` return as if all were well; so it is asked."""
    client = AsgiClient(0, None, is_cut=True)
    context, metrics = Context("1"), FrontendMetrics(RealEnv())

    async def quick() -> AsyncGenerator[bytes, None]:
        yield b"data: 0\n\n"

    async def body() -> bytes:
        return b"{}"

    with metrics.request("m", "chat") as record:
        writer = AnswerWriter(
            client.receive,
            client.send,
            context,
            record,
            HttpConfig(),
            headers=[],
            connection=client.connection,
        )
        if is_streamed:
            await writer.stream(quick(), bytes)
        else:
            await writer.whole(body)
    assert record.outcome == Reason.CLIENT_DISCONNECT
    assert metrics.value("client_disconnects_total", model="m", endpoint="chat") == 1

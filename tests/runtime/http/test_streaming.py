"""One answer's way to an ASGI client that reads and leaves when the dice say so.

On a virtual clock, so that every interleaving is cheap and repeats.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

import attrs
import msgspec
import pytest
import trio
import trio.testing
from hypothesis import example, given, settings, strategies as st

from tests.sse import parse_events
from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import EngineError, UnavailableError
from trinamo.runtime.http.bodies import Bodies, Body
from trinamo.runtime.http.exchanges import HttpExchange
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.http.streaming import AnswerDelivery, BodySink, EventSink
from trinamo.runtime.metrics.metrics import SUCCESS
from trinamo.runtime.protocol.openai.answers import DONE_DATA, CompletionAnswer
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason
from trinamo.runtime.sinks import Sink, forward_items
from trinamo.transports.http.asgi import answer_over_asgi
from trinamo.transports.http.refusals import Dates

LAST = Delta("!", [0], FinishReason.STOP)


@attrs.define
class AsgiClient:
    """Takes `read_s` for each message, and leaves at `leave_at` if that is not None."""

    read_s: float = 0
    leave_at: float | None = None
    cut_at: float | None = None
    """When the server ends the connection, because this client does not read."""
    messages: list[MutableMapping[str, Any]] = attrs.field(factory=list)
    in_send: bool = False

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
        if self.cut_at is not None and trio.current_time() >= self.cut_at:
            raise BrokenPipeError
        self.messages.append(message)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def is_answered(self) -> bool:
        """Whether the answer has come to its end."""
        return bool(self.messages) and self.messages[-1].get("more_body") is False

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def events(self) -> list[str]:
        """The data of the events that have come, whole ones only."""
        return [event.data for event in parse_events(self.body)]


@attrs.define
class Served:
    """One request that was answered, and its books."""

    client: AsgiClient
    config: HttpConfig = attrs.field(factory=HttpConfig)
    context: Context = attrs.field(factory=lambda: Context("1"))
    metrics: FrontendMetrics = attrs.field(factory=lambda: FrontendMetrics(RealEnv()))
    sink_type: type[EventSink | BodySink] = EventSink
    outcome: str = ""
    answers: Bodies = attrs.field(factory=lambda: Bodies(1 << 20, are_answers=True))
    tokens_max: int = 1 << 20

    async def run(self, forward: Callable[[Sink[Delta]], Awaitable[None]]) -> None:
        scope = {"method": "POST", "path": "/", "headers": []}
        await answer_over_asgi(
            partial(self._answer, forward),
            (scope, self.client.receive, self.client.send),
            Dates(RealEnv().clock),
            backlog_bytes_max=self.config.backlog_bytes_max,
        )

    async def run_items(self, items: AsyncGenerator[Delta, None]) -> None:
        await self.run(partial(forward_items, items))

    async def _answer(
        self, forward: Callable[[Sink[Delta]], Awaitable[None]], exchange: HttpExchange
    ) -> None:
        make_form = partial(CompletionAnswer, "1", "m", 0, wants_usage=False)
        with self.metrics.request("m", "chat") as record, Body(self.answers) as kept:
            config = msgspec.structs.replace(self.config, answer_bytes_max=1 << 19)
            delivery = AnswerDelivery(
                exchange, record, [], kept, config, self.context, self.tokens_max
            )
            sink = self.sink_type(delivery, make_form)
            await delivery.run(sink, partial(forward, sink))
        self.outcome = record.outcome

    def value(self, name: str) -> float:
        return self.metrics.value(name, model="m", endpoint="chat")


def told(events: list[str]) -> list[str]:
    """The texts of the chunks among `events`."""
    chunks = [event.partition('"text":"')[2].partition('"')[0] for event in events]
    return [text for text in chunks if text]


times = st.sampled_from([0, 0.001, 0.01, 0.1])


@settings(deadline=None)
@given(
    gaps=st.lists(times, max_size=8),
    fails=st.booleans(),
    read_s=times,
    leave_at=st.none() | st.floats(min_value=0, max_value=0.5),
    cut_at=st.none() | st.floats(min_value=0, max_value=0.5),
    config=st.builds(
        HttpConfig,
        on_disconnect=st.sampled_from(["kill", "stop"]),
        backlog_bytes_max=st.sampled_from([1, 300, 1 << 16]),
    ),
)
def test_a_client_gets_a_prefix_and_exactly_one_end_or_has_left(
    *,
    gaps: list[float],
    fails: bool,
    read_s: float,
    leave_at: float | None,
    cut_at: float | None,
    config: HttpConfig,
) -> None:
    """What the client reads is a gapless prefix of the texts; `[DONE]` means all of them.

    A client that stays sees exactly one end: `[DONE]`, an error event, or an error status if
    nothing came before. Whatever happens, the generator is closed and the books say how it ended.
    """
    texts = [f"t{number}" for number in range(len(gaps))]
    client = AsgiClient(read_s, leave_at, cut_at)
    served = Served(client, config)
    is_begun = is_closed = False

    async def generate() -> AsyncGenerator[Delta, None]:
        nonlocal is_begun, is_closed
        is_begun = True
        try:
            for gap, text in zip(gaps, texts, strict=True):
                await trio.sleep(gap)
                yield Delta(text, [1])
            if fails:
                raise UnavailableError("no live instance")
            yield LAST
        finally:
            is_closed = True

    trio.run(served.run_items, generate(), clock=trio.testing.MockClock(autojump_threshold=0))
    assert is_closed == is_begun
    events = client.events if client.messages and client.status == 200 else []
    got = told(events)
    assert ([*texts, "!"])[: len(got)] == got
    has_left = served.value("client_disconnects_total")
    if served.outcome == SUCCESS:
        assert (got, events[-1], has_left) == ([*texts, "!"], DONE_DATA.decode(), 0)
    elif served.outcome == Reason.CLIENT_DISCONNECT:
        assert leave_at is not None or cut_at is not None
        assert has_left == 1
    else:
        assert (served.outcome, client.status) == ("unavailable", 200 if texts else 503)
        assert (got, client.body.count(b'"error"'), has_left) == (texts, 1, 0)
        assert DONE_DATA.decode() not in events
    if leave_at is None and cut_at is None:
        assert served.outcome == ("unavailable" if fails else SUCCESS)
    assert client.is_answered or served.outcome == Reason.CLIENT_DISCONNECT
    assert served.value("requests_in_flight") == 0


@given(leave_at=st.floats(min_value=0, max_value=0.02))
@example(leave_at=0.01)
@settings(deadline=None)
def test_a_client_that_waits_for_a_whole_answer_kills_it_by_leaving(*, leave_at: float) -> None:
    """A unary request ends when its client leaves, at any moment before the answer is sent.

    Work that is done when he leaves, and whose answer he never gets, has nothing left to kill.
    """
    served = Served(AsgiClient(leave_at=leave_at), sink_type=BodySink)
    is_made = False

    async def one() -> AsyncGenerator[Delta, None]:
        nonlocal is_made
        await trio.sleep(0.01)
        yield LAST
        is_made = True

    trio.run(served.run_items, one(), clock=trio.testing.MockClock(autojump_threshold=0))
    if served.client.messages:
        assert (served.outcome, served.context.is_killed) == (SUCCESS, False)
        assert b'"text":"!"' in served.client.body
    else:
        assert served.outcome == Reason.CLIENT_DISCONNECT
        assert is_made or served.context.kill_reason == Reason.CLIENT_DISCONNECT


async def one_then_hang() -> AsyncGenerator[Delta, None]:
    yield Delta("a", [1])
    await trio.sleep_forever()


@pytest.mark.parametrize("sink_type", [EventSink, BodySink])
async def test_an_answer_not_made_in_time_is_ended_as_a_deadline(
    autojump_clock: trio.testing.MockClock, sink_type: type[EventSink | BodySink]
) -> None:
    """The last bound there is when a worker hangs and discovery cannot say that it is gone."""
    served = Served(AsgiClient(), sink_type=sink_type)
    served.context.limit(60)
    await served.run_items(one_then_hang())
    assert trio.current_time() == 60
    assert (served.outcome, served.context.kill_reason) == (Reason.DEADLINE, Reason.DEADLINE)
    assert served.client.status == (200 if sink_type is EventSink else 504)
    assert b'"code":"deadline"' in served.client.body
    assert served.client.is_answered


async def test_an_answer_made_in_time_is_not_cut_off_by_its_slow_reader(
    autojump_clock: trio.testing.MockClock,
) -> None:
    served = Served(AsgiClient(read_s=6))
    served.context.limit(5)

    async def quick() -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        yield LAST

    await served.run_items(quick())
    assert (served.outcome, served.context.reason) == (SUCCESS, None)
    assert served.client.events[-1] == DONE_DATA.decode()


@pytest.mark.parametrize("stops_at_s", [1, None])
async def test_a_client_that_left_is_given_the_grace_to_stop_then_killed(
    autojump_clock: trio.testing.MockClock, stops_at_s: float | None
) -> None:
    """A slow one as well: its answer had been paused, and is to go on to its end."""
    config = HttpConfig(on_disconnect="stop", stop_grace_s=3, backlog_bytes_max=1)
    served = Served(AsgiClient(read_s=100, leave_at=2), config)

    async def stop_late() -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        await served.context.wait_stopped()
        await trio.sleep(3.1 if stops_at_s is None else stops_at_s)
        yield Delta("", [], FinishReason.STOP)

    await served.run_items(stop_late())
    assert served.context.stop_reason is Reason.CLIENT_DISCONNECT
    assert served.context.is_killed == (stops_at_s is None)
    assert trio.current_time() == 2 + (stops_at_s or 3)
    assert served.outcome == Reason.CLIENT_DISCONNECT


async def test_an_engine_that_never_waits_lets_the_others_run(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Every so many deltas the others have their turn, and Kill its effect."""
    served, made = Served(AsgiClient()), 0

    async def busy() -> AsyncGenerator[Delta, None]:
        nonlocal made
        while made < 10_000:
            made += 1
            yield Delta("x", [1])
        yield LAST

    async def kill() -> None:
        for _ in range(10):
            await trio.lowlevel.checkpoint()
        served.context.kill(Reason.STOP_REQUESTED)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill)
        await served.run_items(busy())
    assert served.outcome == Reason.STOP_REQUESTED
    assert 100 < made < 1000


async def test_a_slow_client_pauses_its_source_until_half_of_it_is_sent(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A source that pushes is told that there is no room, and again when there is."""
    served = Served(AsgiClient(read_s=1), HttpConfig(backlog_bytes_max=1000))
    rooms: list[bool] = []
    resumed: list[float] = []

    async def push(sink: Sink[Delta]) -> None:
        sink.on_room(lambda: resumed.append(trio.current_time()))
        rooms.extend(sink.take([Delta("x" * size, [1])]) for size in (100, 300, 700))
        await trio.sleep(10)
        rooms.append(sink.take([Delta("y", [1]), LAST]))

    await served.run(push)
    assert rooms == [True, True, False, True]
    # The head and the first piece, which is all that there was then.
    assert resumed == [2]
    assert served.outcome == SUCCESS


@pytest.mark.parametrize("sink_type", [EventSink, BodySink])
async def test_what_a_sink_cannot_take_ends_the_request(
    sink_type: type[EventSink | BodySink],
) -> None:
    """It comes out of the source, and is told like any other error."""
    served = Served(AsgiClient(), sink_type=sink_type)

    async def push(sink: Sink[Delta]) -> None:
        sink.on_room(lambda: None)
        nothing: Any = object()
        sink.take([Delta(nothing, [1], FinishReason.STOP)])

    await served.run(push)
    assert (served.outcome, served.client.status) == ("internal", 500)


async def test_an_end_without_a_finish_reason_is_told_after_what_came(
    autojump_clock: trio.testing.MockClock,
) -> None:
    served = Served(AsgiClient())

    async def cut_short() -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])

    await served.run_items(cut_short())
    assert told(served.client.events[:1]) == ["a"]
    assert EngineError.code in served.client.events[-1]
    assert served.outcome == EngineError.code


async def test_an_answer_that_breaks_between_its_finish_reason_and_its_end_is_not_whole(
    autojump_clock: trio.testing.MockClock,
) -> None:
    served = Served(AsgiClient())

    async def break_off() -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        yield LAST
        raise UnavailableError("gone")

    await served.run_items(break_off())
    *chunks, error = served.client.events
    assert (told(chunks), served.outcome) == (["a"], "unavailable")
    assert '"finish_reason":"' not in "".join(chunks)
    assert '"code":"unavailable"' in error


async def test_an_engine_that_goes_on_after_its_finish_reason_fills_no_memory(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Only the last event waits for the end; a client that does not read stops such an engine too."""
    served = Served(AsgiClient(read_s=1), HttpConfig(backlog_bytes_max=10_000))

    async def push(sink: Sink[Delta]) -> None:
        sink.on_room(lambda: None)
        assert sink.take([LAST])
        assert [sink.take([Delta("x" * 4000, [1])]) for _ in range(3)] == [True, True, False]

    await served.run(push)
    assert told(served.client.events) == ["!", *["x" * 4000] * 3]
    assert served.outcome == SUCCESS

"""When a client gives up a connection that says nothing: asked, doubted, or left in peace."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import pytest
import trio

from trinamo.runtime.protocol.streams.codec import Frame, FrameDecoder, encode_frame
from trinamo.sim import Network, SeedChoices, World
from trinamo.sim.services.connector import Connector
from trinamo.sim.services.peer import Peer

PORT, SILENCE_S = 7000, 6.0
HELLO = 0.01
"""Longer than a round trip."""


@attrs.define
class Waiting:
    """A session that waits for something or not; the times at which it was told things."""

    is_expectant: bool = False
    opened_s: list[float] = attrs.Factory(list)
    lost_s: list[float] = attrs.Factory(list)
    asked_s: list[float] = attrs.Factory(list)
    frames: list[Frame] = attrs.Factory(list)

    def opened(self, peer: Peer) -> None:
        assert not peer.is_lost
        self.opened_s.append(trio.current_time())

    def unreached(self) -> None:
        pass

    def received(self, frame: Frame) -> None:
        self.frames.append(frame)

    def lost(self) -> None:
        self.lost_s.append(trio.current_time())

    def ping(self, peer: Peer) -> None:
        self.asked_s.append(trio.current_time())
        peer.post(b"ping")


class Line:
    """A connector on one host and a server on another, which answers or does not."""

    def __init__(self, *, asks_idly: bool, answers: bool = True) -> None:
        self.world = World(SeedChoices(1))
        self.network = Network(self.world, tear_one_in=0, short_one_in=0)
        self.session = Waiting()
        self.connector: Connector
        self.answers = answers
        self._asks_idly = asks_idly

    def play(self, story: Callable[[Line], Awaitable[None]]) -> None:
        async def client() -> None:
            self.connector = Connector(
                "server",
                PORT,
                rng=self.world.choices.stream("client"),
                silence_s=SILENCE_S,
                asks_idly=self._asks_idly,
            )
            await self.connector.run(self.session)

        async def main() -> None:
            self.world.boot("server", trio.serve_tcp, self._answer, PORT)
            await trio.sleep(HELLO)
            self.world.boot("client", client)
            await trio.sleep(HELLO)
            await story(self)

        self.world.run(main)

    async def _answer(self, stream: trio.SocketStream) -> None:
        decoder = FrameDecoder()
        async for chunk in stream:
            for _ in decoder.feed(bytes(chunk)):
                if self.answers:
                    await stream.send_all(encode_frame(b"pong", b""))


def test_a_connection_that_nobody_waits_on_is_left_in_peace_and_costs_no_step() -> None:
    async def story(line: Line) -> None:
        before = line.world.steps
        await trio.sleep(100 * SILENCE_S)
        # The sleeper itself.
        assert line.world.steps - before <= 1
        assert (line.session.asked_s, line.session.lost_s) == ([], [])

    Line(asks_idly=False, answers=False).play(story)


def test_from_the_moment_somebody_waits_silence_is_asked_about_and_then_given_up() -> None:
    async def story(line: Line) -> None:
        await trio.sleep(50)
        began_s = trio.current_time()
        line.session.is_expectant = True
        line.connector.expect()
        await trio.sleep(1.5 * SILENCE_S)
        assert line.session.asked_s[0] == pytest.approx(began_s + SILENCE_S / 2)
        assert line.session.lost_s == [pytest.approx(began_s + SILENCE_S)]
        assert len(line.session.opened_s) == 2

    Line(asks_idly=False, answers=False).play(story)


def test_a_server_that_answers_is_asked_again_and_again_and_kept() -> None:
    async def story(line: Line) -> None:
        line.session.is_expectant = True
        line.connector.expect()
        await trio.sleep(4 * SILENCE_S)
        assert 7 <= len(line.session.asked_s) <= 8
        assert len(line.session.frames) == len(line.session.asked_s)
        assert line.session.lost_s == []

    Line(asks_idly=False).play(story)


def test_once_what_was_waited_for_has_come_nothing_more_is_asked() -> None:
    async def story(line: Line) -> None:
        line.session.is_expectant = True
        line.connector.expect()
        peer = await line.connector.wait_open()
        await trio.sleep(1)
        line.session.is_expectant = False
        peer.post(b"question")
        await trio.sleep(HELLO)
        assert len(line.session.frames) == 1
        line.answers = False
        await trio.sleep(20 * SILENCE_S)
        assert (line.session.asked_s, line.session.lost_s) == ([], [])

    Line(asks_idly=False).play(story)


@pytest.mark.parametrize("answers", [True, False])
def test_asking_idly_finds_a_dead_server_though_nobody_waits(answers: bool) -> None:
    async def story(line: Line) -> None:
        opened_s = line.session.opened_s[0]
        await trio.sleep(opened_s + 1.2 * SILENCE_S - trio.current_time())
        assert line.session.asked_s[0] == pytest.approx(opened_s + SILENCE_S / 2, abs=HELLO)
        lost_s = [] if answers else [pytest.approx(opened_s + SILENCE_S, abs=HELLO)]
        assert line.session.lost_s == lost_s

    Line(asks_idly=True, answers=answers).play(story)


def test_a_question_without_an_answer_counts_as_asked_from_when_it_was_put() -> None:
    async def story(line: Line) -> None:
        await trio.sleep(30)
        put_s = trio.current_time()
        line.connector.doubt(put_s)
        await trio.sleep(SILENCE_S / 2 - HELLO)
        line.connector.doubt(trio.current_time() - 1)
        assert line.session.lost_s == []
        await trio.sleep(2 * HELLO)
        line.connector.doubt(trio.current_time() - 1)
        await trio.sleep(HELLO)
        assert len(line.session.lost_s) == 1

    Line(asks_idly=False, answers=False).play(story)


def test_whatever_is_heard_ends_a_doubt() -> None:
    async def story(line: Line) -> None:
        peer = await line.connector.wait_open()
        line.connector.doubt(trio.current_time())
        await trio.sleep(SILENCE_S / 2 - 0.5)
        peer.post(b"another")
        await trio.sleep(1)
        # Put before the answer to another one: not doubted.
        line.connector.doubt(trio.current_time() - 2)
        # Put after it: doubted from now on.
        line.connector.doubt(trio.current_time())
        await trio.sleep(HELLO)
        assert line.session.lost_s == []

    Line(asks_idly=False).play(story)

"""When a client gives up a connection that says nothing: asked, doubted, or left in peace."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import pytest
import trio

from trinamo.runtime.protocol.streams.codec import Frame, FrameDecoder, encode_frame
from trinamo.sim import Network, SeedChoices, World
from trinamo.sim.services.etcd.channel import SimulatedChannel
from trinamo.sim.services.peer import StreamPeer

PORT, SILENCE_S = 7000, 6.0
HELLO = 0.01
"""Longer than a round trip."""


@attrs.define
class Heard:
    """The times at which a channel was told things."""

    opened_s: list[float] = attrs.Factory(list)
    lost_s: list[float] = attrs.Factory(list)
    unreached_count: int = 0
    asked_s: list[float] = attrs.Factory(list)
    frames: list[Frame] = attrs.Factory(list)


class Waiting(SimulatedChannel):
    """One that writes down what it is told."""

    heard: Heard

    def opened(self, peer: StreamPeer) -> None:
        assert not peer.is_lost
        self.heard.opened_s.append(trio.current_time())

    def unreached(self) -> None:
        self.heard.unreached_count += 1

    def received(self, frame: Frame) -> None:
        self.heard.frames.append(frame)

    def lost(self) -> None:
        self.heard.lost_s.append(trio.current_time())

    def ping(self, peer: StreamPeer) -> None:
        self.heard.asked_s.append(trio.current_time())
        peer.post(b"ping")


class Line:
    """A channel on one host and a server on another, which answers or does not."""

    def __init__(self, *, answers: bool = True) -> None:
        self.world = World(SeedChoices(1), ambient="raise")
        self.network = Network(self.world, tear_one_in=0, short_one_in=0)
        self.session = Heard()
        self.channel: SimulatedChannel
        self.answers = answers

    def play(self, story: Callable[[Line], Awaitable[None]]) -> None:
        async def client() -> None:
            self.channel = channel = Waiting(
                "server", PORT, rng=self.world.choices.stream("client"), silence_s=SILENCE_S
            )
            channel.heard = self.session
            await channel.run()

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


def test_silence_is_asked_about_and_then_given_up() -> None:
    async def story(line: Line) -> None:
        began_s = line.session.opened_s[0]
        await trio.sleep(1.4 * SILENCE_S)
        assert line.session.asked_s[0] == pytest.approx(began_s + SILENCE_S / 2)
        assert line.session.lost_s == [pytest.approx(began_s + SILENCE_S)]
        assert len(line.session.opened_s) == 2

    Line(answers=False).play(story)


def test_a_server_that_answers_is_asked_again_and_again_and_kept() -> None:
    async def story(line: Line) -> None:
        await trio.sleep(4.1 * SILENCE_S)
        assert len(line.session.asked_s) == 8
        assert len(line.session.frames) == len(line.session.asked_s)
        assert line.session.lost_s == []

    Line().play(story)


def test_who_is_heard_is_not_asked() -> None:
    async def story(line: Line) -> None:
        peer = line.channel.peer
        assert peer is not None
        for _ in range(8):
            await trio.sleep(SILENCE_S / 4)
            peer.post(b"question")
        assert (line.session.asked_s, line.session.lost_s) == ([], [])

    Line().play(story)


def test_a_server_that_cannot_be_dialled_is_tried_again_and_the_session_hears_of_it() -> None:
    async def story(line: Line) -> None:
        line.world.kill("server")
        await trio.sleep(5)
        assert line.channel.is_failing
        assert line.session.unreached_count > 3
        assert "cannot connect to server" in line.channel.last_words

    Line().play(story)

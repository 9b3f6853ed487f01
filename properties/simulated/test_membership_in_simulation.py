"""Members among strangers, over a simulated network that tears everything that is said."""

from __future__ import annotations

import msgspec
import trio
from hypothesis import given, settings, strategies as st

from tests.conformance.requests.service import Service, result_of, unary
from trinamo.runtime.errors import ConnectError, ImpostorError
from trinamo.runtime.protocol.streams.request import Envelope
from trinamo.sim import Network, SeedChoices, SimEnv, World
from trinamo.sim.cluster.memory import SECRET
from trinamo.transports.tcp import (
    TcpOptions,
    TcpRequestPlane,
    open_request_plane,
    open_request_server,
)

PORT = 7000
ANSWER_S_MAX = 5.0
"""Longer than a dial and a greeting on such a network take, shorter than any timeout of a stranger."""
strangers = st.lists(
    st.tuples(
        st.sampled_from(["silence", "hello", "other secret", "noise"]), st.floats(0, 2), st.binary()
    ),
    max_size=12,
)


def options(secret: bytes = SECRET, name: str = "worker") -> TcpOptions:
    return TcpOptions(
        host="0.0.0.0",
        port=PORT,
        advertise_host=name,
        secret=secret,
        ungreeted_max=4,
        handshake_timeout_s=20.0,
    )


class Scene:
    """One worker, one honest caller, and whoever else comes."""

    def __init__(self, seed: int) -> None:
        self.world = World(SeedChoices(seed), virtual_s_max=300)
        Network(self.world, tear_one_in=3, short_one_in=3)
        self.service = Service()
        self.answers: list[bytes] = []
        self.took_s: list[float] = []
        self.refusals: list[type[ConnectError]] = []

    async def work(self) -> None:
        env = SimEnv(self.world, "worker")
        async with (
            open_request_server(options(), env, instance_id="w1") as server,
            trio.open_nursery() as nursery,
        ):
            await nursery.start(server.serve, self.service)

    async def call(self) -> None:
        """A new connection for every request, as after every restart of a frontend."""
        for number in range(4):
            began = trio.current_time()
            async with open_request_plane(options(), SimEnv(self.world, "caller")) as plane:
                ask = unary(f"r{number}")
                self.answers.append(await self._answer(plane, ask, b"%d" % number))
                self.took_s.append(trio.current_time() - began)
                await self._expect(plane, msgspec.structs.replace(ask, instance_id="w0"))
            await trio.sleep(0.5)

    async def _answer(self, plane: TcpRequestPlane, ask: Envelope, payload: bytes) -> bytes:
        """As a router: where more strangers come in one instant than there are places, once more."""
        while True:
            try:
                return await result_of(plane, f"worker:{PORT}", ask, payload)
            except ConnectError:
                await trio.sleep(0.1)

    async def _expect(self, plane: TcpRequestPlane, envelope: Envelope) -> None:
        try:
            await result_of(plane, f"worker:{PORT}", envelope, b"")
        except ConnectError as error:
            self.refusals.append(type(error))

    async def be_strange(self, kind: str, at_s: float, noise: bytes) -> None:
        await trio.sleep(at_s)
        if kind == "other secret":
            env = SimEnv(self.world, "stranger")
            async with open_request_plane(options(b"another secret, as long"), env) as plane:
                await self._expect(plane, unary("stolen"))
            return
        try:
            async with await trio.open_tcp_stream("worker", PORT) as stream:
                if kind == "hello":
                    await stream.send_all(b"trinamo\r\n\r\n\x02\0\0" + bytes(16))
                elif kind == "noise":
                    await stream.send_all(noise)
                async for _ in stream:
                    pass
        except (OSError, trio.BrokenResourceError):
            pass

    def play(self, others: list[tuple[str, float, bytes]]) -> None:
        async def main() -> None:
            self.world.boot("worker", self.work)
            await trio.sleep(0.1)
            for number, (kind, at_s, noise) in enumerate(others):
                self.world.boot(f"stranger{number}", self.be_strange, kind, at_s, noise)
            await self.world.boot("caller", self.call).ended.wait()

        self.world.run(main)


@settings(max_examples=20)
@given(st.integers(1, 2**32), strangers)
def test_a_member_gets_its_answers_whoever_else_is_there(
    seed: int, others: list[tuple[str, float, bytes]]
) -> None:
    """Every request of a member is answered soon, and asked for under another instance's id it is an
    `ImpostorError`; no stranger's request ever reaches the service, however few places there are."""
    scene = Scene(seed)
    scene.play(others)
    assert scene.answers == [b"re:%d" % number for number in range(4)]
    assert max(scene.took_s) < ANSWER_S_MAX
    assert scene.service.answered == ["r0", "r1", "r2", "r3"]
    assert scene.refusals.count(ImpostorError) == 4
    others_refused = [kind for kind, _, _ in others if kind == "other secret"]
    assert scene.refusals.count(ConnectError) == len(others_refused)

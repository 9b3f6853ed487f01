"""Unmodified trio networking in a world: one echo server, some clients, every kind of fault.

The first thing to run when trio or the simulator changes: it holds the simulator against trio
alone, without a line of the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from trinamo.sim import SimEnv, World
from trinamo.sim.core.choices import Choices
from trinamo.sim.core.policies import Policy
from trinamo.sim.net.network import Network

SERVER, PORT = "server", 7000


@dataclass
class EchoRun:
    """What one run left behind."""

    world: World
    network: Network
    digest: str = ""
    replies: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def serve(self) -> None:
        """Echo in capitals, after a moment."""
        env = SimEnv(self.world, SERVER)

        async def handle(stream: trio.SocketStream) -> None:
            try:
                async with stream:
                    async for chunk in stream:
                        await trio.sleep(env.rng.random() * 0.005)
                        await stream.send_all(bytes(chunk).upper())
            except trio.BrokenResourceError:
                self.world.note("broken")

        await trio.serve_tcp(handle, PORT)

    async def ask(self, number: int) -> None:
        """Ask five times, over a new connection each."""
        for attempt in range(5):
            question = f"hello-{number}-{attempt}".encode() * 30
            try:
                with trio.fail_after(2):
                    reply = await self._exchange(question)
            except (OSError, trio.TooSlowError, trio.BrokenResourceError) as error:
                self.failures.append(type(error).__name__)
                self.world.note("failure", client=number, error=type(error).__name__)
                await trio.sleep(0.3)
            else:
                # A server killed on its way sends FIN, so a reply may be cut short, never wrong.
                assert question.upper().startswith(reply)
                self.replies.append(len(reply))
                self.world.note("reply", client=number, size=len(reply))

    @staticmethod
    async def _exchange(question: bytes) -> bytes:
        async with await trio.open_tcp_stream(SERVER, PORT) as stream:
            await stream.send_all(question)
            await stream.send_eof()
            return b"".join([bytes(chunk) async for chunk in stream])

    def mistreat(self) -> None:
        """Pause, cut, resume, reset, kill, heal and restart, within the first second."""
        world, network = self.world, self.network
        world.after(0.006, world.pause, SERVER)
        world.after(0.010, network.cut, "client1", SERVER)
        world.after(0.050, world.resume, SERVER)
        world.after(0.055, network.reset, "client2", SERVER)
        world.after(0.060, world.kill, SERVER)
        world.after(0.500, network.heal, "client1", SERVER)
        world.after(1.000, world.boot, SERVER, self.serve)


def run(
    choices: Choices, *, policy: Policy = "batch", clients: int = 4, faults: bool = True
) -> EchoRun:
    """Play the scenario in a fresh world."""
    world = World(choices, policy=policy, virtual_s_max=60)
    result = EchoRun(world, Network(world, tear_one_in=4, short_one_in=8, connect_timeout_s=3))

    async def main() -> None:
        world.boot(SERVER, result.serve)
        asking = [world.boot(f"client{number}", result.ask, number) for number in range(clients)]
        if faults:
            result.mistreat()
        for host in asking:
            await host.ended.wait()

    result.digest = world.run(main)
    return result

"""One worker streams answers to one caller over simulated TCP; both ends are the real ones.

The caller registers a subject and consumes its channel; the worker calls home, sends numbered
items and finishes. How the connection info gets to the worker is not under test: a channel in
memory stands in for the request plane. Until the prologue the caller hears, late, of a worker or a
handler that ended, as discovery and the request's own connection would tell it; from then on the
response stream is on its own. Faults strike at a time or after the nth note. Afterwards the outcome is held against the invariants I1,
I2, I5 and I15 of the stream protocol.

What this module does not do: draw plans
(`properties/simulated/test_response_stream_in_simulation.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from tests.sim.programs.stream_outcome import CALLER, WORKER, Fault, FaultKind, Outcome, Plan
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import ConnectError, DisconnectedError, KilledError, TrinamoError
from trinamo.runtime.planes import ResponseChannel
from trinamo.runtime.protocol.streams.request import ConnectionInfo
from trinamo.sim import SimEnv, World
from trinamo.sim.cluster.memory import SECRET
from trinamo.sim.core.choices import Choices
from trinamo.sim.core.host import Host, HostState
from trinamo.sim.net.network import Network
from trinamo.transports.tcp import (
    TcpClient,
    TcpOptions,
    TcpStreamServer,
    open_client,
    open_stream_server,
)

__all__ = ["Fault", "FaultKind", "Outcome", "Plan", "run"]

PRESENCE_DELAY_S = 1.0
"""How long after the end of a worker, or of a handler, the caller hears of it by other means."""
IDLE_S = 2.0
"""A link without streams is gone soon, so that what is left over can be counted."""
SETTLE_S = 30.0
"""Bound on the end of everything once the faults are over: half-open detection and lingering."""


def run(plan: Plan, choices: Choices) -> Outcome:
    """Play `plan` in a fresh world; raises what `World.run` raises."""
    world = World(choices, policy=plan.policy, virtual_s_max=300.0, ambient="raise")
    network = Network(
        world,
        tear_one_in=plan.tear_one_in,
        short_one_in=plan.short_one_in,
        window_bytes=plan.window_bytes,
        connect_timeout_s=10.0,
    )
    scenario = _Scenario(plan, world, network)
    outcome = scenario.outcome
    outcome.digest = world.run(scenario.play)
    return outcome


class _Scenario:
    def __init__(self, plan: Plan, world: World, network: Network) -> None:
        self.plan, self.world, self.network = plan, world, network
        self.outcome = Outcome(world, plan)
        self._calls_in, self._calls_out = trio.open_memory_channel[tuple[int, ConnectionInfo]](
            math.inf
        )
        self._server: TcpStreamServer | None = None
        self._client: TcpClient | None = None
        self._go = trio.Event()
        self._all_told, self._go_on, self._last_told = trio.Event(), trio.Event(), trio.Event()
        self._over = [trio.Event() for _ in range(plan.streams + 1)]
        """Per stream: its handler has ended, or its worker has."""
        world.on_end.append(self._worker_ended)

    async def play(self) -> None:
        world = self.world
        caller, worker = world.boot(CALLER, self._caller), world.boot(WORKER, self._worker)
        await trio.sleep(0.01)
        baseline = self._census()
        for fault in self.plan.faults:
            self._arm(fault)
        self._go.set()
        with trio.move_on_after(self._bound_s()):
            await self._told_or_ended()
        if not (self._all_told.is_set() or caller.ended.is_set()):
            self.outcome.leftovers.append(f"I15: streams have not ended\n{world.waiting()}")
        with trio.move_on_after(SETTLE_S):
            # Quiescence is no event anybody could set: it is looked for.
            while self._leftover(baseline):
                await trio.sleep(0.25)
        if self._leftover(baseline):
            self.outcome.leftovers.append(f"I5: left {self._leftover(baseline)}\n{world.waiting()}")
        await self._ask_once_more()
        for host in (caller, worker):
            if host.state is HostState.UP:
                world.stop(host.name)
                await host.ended.wait()
        world.note("result", sent=self.outcome.sent, got=self.outcome.got)

    async def _ask_once_more(self) -> None:
        """One more stream, if nothing is broken any more."""
        passes = self.network.links.passes
        is_up = all(self.world.host(name).state is HostState.UP for name in (CALLER, WORKER))
        if is_up and passes(CALLER, WORKER) and passes(WORKER, CALLER):
            self.outcome.is_whole = True
            self._go_on.set()
            with trio.move_on_after(self._bound_s()):
                await self._last_told.wait()
            outcome, last = self.outcome, self.plan.streams
            outcome.last_terminals = outcome.terminals.pop(last, [])
            outcome.last_got = outcome.got.pop(last, [])
            outcome.sent.pop(last, None)
            outcome.finished.discard(last)
            outcome.handlers.pop(last, None)

    def _bound_s(self) -> float:
        """Until every stream must have its terminal: the work, the faults, and the detection."""
        faults_s = sum(f.lasts_s for f in self.plan.faults if f.lasts_s != math.inf)
        starts_s = sum(fault.at_s for fault in self.plan.faults)
        return SETTLE_S + self.plan.items * self.plan.gap_s * 20 + faults_s * 2 + starts_s

    async def _told_or_ended(self) -> None:
        async def end_wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_wait, self._all_told)
            nursery.start_soon(end_wait, self.world.host(CALLER).ended)

    def _leftover(self, baseline: dict[str, int]) -> dict[str, int]:
        """What living hosts hold more, or less, than they did before the first request."""
        return {key: n - baseline[key] for key, n in self._census().items() if n != baseline[key]}

    def _census(self) -> dict[str, int]:
        """Tasks and sockets of the living, and what each end counts itself."""
        counted: dict[str, int] = {}
        for name in (CALLER, WORKER):
            if self.world.host(name).state is HostState.DEAD:
                continue
            counted[f"{name} tasks"] = self.world.task_count(name)
            counted[f"{name} sockets"] = self.network.open_sockets(name)
        if f"{CALLER} tasks" in counted and self._server is not None:
            counted["subjects"] = self._server.registered_count
        if f"{WORKER} tasks" in counted and self._client is not None:
            counted["calls"] = self._client.open_count
        return counted

    # --- the two hosts ---------------------------------------------------------------------------

    async def _caller(self) -> None:
        env = SimEnv(self.world, CALLER)
        options = TcpOptions(
            host="0.0.0.0",
            advertise_host=CALLER,
            secret=SECRET,
            streams=self.plan.carrier,
        )
        async with open_stream_server(options, env) as self._server:
            await self._go.wait()
            async with trio.open_nursery() as nursery:
                for stream in range(self.plan.streams):
                    nursery.start_soon(self._ask, self._server, stream)
            self._all_told.set()
            await self._go_on.wait()
            await self._ask(self._server, self.plan.streams)
            self._last_told.set()
            await trio.sleep_forever()

    async def _ask(self, server: TcpStreamServer, stream: int) -> None:
        terminals = self.outcome.terminals.setdefault(stream, [])
        with Context(f"r{stream}") as context, server.register(context) as registration:
            self._calls_in.send_nowait((stream, registration.connection))
            channel = registration.channel
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch_presence, stream, channel.fail)
                    await channel.wait_prologue()
                    # From here on the connection alone must tell.
                    nursery.cancel_scope.cancel()
                terminals.append(await self._consume(channel, context, stream))
            except* TrinamoError as group:
                terminals += [type(error).__name__ for error in group.exceptions]
            if terminals != ["left"]:
                async for item in channel:
                    terminals.append(f"item {_index(item)} after the end")
        self.world.note("stream.end", stream=stream, terminal=terminals)

    async def _consume(self, channel: ResponseChannel, context: Context, stream: int) -> str:
        plan, got = self.plan, self.outcome.got.setdefault(stream, [])
        async for item in channel:
            got.append(_index(item))
            self.world.note("stream.got", stream=stream, index=got[-1])
            if stream == plan.streams:  # The last one is wanted whole.
                continue
            if len(got) == plan.stop_after:
                context.stop(Reason.STOP_REQUESTED)
            if len(got) == plan.kill_after:
                context.kill(Reason.CLIENT_DISCONNECT)
            if len(got) == plan.leave_after:
                return "left"
        return "complete"

    async def _watch_presence(self, stream: int, fail: Callable[[TrinamoError], None]) -> None:
        await self._over[stream].wait()
        await trio.sleep(PRESENCE_DELAY_S)
        fail(DisconnectedError("the worker is gone, or gave the request up"))

    def _worker_ended(self, host: Host) -> None:
        if host.name == WORKER:
            for event in self._over:
                event.set()

    async def _worker(self) -> None:
        env = SimEnv(self.world, WORKER)
        async with (
            open_client(TcpOptions(secret=SECRET, idle_s=IDLE_S), env) as self._client,
            trio.open_nursery() as nursery,
        ):
            async for stream, connection in self._calls_out:
                nursery.start_soon(self._answer, self._client, stream, connection)

    async def _answer(self, client: TcpClient, stream: int, connection: ConnectionInfo) -> None:
        outcome, plan = self.outcome, self.plan
        outcome.handlers[stream] = False
        sent = outcome.sent.setdefault(stream, [])
        with Context(f"r{stream}") as context:
            try:
                async with client.call_home(connection, context) as sender:
                    with context.cancelled_by_kill():
                        sender.open()
                        for index in range(plan.items):
                            await trio.sleep(plan.gap_s)
                            if context.is_stopped:
                                break
                            sent.append(index)
                            self.world.note("stream.sent", stream=stream, index=index)
                            if not sender.send_nowait(_item(index, plan.item_bytes)):
                                room = trio.Event()
                                sender.on_room(room.set)
                                await room.wait()
                        outcome.finished.add(stream)
                        sender.finish()
            except (ConnectError, KilledError) as error:
                self.world.note("call.failed", stream=stream, error=type(error).__name__)
        outcome.handlers[stream] = True
        self._over[stream].set()
        self.world.note("handler.end", stream=stream, state=context.state)

    # --- faults ------------------------------------------------------------------------------------

    def _arm(self, fault: Fault) -> None:
        def strike() -> None:
            if self.outcome.is_whole:
                return
            do, undo = self._effect(fault.kind)
            do()
            if fault.lasts_s != math.inf:
                self.world.after(fault.lasts_s, undo)

        if fault.on:
            self.world.after_note(fault.on, fault.nth, strike, delay_s=fault.at_s)
        else:
            self.world.after(fault.at_s, strike)

    def _effect(self, kind: FaultKind) -> tuple[Callable[[], object], Callable[[], object]]:
        world, network = self.world, self.network

        def heal() -> None:
            network.heal(CALLER, WORKER)

        match kind:
            case "reset":
                return lambda: network.reset(CALLER, WORKER), lambda: None
            case "kill worker" | "kill caller":
                name = kind.removeprefix("kill ")
                return lambda: world.kill(name), lambda: None
            case "pause worker" | "pause caller":
                name = kind.removeprefix("pause ")
                return lambda: world.pause(name), lambda: world.resume(name)
            case "cut":
                return lambda: network.cut(CALLER, WORKER), heal
            case "cut worker to caller":
                return lambda: network.cut(WORKER, CALLER, one_way=True), heal
            case "cut caller to worker":
                return lambda: network.cut(CALLER, WORKER, one_way=True), heal


def _item(index: int, size: int) -> bytes:
    return index.to_bytes(4, "big").ljust(size, b".")


def _index(item: bytes) -> int:
    return int.from_bytes(item[:4], "big")

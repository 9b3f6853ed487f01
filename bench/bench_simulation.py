"""How fast the simulator is, beside simpy in the same process: processor time, best of some rounds.

Messages: pairs that play ping-pong over a millisecond of latency, the same in both. simpy's message
is a process that waits and puts; ours is an event that the clock delivers, or one on the bus, with
every row in the digest. TCP: clients that ask over simulated sockets, through unmodified
`trio.SocketStream`. Cluster: workers that keep a connection alive against a store, to see how many
times faster than real time an idle cluster goes by; and whole ones, with requests and faults.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
from collections.abc import Callable

import simpy
import trio

from trinamo.sim import Bus, Network, Policy, SeedChoices, World
from trinamo.sim.explore import Scenario, run
from trinamo.sim.scenario.file import parse_scenario
from trinamo.sim.scenario.run import run_scenario

PAIRS, MESSAGES = 50, 200
LATENCY_S = 0.001
CLIENTS, QUESTIONS = 10, 100
KEEP_ALIVE_S, CLUSTER_S = 3.0, 600.0


def simpy_messages() -> int:
    env = simpy.Environment()

    def deliver(store, message):
        yield env.timeout(LATENCY_S)
        yield store.put(message)

    def ping(mine, theirs):
        for number in range(MESSAGES):
            env.process(deliver(theirs, number))
            yield mine.get()

    def pong(mine, theirs):
        for number in range(MESSAGES):
            yield mine.get()
            env.process(deliver(theirs, number))

    for _ in range(PAIRS):
        a, b = simpy.Store(env), simpy.Store(env)
        env.process(ping(a, b))
        env.process(pong(b, a))
    env.run()
    return PAIRS * MESSAGES * 2


def world_messages(policy: Policy, *, trace_steps: bool) -> int:
    """Channels of trio, filled by events: the simulator's own engine and nothing else."""
    world = World(SeedChoices(1), policy=policy, keep_rows=False, trace_steps=trace_steps)

    def send(channel: trio.MemorySendChannel[int], number: int) -> None:
        world.trace.add(world.current_time(), "driver", "send", {"number": number})
        world.after(LATENCY_S, channel.send_nowait, number)

    async def ping(out: trio.MemorySendChannel[int], back: trio.MemoryReceiveChannel[int]) -> None:
        for number in range(MESSAGES):
            send(out, number)
            await back.receive()

    async def pong(out: trio.MemorySendChannel[int], back: trio.MemoryReceiveChannel[int]) -> None:
        for number in range(MESSAGES):
            await back.receive()
            send(out, number)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(PAIRS):
                there, at_pong = trio.open_memory_channel[int](10)
                back, at_ping = trio.open_memory_channel[int](10)
                nursery.start_soon(ping, there, at_ping)
                nursery.start_soon(pong, back, at_pong)

    world.run(main)
    return PAIRS * MESSAGES * 2


def bus_messages() -> int:
    """The same between hosts on the bus, with links, verdicts, and a row for each end."""
    world = World(SeedChoices(1), keep_rows=False)
    bus = Bus(world, Network(world, latency_s=LATENCY_S, jitter_s=0))

    async def ping(me: str, peer: str) -> None:
        for number in range(MESSAGES):
            bus.send(me, peer, "c", number)
            await bus.receive("c")

    async def pong(me: str, peer: str) -> None:
        for number in range(MESSAGES):
            await bus.receive("c")
            bus.send(me, peer, "c", number)

    async def main() -> None:
        for pair in range(PAIRS):
            world.boot(f"b{pair}", pong, f"b{pair}", f"a{pair}")
            world.boot(f"a{pair}", ping, f"a{pair}", f"b{pair}")
        for pair in range(PAIRS):
            await world.host(f"b{pair}").ended.wait()

    world.run(main)
    return PAIRS * MESSAGES * 2


def sleeps() -> int:
    async def main() -> None:
        for _ in range(5000):
            await trio.sleep(1)

    World(SeedChoices(1), keep_rows=False, virtual_s_max=1e6).run(main)
    return 5000


def tcp(*, keep_rows: bool, virtual_s: float = 0.0) -> World:
    """Clients ask an echo server; with `virtual_s` they ask every `KEEP_ALIVE_S` until then."""
    world = World(SeedChoices(1), keep_rows=keep_rows, virtual_s_max=1e6)
    Network(world)

    async def echo(stream: trio.SocketStream) -> None:
        async for chunk in stream:
            await stream.send_all(chunk)

    async def ask() -> None:
        stream = await trio.open_tcp_stream("store", 7000)
        if virtual_s:
            while trio.current_time() < virtual_s:
                await exchange(stream)
                await trio.sleep(KEEP_ALIVE_S)
        else:
            for _ in range(QUESTIONS):
                await exchange(stream)
        await stream.aclose()

    async def exchange(stream: trio.SocketStream) -> None:
        await stream.send_all(bytes(100))
        await stream.receive_some()

    async def main() -> None:
        world.boot("store", trio.serve_tcp, echo, 7000)
        await trio.sleep(0.1)
        hosts = [world.boot(f"worker{number}", ask) for number in range(CLIENTS)]
        for host in hosts:
            await host.ended.wait()

    world.run(main)
    return world


def tcp_work() -> int:
    world = tcp(keep_rows=True)
    return world.steps + world.events


def tcp_rounds() -> int:
    tcp(keep_rows=True)
    return CLIENTS * QUESTIONS


def cluster_seconds() -> int:
    tcp(keep_rows=True, virtual_s=CLUSTER_S)
    return int(CLUSTER_S)


def small_runs() -> int:
    scenario = Scenario("trinamo.sim.programs.leased_queue")
    for seed in range(100):
        run(scenario, seed)
    return 100


CLUSTER = """
name = "bench"
about = "Ten workers under load, one of them killed and one cut off for a while."

[cluster]
frontends = 1
workers = 10

[[workload]]
clients = {clients}
requests = {requests}
pause_s = {pause_s}

[[fault]]
do = "kill"
on = "worker1"
at = 1.0
for = 5.0

[[fault]]
do = "isolate"
on = "worker2"
at = 1.5
for = 5.0

[limits]
end_s = 3000.0
virtual_s = 4000.0
idle_s = 60.0
"""


def cluster_under_load(*, clients: int, requests: int, pause_s: list[float]) -> float:
    """The whole stack: hypercorn, httpx, router, workers with the mocker engine, store."""
    text = CLUSTER.format(clients=clients, requests=requests, pause_s=pause_s)
    outcome = run_scenario(parse_scenario(text), SeedChoices(1))
    assert not outcome.violations, outcome.violations
    return outcome.world.ended_s


CASES: tuple[tuple[str, str, Callable[[], float]], ...] = (
    ("simpy, a process per message", "messages", simpy_messages),
    ("clock delivers, sends traced", "messages", lambda: world_messages("batch", trace_steps=False)),
    ("clock delivers, steps traced too", "messages", lambda: world_messages("batch", trace_steps=True)),
    ("the same, every pick a decision", "messages", lambda: world_messages("choice", trace_steps=True)),
    ("the same, single steps", "messages", lambda: world_messages("step", trace_steps=True)),
    ("bus between hosts, all traced", "messages", bus_messages),
    ("sleeps, jumped over", "sleeps", sleeps),
    ("TCP, all traced", "steps + events", tcp_work),
    ("TCP, all traced", "round trips", tcp_rounds),
    ("10 workers keeping alive", "virtual seconds", cluster_seconds),
    ("cluster of 10 workers, light load, faults", "virtual seconds", lambda: cluster_under_load(clients=1, requests=60, pause_s=[5.0, 15.0])),
    ("cluster of 10 workers, heavy load, faults", "virtual seconds", lambda: cluster_under_load(clients=10, requests=20, pause_s=[0.0, 0.02])),
    ("leased queue, whole runs", "runs", small_runs),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gc.freeze()
    best = [0.0] * len(CASES)
    for _ in range(options.rounds):
        for index, (_, _, case) in enumerate(CASES):
            start = time.process_time()
            count = case()
            best[index] = max(best[index], count / (time.process_time() - start))
    print("| what | unit | per second of CPU | × simpy |")
    print("|---|---|---|---|")
    for (name, unit, _), rate in zip(CASES, best, strict=True):
        ratio = f"{rate / best[0]:.2f}" if unit == "messages" else ""
        print(f"| {name} | {unit} | {rate:,.0f} | {ratio} |")


if __name__ == "__main__":
    main()

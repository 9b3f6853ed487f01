"""Long prompts beside short answers: workers that do all, and workers of two roles, in both modes.

Two questions, of the engines `mocker` (the time of a GPU, no work) and `exact` (real work, real KV),
with two workers each, on cores of their own:

* How long from a prompt of 4,096 tokens to its first token, alone in the cluster?
* How late are the tokens of eight other answers while such a prompt is computed?

Two aggregated workers, a decode and a prefill worker in `decode_first`, and two more in
`prefill_first` serve three models side by side behind one frontend. They are asked in turns, and
medians of the rounds are shown. Each prompt is another, so that no prefix is cached.

    python bench/serving/bench_disaggregation.py --write   # figures, bench/README.md, the picture
    python bench/serving/bench_disaggregation.py --from FILE   # the table again
"""

from __future__ import annotations

import argparse
import json
import os
import re
import string
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import trio

# The processes are those of the other benchmarks.
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_http import free_port, wait_for
from load.streams import Answer
from report.results import described, machine, write_results
from roles.processes import ROLES, Server, medians, percentile

HERE = Path(__file__).parents[1]
ENGINES = ("mocker", "exact")
KINDS = ("aggregated", "decode_first", "prefill_first")
WORKERS = {
    "aggregated": ("aggregated", "aggregated"),
    "decode_first": ("decode", "prefill"),
    "prefill_first": ("decode", "prefill"),
}
BLOCK_TOKENS = 16
LOG_CHARACTERS_MAX = 4000
PICTURE = "![Inter-token p99 of eight answers beside long prompts](../docs/disaggregation.svg)"
METRICS_AGE_S = 1.1
"""`/metrics` is kept for a second."""
TTFT_TARGET, GAP_TARGET = 1.15, 0.5
SETTINGS = {
    "TRINAMO_EVENT_PLANE__BACKEND": "nats",
    "TRINAMO_WORKER__CONTEXT_TOKENS_MAX": "8192",
    "TRINAMO_WORKER__KV_BLOCKS": "4096",
    "TRINAMO_WORKER__KV_BLOCK_TOKENS": str(BLOCK_TOKENS),
    "TRINAMO_LOG__LEVEL": "warning",
    # What OpenBLAS would else start threads for, a worker has one core.
    "OPENBLAS_NUM_THREADS": "1",
}


class Plan(NamedTuple):
    """How much is asked in one round. All of it fits into the KV memory of one worker."""

    prompt_tokens: int = 4096
    prompts: int = 5
    streams: int = 8
    stream_tokens: int = 7000

    def quick(self) -> Plan:
        """Hardly anything, to see that it works."""
        return Plan(prompt_tokens=1100, prompts=1, streams=2, stream_tokens=2000)


class System:
    """Two workers that serve one model, and where they say what they have done."""

    def __init__(self, kind: str, port: int, status_ports: list[int]) -> None:
        self.kind, self.port = kind, port
        self._status_ports = status_ports

    def counted(self, name: str) -> float:
        """A counter of `/metrics`, summed over labels and workers."""
        found = 0.0
        for port in self._status_ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            found += sum(
                float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
            )
            found += sum(
                float(value) for value in re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
            )
        return found

    async def measure(self, plan: Plan, prompts: Iterator[str]) -> dict[str, float]:
        """What came of one round."""
        await trio.sleep(METRICS_AGE_S)
        blocks = self.counted("trinamo_remote_prefill_blocks_total")
        lone = [await self._ask(next(prompts)) for _ in range(plan.prompts)]
        beside, quiet = await self._beside(plan, prompts)
        await trio.sleep(METRICS_AGE_S)
        moved = self.counted("trinamo_remote_prefill_blocks_total") - blocks
        return {
            "ttft_p50_ms": percentile(lone, 50),
            "beside_p99_ms": percentile(beside, 99),
            "beside_max_ms": max(beside),
            "quiet_p99_ms": percentile(quiet, 99),
            "blocks": moved / (2 * plan.prompts),
        }

    async def _ask(self, prompt: str) -> float:
        answer = Answer(self.port, self.kind, prompt, 2)
        await answer.run()
        return answer.first_ms

    async def _beside(self, plan: Plan, prompts: Iterator[str]) -> tuple[list[float], list[float]]:
        """The gaps of the streams while long prompts are computed, and between these."""
        beside: list[float] = []
        quiet: list[float] = []
        async with trio.open_nursery() as nursery:
            streams = [
                Answer(self.port, self.kind, f"short {number}", plan.stream_tokens)
                for number in range(plan.streams)
            ]
            for each in streams:
                nursery.start_soon(each.run)
            for each in streams:
                await each.first.wait()
            for _ in range(plan.prompts):
                begin = perf_counter()
                await trio.sleep(0.2)
                asked = perf_counter()
                await self._ask(next(prompts))
                end = perf_counter()
                for each in streams:
                    quiet += each.gaps_ms(begin, asked)
                    beside += each.gaps_ms(asked, end)
            if any(each.events >= plan.stream_tokens for each in streams):
                raise SystemExit("the streams were over before the prompts: ask for more tokens")
            for each in streams:
                each.leave()
        return beside, quiet


def long_prompts(tokens: int) -> Iterator[str]:
    """Prompts of so many characters, which are tokens here, that share no prefix."""
    letters = string.ascii_lowercase
    number = int(time.time() * 1e3)
    while True:
        number += 1
        name = f"{number:x} "[::-1]
        yield (name + letters * (tokens // len(letters) + 1))[:tokens]


@contextmanager
def open_systems(engine: str, kinds: tuple[str, ...]) -> Iterator[list[System]]:
    """One frontend, and two workers for each kind, until the context is left."""
    with ExitStack() as held:
        directory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="trinamo-bench-")))
        cores = sorted(os.sched_getaffinity(0))

        def start(
            core: int,
            *arguments: object,
            reads: bool = False,
            environ: Mapping[str, str] | None = None,
        ) -> Server:
            # Before it has threads: those of its libraries stay on the same core.
            server = Server(
                ["taskset", "-c", cores[core % len(cores)], sys.executable, *arguments],
                environ=environ or {},
                log=directory / "log",
                reads=reads,
            )
            held.callback(server.close)
            return server

        servers = start(0, ROLES, "trinamo-servers", reads=True).ready
        environ = {
            **SETTINGS,
            "TRINAMO_CONTROL_PLANE__ETCD__ENDPOINTS": servers["etcd"],
            "TRINAMO_EVENT_PLANE__NATS__SERVERS": servers["nats"],
            "TRINAMO_EVENT_PLANE__NATS__TOKEN": servers["token"],
        }
        port, systems = free_port(), []
        start(0, "-m", "trinamo.cli", "frontend", "--port", port, environ=environ)
        for kind in kinds:
            status_ports = []
            # The first shares its core with the frontend and the load, the second has its own.
            for core, role in enumerate(WORKERS[kind]):
                status_ports.append(free_port())
                more = worker_environ(engine, kind, role, status_ports[-1])
                start(core, "-m", "trinamo.cli", "worker", environ={**environ, **more})
            systems.append((kind, status_ports))
        try:
            wait_for(port, kinds)
            for _, status_ports in systems:
                for each in status_ports:
                    wait_ready(each)
        except SystemExit:
            sys.stderr.write((directory / "log").read_text("utf-8")[-LOG_CHARACTERS_MAX:])
            raise
        os.sched_setaffinity(0, {cores[0]})
        held.callback(os.sched_setaffinity, 0, cores)
        yield [System(kind, port, status_ports) for kind, status_ports in systems]


def worker_environ(engine: str, kind: str, role: str, status_port: int) -> Mapping[str, str]:
    mode = {} if kind == "aggregated" else {"TRINAMO_DISAGGREGATION__MODE": kind}
    return {
        **mode,
        "TRINAMO_WORKER__ENGINE": engine,
        "TRINAMO_WORKER__MODEL_NAME": kind,
        "TRINAMO_WORKER__NAMESPACE": kind.replace("_", "-"),
        "TRINAMO_WORKER__ROLE": role,
        "TRINAMO_WORKER__STATUS_PORT": str(status_port),
    }


def wait_ready(status_port: int) -> None:
    """Until a worker is registered."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{status_port}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"no worker at status port {status_port}")


def run(engines: tuple[str, ...], kinds: tuple[str, ...], plan: Plan, rounds: int) -> dict:
    """The medians by engine and kind, rounds in turns."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for engine in engines:
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        prompts = long_prompts(plan.prompt_tokens)
        with open_systems(engine, kinds) as systems:
            for system in systems:
                trio.run(system.measure, plan.quick(), long_prompts(plan.quick().prompt_tokens))
            for _ in range(rounds):
                for system in systems:
                    found[system.kind].append(trio.run(system.measure, plan, prompts))
        results[engine] = {kind: medians(each) for kind, each in found.items()}
        print(table({engine: results[engine]}), flush=True)
    return results


# --- what is shown -------------------------------------------------------------------------------


def table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Markdown, a row for each engine and kind."""
    lines = [
        "| engine | workers | TTFT p50 | | ITL p99 beside a prompt | | quiet | blocks a prompt |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for engine, by_kind in results.items():
        base = by_kind.get("aggregated")
        for kind, found in by_kind.items():
            ttft = ratio(found, base, "ttft_p50_ms", TTFT_TARGET, kind)
            gap = ratio(found, base, "beside_p99_ms", GAP_TARGET, kind)
            lines.append(
                f"| {engine} | {kind} | {found['ttft_p50_ms']:.1f} ms | {ttft} "
                f"| {found['beside_p99_ms']:.1f} ms | {gap} | {found['quiet_p99_ms']:.1f} ms "
                f"| {found['blocks']:.0f} |"
            )
    return "\n".join(lines)


def ratio(
    found: Mapping[str, float],
    base: Mapping[str, float] | None,
    key: str,
    target: float,
    kind: str,
) -> str:
    """Against aggregated workers, and whether that is in the target."""
    if base is None or kind == "aggregated":
        return ""
    share = found[key] / base[key]
    said = "reached" if share <= target else "**not reached**"
    return f"{share:.2f} × (≤ {target:g}): {said}"


def draw(path: Path, results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Write an SVG with a bar for each engine and kind: the gaps of other answers beside a long prompt."""
    bars = [
        (f"{engine}, {kind}", found["beside_p99_ms"])
        for engine, by_kind in results.items()
        for kind, found in by_kind.items()
    ]
    largest = max((value for _, value in bars), default=0.0) or 1.0
    bar, left, widest = 18, 190, 520
    height, width = (len(bars) + 2) * (bar + 6), left + widest + 90
    title = "Inter-token p99 of eight answers beside prompts of 4,096 tokens"
    font = 'font-family="sans-serif" font-size="13"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {font}>',
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="18">{title}</text>',
    ]
    for row, (name, value) in enumerate(bars):
        top = (row + 1) * (bar + 6) + 6
        length = max(1.0, widest * value / largest)
        lines += [
            f'<text x="{left - 8}" y="{top + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{bar}" fill="#3b6ea5"/>',
            f'<text x="{left + length + 6:.1f}" y="{top + 14}">{value:.2f} ms</text>',
        ]
    path.write_text("\n".join([*lines, "</svg>"]) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=ENGINES, action="append", help="only this; repeatable")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument(
        "--quick", action="store_true", help="hardly anything, to see that it works"
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--from", dest="read", type=Path, help="measure nothing; take this file")
    parser.add_argument("--write", action="store_true", help="write what the documentation shows")
    options = parser.parse_args()
    if options.read:
        found = json.loads(options.read.read_text("utf-8"))
    else:
        plan = Plan().quick() if options.quick else Plan()
        engines, kinds = tuple(options.engine or ENGINES), tuple(options.kind or KINDS)
        found: dict[str, Any] = {"machine": machine()}
        rounds = 1 if options.quick else options.rounds
        found["results"] = run(engines, kinds, plan, rounds)
    text = json.dumps(found, indent=1) + "\n"
    if options.json:
        options.json.write_text(text, "utf-8")
    shown = f"{described(found['machine'])}\n\n{table(found['results'])}\n"
    print("\n" + shown)
    if options.write:
        (HERE / "serving" / "disaggregation.json").write_text(text, "utf-8")
        write_results(HERE / "README.md", f"{shown}\n{PICTURE}\n", by="bench_disaggregation.py")
        draw(HERE.parent / "docs" / "disaggregation.svg", found["results"])


if __name__ == "__main__":
    main()

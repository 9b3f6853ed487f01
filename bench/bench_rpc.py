"""RPC between a worker and a client process, without HTTP: CPU per item or request on each side.

trinamo, in clear and sealed, beside grpc.aio and, where `python bench/peers.py install` was run, Dynamo; with BENCH_BEFORE,
the directory of another checkout, that one, too. Rounds alternate, medians are shown. The loads:

`one` streams of one item, 64 at once, and `unary` calls; `steps` all streams get one item each in the
same instant, every 5 ms, from generators to iterators; `pushed` the same from sink to sink, without a
task in between, and `loop` from trinamo's own step loop; `phased` every 1.25 ms one stream after the
other gets an item, as from many engines; `free` handlers yield as fast as the consumers take; `kills`
from a consumer's leaving its stream to the handler's cancellation, with other streams or none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import peers
from roles.processes import Pair, before, medians, open_pairs, percentile

KINDS = ("trinamo", "sealed", "before", "grpc", "dynamo")
LOADS = {
    "one": "streams of one item, 64 at once",
    "unary": "unary, 64 at once",
    "steps": "items of 64 streams that step together",
    "pushed": "the same, pushed",
    "loop": "the same, pushed by trinamo's step loop",
    "phased": "items of 64 streams in turn",
    "free": "items of 64 streams at once",
}
PUSHED = ("pushed", "loop")
"""Which only trinamo can."""
PUSHING = ("trinamo", "sealed")
STREAMS = 64
FREE_ITEMS = {
    "trinamo": 320_000,
    "sealed": 320_000,
    "before": 320_000,
    "grpc": 64_000,
    "dynamo": 25_600,
}
CALLS = {"trinamo": 80, "sealed": 80, "before": 80, "grpc": 60, "dynamo": 60}
"""Of each of the 64 tasks."""


def measure(pair: Pair, load: str, *, share: int = 1) -> dict[str, float]:
    """Rate, and CPU microseconds per item or request on both sides; `share`: of a whole round."""
    if load in ("one", "unary"):
        calls = max(1, CALLS[pair.kind] // share)
        do = "requests" if load == "one" else "unary"
        return pair.measure(do, calls * STREAMS, in_flight=STREAMS, calls=calls)
    handler, items = {
        "steps": ("paced", 25_600),
        "pushed": ("pushed", 25_600),
        "loop": ("loop", 25_600),
        "phased": ("phased", 1_920),
        "free": ("tokens", FREE_ITEMS[pair.kind]),
    }[load]
    each = max(1, items // STREAMS // share)
    return pair.measure("stream", each * STREAMS, load=handler, streams=STREAMS, items=each)


def run(loads: Sequence[str], kinds: Sequence[str], *, rounds: int, share: int = 1) -> dict:
    """The median of every load and kind, `{load: {kind: figures}}`."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    with open_pairs(kinds) as pairs:
        for load in loads:
            able = [pair for pair in pairs if load not in PUSHED or pair.kind in PUSHING]
            rows: dict[str, list[dict[str, float]]] = {pair.kind: [] for pair in able}
            for number in range(rounds + 1):
                for pair in able:
                    found = measure(pair, load, share=share)
                    if number:  # The first round warms up.
                        rows[pair.kind].append(found)
            results[load] = {kind: medians(each) for kind, each in rows.items()}
            for kind, row in results[load].items():
                print(
                    f"| {LOADS[load]} | {kind} | {row['rate']:,.0f} "
                    f"| {row['worker']:.1f} | {row['client']:.1f} |",
                    flush=True,
                )
    return results


def run_kills(kills: int) -> dict:
    """Milliseconds from leaving a stream to the handler's `finally`, beside other streams or none."""
    results = {}
    for busy_streams in (0, 64):
        with open_pairs(["trinamo"]) as (pair,):
            pair.client.ask("kills", count=20, busy_streams=busy_streams)
            pair.worker.ask("cancellations")
            left = pair.client.ask("kills", count=kills, busy_streams=busy_streams)["at"]
            cancelled = pair.worker.ask("cancellations")["at"]
        assert left.keys() == cancelled.keys(), "a handler was not cancelled"
        late_ms = [(cancelled[number] - at) * 1e3 for number, at in left.items()]
        found = {
            "p50": percentile(late_ms, 50),
            "p99": percentile(late_ms, 99),
            "max": max(late_ms),
        }
        results[str(busy_streams)] = found
        print(
            f"| kills, {busy_streams} other streams | p50 {found['p50']:.2f} ms "
            f"| p99 {found['p99']:.2f} ms | max {found['max']:.2f} ms |",
            flush=True,
        )
    return results


def installed(kinds: Sequence[str] = KINDS) -> list[str]:
    found = [kind for kind in kinds if kind != "dynamo" or peers.has("ai-dynamo-runtime")]
    return [kind for kind in found if kind != "before" or before()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", choices=[*LOADS, "kills"], action="append", help="repeatable")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this; repeatable")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument(
        "--quick", action="store_true", help="hardly anything, to see that it works"
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    loads = options.load or [*LOADS, "kills"]
    print("| load | RPC | per second | worker µs | client µs |\n|---|---|---|---|---|")
    of_items = [load for load in loads if load != "kills"]
    rounds, share, kills = (1, 40, 5) if options.quick else (options.rounds, 1, options.kills)
    results = run(of_items, installed(options.kind or KINDS), rounds=rounds, share=share)
    if "kills" in loads:
        results["kills"] = run_kills(kills)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), "utf-8")


if __name__ == "__main__":
    main()

"""Streaming RPC, one small item per token: CPU per item on each side, beside grpc.aio.

`free`: handlers yield as fast as the consumers take. `paced`: all streams get one item each in the
same instant, every 5 ms, as from an engine that steps them together. `phased`: every 1.25 ms one
stream after the other gets an item, as from many engines. Rounds alternate between the two
libraries; medians are shown, and with `--spread` the least and the most.
"""

from __future__ import annotations

import argparse

from roles.processes import medians, open_pairs

LOADS = {"free": "tokens", "paced": "paced", "phased": "phased"}
ITEMS = {
    ("free", "trinamo"): 320_000,
    ("free", "grpc"): 64_000,
    ("paced", "trinamo"): 25_600,
    ("paced", "grpc"): 25_600,
    ("phased", "trinamo"): 2_560,
    ("phased", "grpc"): 2_560,
}
"""Of all streams of one round together."""
STREAMS = (16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", choices=LOADS, action="append", help="only this one; repeatable")
    parser.add_argument("--spread", action="store_true", help="show the least and the most, too")
    options = parser.parse_args()
    print("| load | streams | RPC | items/s | worker µs/item | client µs/item |")
    print("|---|---|---|---|---|---|")
    for load in options.load or LOADS:
        for streams in STREAMS:
            run(load, streams, rounds=options.rounds, is_spread_shown=options.spread)


def run(load: str, streams: int, *, rounds: int, is_spread_shown: bool) -> None:
    results: dict[str, list[dict[str, float]]] = {"trinamo": [], "grpc": []}
    with open_pairs(tuple(results)) as pairs:
        for number in range(rounds + 1):
            for pair in pairs:
                each = ITEMS[load, pair.kind] // streams
                found = pair.measure(
                    "stream", each * streams, load=LOADS[load], streams=streams, items=each
                )
                if number:  # The first round warms up.
                    results[pair.kind].append(found)
    ours, theirs = medians(results["trinamo"]), medians(results["grpc"])
    for kind, row in (("trinamo", ours), ("grpc.aio", theirs)):
        shown = {side: f"{row[side]:.1f}" for side in ("worker", "client")}
        if is_spread_shown:
            for side in shown:
                every = [each[side] for each in results[kind.removesuffix(".aio")]]
                shown[side] += f" ({min(every):.1f}–{max(every):.1f})"
        print(
            f"| {load} | {streams} | {kind} | {row['rate']:,.0f} "
            f"| {shown['worker']} | {shown['client']} |"
        )
    print(
        f"| {load} | {streams} | ratio | {ours['rate'] / theirs['rate']:.2f} "
        f"| {ours['worker'] / theirs['worker']:.2f} | {ours['client'] / theirs['client']:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()

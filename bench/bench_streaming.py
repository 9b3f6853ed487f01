"""Streaming RPC, one small item per token: CPU per item on each side, beside grpc.aio.

`free`: handlers yield as fast as the consumers take. `paced`: every stream gets one item per
5 ms step, so that there is nothing to batch. Rounds alternate between the two; medians are shown.
"""

from __future__ import annotations

import argparse

from processes import medians, open_pairs

ITEMS = {("trinamo", False): 320_000, ("grpc", False): 64_000}
PACED_STEPS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-paced", action="store_true", help="skip the paced runs")
    options = parser.parse_args()
    print("| load | streams | RPC | items/s | worker µs/item | client µs/item |")
    print("|---|---|---|---|---|---|")
    for is_paced in (False,) if options.no_paced else (False, True):
        for streams in (16, 64):
            run(streams, is_paced=is_paced, rounds=options.rounds)


def run(streams: int, *, is_paced: bool, rounds: int) -> None:
    results: dict[str, list[dict[str, float]]] = {"trinamo": [], "grpc": []}
    with open_pairs(tuple(results)) as pairs:
        for number in range(rounds + 1):
            for pair in pairs:
                each = PACED_STEPS if is_paced else ITEMS[pair.kind, False] // streams
                found = pair.measure(
                    "stream", each * streams, streams=streams, items=each, paced=is_paced
                )
                if number:  # The first round warms up.
                    results[pair.kind].append(found)
    load = "paced" if is_paced else "free"
    ours, theirs = medians(results["trinamo"]), medians(results["grpc"])
    for kind, row in (("trinamo", ours), ("grpc.aio", theirs)):
        print(
            f"| {load} | {streams} | {kind} | {row['rate']:,.0f} "
            f"| {row['worker']:.1f} | {row['client']:.1f} |"
        )
    print(
        f"| {load} | {streams} | ratio | {ours['rate'] / theirs['rate']:.2f} "
        f"| {ours['worker'] / theirs['worker']:.2f} | {ours['client'] / theirs['client']:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()

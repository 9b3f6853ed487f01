"""Unary requests at 64 in flight: rate and CPU per request on both sides, beside grpc.aio."""

from __future__ import annotations

import argparse

from roles.processes import medians, open_pairs

CALLS = {"trinamo": 200, "grpc": 60}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=64)
    options = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {"trinamo": [], "grpc": []}
    with open_pairs(tuple(results)) as pairs:
        for number in range(options.rounds + 1):
            for pair in pairs:
                calls = CALLS[pair.kind]
                found = pair.measure(
                    "unary",
                    calls * options.in_flight,
                    in_flight=options.in_flight,
                    calls=calls,
                )
                if number:  # The first round warms up.
                    results[pair.kind].append(found)
    ours, theirs = medians(results["trinamo"]), medians(results["grpc"])
    print("| in flight | RPC | requests/s | worker µs/request | client µs/request |")
    print("|---|---|---|---|---|")
    for kind, row in (("trinamo", ours), ("grpc.aio", theirs)):
        print(
            f"| {options.in_flight} | {kind} | {row['rate']:,.0f} "
            f"| {row['worker']:.0f} | {row['client']:.0f} |"
        )
    print(
        f"| {options.in_flight} | ratio | {ours['rate'] / theirs['rate']:.2f} "
        f"| {ours['worker'] / theirs['worker']:.2f} | {ours['client'] / theirs['client']:.2f} |"
    )


if __name__ == "__main__":
    main()

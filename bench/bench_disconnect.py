"""From a consumer leaving its stream to the handler's cancellation, across two processes."""

from __future__ import annotations

import argparse

from roles.processes import open_pairs, percentile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    options = parser.parse_args()
    print("| other streams | kills | p50 ms | p99 ms | max ms |")
    print("|---|---|---|---|---|")
    for busy_streams in (0, 64):
        with open_pairs(["trinamo"]) as (pair,):
            pair.client.ask("kills", count=50, busy_streams=busy_streams)
            pair.worker.ask("cancellations")
            left = pair.client.ask("kills", count=options.kills, busy_streams=busy_streams)["at"]
            cancelled = pair.worker.ask("cancellations")["at"]
        assert left.keys() == cancelled.keys(), "a handler was not cancelled"
        late_ms = [(cancelled[number] - at) * 1e3 for number, at in left.items()]
        print(
            f"| {busy_streams} | {len(late_ms)} | {percentile(late_ms, 50):.2f} "
            f"| {percentile(late_ms, 99):.2f} | {max(late_ms):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

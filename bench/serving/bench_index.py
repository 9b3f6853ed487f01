"""What an index of KV blocks costs beside Dynamo's `RadixTree`: inserting, finding, memory.

python bench/serving/bench_index.py --blocks 1048576 --rounds 3

Each index is in a process of its own, rounds in turns, medians shown. Without the peers
(`make peers`) only our own is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import peers

ROLES = Path(__file__).with_name("index_roles.py")
ROWS = {
    "insert_us": ("insert, as the event came: µs a block", 0.5),
    "name_us": ("name a prompt's block of 16 tokens, of 32k: µs", None),
    "find_1k_us": ("find, 64 blocks (1k tokens): µs", 15),
    "find_8k_us": ("find, 512 blocks (8k tokens): µs", 40),
    "find_32k_us": ("find, 2048 blocks (32k tokens): µs", 120),
    "bytes": ("memory: bytes a block", 100),
    "replace_us": ("one block in, the oldest out: µs", None),
    "bytes_full": ("memory after every block was replaced: bytes a block", 100),
    "bytes_left": ("memory after all workers left: bytes a block", None),
    "sweep_ms": ("the longest pause while they leave: ms", None),
}


def measure(kind: str, blocks: int) -> dict[str, float]:
    interpreter = peers.python() if kind == "radix" else Path(sys.executable)
    said = subprocess.run(
        [interpreter, ROLES, kind, str(blocks)], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(said.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="hardly anything, to see that it works"
    )
    options = parser.parse_args()
    if options.quick:
        options.blocks, options.rounds = 1 << 14, 1
    kinds = ["ours", *(["radix"] if peers.has("ai-dynamo-runtime") else [])]
    if "radix" not in kinds:
        print("Dynamo is not there: make peers", file=sys.stderr)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            found[kind].append(measure(kind, options.blocks))
    version = peers.versions().get("ai-dynamo-runtime", "")
    names = {"ours": "trinamo", "radix": f"RadixTree {version}"}
    print(f"{options.blocks:,} blocks, 16 workers, events of 64 blocks")
    print("| " + " | ".join(["what", "target", *(names[kind] for kind in kinds)]) + " |")
    print("|" + "---|" * (2 + len(kinds)))
    for key, (what, target) in ROWS.items():
        aim = "" if target is None else f"≤ {target:g}"
        shown = [
            f"{statistics.median(each[key] for each in found[kind]):,.2f}"
            if key in found[kind][0]
            else "–"
            for kind in kinds
        ]
        print("| " + " | ".join([what, aim, *shown]) + " |")


if __name__ == "__main__":
    main()

"""The data path as a whole: every row of its table, measured in one run, as Markdown to paste.

RPC, HTTP, isolation, and the cost per token against the number of streams, with all peers that are
installed, and with BENCH_BEFORE, the directory of another checkout, that one as `before`. All figures
go to a JSON file, from which table and picture are made:

    python bench/bench_data_path.py --write            # bench/measured.json, README.md, the picture
    python bench/bench_data_path.py --json measured.json
    python bench/bench_data_path.py --from measured.json     # the table again, without measuring
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import bench_http
import bench_isolation
import bench_rpc
from bench_http import Load, open_system
from load.load import raise_descriptors
from report.picture import draw
from report.results import described, machine, write_results
from report.rows import Measured, table

HERE = Path(__file__).parent
STREAMS = (1, 4, 16, 64, 256, 512)
SWEPT = {
    "trinamo": "trinamo: frontend and worker",
    "dynamo": "Dynamo: frontend and worker",
    "uvicorn": "uvicorn: one process",
}
RPC_LOADS = ("one", "steps", "pushed", "free")
HTTP_LOADS = ("unary64", "steps64", "steps256", "sleeps64", "sleeps256", "burst", "open5000")


def sweep(rounds: int) -> dict[str, list[tuple[int, float]]]:
    """CPU of all processes per token, against the number of streams; the least of some rounds."""
    kinds = bench_http.installed(tuple(SWEPT))
    lines: dict[str, list[tuple[int, float]]] = {SWEPT[kind]: [] for kind in kinds}
    for kind in kinds:
        with open_system(kind, trinamo=("steps",)) as system:
            for streams in STREAMS:
                load = Load(f"{streams} streams", streams, 100, pause_s=0.02)
                cost = min(system.measure(load)["sum_us"] for _ in range(rounds))
                lines[SWEPT[kind]].append((streams, cost))
    os.environ["BENCH_STEP_S"] = "0.02"
    points = lines["grpc.aio: no HTTP, two processes"] = []
    with bench_rpc.open_pairs(["grpc"]) as (pair,):
        for streams in STREAMS:
            found = [
                pair.measure("stream", 100 * streams, load="paced", streams=streams, items=100)
                for _ in range(rounds)
            ]
            points.append((streams, min(each["worker"] + each["client"] for each in found)))
    del os.environ["BENCH_STEP_S"]
    return lines


def measure(rounds: int) -> dict:
    started = time.monotonic()
    raise_descriptors()
    found: dict = {"machine": machine()}
    found["rpc"] = bench_rpc.run(RPC_LOADS, bench_rpc.installed(), rounds=rounds)
    kinds = bench_http.installed(bench_http.KINDS)
    found["http"] = bench_http.run(HTTP_LOADS, kinds, rounds=rounds)
    found["isolation"] = {
        "stalled": bench_isolation.run_stalled(rounds),
        "deaths": bench_isolation.run_deaths(bench_isolation.HELD),
    }
    found["sweep"] = sweep(2)
    found["machine"]["minutes"] = f"{(time.monotonic() - started) / 60:.1f}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--from", dest="read", type=Path, help="measure nothing; take this file")
    parser.add_argument("--write", action="store_true", help="write what the documentation shows")
    options = parser.parse_args()
    read = options.read
    found = json.loads(read.read_text("utf-8")) if read else measure(options.rounds)
    text = json.dumps(found, indent=1) + "\n"
    if options.json:
        options.json.write_text(text, "utf-8")
    shown = f"{described(found['machine'])}\n\n{table(Measured(found))}\n"
    print("\n" + shown)
    if options.write:
        Path(HERE / "measured.json").write_text(text, "utf-8")
        write_results(HERE / "README.md", shown, by="bench_data_path.py")
        draw(
            HERE.parent / "docs" / "data_path.svg",
            "CPU per token against streams",
            "one token per stream every 20 ms, all streams in the same instant",
            found["sweep"],
        )


if __name__ == "__main__":
    main()

"""What comes of every fault of a KV transfer, on every backend: one table.

The rows are those that `tests/transports/test_transfer_faults.py` holds; two processes a backend,
one that moves blocks and one that owns them, and a third that waits for them, so that a process
that ends is seen. Every block that was called complete is compared. `--only` takes a part of a
row's name, `--json FILE` writes the rows. Exit status 1 if a row is not as the table may say.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import attrs
import trio

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.transports.memory_owner import BACKENDS  # noqa: E402
from tests.transports.routed_faults import ROUTED_FAULTS, open_routed_scene  # noqa: E402
from tests.transports.transfer_faults import FAULTS  # noqa: E402
from tests.transports.transfer_scenes import Outcome, open_scene  # noqa: E402

BACKEND_TIMEOUT_S = 180.0


# --- the process that moves blocks ---------------------------------------------------------------


def say(kind: str, name: str, found: Outcome, *, is_allowed: bool) -> None:
    print(json.dumps({"as": kind, "fault": name, "ok": is_allowed, **attrs.asdict(found)}))
    sys.stdout.flush()


async def run_rows(backend: str, only: str) -> None:
    with trio.fail_after(BACKEND_TIMEOUT_S):
        async with open_scene(backend) as scene:
            for fault in FAULTS:
                if only in fault.name:
                    found = await fault.run(scene)
                    is_allowed = found.kind in fault.allows(backend) and not found.wrong_count
                    say("alone", fault.name, found, is_allowed=is_allowed)
        routed = [] if backend.startswith("tcp") else [r for r in ROUTED_FAULTS if only in r.name]
        if routed:
            async with open_routed_scene(backend) as scene:
                for fault in routed:
                    found = await fault.run(scene)
                    is_allowed = found.kind in fault.allows(backend) and not found.wrong_count
                    is_allowed &= fault.carried_on in ("", found.text)
                    say("routed", fault.name, found, is_allowed=is_allowed)


# --- the table -----------------------------------------------------------------------------------


def rows_of(backend: str, only: str) -> Iterator[dict[str, Any]]:
    """What the process of one backend says, and how it ended; its last words if it failed."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        yield from _rows_of(backend, only, said)


def _rows_of(backend: str, only: str, said: IO[str]) -> Iterator[dict[str, Any]]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--run", backend, "--only", only],
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                if line.startswith("{"):
                    yield {"backend": backend, **json.loads(line)}
        status = process.wait(10)
    finally:
        process.kill()
        process.wait()
    if status:
        said.seek(0)
        print("".join(said.readlines()[-20:]), file=sys.stderr)
    yield {"backend": backend, "as": "process", "status": status}


def cell(found: dict[str, Any]) -> str:
    """An outcome as text."""
    if found["kind"] == "-":
        return "n/a"
    mark = "" if found["ok"] else " **UNEXPECTED**"
    return f"{found['kind']} {found['duration_s']:.3f}{mark}"


def router_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    mark = "" if found["ok"] else " **UNEXPECTED**"
    if found["kind"] != "done":
        return f"no: {found['kind']} {found['duration_s']:.3f}{mark}"
    way, _, block = found["text"].partition(" ")
    if way == "tcp":
        return f"yes: tcp {block} {found['duration_s']:.3f}{mark}"
    return f"not needed: done {found['duration_s']:.3f}{mark}"


def show(backend: str, rows: list[dict[str, Any]]) -> bool:
    """Print the rows of one backend; whether all were as they may be."""
    alone = {row["fault"]: row for row in rows if row["as"] == "alone"}
    routed = {row["fault"]: row for row in rows if row["as"] == "routed"}
    status = rows[-1]["status"]
    for name, found in alone.items():
        wrong = found["wrong_count"] + routed.get(name, {}).get("wrong_count", 0)
        # It said so after the outcome.
        cells = (backend, name, cell(found), str(wrong), "alive", router_cell(routed.get(name)))
        print(f"| {' | '.join(cells)} |", flush=True)
    if status != 0:
        last = list(routed or alone)[-1:] or ["the start"]
        print(f"| {backend} | after: {last[0]} | | | **STATUS {status}** | |", flush=True)
    return status == 0 and bool(alone) and all(row["ok"] for row in rows[:-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="*", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--only", default="", help="a part of a row's name")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--run", choices=BACKENDS, help=argparse.SUPPRESS)
    chosen, _ = parser.parse_known_args()
    if chosen.run:
        trio.run(run_rows, chosen.run, chosen.only)
        return 0
    print("| backend | fault | outcome, s | wrong blocks | process | fallback by the router |")
    print("|---|---|---|---|---|---|")
    everything: list[dict[str, Any]] = []
    is_good = True
    for backend in chosen.backend:
        rows = list(rows_of(backend, chosen.only))
        everything += rows
        is_good &= show(backend, rows)
    wrong = sum(row.get("wrong_count", 0) for row in everything)
    print(f"\nwrong blocks that were reported complete: {wrong}")
    if chosen.json:
        chosen.json.write_text(json.dumps(everything, indent=2) + "\n", "utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

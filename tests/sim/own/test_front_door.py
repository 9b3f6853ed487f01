"""What somebody's own protocol loads who imports the simulator: nothing of our cluster."""

from __future__ import annotations

import json
import subprocess
import sys

SHOW = "import json, sys, trinamo.sim; print(json.dumps(sorted(sys.modules)))"
OURS = {
    "trinamo.runtime.config.keys",
    "trinamo.runtime.env",
    "trinamo.runtime.logs.text",
    "trinamo.runtime.nurseries",
    "trinamo.runtime.process.tasks",
}
"""All that the simulator itself takes from the runtime, beside the packages these stand in."""
ROOMS = {
    "core",
    "disk",
    "env",
    "isolation",
    "net",
    "checkers",
    "explore",
    "own",
    "errors",
    "faults",
    "stress",
}
HEAVY = {"asyncio", "unittest", "email", "numpy", "grpc", "nats", "hypercorn", "starlette", "httpx"}


def test_the_front_door_opens_on_no_cluster_no_transport_and_no_library_of_theirs() -> None:
    found = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    modules = set(json.loads(found.stdout))
    packages = {f"{name}." for name in OURS}
    theirs = {
        name for name in modules if name.startswith(("trinamo.runtime", "trinamo.transports"))
    }
    rooms = {name.split(".")[2] for name in modules if name.startswith("trinamo.sim.")}

    assert {name for name in theirs if not any(p.startswith(f"{name}.") for p in packages)} == set()
    assert rooms <= ROOMS
    assert HEAVY & modules == set()

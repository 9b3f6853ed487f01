"""`trinamo status` of a cluster that is not whole, with a real process that hangs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.cli.places import Place, cluster


def test_a_stopped_worker_is_away_and_is_not_counted_as_serving(tmp_path: Path) -> None:
    """Before: exit 0, `away: []`, "2 instances"."""
    # However slow the commands are, the worker's lease outlives both.
    lease = ("--set", "control_plane.etcd.lease_ttl_s=60")
    with cluster(Place(tmp_path), "--engine", "echo", "--workers", "2", *lease) as running:
        workers = [pid for pid, line in running.children.items() if " worker " in line]
        os.kill(workers[0], signal.SIGSTOP)
        try:
            done = running.place.run("status", "--json")
            shown = running.place.run("status")
        finally:
            os.kill(workers[0], signal.SIGCONT)

    assert (done.returncode, shown.returncode) == (3, 3), done.stderr
    found = json.loads(done.stdout)
    [silent] = [each for each in found["instances"] if each["problem"]]
    assert silent["metadata"]["pid"] == str(workers[0])
    assert any(silent["id"] in sentence for sentence in found["away"])
    [model] = found["models"]
    assert (model["instances"], model["registered"]) == (1, 2)
    assert "1 of 2" in shown.stdout

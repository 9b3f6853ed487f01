"""`trinamo status` of a cluster that is not whole, with a real process that hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.cli.places import Place, cluster, wait_for


def test_a_stopped_worker_is_away_and_is_not_counted_as_serving(tmp_path: Path) -> None:
    """Before: exit 0, `away: []`, "2 instances"."""
    # However slow the commands are, the worker and its lease outlive them.
    lives = ("--set", "control_plane.etcd.lease_ttl_s=600", "--set", "worker.hang_timeout_s=600")
    with cluster(Place(tmp_path), "--engine", "echo", "--workers", "2", *lives) as running:
        workers = [pid for pid, line in running.children.items() if " worker " in line]
        ran: list[subprocess.CompletedProcess[str]] = []

        def is_told() -> bool:
            # What does not answer a busy machine's `status` in time is away, too.
            ran[:] = [running.place.run("status", "--json"), running.place.run("status")]
            if not ran[0].stdout:
                return False
            seen = json.loads(ran[0].stdout)["instances"]
            silent = [each["metadata"]["pid"] for each in seen if each["problem"]]
            return silent == [str(workers[0])] and "1 of 2" in ran[1].stdout

        os.kill(workers[0], signal.SIGSTOP)
        try:
            wait_for(is_told, 300, "the word about one worker that is silent")
        finally:
            os.kill(workers[0], signal.SIGCONT)

    done, shown = ran
    assert (done.returncode, shown.returncode) == (3, 3), done.stderr
    found = json.loads(done.stdout)
    [silent] = [each for each in found["instances"] if each["problem"]]
    assert silent["metadata"]["pid"] == str(workers[0])
    assert any(silent["id"] in sentence for sentence in found["away"])
    [model] = found["models"]
    assert (model["instances"], model["registered"]) == (1, 2)
    assert "1 of 2" in shown.stdout

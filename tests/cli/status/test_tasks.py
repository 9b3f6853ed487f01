"""`trinamo tasks` on real processes: a task that is stuck is found by its line."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from tests.cli.places import Place, cluster, wait_for

ENGINE = """
import trinamo, trio

@trinamo.engine(name="stuck")
async def stuck(request, context):
    await trio.Event().wait()  # line 6
    yield ""
"""
SECRET = "a-prompt-that-is-nobodys-business"


def ask(url: str) -> socket.socket:
    """Ask what nobody answers; closed, the client has left."""
    host, _, port = url.rpartition("//")[2].partition(":")
    connection = socket.create_connection((host, int(port)), timeout=120)
    body = json.dumps({"model": "stuck", "prompt": SECRET, "max_tokens": 5})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall((head + body).encode())
    return connection


def test_a_stuck_engine_is_drawn_with_its_file_and_line(tmp_path: Path) -> None:
    """In the one process of the worker, by name or by pid; and nothing of what it was asked."""
    place = Place(tmp_path)
    (tmp_path / "stuck.py").write_text(ENGINE, "ascii")
    with (
        cluster(place, "--workers", "1", "--engine", "stuck.py:stuck") as running,
        ask(running.url),
    ):
        drawn = ""

        def is_stuck() -> bool:
            nonlocal drawn
            drawn = place.run("tasks", "worker-1").stdout
            return "stuck.py:6" in drawn

        wait_for(is_stuck, 60, "the request reaches the engine")
        everybody = json.loads(place.run("tasks", "--json").stdout)
        trees = {each["name"]: each["tree"] for each in everybody["processes"]}
        by_pid = place.run("tasks", str(trees["worker-1"]["pid"])).stdout
        nobody = place.run("tasks", "worker-9")

    assert "waits in Event.wait" in next(
        line for line in drawn.splitlines() if "stuck.py:6" in line
    )
    assert "frontend, pid" not in drawn
    assert set(trees) == {"frontend", "worker-1"}
    assert everybody["away"] == []
    assert "stuck.py:6" in by_pid
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "no process worker-9 here; there are: frontend (pid" in nobody.stderr
    assert SECRET not in drawn + json.dumps(everybody)

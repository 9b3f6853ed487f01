"""A frontend that nothing but itself has started, in an outage of etcd: `trinamo status` finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.places import END_TIMEOUT_S, START_TIMEOUT_S, Place, wait_for
from tests.servers import session_etcd

ALONE = ("--port", "0", "--set", "event_plane.backend=memory")


def test_it_is_found_and_tells_what_it_knows_though_nobody_names_it(tmp_path: Path) -> None:
    place = Place(tmp_path)

    def looked(*arguments: str) -> tuple[int, dict[str, Any]]:
        done = place.run("status", "--json", "--etcd", endpoint, *arguments)
        return done.returncode, json.loads(done.stdout or "{}")

    with session_etcd() as etcd:
        endpoint = etcd.endpoint
        process = place.start("frontend", "--etcd", endpoint, *ALONE)
        try:
            wait_for(
                lambda: "frontend is ready" in place.output or process.poll() is not None,
                START_TIMEOUT_S,
                "the frontend's start",
            )
            url = place.ready_url
            # What a program reads is one object a line, in one style.
            for line in place.output.splitlines():
                again = json.dumps(json.loads(line), ensure_ascii=False, separators=(",", ":"))
                assert line == again
            _, with_etcd = looked()
        except BaseException:
            process.kill()
            raise
    try:
        code, without = looked()
        process.terminate()
        assert process.wait(END_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
    gone, _ = looked()

    for told in (with_etcd, without):
        assert [(each["url"], each["pid"]) for each in told["frontends"]] == [(url, process.pid)]
        assert told["frontends"][0]["status"] == "unavailable"
    assert code == 3
    assert "does not answer" in str(without["away"])
    assert gone == 1
    assert list((tmp_path / "run").rglob("*.frontends")) == []

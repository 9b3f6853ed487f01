"""Several frontends on one port, as whoever opens the dashboard sees them: one of them killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.cli.places import Place, cluster, wait_for


def snapshots(url: str) -> Iterator[Any]:
    """What a page is told, of whichever frontend has its connection; a new one where that ends."""
    while True:
        with (
            suppress(OSError),
            urllib.request.urlopen(f"{url}/dashboard/events", timeout=120) as stream,
        ):
            for line in stream:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))


def until(told: Iterator[Any], is_so: Callable[[Any], bool]) -> Any:
    for _, snapshot in zip(range(120), told, strict=False):
        if is_so(snapshot):
            return snapshot
    raise AssertionError("the page was not told so in 120 looks")


def ask_until(url: str, is_over: threading.Event) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hello " * 20}]}).encode()
    headers = {"content-type": "application/json", "connection": "close"}
    while not is_over.is_set():
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
        with suppress(OSError), urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()


def events_of(who: str, snapshot: Any) -> set[str]:
    return {each["kind"] for each in snapshot["events"] if each["who"] == who}


def test_each_frontend_is_shown_and_one_that_is_killed_is_there_again(tmp_path: Path) -> None:
    started = cluster(
        Place(tmp_path), "--engine", "echo", "--workers", "1", "--frontend-processes", "2"
    )
    is_over = threading.Event()
    with started as running:
        asking = threading.Thread(target=ask_until, args=(running.url, is_over))
        asking.start()
        try:
            told = snapshots(running.url)
            # The kernel gives each new connection to one of them.
            snapshot = until(
                told,
                lambda found: (
                    len([each for each in found["frontends"] if each["requests_per_s"]]) == 2
                ),
            )
            both = snapshot["frontends"]
            assert sorted(each["name"] for each in both) == ["frontend-1", "frontend-2"]
            assert [each["is_own"] for each in both].count(True) == 1
            victim = next(each for each in both if not each["is_own"])
            os.kill(victim["pid"], signal.SIGKILL)
            pids = {each["pid"] for each in both}

            def is_back(found: Any) -> bool:
                alive = [each for each in found["frontends"] if each["status"] == "ready"]
                return len(alive) == 2 and {each["pid"] for each in alive} != pids

            until(told, is_back)
            # What is left of the old one goes with its lease, sooner or later than the new one comes.
            until(told, lambda found: {"left", "joined"} <= events_of(victim["name"], found))
            wait_for(lambda: len(running.children) >= 3, 120, "all processes run again")
        finally:
            is_over.set()
            asking.join()

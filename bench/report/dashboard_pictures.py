"""The pictures of `docs/dashboard.md`: a cluster of its own under load, of which one worker is killed.

`python -m bench.report.dashboard_pictures` needs a Chromium; it takes about a minute, and its pictures differ
each time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.sim.report.browser import Browser, browser

FOLDER: Final = Path(__file__).parents[2] / "docs"
BYTES_MAX: Final = 150_000
START_S: Final = 120.0
LOAD_S: Final = 25.0
CLIENTS: Final = 18
PICTURES: Final = (
    ("dashboard-light.png", 1200, 800, "light"),
    ("dashboard-dark.png", 1200, 800, "dark"),
    ("dashboard-phone.png", 360, 1500, "light"),
)


@contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    """The address of a frontend before prefill and decode workers."""
    command = [
        *(sys.executable, "-m", "trinamo.cli", "up", "--disagg", "--prefill", "2", "--decode", "3"),
        *("--engine", "mocker", "--port", "0"),
        *("--set", "disaggregation.prefill_tokens_local_max=64"),
        *("--set", "control_plane.etcd.lease_ttl_s=3", "--set", "worker.kv_blocks=2100"),
    ]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ)
    try:
        yield _wait_ready(log)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _wait_ready(log: Path) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        for line in log.read_text("utf-8").splitlines():
            if line.startswith("The cluster is ready: "):
                return line.rpartition(" ")[2].removesuffix("/v1")
        time.sleep(0.2)
    raise RuntimeError(f"the cluster did not start:\n{log.read_text('utf-8')}")


def _ask(url: str, number: int, until: float) -> None:
    """One client: prompts that begin alike, so that blocks are found, and some that are long."""
    turn = 0
    while time.monotonic() < until:
        turn += 1
        own = f"{number}, {turn}: "
        text = "You are a helpful assistant. " * (3 + 12 * (turn % 5))
        text = text + own if turn % 3 else own + text
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 160, "stream": True}
        if turn == 20 and number % 4 == 0:
            body["model"] = "one-that-nobody-serves"
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()


def _kill_one(url: str) -> None:
    """End a decode worker as hard as it gets; `trinamo up` starts another."""
    with urllib.request.urlopen(f"{url}/dashboard/events", timeout=10) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                instances: list[dict[str, Any]] = json.loads(line[6:])["instances"]
                break
        else:
            raise RuntimeError("the page is told nothing")
    victim = next(each for each in instances if each["role"] == "decode")
    os.kill(int(victim["pid"]), signal.SIGKILL)


def _take(chromium: Browser, url: str, name: str, size: tuple[int, int], scheme: str) -> None:
    width, height = size
    chromium.open(f"{url}/dashboard")
    chromium.call(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
    )  # fmt: skip
    chromium.call(
        "Emulation.setEmulatedMedia",
        features=[{"name": "prefers-color-scheme", "value": scheme}],
    )
    chromium.evaluate("new Promise(done => setTimeout(done, 2500))")
    path = FOLDER / name
    chromium.screenshot(path)
    size_bytes = path.stat().st_size
    if size_bytes > BYTES_MAX:
        raise RuntimeError(f"{name} has {size_bytes} bytes, more than {BYTES_MAX}")


def main() -> None:
    """Take all pictures."""
    with tempfile.TemporaryDirectory() as folder, _cluster(Path(folder)) as url:
        until = time.monotonic() + 4 * LOAD_S
        for number in range(CLIENTS):
            threading.Thread(target=_ask, args=(url, number, until), daemon=True).start()
        with browser() as chromium:
            chromium.open(f"{url}/dashboard")
            chromium.evaluate(f"new Promise(done => setTimeout(done, {LOAD_S * 1000:.0f}))")
            _kill_one(url)
            chromium.evaluate("new Promise(done => setTimeout(done, 12000))")
            for name, width, height, scheme in PICTURES:
                _take(chromium, url, name, (width, height), scheme)


if __name__ == "__main__":
    main()

"""Prometheus and its promtool; its rules are tried by tests/shipped/test_monitoring.py."""

import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from checks import SERVER, tried

START_S = 60
CONFIG = f"""
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: fixed
    static_configs: [{{targets: ["{SERVER.removeprefix("http://")}"]}}]
  - job_name: found
    http_sd_configs: [{{url: "{SERVER}/sd", refresh_interval: 1s}}]
"""


def promtool(*arguments: str, given: str = "") -> None:
    command = ["promtool", "check", *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-500:]


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def targets(url: str) -> list[tuple[str, str]]:
    """Job and health of each target that is looked at."""
    try:
        told = json.loads(read(f"{url}/api/v1/targets"))["data"]["activeTargets"]
    except OSError:
        return []
    return [(each["labels"]["job"], each["health"]) for each in told]


def scrape(folder: Path) -> None:
    """Until all that are to be there are up: the frontend by its address, all processes by /sd."""
    expected = {
        address for group in json.loads(read(f"{SERVER}/sd")) for address in group["targets"]
    }
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    command = ["prometheus", f"--config.file={folder}/config.yaml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wanted = [("fixed", "up"), *[("found", "up")] * len(expected)]
        for _ in range(START_S * 5):
            seen = targets(f"http://127.0.0.1:{port}")
            if sorted(seen) == wanted:
                return
            assert process.poll() is None, (folder / "log").read_text()[-500:]
            time.sleep(0.2)
        raise AssertionError(f"{seen} and not {wanted}")
    finally:
        process.terminate()
        process.wait()


with tempfile.TemporaryDirectory() as place:
    (Path(place) / "config.yaml").write_text(CONFIG)
    with tried("promtool check metrics"):
        promtool("metrics", given=read(f"{SERVER}/metrics"))
    with tried("promtool check config"):
        promtool("config", f"{place}/config.yaml")
    with tried("all processes are scraped, by address and by /sd"):
        scrape(Path(place))

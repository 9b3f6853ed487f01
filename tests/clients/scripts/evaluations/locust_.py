"""locust: four users, whole answers and streamed ones in turns."""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, SERVER, tried

SECONDS, USERS = 10, 4
FILE = f"""
from locust import HttpUser, task

BODY = {{
    "model": {MODEL!r}, "messages": [{{"role": "user", "content": "Say hello."}}],
    "max_tokens": 12, "temperature": 0,
}}


class Chatting(HttpUser):
    @task
    def whole(self):
        with self.client.post("/v1/chat/completions", json=BODY, catch_response=True) as answer:
            if not answer.json()["choices"][0]["message"]["content"]:
                answer.failure("no content")

    @task
    def streamed(self):
        asked = {{"json": {{**BODY, "stream": True}}, "stream": True, "catch_response": True}}
        with self.client.post("/v1/chat/completions", name="streamed", **asked) as answer:
            lines = [each for each in answer.iter_lines() if each]
            if lines[-1] != b"data: [DONE]":
                answer.failure(f"ends with {{lines[-1]}}")
"""


def main(folder: Path) -> None:
    (folder / "locustfile.py").write_text(FILE)
    command = [str(Path(sys.executable).with_name("locust")), "--headless", "--host", SERVER]
    command += ["--users", str(USERS), "--spawn-rate", "4", "--run-time", f"{SECONDS}s"]
    command += ["--stop-timeout", "30", "--csv", "told", "--only-summary"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-600:]
    rows = {row["Name"]: row for row in csv.DictReader((folder / "told_stats.csv").open())}
    assert int(rows["Aggregated"]["Request Count"]) > USERS
    assert rows["Aggregated"]["Failure Count"] == "0", rows
    assert set(rows) == {"/v1/chat/completions", "streamed", "Aggregated"}, rows


with tempfile.TemporaryDirectory() as place, tried("whole and streamed to [DONE], 4 users"):
    main(Path(place))

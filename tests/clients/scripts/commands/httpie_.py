"""HTTPie."""

import json
import subprocess
import sys
from pathlib import Path

from checks import BASE, tried

HTTP = str(Path(sys.executable).with_name("http"))


def http(*arguments: str) -> str:
    command = [HTTP, "--ignore-stdin", "--check-status", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-500:]
    return done.stdout


CHAT = ("POST", f"{BASE}/chat/completions", 'messages:=[{"role":"user","content":"Hello."}]')
with tried("models"):
    assert json.loads(http("GET", f"{BASE}/models"))["data"]
with tried("chat"):
    assert json.loads(http(*CHAT, "max_tokens:=5"))["choices"]
with tried("chat, streamed to [DONE]"):
    assert "data: [DONE]" in http("--stream", *CHAT, "max_tokens:=5", "stream:=true")

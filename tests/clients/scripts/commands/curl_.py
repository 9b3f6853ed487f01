"""curl, which asks for HTTP/2 with `--http2` and is answered by HTTP/1.1."""

import json
import subprocess

from checks import BASE, MODEL, SHORT, tried

BODY = {"model": MODEL, "messages": SHORT, "max_tokens": 5}


def curl(*arguments: str) -> str:
    command = ["curl", "--silent", "--show-error", "--fail", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def chat(**more) -> list[str]:
    return [f"{BASE}/chat/completions", "--json", json.dumps({**BODY, **more})]


with tried("--http2 is answered by HTTP/1.1"):
    told = curl("--http2", "--include", f"{BASE}/models")
    assert told.startswith("HTTP/1.1 200"), told[:100]
    assert MODEL in told
with tried("--http2: chat"):
    assert json.loads(curl("--http2", *chat()))["choices"]
with tried("--no-buffer: chat, streamed"):
    events = curl("--no-buffer", *chat(stream=True)).split("\n\n")
    assert events[-2] == "data: [DONE]", events[-3:]

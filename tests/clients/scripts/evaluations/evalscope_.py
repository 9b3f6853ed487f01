"""ModelScope's evalscope, its part that measures."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE, MODEL, tried
from tokenizer import make_tokenizer

TOKENS, REQUESTS = 24, 8


def measure(folder: Path, tokenizer: Path, api: str, path: str) -> dict:
    out = folder / api
    command = [str(Path(sys.executable).with_name("evalscope")), "perf", "--model", MODEL]
    command += ["--url", f"{BASE}{path}", "--api", api, "--tokenizer-path", str(tokenizer)]
    command += ["--dataset", "random", "--min-prompt-length", "64", "--max-prompt-length", "64"]
    command += ["--number", str(REQUESTS), "--parallel", "2", "--stream", "--no-timestamp"]
    command += ["--max-tokens", str(TOKENS), "--min-tokens", str(TOKENS), "--temperature", "0"]
    command += ["--extra-args", '{"ignore_eos": true}', "--outputs-dir", str(out)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-600:]
    (found,) = out.rglob("benchmark_summary.json")
    return json.loads(found.read_text())


with tempfile.TemporaryDirectory() as place:
    made = make_tokenizer(Path(place))
    for api, path in {"openai": "/chat/completions", "responses": "/responses"}.items():
        with tried(f"perf by {path}, streamed: every answer has the tokens asked for"):
            told = measure(Path(place), made, api, path)
            assert told["Success Requests"] == REQUESTS, told
            assert told["Avg Output Tokens"] == TOKENS, told

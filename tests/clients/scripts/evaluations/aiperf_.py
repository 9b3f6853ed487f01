"""NVIDIA's aiperf, which has to get as many tokens as it asks for."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, SERVER, tried
from tokenizer import make_tokenizer

TOKENS, REQUESTS = 24, 8


def measure(folder: Path, tokenizer: Path, kind: str, *more: str) -> dict:
    out = folder / kind
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--url", SERVER]
    command += ["--model", MODEL, "--endpoint-type", kind, "--tokenizer", str(tokenizer)]
    command += ["--request-count", str(REQUESTS), "--concurrency", "2", "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", "16", "--output-tokens-mean", str(TOKENS)]
    command += ["--output-artifact-dir", str(out), *more]
    done = subprocess.run(
        command,
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-600:]
    (found,) = out.rglob("profile_export_aiperf.json")
    return json.loads(found.read_text())


with tempfile.TemporaryDirectory() as place, tried("every answer has the tokens asked for"):
    asked = ("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{TOKENS}")
    told = measure(Path(place), make_tokenizer(Path(place)), "chat", "--streaming", *asked)
    assert told["request_count"]["avg"] == REQUESTS, told["request_count"]
    usage = told.get("usage_completion_tokens") or told["output_sequence_length"]
    assert usage["min"] == usage["max"] == TOKENS, usage

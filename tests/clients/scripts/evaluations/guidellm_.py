"""guidellm, which asks for `ignore_eos` of itself and has to get as many tokens as it asks for."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, SERVER, tried
from tokenizer import make_tokenizer

TOKENS, REQUESTS = 24, 8


def measure(folder: Path, tokenizer: Path, path: str) -> list[int]:
    """The tokens of each answer, as its usage says."""
    out = folder / "told.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    command += [
        "--backend",
        f"kind=openai_http,target={SERVER},model={MODEL},request_format={path}",
    ]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={TOKENS}"]
    command += ["--output", f"kind=json,path={out}"]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-600:]
    requests = json.loads(out.read_text())["benchmarks"][0]["requests"]
    assert not requests["errored"], requests["errored"][0]
    return [each["output_tokens"] for each in requests["successful"]]


with tempfile.TemporaryDirectory() as place:
    made = make_tokenizer(Path(place))
    for path in ("/v1/chat/completions", "/v1/completions"):
        with tried(f"{path}: every answer has the tokens asked for"):
            assert measure(Path(place), made, path) == [TOKENS] * REQUESTS

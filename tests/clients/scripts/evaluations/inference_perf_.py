"""inference-perf of Kubernetes, which asks for `ignore_eos` of itself."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, SERVER, tried
from tokenizer import make_tokenizer

TOKENS, RATE, SECONDS = 16, 2, 4
CONFIG = """
load: {{type: constant, interval: 1, num_workers: 1, stages: [{{rate: {rate}, duration: {seconds}}}]}}
api: {{type: completion, streaming: true}}
server: {{type: vllm, model_name: {model}, base_url: "{server}", ignore_eos: true}}
tokenizer: {{pretrained_model_name_or_path: {tokenizer}}}
data:
  type: random
  input_distribution: {{min: 16, max: 16, mean: 16, std_dev: 0, total_count: 20}}
  output_distribution: {{min: {tokens}, max: {tokens}, mean: {tokens}, std_dev: 0, total_count: 20}}
report: {{request_lifecycle: {{summary: true, per_stage: false, per_request: true}}}}
storage: {{local_storage: {{path: {out}}}}}
"""


def measure(folder: Path, tokenizer: Path) -> list[dict]:
    """What it knows of each request."""
    out = folder / "told"
    told = {"rate": RATE, "seconds": SECONDS, "tokens": TOKENS, "model": MODEL, "server": SERVER}
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(**told, tokenizer=tokenizer, out=out))
    command = [str(Path(sys.executable).with_name("inference-perf")), "--config_file", str(config)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-600:]
    (found,) = out.rglob("per_request_lifecycle_metrics.json")
    return json.loads(found.read_text())


with (
    tempfile.TemporaryDirectory() as place,
    tried("completion, streamed: every answer has the tokens asked for"),
):
    requests = measure(Path(place), make_tokenizer(Path(place)))
    assert len(requests) == RATE * SECONDS, len(requests)
    assert not [each["error"] for each in requests if each["error"]]
    told = [each["info"]["response_metrics"]["server_usage"] for each in requests]
    assert {each["completion_tokens"] for each in told} == {TOKENS}, told

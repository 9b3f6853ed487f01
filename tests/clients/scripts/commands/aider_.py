"""aider: one request to edit a file, which so small a model need not follow."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE, MODEL, tried

# Without a bound so small a model may write to the end of its context.
SETTINGS = f"[{{name: openai/{MODEL}, edit_format: whole, extra_params: {{max_tokens: 60}}}}]"


def aider(folder: Path, *more: str) -> str:
    (folder / ".aider.model.settings.yml").write_text(SETTINGS)
    (folder / "hello.py").write_text('print("hello")\n')
    command = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{MODEL}"]
    command += ["--openai-api-base", BASE, "--openai-api-key", "any", "--no-git", "--yes-always"]
    command += ["--no-analytics", "--no-check-update", "--no-show-model-warnings", *more]
    command += ["--no-show-release-notes", "--map-tokens", "0"]
    done = subprocess.run(
        [*command, "--message", "Say bye instead.", "hello.py"],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-600:]
    return done.stdout


with tempfile.TemporaryDirectory() as place:
    with tried("a request to edit, streamed"):
        assert "tokens: " in aider(Path(place)).lower()
    with tried("a request to edit, whole"):
        assert "tokens: " in aider(Path(place), "--no-stream").lower()

"""gptme: one question."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE, MODEL, tried


def ask(folder: Path, *more: str) -> str:
    command = [str(Path(sys.executable).with_name("gptme")), "--non-interactive", "--no-confirm"]
    command += [
        "--model",
        f"local/{MODEL}",
        "--workspace",
        str(folder),
        "--tools",
        "none",
        *more,
        "Say hello.",
    ]
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "OPENAI_BASE_URL": BASE,
            "OPENAI_API_KEY": "any",
            "GPTME_MAX_TOKENS": "40",
        },
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
    with tried("a question, streamed"):
        assert "Assistant" in ask(Path(place))
    with tried("a question, whole"):
        assert "Assistant" in ask(Path(place), "--no-stream")

"""gptme: one question, which it follows up with others of its own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE, MODEL, tried

FOLLOWED_S = 60


def ask(folder: Path, *more: str) -> str:
    """What it says on the way to its end, or within `FOLLOWED_S`.

    It asks the model twice more whether it is done, and sets no limit to an answer: a small model
    goes on until its context is full.
    """
    command = [str(Path(sys.executable).with_name("gptme")), "--non-interactive", "--no-confirm"]
    command += ["--model", f"local/{MODEL}", "--workspace", str(folder), "--tools", "none"]
    environ = os.environ | {"OPENAI_BASE_URL": BASE, "OPENAI_API_KEY": "any"}
    with subprocess.Popen(
        [*command, *more, "Say hello."],
        env=environ,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as asking:
        try:
            said, _ = asking.communicate(timeout=FOLLOWED_S)
        except subprocess.TimeoutExpired:
            asking.kill()
            said, _ = asking.communicate()
            return said
    assert asking.returncode == 0, said[-600:]
    return said


def answer(said: str) -> str:
    """What the model said first."""
    _, _, first = said.partition("Assistant:")
    return first.partition("User:")[0].replace("Thinking...", "").strip()


with tempfile.TemporaryDirectory() as place:
    with tried("a question, streamed"):
        assert answer(ask(Path(place)))
    with tried("a question, whole"):
        assert answer(ask(Path(place), "--no-stream"))

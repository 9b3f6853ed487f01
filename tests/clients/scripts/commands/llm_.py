"""Simon Willison's llm, a program for the command line."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE, MODEL, tried

MODELS = f"""
- model_id: small
  model_name: {MODEL}
  api_base: {BASE}
  supports_schema: true
  supports_tools: true
- model_id: plain
  model_name: {MODEL}
  api_base: {BASE}
  completion: true
"""
TOOL = 'def get_weather(city: str) -> str:\n    "The weather in a city."\n    return "sunny"\n'


def llm(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("llm")), *arguments],
        env={**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "any"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-500:]
    return done.stdout


def main(folder: Path) -> None:
    (folder / "extra-openai-models.yaml").write_text(MODELS)
    steady = ("-o", "temperature", "0", "-o", "max_tokens", "40")
    with tried("chat"):
        assert llm(folder, "-m", "small", *steady, "Say hello.").strip()
    with tried("chat, not streamed"):
        assert llm(folder, "-m", "small", "--no-stream", *steady, "Say hello.").strip()
    with tried("a schema"):
        asked = ("--schema", "is_adult bool", "Who is Bob?")
        assert "is_adult" in llm(folder, "-m", "small", *steady, *asked)
    with tried("completion"):
        assert llm(folder, "-m", "plain", *steady, "Paris is").strip()
    with tried("a tool"):
        assert llm(folder, "-m", "small", *steady, "--functions", TOOL, "Weather in Rome?")
    with tried("its log"):
        assert "Say hello." in llm(folder, "logs", "-n", "0")


with tempfile.TemporaryDirectory() as place:
    main(Path(place))

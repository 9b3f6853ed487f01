"""The example of the page about upstreams does what it says: llama.cpp's server, a frontend, a client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import needs
from tests.cli.places import Place, wait_for
from tests.shipped.test_docs import blocks
from tests.shipped.test_guides import write_files
from tests.sources import ROOT
from trinamo.runtime.engines.llamacpp.model_file import find_model
from trinamo.runtime.errors import ConfigError

START_TIMEOUT_S = 90


def model_by_the_page() -> str:
    """What the shell block of the page takes for the model."""
    shell = blocks(ROOT / "docs" / "upstreams.md", "bash")
    (line,) = (line for body in shell for line in body.splitlines() if line.startswith("MODEL="))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.check_output(
        ["bash", "-euc", f'{line}\necho "$MODEL"'], env={**os.environ, "PATH": path}, text=True
    ).rstrip("\n")


@contextmanager
def llamacpp_server(folder: Path) -> Iterator[str]:
    """The page's own server; its URL. With one thread: several wait for each other where others compute."""
    needs.LLAMACPP_SERVER.imported()
    try:
        find_model()
    except ConfigError:
        needs.A_MODEL.lacking()
    model = model_by_the_page()
    file = folder / "llamacpp_server.py"
    one = "params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1\n"
    file.write_text(file.read_text().replace("server = ", f"{one}server = "))
    command = [sys.executable, file.name, model, "0"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=quiet, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = next((line for line in process.stdout if line.startswith("llama.cpp")), "")
            assert said, "the server ended before it listened"
            yield said.split()[-1]
        finally:
            process.kill()


def test_the_page_s_client_gets_json_from_llamacpp_through_a_frontend(tmp_path: Path) -> None:
    assert write_files(ROOT / "docs" / "upstreams.md", tmp_path) == ["llamacpp_server.py", "ask.py"]
    place = Place(tmp_path)
    with llamacpp_server(tmp_path) as url:
        frontend = place.start("frontend", "--port", "0", "--upstream", f"{url}/v1")
        try:
            wait_for(
                lambda: "ready: url" in place.output or frontend.poll() is not None,
                START_TIMEOUT_S,
                "the frontend's start",
            )
            base_url = place.ready_url
            done = subprocess.run(
                [sys.executable, "ask.py"],
                cwd=tmp_path,
                env={**os.environ, "OPENAI_BASE_URL": f"{base_url}/v1"},
                capture_output=True,
                text=True,
                timeout=START_TIMEOUT_S,
                check=False,
            )
            frontend.send_signal(signal.SIGTERM)
            assert frontend.wait(START_TIMEOUT_S) == 0
        finally:
            if frontend.poll() is None:
                frontend.kill()
                frontend.wait()

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["city"] in ("Bern", "Geneva")

"""llama.cpp's own HTTP server, in a process of its own that a test may kill, before the small model.

It is the C++ server of the wheel `xllamacpp`, and calls its model `m`. Run by hand:

    python -m tests.transports.openai.llamacpp.server [--embeddings] [PORT]
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from tests import needs
from tests.sources import ROOT
from trinamo.runtime.engines.llamacpp.model_file import find_model
from trinamo.runtime.errors import ConfigError

TEMPLATE = Path(__file__).with_name("tools.jinja")
"""Calls of tools in the form of Hermes; few tokens, since each costs a prompt 10 ms."""
CONTEXT_TOKENS = 1024


@attrs.frozen
class LlamaServer:
    """One that serves; `kill` is `kill -9`."""

    url: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def llama_server(*arguments: str) -> Iterator[LlamaServer]:
    """Yields once the model is loaded. Skips the test if the wheel, or the model, is not there."""
    needs.LLAMACPP_SERVER.imported()
    try:
        find_model()
    except ConfigError:
        needs.A_MODEL.lacking()
    command = [sys.executable, "-m", __name__, *arguments]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=quiet, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            said = next((line for line in process.stdout if line.startswith("http")), "")
            assert said, "the server ended before it listened"
            yield LlamaServer(f"{said.strip()}/v1", process)
        finally:
            process.kill()


def _serve(port: int, *, embeddings: bool) -> None:
    xllamacpp: Any = needs.LLAMACPP_SERVER.imported()

    params = xllamacpp.CommonParams()
    params.model.path = str(find_model())
    params.model_alias = {"m"}
    params.hostnames, params.port = ["127.0.0.1"], port
    params.n_ctx, params.n_parallel = 2 * CONTEXT_TOKENS, 2
    # Threads of a model wait for each other by spinning, which on a busy machine takes seconds a token.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # Each open connection holds one.
    params.n_threads_http = 16
    params.warmup, params.endpoint_metrics, params.use_jinja = False, True, True
    if embeddings:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    else:
        params.chat_template = TEMPLATE.read_text("utf-8")
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    *_, last = ["0", *sys.argv[1:]]
    _serve(int(last) if last.isdigit() else 0, embeddings="--embeddings" in sys.argv)

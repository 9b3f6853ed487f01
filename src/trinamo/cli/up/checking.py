"""Whether an engine of the user's own can be a worker's, before anything is started for it.

A process of its own imports it: what an import takes (memory, threads, a GPU) is no business of `up`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from trinamo.runtime.config.models import is_own_engine
from trinamo.runtime.config.worker import WorkerConfig
from trinamo.runtime.errors import ConfigError

TIMEOUT_S: Final = 120.0
_COMMAND: Final = (sys.executable, "-m", "trinamo.cli", "worker", "--check-engine")


def check_own_engines(section: WorkerConfig, environ: Mapping[str, str]) -> None:
    """Return if all of them import and are engines; blocks meanwhile.

    A worker started with `environ` has the configuration `section`. Raises `ConfigError` for a check
    that could not end, and `SystemExit` for an engine that is none: what the check said of it has then
    been written to standard error.
    """
    own = [each.engine for each in section.by_model() if is_own_engine(each.engine)]
    if not own:
        return
    command = [*_COMMAND, "--parent", str(os.getpid())]
    what = f"engine {', '.join(own)}"
    try:
        done = subprocess.run(  # noqa: S603 -- the command is ours
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{what} is not imported within {TIMEOUT_S:g} s") from None
    if done.returncode:
        sys.stderr.write(done.stderr.decode("utf-8", "replace"))
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise ConfigError(f"{what} does not import: the process that did was killed by {name}")
    if done.returncode:
        raise SystemExit(done.returncode)

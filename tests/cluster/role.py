"""One process of a test cluster: `python role.py worker|frontend key=value …`.

Prints one JSON line once it serves. The same code as `trinamo worker` and `trinamo frontend`,
without the command line round it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import attrs
import trio

from trinamo.runtime.engines.threads import limit_threads

limit_threads(1)

from trinamo.cli.serve.roles import run_frontend, run_worker  # noqa: E402 -- threads first
from trinamo.runtime.config.config import load_config  # noqa: E402
from trinamo.runtime.logs.setup import setup_log  # noqa: E402


def main() -> None:
    role, *settings = sys.argv[1:]
    config = load_config(environ={}, overrides=dict(text.split("=", 1) for text in settings))
    setup_log(config.log)

    def ready(facts: Any) -> None:
        print(json.dumps(attrs.asdict(facts)), flush=True)

    async def run() -> None:
        if role == "worker":
            await run_worker(config, ready=ready)
        else:
            await run_frontend(config, ready=ready)

    trio.run(run)


main()

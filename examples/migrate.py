"""`kill -9` of a worker in the middle of an answer, and the client reads on: nothing lost or twice.

    python examples/migrate.py

Needs the extra: pip install 'trinamo[embedded]'. The two workers are processes of this same file;
the frontend knows which tokens its client has, and has the other worker go on behind them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import trio

from trinamo import (
    Config,
    FrontendReady,
    StopRequest,
    WorkerReady,
    load_config,
    open_etcd_server,
    open_exact_engine,
    serve_frontend,
    serve_worker,
)

TOKENS = 200


def configure(etcd: str) -> Config:
    overrides = {
        "control_plane.etcd.endpoints": etcd,
        "event_plane.backend": "memory",
        "http.port": 0,
    }
    return load_config(environ={}, overrides=overrides)


async def work(etcd: str) -> None:
    """A worker process: it says who it is once it can be found."""

    def tell(ready: WorkerReady) -> None:
        print(json.dumps({"instance": ready.instance_id, "pid": os.getpid()}), flush=True)

    async with open_exact_engine() as engine:
        await serve_worker(engine, config=configure(etcd), ready=tell)


def stream(url: str) -> Iterator[tuple[str, str]]:
    """The instance that answers at first, and piece after piece of the text."""
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        worker = response.headers["x-trinamo-worker"]
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    yield worker, choice["text"]


def compare(url: str, pids: dict[str, int]) -> None:
    """Ask twice, and kill the worker of the second answer in the middle."""
    undisturbed = "".join(text for _, text in stream(url))
    pieces = []
    for worker, text in stream(url):
        pieces.append(text)
        if len(pieces) == TOKENS // 4:
            os.kill(pids[worker], signal.SIGKILL)
            print(f"the worker was killed after {len(pieces)} events")
    print(f"the same text: {''.join(pieces) == undisturbed}")


async def main() -> None:
    async with open_etcd_server() as etcd, trio.open_nursery() as nursery:

        async def serve(*, task_status: trio.TaskStatus[FrontendReady]) -> None:
            config = configure(etcd.endpoint)
            await serve_frontend(config=config, ready=task_status.started, stop=StopRequest())

        command = [sys.executable, __file__, etcd.endpoint]
        workers = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 -- milliseconds
            for _ in range(2)
        ]
        try:
            pids = dict([await trio.to_thread.run_sync(introduce, worker) for worker in workers])
            frontend: FrontendReady = await nursery.start(serve)
            await trio.to_thread.run_sync(compare, frontend.url, pids)
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
        nursery.cancel_scope.cancel()


def introduce(worker: subprocess.Popen[str]) -> tuple[str, int]:
    """The instance that a worker is, and its process."""
    assert worker.stdout is not None
    told = json.loads(worker.stdout.readline())
    return told["instance"], told["pid"]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        trio.run(work, sys.argv[1])
    else:
        trio.run(main)

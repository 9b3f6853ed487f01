"""A prompt is computed by one worker and answered by another: its KV blocks travel, over TCP.

    python examples/disaggregation/remote_prefill.py

Needs the extra: pip install 'trinamo[embedded]'. Both workers run in this program, each with an
engine and memory of its own; `trinamo up --disagg` makes processes of them. The tokens are those of
one engine that does all by itself.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import trio

from trinamo import (
    Client,
    Config,
    Context,
    Delta,
    EndpointName,
    GenerateRequest,
    GenerationEngine,
    StopRequest,
    WorkerReady,
    load_config,
    open_etcd_server,
    open_exact_engine,
    open_runtime,
    serve_worker,
)

ENDPOINT = EndpointName("trinamo", "backend", "generate")
REQUEST = GenerateRequest(model="exact", prompt="long " * 40, max_tokens=16, temperature=0)
OpenEngine = Callable[[], AbstractAsyncContextManager[GenerationEngine]]


def configure(etcd: str, role: str = "aggregated") -> Config:
    overrides = {
        "control_plane.etcd.endpoints": etcd,
        "event_plane.backend": "memory",
        "worker.role": role,
        # The decode worker asks a prefill worker directly: the other mode needs NATS.
        "disaggregation.mode": "prefill_first",
        "disaggregation.prefill_tokens_local_max": 64,
        "disaggregation.queue_timeout_s": 60,
    }
    return load_config(environ={}, overrides=overrides)


async def work(
    open_engine: OpenEngine, etcd: str, role: str, *, task_status: trio.TaskStatus[WorkerReady]
) -> None:
    """One worker, until it is cancelled; tells where its status port is."""
    async with open_engine() as engine:
        config = configure(etcd, role)
        await serve_worker(engine, config=config, ready=task_status.started, stop=StopRequest())


async def ask(client: Client) -> list[int]:
    await client.router.wait_instances()
    async with client.stream(REQUEST, Delta) as stream:
        return [token async for delta in stream for token in delta.token_ids]


async def alone(open_engine: OpenEngine) -> list[int]:
    async with open_engine() as engine:
        return [
            token
            async for delta in engine.generate(REQUEST, Context("alone"))
            for token in delta.token_ids
        ]


async def wait_for_prefill_worker(decode: WorkerReady) -> None:
    """Until the decode worker knows of a prefill worker; it would compute prompts by itself."""
    with trio.fail_after(60):
        while not await trio.to_thread.run_sync(knows_prefill_worker, decode):
            await trio.sleep(0.05)


def knows_prefill_worker(decode: WorkerReady) -> bool:
    with urllib.request.urlopen(f"{decode.status_url}/health", timeout=60) as answer:
        return bool(json.load(answer)["disaggregation"]["prefill_workers"])


def counted(worker: WorkerReady, name: str) -> list[str]:
    """The samples of a counter on the worker's `/metrics` that are not zero."""
    with urllib.request.urlopen(f"{worker.status_url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return [line for line in lines if line.startswith(name) and not line.endswith(" 0.0")]


async def main(open_engine: OpenEngine) -> None:
    async with open_etcd_server() as etcd, trio.open_nursery() as workers:
        await workers.start(work, open_engine, etcd.endpoint, "prefill")
        decode: WorkerReady = await workers.start(work, open_engine, etcd.endpoint, "decode")
        async with open_runtime(configure(etcd.endpoint)) as runtime:
            await wait_for_prefill_worker(decode)
            found = await ask(await runtime.client(ENDPOINT))
        for name in ("trinamo_prefills_total", "trinamo_remote_prefill_blocks_total"):
            for line in await trio.to_thread.run_sync(counted, decode, name):
                print(line)
        workers.cancel_scope.cancel()
    print(f"tokens as of one engine alone: {found == await alone(open_engine)}")


if __name__ == "__main__":
    trio.run(main, open_exact_engine)

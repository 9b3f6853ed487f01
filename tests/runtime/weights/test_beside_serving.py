"""A worker lends its file beside what it serves: neither takes a place of the other."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from filecmp import cmp
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.runtime.one_process import OneProcess, config, open_process
from tests.runtime.weights.lending import CHUNK
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import UnavailableError
from trinamo.runtime.metrics.tallies import Registry
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.worker.weights import WorkerWeights, lend_weights, take_weights
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.weights.lender import HeldFile, WeightsMetrics
from trinamo.runtime.weights.taker import MissingFile

ENDPOINT = EndpointName("trinamo", "backend", "generate")
SETTINGS: dict[str, Any] = {"weights__chunk_bytes": CHUNK}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.gguf"
    path.write_bytes(random.Random(1).randbytes(3 * CHUNK))
    return path


async def take(transports: OneProcess, target: Path, *, patience_s: float) -> bool:
    return await take_weights(
        config(**SETTINGS, weights__patience_s=patience_s),
        RealEnv(),
        transports,
        MissingFile("m", "trinamo"),
        target,
        metrics=WeightsMetrics(Registry()),
        patience_s=60.0,
    )


async def lend(runtime: Runtime, transports: OneProcess, source: Path) -> None:
    weights = WorkerWeights([HeldFile(source, "m")], WeightsMetrics(Registry()))
    lender = weights.lender(runtime)
    assert lender is not None
    await lend_weights(runtime, transports, weights, lender, {})


async def test_a_worker_that_is_full_lends_to_those_who_come_to_help(
    source: Path, tmp_path: Path
) -> None:
    transports = OneProcess()
    full = {**SETTINGS, "worker__requests_max": 1}
    taken = tmp_path / "model.gguf"

    async def serve(_: object, __: Context) -> AsyncGenerator[int, None]:
        yield 1
        await trio.sleep_forever()

    async with (
        open_process(transports, serving=True, **full) as runtime,
        open_process(transports) as caller,
        trio.open_nursery() as nursery,
    ):
        assert runtime.worker is not None
        await runtime.serve(ENDPOINT, serve)
        client = await caller.client(ENDPOINT)
        await client.router.wait_instances()
        async with client.stream(None, int) as answer:
            await anext(answer)
            nursery.start_soon(lend, runtime, transports, source)
            with trio.fail_after(120):
                assert await take(transports, taken, patience_s=60.0)
            assert cmp(taken, source, shallow=False)
            assert runtime.worker.admitted_count == 1
            runtime.worker.refuse_new()
            with trio.fail_after(120), pytest.raises(UnavailableError):
                await take(transports, tmp_path / "another.gguf", patience_s=0.5)
        nursery.cancel_scope.cancel()

"""What a worker says of itself reaches routers and `/metrics`: load with blocks, and KV events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

from tests.runtime.kv.indexing import held
from tests.runtime.kv.naming import block_hashes
from tests.runtime.one_process import OneProcess, open_process
from trinamo.runtime.caller.client import Client
from trinamo.runtime.context import Context
from trinamo.runtime.engines.mocker.engine import MockerOptions, open_mocker_engine
from trinamo.runtime.events.follower import ReportFollower
from trinamo.runtime.events.load import LoadReport
from trinamo.runtime.events.source import topic_of
from trinamo.runtime.kv.events import KV_NAMES_PREFIX
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.protocol.kv.names import block_keys, hint_of_tokens
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest

GENERATE = EndpointName("test", "backend", "generate")
FAST = MockerOptions(num_gpu_blocks=64, block_size=4, speedup_ratio=1000)
WANTED: dict[str, Any] = {"router__policy": "kv"}


@asynccontextmanager
async def serving(
    transports: OneProcess, options: MockerOptions = FAST, **overrides: Any
) -> AsyncIterator[Runtime]:
    async with (
        open_mocker_engine(options, context_tokens_max=128) as engine,
        open_process(transports, serving=True, **overrides) as server,
    ):
        await server.serve(GENERATE, engine.generate, request_type=GenerateRequest, engine=engine)
        yield server


async def ask(client: Client, prompt: str) -> None:
    request = GenerateRequest(model="mocker", prompt=prompt, max_tokens=4)
    async with client.stream(request, Delta) as deltas:
        async for _ in deltas:
            pass


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(120):
        while not condition():
            await trio.sleep(0.005)


async def test_a_caller_s_index_follows_its_workers_from_joining_to_leaving() -> None:
    transports = OneProcess()
    prompt = "the same beginning, and more"
    async with open_process(transports, **WANTED) as caller:
        client = await caller.client(GENERATE)
        assert client.router.kv is not None
        index, names = client.router.kv.index, client.router.kv.names
        assert index is not None
        named = block_hashes([256, *prompt.encode()], FAST.block_size, names=names)
        hashes = block_keys(named)
        async with serving(transports, **WANTED) as server:
            await client.router.wait_instances()
            await ask(client, prompt)
            # The prompt's blocks, and one that the answer fills.
            await until(lambda: index.statistics()["blocks"] == len(hashes) + 1)
            assert held(index.reach(hashes)) == {server.instance_id: len(hashes)}
            path, blocks = str(GENERATE), len(hashes) + 1
            assert caller.metrics.value("kv_index_instances", endpoint=path) == 1
            assert caller.metrics.value("kv_index_blocks", endpoint=path) == blocks
            assert caller.metrics.value("kv_index_gaps_total", endpoint=path) == 0
            assert server.metrics.value("kv_events_blocks", endpoint=path) == blocks
            assert server.metrics.value("kv_events_dropped_total", endpoint=path) == 0
            free = FAST.num_gpu_blocks
            metrics = server.metrics
            await until(
                lambda: metrics.value("engine_kv_blocks", endpoint=path, state="free") == free
            )
        await until(lambda: not held(index.reach(hashes)))
        assert index.statistics()["instances"] == 0


@pytest.mark.parametrize("wanted", [WANTED, {"http__busy_blocks": 0.5}], ids=["kv", "busy"])
async def test_load_reports_say_how_many_blocks_are_in_use(
    wanted: dict[str, Any],
) -> None:
    transports = OneProcess()
    request = GenerateRequest(model="mocker", prompt="nobody reads on", max_tokens=100)
    async with (
        open_process(transports, **wanted) as caller,
        trio.open_nursery() as nursery,
        open_mocker_engine(FAST, context_tokens_max=128, queued_deltas_max=1) as engine,
        aclosing(engine.generate(request, Context("slow"))) as deltas,
    ):
        assert engine.kv is not None
        # Its consumer is slow, so it stands still and keeps its blocks.
        await anext(deltas)
        await until(lambda: engine.statistics().paused)
        reports: dict[str, LoadReport] = {}
        loads = ReportFollower(
            caller.events,
            topic_of("load", GENERATE),
            LoadReport,
            follows=lambda _: True,
            take=reports.__setitem__,
        )
        await nursery.start(loads.follower.run)
        async with open_process(transports, serving=True, **wanted) as server:
            assert server.instance_id is not None
            instance = await server.serve(
                GENERATE, engine.generate, request_type=GenerateRequest, engine=engine
            )
            await until(lambda: instance.id in reports)
            used = engine.statistics().blocks_used
            assert reports[instance.id] == LoadReport(0, used, FAST.num_gpu_blocks)
            assert 0 < used < FAST.num_gpu_blocks
            path = str(GENERATE)
            assert server.metrics.value("engine_kv_blocks", endpoint=path, state="used") == used
            # What a transfer may touch, or has not let go of, has no room for anybody.
            pool = engine.kv.pool
            lent = pool.take(20) or []
            pool.lease(lent)
            pool.give_back(lent)
            pool.quarantine(lent[:10])
            await until(lambda: reports[instance.id].blocks_used == used + 20)
        nursery.cancel_scope.cancel()


async def test_an_engine_that_keeps_blocks_tells_whatever_policy_its_worker_was_given() -> None:
    transports = OneProcess()
    async with open_process(transports, **WANTED) as caller:
        client = await caller.client(GENERATE)
        assert client.router.kv is not None
        index = client.router.kv.index
        assert index is not None
        async with serving(transports) as server:
            assert server.config.router.policy == "round_robin"
            [instance] = await client.router.wait_instances()
            assert instance.kv_events is True
            await ask(client, "the same beginning, and more")
            await until(lambda: index.statistics()["blocks"])
            await until(lambda: client.router.report(instance.id))


@pytest.mark.parametrize("policy", ["kv", "round_robin"])
async def test_what_was_sent_lately_is_held_by_a_worker_that_tells_no_blocks(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not taken for empty, beside one that tells, and the log says so once."""
    transports = OneProcess()
    prompt = "the same beginning, and more"
    mute: dict[str, Any] = {"router__policy": policy, "router__kv__events": False}
    async with open_process(transports, **WANTED) as caller:
        client = await caller.client(GENERATE)
        assert client.router.kv is not None
        hint = hint_of_tokens(client.router.kv.names, [256, *prompt.encode()], FAST.block_size)
        async with serving(transports, **mute) as server, serving(transports):
            silent, teller = sorted(
                await client.router.wait_instances(2), key=lambda each: each.kv_events or False
            )
            assert (silent.id, silent.kv_events) == (server.instance_id, False)
            assert teller.kv_events is True
            for request in range(3):
                client.router.kv.begin(silent.id, request, hint)
                client.router.kv.end(request)
            assert client.router.kv.statistics().overlap_blocks == 2 * len(hint.keys)
            chosen = {client.router.choose(hint=hint).id for _ in range(8)}
            assert chosen == {silent.id}
    told = [each for each in caplog.messages if "does not tell which KV blocks" in each]
    assert [silent.id in each for each in told] == [True]


@pytest.mark.parametrize("release", ["of other names", "before names had a key"])
async def test_blocks_are_not_looked_for_by_names_that_their_worker_does_not_use(
    release: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What was sent there lately is taken for held, and the log says why."""
    transports = OneProcess()
    prompt = "the same beginning, and more"
    async with open_process(transports, **WANTED) as caller:
        client = await caller.client(GENERATE)
        assert client.router.kv is not None
        index, names = client.router.kv.index, client.router.kv.names
        assert index is not None
        # Whoever comes now draws another salt.
        await caller.control.delete(f"{KV_NAMES_PREFIX}{GENERATE.namespace}")
        async with serving(transports) as server:
            [instance] = await client.router.wait_instances()
            if release == "before names had a key":
                old = Instance(
                    endpoint=instance.endpoint, id="a" * 16, transports={}, kv_events=True
                )
                await caller.control.put(old.key, encode_instance(old))
                joined = await client.router.wait_instances(2)
                [instance] = [each for each in joined if each.id == old.id]
                there = "none"
            else:
                there = instance.kv_names
            assert there != names.mark
            await ask(client, prompt)
            await until(lambda: server.metrics.value("kv_events_blocks", endpoint=str(GENERATE)))
            hint = hint_of_tokens(names, [256, *prompt.encode()], FAST.block_size)
            for request in range(2):
                client.router.kv.begin(instance.id, request, hint)
            assert client.router.kv.statistics().overlap_blocks == len(hint.keys)
            assert index.statistics()["blocks"] == 0
    [told] = [
        each for each in caplog.messages if f"instance {instance.id} of" in each and "KV" in each
    ]
    assert f"by the names in use here ({there} there, {names.mark} here)" in told


async def test_nobody_tells_anything_that_is_not_asked_for() -> None:
    """An engine that keeps no blocks for later requests."""
    transports = OneProcess()
    plain = attrs.evolve(FAST, enable_prefix_caching=False)
    async with open_process(transports) as caller, serving(transports, plain):
        client = await caller.client(GENERATE)
        await client.router.wait_instances()
        await ask(client, "hello")
        assert client.router.kv is None
        assert transports.broker.subscription_count == 0

"""Prefill and decode workers as real processes: the tokens of one that does all, whatever dies."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.cluster.processes import Cluster, Member, chat, open_cluster, until
from tests.needs import GPU, MOONCAKE, NIXL, Need
from tests.runtime.disaggregation import own_memory
from tests.transports.nixl.gpu import find_gpu
from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import open_exact_engine
from trinamo.runtime.protocol.openai.generate import ChatMessage, GenerateRequest

MODES = ("decode_first", "prefill_first")
BACKENDS: Mapping[str, tuple[Need | None, dict[str, Any]]] = {
    "tcp": (None, {}),
    "nixl": (NIXL, {"data_plane.nixl.enabled": True}),
    "mooncake_tcp": (MOONCAKE, {"data_plane.mooncake.enabled": True}),
}
ANSWER_TOKENS = 24
# Lengths on both sides of a block's end, and some that are several chunks of a prompt.
# None begins as another, or its first blocks would be here already.
PROMPTS = [
    (f"{length} " + "abcdefgh " * 40)[:length] for length in (60, 61, 77, 140, 200, 271, 333)
]


def body(text: str, seed: int) -> dict[str, Any]:
    """A request of this text; every other one is greedy."""
    temperature = float(seed % 2)
    return chat(text, max_tokens=ANSWER_TOKENS, seed=seed, temperature=temperature)


async def alone(texts: list[str]) -> list[str]:
    """The answers of one engine in this process."""
    answers = []
    async with open_exact_engine() as engine:
        for seed, text in enumerate(texts):
            request = GenerateRequest(
                model="exact",
                messages=[ChatMessage("user", text)],
                max_tokens=ANSWER_TOKENS,
                seed=seed,
                temperature=float(seed % 2),
            )
            deltas = [delta async for delta in engine.generate(request, Context("alone"))]
            answers.append("".join(delta.text for delta in deltas))
    return answers


async def answer(cluster: Cluster, text: str, seed: int) -> str:
    response = await cluster.client.post(
        f"{cluster.url}/v1/chat/completions", json=body(text, seed)
    )
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert response.json()["usage"]["completion_tokens"] == ANSWER_TOKENS
    return str(choice["message"]["content"])


@asynccontextmanager
async def disaggregated(
    directory: Path, *roles: str, linked: bool = False, engine: str = "exact", **settings: Any
) -> AsyncIterator[tuple[Cluster, list[Member]]]:
    """A cluster of `exact` workers with these roles, once the decode workers know the others."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    async with open_cluster(
        directory,
        roles=roles,
        engine=engine,
        linked=linked,
        settings={
            "disaggregation.prefill_tokens_local_max": 32,
            # After these the decode worker computes a prompt by itself.
            "disaggregation.queue_timeout_s": 60,
            "data_plane.transfer.probe_timeout_s": 60,
            **given,
        },
    ) as cluster:
        for member, role in zip(cluster.workers, roles, strict=True):
            if role == "decode":
                await until(lambda member=member: knows_prefill(cluster, member), "it is found")
        yield cluster, cluster.workers


async def knows_prefill(cluster: Cluster, decode: Member) -> bool:
    health = (await cluster.client.get(f"{decode.facts['status_url']}/health")).json()
    return bool(health["disaggregation"]["prefill_workers"])


async def metric(cluster: Cluster, member: Member, name: str, **labels: str) -> float:
    return await cluster.metric(str(member.facts["status_url"]), name, **labels)


async def wait_no_blocks_used(cluster: Cluster, *members: Member) -> None:
    """Every block of these workers is free: none is owned, in flight or in quarantine."""
    for member in members:

        async def is_free(member: Member = member) -> bool:
            free = await metric(cluster, member, "engine_kv_blocks", state="free")
            lost = await metric(cluster, member, "quarantined_blocks")
            return (free, lost) == (512, 0)

        await until(is_free, "all blocks are free", timeout_s=300)


@pytest.fixture(scope="module")
def matrix() -> Iterator[dict[tuple[str, str], str]]:
    """What became of each way to serve, printed at the end."""
    found: dict[tuple[str, str], str] = {}
    yield found
    print("\n\nthe tokens are those of one engine alone:")
    for mode, backend in itertools.product(("aggregated", *MODES), BACKENDS):
        if (mode, backend) in found:
            print(f"  {mode:<14} {backend:<14} {found[mode, backend]}")


async def test_aggregated_workers_answer_as_one_engine(
    tmp_path: Path, matrix: dict[tuple[str, str], str]
) -> None:
    async with open_cluster(tmp_path, workers=2, engine="exact") as cluster:
        answers = [await answer(cluster, text, seed) for seed, text in enumerate(PROMPTS)]

    assert answers == await alone(PROMPTS)
    matrix["aggregated", "tcp"] = f"{len(answers)} of {len(answers)}, no block moved"


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=[pytest.mark.check] if need else [])
        for name, (need, _) in BACKENDS.items()
    ],
)
@pytest.mark.parametrize("mode", MODES)
async def test_disaggregated_workers_answer_as_one_engine(
    tmp_path: Path, mode: str, backend: str, matrix: dict[tuple[str, str], str]
) -> None:
    need, settings = BACKENDS[backend]
    if need is not None:
        matrix[mode, backend] = f"skipped: {need.reason}"
        need.imported()
        del matrix[mode, backend]
    async with disaggregated(
        tmp_path, "decode", "prefill", disaggregation__mode=mode, **settings
    ) as (cluster, (decode, prefill)):
        answers = [await answer(cluster, text, seed) for seed, text in enumerate(PROMPTS)]
        remote = await metric(cluster, decode, "prefills_total", where="remote", mode=mode)
        blocks = await metric(cluster, decode, "remote_prefill_blocks_total")
        mover = prefill if mode == "decode_first" else decode
        # `mooncake_tcp` is Mooncake without RDMA.
        label = backend.partition("_")[0]
        moved = await metric(cluster, mover, "transfer_bytes_total", backend=label)
        computed = await metric(cluster, decode, "engine_prompt_tokens_total")
        await wait_no_blocks_used(cluster, decode, prefill)

    assert answers == await alone(PROMPTS)
    assert remote == len(PROMPTS)
    assert moved == blocks * 16 * 1024
    assert computed == 0
    matrix[mode, backend] = f"{len(answers)} of {len(answers)}, {blocks:.0f} blocks moved"


@pytest.mark.parametrize("place", ["host", "GPU"])
@pytest.mark.parametrize("mode", MODES)
async def test_an_engine_with_memory_of_its_own_is_served_alike(
    tmp_path: Path, mode: str, place: str
) -> None:
    """As an author hands it over: tensors, one a layer, which `trinamo.kv_cache` describes."""
    own = f"{Path(own_memory.__file__)}:engine"
    settings: dict[str, Any] = {"disaggregation__mode": mode}
    if place == "GPU":
        if find_gpu() is None or find_spec("torch") is None:
            GPU.lacking()
        own = own.replace(":engine", ":gpu_engine")
        settings |= {"data_plane.nixl.enabled": True, "data_plane.transfer.backends": "nixl"}
    async with disaggregated(tmp_path, "decode", "prefill", engine=own, **settings) as (
        cluster,
        (decode, prefill),
    ):
        answers = [await answer(cluster, text, seed) for seed, text in enumerate(PROMPTS)]
        remote = await metric(cluster, decode, "prefills_total", where="remote", mode=mode)
        computed = await metric(cluster, decode, "engine_prompt_tokens_total")
        await wait_no_blocks_used(cluster, decode, prefill)

    assert answers == await alone(PROMPTS)
    assert remote == len(PROMPTS)
    assert computed == 0


@pytest.mark.parametrize("mode", MODES)
async def test_a_prefill_worker_that_is_killed_costs_its_clients_nothing_but_time(
    tmp_path: Path, mode: str
) -> None:
    texts = [f"{number} " + PROMPTS[number % len(PROMPTS)] for number in range(60)]
    answers: dict[int, str] = {}
    room = trio.CapacityLimiter(12)

    async def ask(cluster: Cluster, number: int) -> None:
        async with room:
            answers[number] = await answer(cluster, texts[number], number)

    # So long wait the prompts that are in the queue when the prefill worker is killed.
    patience: dict[str, Any] = {"disaggregation__queue_timeout_s": 15}
    async with disaggregated(
        tmp_path, "decode", "prefill", disaggregation__mode=mode, **patience
    ) as (cluster, (decode, prefill)):
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for number in range(len(texts)):
                    nursery.start_soon(ask, cluster, number)
                while len(answers) < 15:
                    await trio.sleep(0.01)
                prefill.kill()
        await wait_no_blocks_used(cluster, decode)
        remote = await metric(cluster, decode, "prefills_total", where="remote")
        local = await metric(cluster, decode, "prefills_total", where="local")

    expected = await alone(texts)
    assert [answers[number] for number in range(len(texts))] == expected
    assert remote >= 10
    assert local >= 10
    assert remote + local == len(texts)


@pytest.mark.check
@pytest.mark.parametrize("mode", MODES)
async def test_a_mooncake_peer_that_is_stopped_costs_its_clients_nothing_but_time(
    tmp_path: Path, mode: str
) -> None:
    """Its sockets stay open and nobody reads or writes there: what moves has a bound, and so has what it lends."""
    MOONCAKE.imported()
    texts = [f"{number} " + PROMPTS[number % len(PROMPTS)] for number in range(48)]
    answers: dict[int, str] = {}
    room = trio.CapacityLimiter(12)

    async def ask(cluster: Cluster, number: int) -> None:
        async with room:
            answers[number] = await answer(cluster, texts[number], number)

    settings: dict[str, Any] = {
        "data_plane.mooncake.enabled": True,
        "data_plane.transfer.timeout_s": 3,
        "data_plane.transfer.quarantine_after_s": 5,
        "data_plane.transfer.probe_timeout_s": 2,
        "disaggregation.queue_timeout_s": 2,
        "disaggregation.prefill_timeout_s": 5,
    }
    async with disaggregated(
        tmp_path, "decode", "prefill", disaggregation__mode=mode, **settings
    ) as (cluster, (decode, prefill)):

        async def is_held() -> bool:
            """Blocks that it may still write are nobody's."""
            return await metric(cluster, decode, "quarantined_blocks") > 0

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for number in range(len(texts)):
                    nursery.start_soon(ask, cluster, number)
                while len(answers) < 12:
                    await trio.sleep(0.01)
                prefill.freeze()
                if mode == "decode_first":
                    await until(is_held, "what the stopped worker may write is in quarantine")
        # All have been answered while it stood still.
        remote = await metric(cluster, decode, "prefills_total", where="remote")
        local = await metric(cluster, decode, "prefills_total", where="local")
        moved = await metric(cluster, decode, "remote_prefill_blocks_total")
        # Its end is a proof; woken it would say itself what it still moves.
        prefill.kill()
        await wait_no_blocks_used(cluster, decode)

    expected = await alone(texts)
    assert [answers[number] for number in range(len(texts))] == expected
    assert moved > 0
    assert local >= 10
    assert remote + local == len(texts)


@pytest.mark.filterwarnings(
    # A client that is cancelled while it sends leaves its body's generator to the collector.
    "ignore:Async generator '(httpx|httpcore):ResourceWarning"
)
@pytest.mark.parametrize("mode", MODES)
async def test_clients_that_go_at_any_time_leave_no_block_behind(tmp_path: Path, mode: str) -> None:
    async def ask(cluster: Cluster, delay_s: float) -> None:
        with trio.move_on_after(delay_s):
            await answer(cluster, PROMPTS[-1] * 4, 0)

    async with disaggregated(tmp_path, "decode", "prefill", disaggregation__mode=mode) as (
        cluster,
        (decode, prefill),
    ):

        async def is_idle() -> bool:
            in_hand = await metric(cluster, prefill, "prefill_jobs_in_hand")
            under_way = await metric(cluster, decode, "remote_prefills_under_way")
            return (in_hand, under_way) == (0, 0)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(ask, cluster, 0.03 * number)
        # The last of them may still be on its way to a worker when all that came have gone.
        await until(is_idle, "nothing is under way")
        await wait_no_blocks_used(cluster, decode, prefill)
        again = await answer(cluster, PROMPTS[0], 0)

    assert [again] == await alone(PROMPTS[:1])


async def test_without_broker_or_store_prompts_are_answered_all_the_same(tmp_path: Path) -> None:
    mode = "decode_first"
    async with disaggregated(
        tmp_path, "decode", "prefill", linked=True, disaggregation__mode=mode
    ) as (cluster, (decode, _)):
        answers = [await answer(cluster, PROMPTS[0], 0)]
        await cluster.links["etcd"].cut()
        answers.append(await answer(cluster, PROMPTS[1], 1))
        await cluster.links["nats"].cut()
        later = list(enumerate(PROMPTS))[2:]
        answers += [await answer(cluster, text, seed) for seed, text in later]

        async def is_counted() -> bool:
            remote = await metric(cluster, decode, "prefills_total", where="remote")
            away = await metric(cluster, decode, "prefills_total", reason="queue_away")
            return (remote, away) == (2, len(later))

        await until(is_counted, "all are counted")

    assert answers == await alone(PROMPTS)


async def test_the_job_of_a_request_that_has_ended_is_never_computed(tmp_path: Path) -> None:
    mode = "decode_first"
    async with disaggregated(tmp_path, "decode", "prefill", disaggregation__mode=mode) as (
        cluster,
        (decode, prefill),
    ):
        prefill.freeze()

        async def is_queued() -> bool:
            return await metric(cluster, decode, "queue_operations_total", operation="put") == 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer, cluster, PROMPTS[-1], 0)
            await until(is_queued, "its prompt is in the queue")
            nursery.cancel_scope.cancel()

        async def is_over() -> bool:
            return await metric(cluster, decode, "worker_requests_in_flight") == 0

        # Its client has left; the worker learns it by way of the frontend.
        await until(is_over, "the request has ended")
        prefill.thaw()

        async def is_refused() -> bool:
            count = await metric(cluster, prefill, "prefill_jobs_total", outcome="not_wanted")
            return count == 1

        await until(is_refused, "the job is refused")
        computed = await metric(cluster, prefill, "engine_prompt_tokens_total")

    assert computed == 0

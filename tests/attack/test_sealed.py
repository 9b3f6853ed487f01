"""Who has NATS's token, and not the cluster's secret: he hears all, says what he likes, and has nothing of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.attack.attackers import HIS, JOBS, REQUESTS, Meddler, Swapper, open_trap, stranger
from tests.cluster.processes import Cluster, until
from tests.cluster.test_disaggregation import PROMPTS, alone, answer, disaggregated, metric


@asynccontextmanager
async def closed(directory: Path, mode: str = "decode_first") -> AsyncIterator[Cluster]:
    """Two decode workers and a prefill worker, with a secret, whose requests go by NATS."""
    secret = directory / "cluster.secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    async with disaggregated(
        directory,
        *("decode", "decode", "prefill"),
        disaggregation__mode=mode,
        data_plane__requests="nats",
        router__policy="kv",
        security__secret_file=secret,
    ) as (cluster, _):
        yield cluster


@pytest.mark.parametrize("mode", ["decode_first", "prefill_first"])
async def test_a_tap_on_the_broker_sees_no_text_and_no_token_id(tmp_path: Path, mode: str) -> None:
    async with (
        closed(tmp_path, mode) as cluster,
        stranger(cluster.nats.url, cluster.nats.token) as him,
    ):
        answers = [await answer(cluster, text, seed) for seed, text in enumerate(PROMPTS)]
        assert answers == await alone(PROMPTS)

        def has_jobs() -> bool:
            return any(JOBS.fullmatch(each.subject) for each in him.heard)

        async def has_heard() -> bool:
            requests = sum(each.subject.startswith(REQUESTS) for each in him.heard)
            return requests >= len(PROMPTS) and (has_jobs() or mode == "prefill_first")

        await until(has_heard, "the requests and jobs have come to him, too")
    assert has_jobs() is (mode == "decode_first")
    said = b"\0".join(
        b"\0".join((each.subject.encode(), each.payload, repr(dict(each.headers)).encode()))
        for each in him.heard
    )
    # The engine's token ids are the bytes of the text, behind one that begins it.
    ids = list(b"abcdefgh abcdefgh")
    words = (b"abcdefgh", json.dumps(ids, separators=(",", ":")).encode()[1:-1], bytes(ids))
    for word in (*words, msgspec.msgpack.encode(ids)[3:], b"token_ids", b"exact"):
        assert word not in said, word
    for text in answers:
        assert text.encode() not in said


async def test_whoever_answers_asks_cancels_and_repeats_on_the_broker_changes_no_answer(
    tmp_path: Path,
) -> None:
    """Before: 83 of 100 requests were answered by him, and inference was done for him."""
    async with closed(tmp_path) as cluster, open_trap() as trap:
        meddler = Meddler(trap.address)
        async with stranger(cluster.nats.url, cluster.nats.token, meddler.say) as him:
            answers = [await answer(cluster, text, seed) for seed, text in enumerate(PROMPTS)]
            assert answers == await alone(PROMPTS)

            async def are_refused() -> bool:
                refused = [
                    await metric(cluster, each, "event_plane_refused_messages_total")
                    for each in cluster.workers
                ]
                return (
                    meddler.attacked >= len(PROMPTS) // 2 and sum(refused) >= 4 * meddler.attacked
                )

            await until(are_refused, "what he said is counted as refused")
    assert meddler.failed == trap.calls == 0
    assert not [each for each in him.heard if each.subject == HIS]


async def test_whoever_puts_and_changes_jobs_on_the_broker_gets_into_no_cache(
    tmp_path: Path,
) -> None:
    """Before: who asked later for the prompt of another had the answer to the attacker's prompt."""
    swapper = Swapper()
    async with closed(tmp_path) as cluster:
        async with stranger(cluster.nats.url, cluster.nats.token, swapper.say):
            answers = [await answer(cluster, text, seed) for seed, text in enumerate(PROMPTS)]
            assert answers == await alone(PROMPTS)

            async def has_them() -> bool:
                return len(swapper.jobs) >= len(PROMPTS)

            await until(has_them, "every job has come to him")
        # When he has gone, as well: nothing of his is in a cache.
        answers = [await answer(cluster, text, seed) for seed, text in enumerate(PROMPTS)]
        assert answers == await alone(PROMPTS)

        async def is_refused() -> bool:
            prefill, name = cluster.workers[2], "event_plane_refused_messages_total"
            return await metric(cluster, prefill, name) > 0

        await until(is_refused, "what he put there is counted as refused")

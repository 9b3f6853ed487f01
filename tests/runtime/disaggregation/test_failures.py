"""Whatever happens to a prefill worker, the client gets the same tokens, and every block comes back."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
import trio

from tests.runtime.disaggregation.serving import (
    MODES,
    Workers,
    alone,
    open_workers,
    prompt,
    tokens,
    until,
)
from trinamo.runtime.context import Context
from trinamo.runtime.disaggregation import decode_first
from trinamo.runtime.disaggregation.decode_first import QueuedPrefills
from trinamo.runtime.engines.loop.pinned import Pinned
from trinamo.runtime.errors import TransferError
from trinamo.runtime.kv.transfer.engine import EngineTransfers
from trinamo.runtime.planes import LeasedJob
from trinamo.runtime.protocol.disaggregation.messages import RemotePrefillRequest
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason

LENGTH = 200

both_modes = pytest.mark.parametrize("mode", MODES)


class Asking:
    """One request under way, and its answer once it has come."""

    def __init__(self, workers: Workers, nursery: trio.Nursery) -> None:
        self.context = Context(workers.client.new_id())
        self.deltas: list[Delta] | None = None
        self.scope = trio.CancelScope()
        nursery.start_soon(self._ask, workers)

    async def _ask(self, workers: Workers) -> None:
        with self.scope:
            self.deltas = await workers.ask(prompt(LENGTH), self.context)


@both_modes
async def test_a_prompt_whose_prefill_worker_dies_in_the_middle_is_computed_here(mode: str) -> None:
    async with (
        open_workers("decode", "prefill", disaggregation__mode=mode) as workers,
        trio.open_nursery() as nursery,
    ):
        decode, prefill = workers.of("decode"), workers.of("prefill")
        prefill.steps.allow(3)
        asking = Asking(workers, nursery)
        await until(lambda: prefill.steps.count == 3 and prefill.steps.is_inside)
        prefill.kill()
        await until(lambda: asking.deltas is not None)

        assert asking.deltas is not None
        assert tokens(asking.deltas) == await alone(prompt(LENGTH))
        assert decode.prefills("local", "prefill_lost", mode) == 1
        assert decode.prompt_tokens == LENGTH
        await workers.wait_blocks_free()


@both_modes
async def test_a_prefill_worker_that_is_too_slow_is_not_waited_for(mode: str) -> None:
    settings: dict[str, Any] = {
        "disaggregation__mode": mode,
        # The prefill worker needs time for two steps first, also on a machine that stalls.
        "disaggregation__prefill_timeout_s": 3.0,
    }
    async with (
        open_workers("decode", "prefill", **settings) as workers,
        trio.open_nursery() as nursery,
    ):
        decode, prefill = workers.of("decode"), workers.of("prefill")
        prefill.steps.allow(2)
        asking = Asking(workers, nursery)
        await until(lambda: asking.deltas is not None)

        assert asking.deltas is not None
        assert tokens(asking.deltas) == await alone(prompt(LENGTH))
        assert decode.prefills("local", "timed_out", mode) == 1
        prefill.steps.allow(1)
        await workers.wait_blocks_free()
        assert prefill.steps.count == 3


@both_modes
async def test_a_client_that_goes_during_a_remote_prefill_ends_it_after_one_step(mode: str) -> None:
    async with (
        open_workers("decode", "prefill", disaggregation__mode=mode) as workers,
        trio.open_nursery() as nursery,
    ):
        decode, prefill = workers.of("decode"), workers.of("prefill")
        prefill.steps.allow(2)
        asking = Asking(workers, nursery)
        await until(lambda: prefill.steps.count == 2 and prefill.steps.is_inside)
        asking.scope.cancel()
        await until(lambda: prefill.jobs("not_wanted", mode) + prefill.jobs("cancelled", mode) == 1)
        prefill.steps.allow(100)
        await workers.wait_blocks_free()

        assert prefill.steps.count == 3
        assert decode.steps.count == 0


@both_modes
async def test_a_stop_during_a_remote_prefill_ends_the_answer_as_cancelled(mode: str) -> None:
    async with (
        open_workers("decode", "prefill", disaggregation__mode=mode) as workers,
        trio.open_nursery() as nursery,
    ):
        decode, prefill = workers.of("decode"), workers.of("prefill")
        prefill.steps.allow(2)
        asking = Asking(workers, nursery)
        await until(lambda: prefill.steps.count == 2 and prefill.steps.is_inside)
        asking.context.stop()
        await until(lambda: asking.deltas is not None)
        await until(lambda: prefill.jobs("not_wanted", mode) + prefill.jobs("cancelled", mode) == 1)
        prefill.steps.allow(100)
        await workers.wait_blocks_free()

        assert asking.deltas is not None
        assert asking.deltas[-1].finish_reason is FinishReason.STOP
        assert tokens(asking.deltas) == []
        assert decode.steps.count == 0
        assert prefill.steps.count == 3


@both_modes
@pytest.mark.parametrize("good_moves", [0, 1])
async def test_a_prompt_whose_blocks_cannot_be_moved_is_computed_here(
    mode: str, good_moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, moves = EngineTransfers.move, 0

    async def move(*args: Any, **options: Any) -> object:
        nonlocal moves
        moves += 1
        if moves > good_moves:
            raise TransferError("the link is down")
        return await original(*args, **options)

    monkeypatch.setattr(EngineTransfers, "move", move)
    async with open_workers("decode", "prefill", disaggregation__mode=mode) as workers:
        with trio.fail_after(120):
            answered = await workers.ask(prompt(LENGTH))
        decode = workers.of("decode")

        assert tokens(answered) == await alone(prompt(LENGTH))
        if mode == "decode_first" or not good_moves:
            assert decode.prefills("remote", "long_prompt", mode) == 0
            assert decode.prompt_tokens == LENGTH
        await workers.wait_blocks_free()


@both_modes
async def test_a_first_token_that_is_none_of_the_engine_s_is_not_gone_on_from(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with it would fail, and with it all the other answers of the decode worker."""

    async def first_token(kept: Pinned) -> int:
        await kept.wait_filled(len(kept.block_ids) - 1)
        return 1 << 20

    monkeypatch.setattr(Pinned, "first_token", first_token)
    async with open_workers("decode", "prefill", disaggregation__mode=mode) as workers:
        with trio.fail_after(120):
            answered = await workers.ask(prompt(LENGTH))
        decode = workers.of("decode")

        assert tokens(answered) == await alone(prompt(LENGTH))
        assert decode.prefills("local", "transfer_failed", mode) == 1
        assert decode.engine.statistics().failures == 0
        await workers.wait_blocks_free()


async def test_a_job_whose_request_has_ended_is_never_computed() -> None:
    """The prefill worker is busy with one prompt while the request of the next one ends."""
    async with (
        open_workers("decode", "prefill", disaggregation__jobs_max=1) as workers,
        trio.open_nursery() as nursery,
    ):
        prefill = workers.of("prefill")
        prefill.steps.allow(1)
        first = Asking(workers, nursery)
        await until(lambda: prefill.steps.count == 1 and prefill.steps.is_inside)
        second = Asking(workers, nursery)
        decode = workers.of("decode")
        assert decode.runtime is not None
        (tally,) = decode.runtime.queues.tallies.values()
        await until(lambda: tally.operations.get(("put", "added")) == 2)
        second.scope.cancel()
        prefill.steps.allow(1000)
        await until(lambda: prefill.jobs("not_wanted", "decode_first") == 1)
        await until(lambda: first.deltas is not None)

        assert prefill.prompt_tokens == LENGTH
        await workers.wait_blocks_free()


async def test_a_job_that_looks_old_by_a_wrong_clock_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker's clock may be minutes behind ours: who waits for the prompt says if it is wanted."""
    work = QueuedPrefills.work

    async def late(self: QueuedPrefills, job: LeasedJob, asked: RemotePrefillRequest) -> None:
        await work(self, attrs.evolve(job, queued_s=600.0), asked)

    monkeypatch.setattr(QueuedPrefills, "work", late)
    async with open_workers("decode", "prefill") as workers:
        assert tokens(await workers.ask(prompt(LENGTH))) == await alone(prompt(LENGTH))
        assert workers.of("decode").prefills("remote", "long_prompt", "decode_first") == 1


async def test_a_prefill_worker_without_a_place_is_not_waited_for() -> None:
    """And who has given up waiting counts for none that waits: the next prompt goes there again."""
    settings: dict[str, Any] = {
        "disaggregation__mode": "prefill_first",
        # It also limits the jobs that must be claimed, so it is longer than a stall.
        "disaggregation__queue_timeout_s": 4.0,
        "disaggregation__queue_depth_max": 1,
    }
    async with (
        open_workers("decode", "prefill", running_max=1, **settings) as workers,
        trio.open_nursery() as nursery,
    ):
        decode, prefill = workers.of("decode"), workers.of("prefill")
        prefill.steps.allow(1)
        first = Asking(workers, nursery)
        await until(lambda: prefill.steps.count == 1 and prefill.steps.is_inside)
        second = Asking(workers, nursery)
        await until(lambda: second.deltas is not None)
        assert decode.prefills("local", "not_claimed", "prefill_first") == 1
        prefill.steps.allow(1000)
        await until(lambda: first.deltas is not None)

        assert second.deltas is not None
        assert tokens(second.deltas) == await alone(prompt(LENGTH))
        assert prefill.prompt_tokens == LENGTH
        await workers.ask(prompt(LENGTH, offset=3))
        assert decode.prefills("remote", "long_prompt", "prefill_first") == 2
        assert prefill.prompt_tokens == 2 * LENGTH
        await workers.wait_blocks_free()


async def test_a_job_that_nobody_takes_is_computed_here() -> None:
    settings: dict[str, Any] = {
        "disaggregation__jobs_max": 1,
        # It also limits the job that must be claimed, so it is longer than a stall; and half of it
        # limits each put.
        "disaggregation__queue_timeout_s": 5.0,
    }
    async with (
        open_workers("decode", "prefill", **settings) as workers,
        trio.open_nursery() as nursery,
    ):
        decode, prefill = workers.of("decode"), workers.of("prefill")
        prefill.steps.allow(1)
        first = Asking(workers, nursery)
        await until(lambda: prefill.steps.count == 1 and prefill.steps.is_inside)
        second = Asking(workers, nursery)
        await until(lambda: second.deltas is not None)
        assert decode.prefills("local", "not_claimed", "decode_first") == 1
        prefill.steps.allow(1000)
        await until(lambda: first.deltas is not None)
        await until(lambda: prefill.jobs("done", "decode_first") == 1)

        assert second.deltas is not None
        assert tokens(second.deltas) == await alone(prompt(LENGTH))
        assert prefill.prompt_tokens == LENGTH


async def test_of_the_prompts_that_come_after_a_refusal_one_waits_for_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others are computed at once, whatever that one finds, until the queue takes a job again."""
    monkeypatch.setattr(decode_first, "REFUSED_S", 0.1)
    # Half of it limits each put, which must outlast a stall.
    settings: dict[str, Any] = {"disaggregation__queue_timeout_s": 6.0}
    async with open_workers("decode", "prefill", **settings) as workers:
        decode = workers.of("decode")
        assert decode.runtime is not None
        (tally,) = decode.runtime.queues.tallies.values()
        workers.transports.broker.stop()
        await workers.ask(prompt(LENGTH))
        await trio.sleep(0.2)
        async with trio.open_nursery() as nursery:
            for offset in range(1, 5):
                nursery.start_soon(workers.ask, prompt(LENGTH, offset=offset))
        assert decode.prefills("local", "queue_away", "decode_first") == 5
        assert tally.operations == {("put", "failed"): 2}
        workers.transports.broker.start()
        await trio.sleep(0.2)
        await workers.ask(prompt(LENGTH, offset=5))
        async with trio.open_nursery() as nursery:
            for offset in range(6, 9):
                nursery.start_soon(workers.ask, prompt(LENGTH, offset=offset))
        assert decode.prefills("remote", "long_prompt", "decode_first") == 4


@both_modes
async def test_without_a_prefill_worker_prompts_are_computed_here_at_once(mode: str) -> None:
    async with open_workers("decode", disaggregation__mode=mode) as workers:
        answered = await workers.ask(prompt(LENGTH))

        assert tokens(answered) == await alone(prompt(LENGTH))
        assert workers.of("decode").prefills("local", "no_prefill_worker", mode) == 1


@both_modes
async def test_a_prefill_worker_that_leaves_finishes_what_it_has(mode: str) -> None:
    async with (
        open_workers("decode", "prefill", disaggregation__mode=mode) as workers,
        trio.open_nursery() as nursery,
    ):
        decode, prefill = workers.of("decode"), workers.of("prefill")
        prefill.steps.allow(2)
        asking = Asking(workers, nursery)
        await until(lambda: prefill.steps.count == 2 and prefill.steps.is_inside)
        prefill.stop.request()
        await trio.sleep(0.05)
        prefill.steps.allow(1000)
        with trio.fail_after(120):
            await prefill.ended.wait()
        await until(lambda: asking.deltas is not None)

        assert decode.prefills("remote", "long_prompt", mode) == 1
        again = await workers.ask(prompt(LENGTH, offset=1))
        assert tokens(again) == await alone(prompt(LENGTH, offset=1))
        assert decode.prefills("local", "no_prefill_worker", mode) == 1


@both_modes
async def test_many_prompts_at_once_are_answered_as_each_alone(mode: str) -> None:
    answers: dict[int, list[int]] = {}

    async def ask(workers: Workers, offset: int) -> None:
        answers[offset] = tokens(await workers.ask(prompt(LENGTH + offset, offset=offset)))

    settings: dict[str, Any] = {
        "disaggregation__mode": mode,
        "disaggregation__pool_share_max": 1.0,
    }
    async with open_workers("decode", "prefill", "prefill", **settings) as workers:
        async with trio.open_nursery() as nursery:
            for offset in range(24):
                nursery.start_soon(partial(ask, workers, offset))
        decode = workers.of("decode")
        await workers.wait_blocks_free()

    assert answers == {
        offset: await alone(prompt(LENGTH + offset, offset=offset)) for offset in range(24)
    }
    assert decode.prefills("remote", "long_prompt", mode) >= 8

"""Schedulers, sequences and steps without a model, for tests."""

from __future__ import annotations

from typing import Any

from trinamo.runtime.engines.loop.scheduler import Scheduler, StepPlan, TokenSequence
from trinamo.runtime.kv.pool import BlockPool

BLOCK_TOKENS = 4


def make_scheduler(blocks: int = 100, **bounds: Any) -> Scheduler:
    chosen: dict[str, Any] = {
        "running_max": 4,
        "waiting_max": 10,
        "step_tokens_max": 16,
        "chunk_tokens_max": 8,
    }
    return Scheduler(BlockPool(blocks), block_tokens=BLOCK_TOKENS, **(chosen | bounds))


def make_sequence(
    prompt_tokens: int, tokens_max: int = 40, token: int = 0, tenant: str = ""
) -> TokenSequence:
    return TokenSequence(
        token_ids=[token] * prompt_tokens,
        prompt_tokens=prompt_tokens,
        tokens_max=tokens_max,
        tenant=tenant,
    )


def submit(scheduler: Scheduler, *prompts: int, tenant: str = "") -> list[TokenSequence]:
    sequences = [make_sequence(prompt, tenant=tenant) for prompt in prompts]
    for sequence in sequences:
        scheduler.submit(sequence)
    return sequences


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    for work in plan.work:
        scheduler.advance(work, 1 if work.is_sampled else None)
    return plan


def shares(plan: StepPlan) -> dict[TokenSequence, int]:
    return {work.sequence: work.token_count for work in plan.work}

"""The section `disaggregation`: when a prompt is computed by another worker, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .keys import Count, Seconds, Section, about


class DisaggregationConfig(Section, frozen=True, kw_only=True):
    """Prefill and decode workers (`worker.role`); see `docs/disaggregation.md`."""

    mode: Annotated[
        Literal["decode_first", "prefill_first"],
        about(
            "As decode workers are told. `decode_first`: they have blocks and put a job into the"
            " queue, and a prefill worker writes into these while it computes. `prefill_first`: they"
            " ask a prefill worker, and read its blocks when it has computed all."
        ),
    ] = "prefill_first"
    prefill_tokens_local_max: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 20, extra={"unit": "tokens"})],
        about("Prompts with no more than this to compute are computed by the decode worker."),
    ] = 1000
    queue_depth_max: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)],
        about("While so many prompts wait for a prefill worker, decode workers compute theirs."),
    ] = 16
    queue_timeout_s: Annotated[
        Seconds,
        about("How long a prompt waits for a prefill worker to begin with it."),
    ] = 2.0
    prefill_timeout_s: Annotated[
        Seconds,
        about("How long a prefill worker may take until the blocks are at the decode worker."),
    ] = 30.0
    pool_share_max: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        about(
            "The part of a decode worker's KV blocks that may be lent to prefill workers, or in"
            " quarantine because one hangs; prompts beyond it are computed by the decode worker."
        ),
    ] = 0.5
    jobs_max: Annotated[
        Count, about("Jobs of the queue that one prefill worker works on at a time.")
    ] = 4

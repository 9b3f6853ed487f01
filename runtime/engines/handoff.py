"""Engines that hand a prompt's KV over, and go on from KV that somebody else computed.

Disaggregated serving is made of this: one worker computes the prompt and keeps its blocks
(`prefill_and_keep`), another has a place and blocks for it (`reserve`), a transfer copies the blocks,
and the second goes on (`adopt`). Who asks whom, and what moves the bytes, is not said here.

The sequences of both are *pinned*: never preempted, since a transfer may touch their blocks. Stop
and Kill of the context end them as they end an answer, with `KilledError` out of whatever waits; but
the blocks are nobody else's before the `async with` is left, however the sequence ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import attrs

from ..context import Context
from ..kv.regions import HoldsKv
from ..protocol.openai.generate import Delta, GenerateRequest
from ..sinks import Sink


@attrs.frozen(kw_only=True)
class Prompt:
    """A request's prompt as the engine sees it, and how much of its KV is here."""

    token_ids: Sequence[int]
    """All known tokens: the prompt, then those of the answer that the client has already."""
    cached_tokens: int
    """Leading tokens whose KV is here now: whole blocks, and never all of them."""
    is_answered: bool = False
    """The client has the whole answer already, all but its end: there is nothing to compute."""


class KeptPrefill(Protocol):
    """A prompt that is being computed; its blocks stay until the `async with` is left."""

    @property
    def block_ids(self) -> Sequence[int]:
        """Of all known tokens, in order; the last may be filled in part."""
        ...

    async def wait_filled(self, count: int) -> int:
        """How many leading blocks hold their final KV, as soon as that are more than `count`.

        All of them once the prompt is complete, a partly filled last one included; then it returns
        at once, whatever `count`. Raises what ended the sequence: `KilledError`, `EngineError`,
        `UnavailableError` when the engine is closing, `OverloadedError` when quarantined blocks
        leave no room for it. Safe to cancel.
        """
        ...

    async def first_token(self) -> int:
        """The token after the prompt, as soon as it is chosen; raises as `wait_filled`."""
        ...


class Reservation(Protocol):
    """A place in the steps, and blocks for all known tokens, which nobody computes yet."""

    @property
    def prompt(self) -> Prompt:
        """As of the reservation. The blocks before `cached_tokens` are shared: never write them."""
        ...

    @property
    def block_ids(self) -> Sequence[int]:
        """Of all known tokens; those from `cached_tokens` on are to be filled by a transfer."""
        ...

    async def adopt(self, first_token: int, sink: Sink[Delta]) -> None:
        """Every block is filled: go on behind `first_token`, as `ForwardsDeltas.forward`.

        The first delta has `first_token`. Once only. Raises what ended the reservation, before
        anything is handed to `sink`, or what `forward` raises.
        """
        ...


@runtime_checkable
class HandsOver(HoldsKv, Protocol):
    """An engine whose prompts can be computed elsewhere, and whose blocks can be filled elsewhere.

    Only one whose `kv` is not None may be asked for the two below. Entering either waits until the
    sequence is admitted, first come first served with all others, and has its blocks; it raises
    what `generate` raises before its first delta. Safe to cancel at any time. Leaving gives the
    blocks back; those that a transfer has leased are free when it is settled, not before.
    """

    async def prepare(self, request: GenerateRequest) -> GenerateRequest:
        """`request` as `examine` takes it; raises `RequestError` for bad input. Safe to cancel."""
        ...

    def examine(self, request: GenerateRequest) -> Prompt:
        """What a prepared `request` asks to compute, and how much of it is here. No checkpoint.

        Raises `RequestError` for bad input.
        """
        ...

    def prefill_and_keep(
        self, request: GenerateRequest, context: Context
    ) -> AbstractAsyncContextManager[KeptPrefill]:
        """Compute the prompt and its next token, and keep the blocks until left."""
        ...

    def reserve(
        self, request: GenerateRequest, context: Context
    ) -> AbstractAsyncContextManager[Reservation]:
        """Hold a place for `request`; left without `adopt`, it was never asked.

        Raises `RequestError`, too, for one that `examine` calls answered.
        """
        ...

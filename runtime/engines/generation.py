"""What an engine is to a worker: a request and its context in, deltas out.

An engine is opened with an async context manager (`open_echo_engine`, `open_engine_host`, …) that
owns every task and buffer it needs. What happens inside is not this module's business:
`engines/loop/step.py` says what a step engine is, `engines/loop/host.py` runs one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, cast, runtime_checkable

import attrs
import msgspec

from ..context import Context
from ..kv.pool import block_count_for
from ..metrics.tallies import Registry, Row
from ..nurseries import is_failure
from ..protocol.kv.events import KvEvent
from ..protocol.kv.names import BlockNames
from ..protocol.openai.generate import (
    UNSAID,
    Delta,
    GenerateRequest,
    ModelCard,
    SamplingDefaults,
)
from ..sinks import Sink, forward_items

_log = logging.getLogger("trinamo.engines")
BlockListener = Callable[[Sequence[KvEvent]], None]
Forward = Callable[[GenerateRequest, Context, Sink[Delta]], Awaitable[None]]


@attrs.frozen(kw_only=True)
class EngineInfo:
    """What an engine is and how much it holds. Zero blocks: it keeps no KV."""

    engine: str
    """`echo`, `exact`, `llamacpp`, …"""
    model: str
    context_tokens_max: int
    """Prompt and answer together."""
    block_tokens: int = 0
    block_count: int = 0
    fingerprint: str = ""
    """Of the weights: two engines of one model answer alike only if these are equal."""
    kv_fingerprint: str = ""
    """Two engines may exchange KV only if these are equal, so it changes with the weights, the layout
    and the data type. Empty: the KV cannot leave the engine, and it serves no prefill or decode role."""
    has_prefix_cache: bool = False
    """What was computed is kept for later requests, which begin behind what they find."""
    tokenizer: str = ""
    """Who else can make tokens of a prompt (`engines/prompts.py`); empty: only the engine."""
    can_resume: bool = False
    """It goes on behind `GenerateRequest.delivered_ids` as if the answer had never stopped."""
    features: frozenset[str] = frozenset()
    """What a request may ask for besides (`Feature`); whatever else is refused by name."""
    passes_through: bool = False
    """It takes clients' bodies as they are (`GenerateRequest.body`), and answers likewise."""
    sampling: SamplingDefaults = UNSAID
    """What its model is best asked with."""

    def card(
        self,
        endpoint: str,
        *,
        created: int,
        aliases: Sequence[str] = (),
        sampling: Mapping[str, Any] = MappingProxyType({}),
    ) -> ModelCard:
        """What frontends are told of its model; `created` is in Unix seconds.

        What the operator says of `sampling`, by its fields, takes the place of the model's own; None is nothing.
        """
        said = {
            field: value
            for field, value in sampling.items()
            if value is not None and not self.passes_through
        }
        return ModelCard(
            name=self.model,
            endpoint=endpoint,
            context_tokens_max=self.context_tokens_max,
            engine=self.engine,
            fingerprint=self.fingerprint,
            can_resume=self.can_resume,
            tokenizer=self.tokenizer,
            block_tokens=self.block_tokens,
            created=created,
            aliases=list(aliases),
            features=sorted(self.features),
            passes_through=self.passes_through,
            sampling=msgspec.structs.replace(self.sampling, **said),
        )

    def check_context_fits(self) -> None:
        """Raise `ValueError` if the longest sequence would wait for blocks for ever."""
        if self.block_count < block_count_for(self.context_tokens_max, self.block_tokens):
            raise ValueError(
                f"{self.block_count} blocks of {self.block_tokens} tokens do not hold one context"
                f" of {self.context_tokens_max} tokens"
            )


@attrs.frozen(kw_only=True)
class EngineStatistics:
    """Gauges and counters at one moment. All gauges are zero at quiescence."""

    running: int = 0
    """Sequences that hold a place in the steps, paused ones included."""
    paused: int = 0
    """Sequences, running or waiting, whose consumer is too slow."""
    waiting: int = 0
    waiting_tokens: int = 0
    """Known tokens still to be computed before their sequences decode, running ones' included."""
    blocks_used: int = 0
    blocks_free: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    """Tokens computed in prefill, those computed again after a preemption included."""
    completion_tokens: int = 0
    hit_tokens: int = 0
    """Of prompts, tokens that were not computed because blocks held them, likewise."""
    sought_tokens: int = 0
    """Tokens of which that was asked, those included that other workers computed."""
    preemptions: int = 0
    cancellations: int = 0
    """Requests that ended by Stop, Kill or an abandoned generator."""
    failures: int = 0
    """Requests that an engine error ended."""


def read_statistics(engine: GenerationEngine) -> EngineStatistics:
    """For those who show it; empty, and a line in the log, if the engine, which is user code, raises."""
    try:
        return engine.statistics()
    except BaseException as error:
        if not is_failure(error):
            raise
        _log.exception("the statistics of engine %s cannot be read", engine.info.engine)
        return EngineStatistics()


def show_engine(metrics: Registry, endpoint: str, engine: GenerationEngine) -> None:
    """Show the blocks of the engine that serves `endpoint`, if any, its sequences and its tokens."""
    for name, text in (("kv_blocks", "KV blocks of the engine"), ("sequences", "Sequences held")):
        metrics.readings("engine_", ("endpoint", "state"), _state_rows, gauges={name: text}).shown[
            endpoint
        ] = engine
    metrics.readings(
        "engine_",
        ("endpoint",),
        _engine_rows,
        gauges={
            "paused_sequences": "Of the sequences those whose consumers are too slow",
            "waiting_tokens": "Known tokens still to be computed before their sequences decode",
        },
        counters={
            "prompt_tokens": "Tokens computed in prefill",
            "completion_tokens": "Tokens generated",
            "prefix_hit_tokens": "Prompt tokens not computed, because blocks held them",
            "steps": "Steps of the model",
            "preemptions": "Sequences that gave their blocks to others, to come back later",
            "cancellations": "Requests that were stopped, killed or abandoned",
            "failures": "Requests that an error of the engine ended",
        },
    ).shown[endpoint] = engine


def _state_rows(shown: Mapping[str, GenerationEngine]) -> Iterator[Row]:
    for endpoint, engine in shown.items():
        told = read_statistics(engine)
        if engine.info.block_count:
            yield (endpoint, "used"), {"kv_blocks": told.blocks_used}
            yield (endpoint, "free"), {"kv_blocks": told.blocks_free}
        yield (endpoint, "running"), {"sequences": told.running}
        yield (endpoint, "waiting"), {"sequences": told.waiting}


def _engine_rows(shown: Mapping[str, GenerationEngine]) -> Iterator[Row]:
    for endpoint, engine in shown.items():
        told = read_statistics(engine)
        renamed = {"paused_sequences": told.paused, "prefix_hit_tokens": told.hit_tokens}
        yield (endpoint,), attrs.asdict(told) | renamed


class GenerationEngine(Protocol):
    """Generates answers for many requests at once."""

    @property
    def info(self) -> EngineInfo:
        """What this engine is; constant while it is open."""
        ...

    def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        """Stream one answer; the last delta carries the finish reason. Use it under `aclosing`.

        Nothing happens before the first item is asked for. A slow consumer pauses its own answer
        only. Once `context` is stopped the answer ends after at most one more step with
        `STOP`, and what was queued is still delivered. Closing the generator, or cancelling
        the task inside it, has no checkpoint: it marks the sequence dead, and its memory is free
        before the next step.

        Raises `RequestError` for bad input, `OverloadedError` when the waiting queue is full (both
        before the first delta), `EngineError` when a step failed, `UnavailableError` when the
        engine is closing.
        """
        ...

    def statistics(self) -> EngineStatistics:
        """The engine's gauges and counters now."""
        ...


class ForwardsDeltas(Protocol):
    """A generation engine that pushes: no task of a request wakes between its first and last delta."""

    async def forward(self, request: GenerateRequest, context: Context, sink: Sink[Delta]) -> None:
        """As `generate`, but hand each delta to `sink` as it is made; return at the complete end.

        While `sink` has no room only its own answer is paused. What `sink` raises ends this answer
        and comes out of here. Cancelling the task that waits here has no checkpoint, and leaves no
        more than closing the generator does. Raises what `generate` raises.
        """
        ...


class Generates(Protocol):
    """What makes deltas, here or behind a client."""

    def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]: ...


@runtime_checkable
class StandsBefore(Protocol):
    """A generation engine whose answers another server makes, which may be away, or busy by others."""

    @property
    def is_healthy(self) -> bool:
        """Whether that server is well; while it is not, the worker is to be given no requests."""
        ...

    async def wait_health(self, *, seen: bool) -> bool:
        """Return the health once it is not `seen`. Safe to cancel."""
        ...

    def load(self) -> tuple[int, float]:
        """Requests that run or wait there, ours included, and the fraction of its KV cache in use."""
        ...


def forward_of(engine: ForwardsDeltas | Generates) -> Forward:
    """The engine's `forward`, or else its `generate`, handed on delta by delta."""
    # Not by `isinstance`: of a protocol it costs 25 µs, and this is asked once a request.
    own: Forward | None = getattr(engine, "forward", None)
    if own is not None:
        return own
    pulled = cast("Generates", engine)

    async def forward(request: GenerateRequest, context: Context, sink: Sink[Delta]) -> None:
        await forward_items(pulled.generate(request, context), sink)

    return forward


@runtime_checkable
class TellsBlocks(Protocol):
    """A generation engine that can say which full KV blocks it keeps for later requests."""

    def listen_blocks(self, listener: BlockListener, names: BlockNames) -> bool:
        """Call `listener` with every change from now on; False if this engine keeps none.

        Blocks have these `names` then; those that had others before are forgotten.

        First it is told what is held already, as somebody who knows of no block. It is called
        between two steps, must not wait, and there is one: the last that was given.
        """
        ...

"""What a model has to offer to the step loop: one synchronous step over many sequences.

`steps.py` runs its steps, and `host.py` asks it for a prompt's tokens. A step engine knows tokens, blocks and slots, but neither
requests in flight nor tasks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import attrs
import msgspec

from ...errors import TrinamoError
from ...protocol.openai.generate import GenerateRequest, TokenLogprob
from ..generation import EngineInfo

if TYPE_CHECKING:
    # numpy comes with it, which most engines' processes do not need.
    from ...kv.regions import RegionSet


_MASK = (1 << 64) - 1


def scramble(number: int) -> int:
    """A one-to-one map of 64-bit numbers without structure: a step of SplitMix64.

    A checksum would not do: it is linear, so two seeds would differ by the same bits everywhere.
    """
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


TEMPERATURE_MIN: Final = 1e-5
"""Less is greedy: logits divided by it may be no numbers any more."""


@attrs.frozen(kw_only=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; `seed` has 64 bits.

    An engine draws from (seed, position) alone, so that a sequence computed again after a
    preemption, or elsewhere, goes on with the same tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 for all."""
    min_p: float = 0.0
    seed: int = 0

    def draw(self, position: int) -> int:
        """64 bits for the token at `position`: all the chance there is."""
        return scramble(scramble(self.seed) ^ position)


@attrs.frozen
class Ends:
    """Which tokens end an answer beside those that end every one, and which may not come yet.

    Of an answer that asks for neither there is none.
    """

    stop_ids: frozenset[int]
    _always: tuple[int, ...]
    """Never chosen."""
    _early: tuple[int, ...]
    """Not chosen before `_position`."""
    _position: int

    @classmethod
    def of(
        cls, request: GenerateRequest, end_ids: Iterable[int], prompt_tokens: int
    ) -> Ends | None:
        """What `request` asks for, where `end_ids` end an answer otherwise."""
        stop_ids = frozenset(request.stop_token_ids)
        if not (stop_ids or request.ignore_eos or request.min_tokens):
            return None
        always = tuple(sorted(end_ids)) if request.ignore_eos else ()
        early = tuple(sorted(stop_ids.union(end_ids)))
        return cls(stop_ids, always, early, prompt_tokens + request.min_tokens)

    def barred(self, position: int) -> tuple[int, ...]:
        """The tokens that are not to be chosen at `position`."""
        return self._early if position < self._position else self._always


@attrs.define(eq=False, kw_only=True)
class Shaping:
    """What one sequence asks for beyond `Sampling`, and what the engine tells of its tokens.

    The choice is still a function of the request, the tokens so far, and the position alone: an engine may
    keep in `state` what it has made of them, and makes it again from `token_ids` where it is None.
    """

    request: GenerateRequest
    token_ids: list[int]
    """Every known token, as it grows; not to be changed."""
    prompt_tokens: int
    state: Any = None
    """The engine's own."""
    counts: Any = None
    """What penalties know of the tokens so far; made again from `token_ids` as `state` is."""
    told: TokenLogprob | None = None
    """Of the token chosen last, where the request asks for log probabilities."""
    prompt_told: list[TokenLogprob] | None = None
    """Of the prompt's first tokens, as far as they are computed; None where nobody asks, or has all."""
    failure: TrinamoError | None = None
    """Why there is no next token: it ends this answer, and no other."""

    @property
    def tells_prompt(self) -> bool:
        """Whether the log probabilities of some of the prompt's tokens are still to be told."""
        return self.prompt_told is not None and len(self.prompt_told) < self.prompt_tokens


class StepItem(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One sequence's share of a step. There is one for every token.

    Attributes:
        slot: A small number that no other running sequence has; constant until it is released.
        token_ids: The tokens to compute in this step, at least one.
        position: The place in the sequence of the first of `token_ids`, counted from 0. The KV of
            all earlier positions is in the blocks already, whoever computed it.
        block_ids: All blocks of the sequence, in order, with room for `token_ids`: position `p` is
            slot `p % block_tokens` of block `block_ids[p // block_tokens]`.
        is_sampled: Whether a next token is wanted: true for the last tokens known.
        sampling: Temperature, seed and what else decides which token is chosen.
        shaping: Penalties, bias and grammars; None for most: then `sampling` says everything.
        barred: Tokens that are not to be chosen, unless there is no other.
    """

    slot: int
    token_ids: Sequence[int]
    position: int
    block_ids: Sequence[int]
    is_sampled: bool
    sampling: Sampling
    shaping: Shaping | None = None
    barred: Sequence[int] = ()

    @property
    def end(self) -> int:
        """The position of the token that is wanted next."""
        return self.position + len(self.token_ids)


class StepEngine(Protocol):
    """A model that computes one step at a time over many sequences.

    One step at a time, in a worker thread. `release`, `recover` and `close` are called between
    steps; `encode`, `token_bytes` and `interrupt` also while one is running.
    """

    @property
    def info(self) -> EngineInfo:
        """Constant. `block_count` blocks must hold one sequence of `context_tokens_max` tokens."""
        ...

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer and have no text."""
        ...

    def encode(self, request: GenerateRequest) -> list[int]:
        """The tokens of a prompt, or of `token_ids`, as delivered; `RequestError` if there are none."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one generated token; empty if it has no text."""
        ...

    def step(self, items: Sequence[StepItem]) -> list[int | None]:
        """Compute every item and return its next token, None where none is wanted, or has failed.

        CPU-bound and synchronous: runs in a worker thread. Whatever it raises fails all running
        sequences.
        """
        ...

    def release(self, slot: int) -> None:
        """The sequence in `slot` is gone: its blocks will get new owners."""
        ...

    def recover(self) -> None:
        """Forget all sequences after a failed step; raises if no later step can work."""
        ...

    def interrupt(self) -> None:
        """The engine is closing: let a step that is running now end soon, by raising.

        No step follows.
        """
        ...

    def close(self) -> None:
        """Free everything. Called once."""
        ...


@runtime_checkable
class KeepsKv(Protocol):
    """A step engine whose KV blocks are bytes that transfers may move."""

    @property
    def memory(self) -> RegionSet | None:
        """The blocks that `StepItem.block_ids` names; None if they have no bytes after all."""
        ...


@runtime_checkable
class StagesKv(StepEngine, Protocol):
    """A step engine that computes with KV in a place of its own, not in the blocks of its `memory`.

    Called between steps, in the thread that runs them, and only if it has memory.
    """

    def save(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        """Copy the KV of the first `tokens` tokens of the sequence in `slot` into its blocks."""
        ...

    def load(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        """The reverse: `slot` holds nothing, and has the KV of `tokens` tokens afterwards."""
        ...


@runtime_checkable
class Prepares(Protocol):
    """A step engine with work on a request that must not hold up the event loop."""

    async def prepare(self, request: GenerateRequest) -> GenerateRequest:
        """The request as `encode` takes it. Idempotent, and safe to cancel; raises `RequestError`."""
        ...


@runtime_checkable
class Embeds(Protocol):
    """A step engine that can make an embedding of a prompt, with `Feature.EMBEDDINGS` if it does."""

    def embed(self, token_ids: list[int]) -> Iterator[bytes]:
        """Compute one vector, a chunk of the prompt for each `next`; the last is the vector, all others empty.

        It is normalised, as float32 in little-endian order. Called as steps are, and between two of
        them; one that is left before its end is not gone on with.
        """
        ...


@runtime_checkable
class KeepsPrefixes(Protocol):
    """A step engine that keeps what ended sequences computed in a place of its own, not in blocks.

    Called between steps; one tenant is given nothing of another's.
    """

    def find(self, token_ids: Sequence[int], tenant: str) -> int:
        """How many leading tokens, but never all, need not be computed for `tenant`."""
        ...

    def begin(self, slot: int, token_ids: Sequence[int], tenant: str) -> int:
        """`slot` is to have this sequence; returns how many leading tokens it has from the start.

        Its last owner may be released only after this, and before the next step.
        """
        ...


class Hop(Protocol):
    """`await hop(step, items)` runs one step to its end: in a thread, or as a costed sleep."""

    def __call__(
        self,
        step: Callable[[Sequence[StepItem]], list[int | None]],
        items: Sequence[StepItem],
        /,
    ) -> Awaitable[list[int | None]]: ...

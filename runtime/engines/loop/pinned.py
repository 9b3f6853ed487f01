"""Sequences that a transfer reads or fills: a prefill that is kept, and a place that is reserved.

What they promise is said in `engines/handoff.py`. The host tells them what the steps did to them;
nothing here decides.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import attrs
import trio

from ...context import Context, State
from ...kv.pool import block_count_for
from ...protocol.openai.generate import Delta
from ...sinks import Sink
from ...traces.trace import Leg
from ..handoff import Prompt
from .scheduler import SequenceState, TokenSequence


@attrs.define(eq=False)
class Pinned:
    """One pinned sequence, until its block is left or it is adopted; a `KeptPrefill`."""

    sequence: TokenSequence
    _context: Context
    _block_tokens: int
    _on_stop: Callable[[Pinned], None]
    """Called when its request is stopped or killed."""
    _is_staged: bool
    """The blocks hold nothing before the prompt is complete."""
    block_ids: Sequence[int] = ()
    _first_token: int | None = None
    _is_over: bool = False
    _error: BaseException | None = None
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)
    _leg: Leg = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        kind = "reservation" if self.sequence.is_held else "prefill"
        self._leg = self._context.trace.begin(kind, prompt_tokens=self.sequence.prompt_tokens)

    @property
    def is_complete(self) -> bool:
        """The prompt is computed."""
        return self._first_token is not None

    def follow_context(self) -> None:
        """Have `on_stop` called when the request is stopped or killed, be it already."""
        self._context.on_change(self._context_changed)

    def forget_context(self) -> None:
        """Nobody asks any more whether the request is stopped."""
        self._context.off_change(self._context_changed)

    def _context_changed(self, _: State) -> None:
        self._on_stop(self)

    # --- what the host tells ---

    def admitted(self) -> None:
        """The sequence has its blocks."""
        self.block_ids = tuple(self.sequence.block_ids)
        self._leg.mark("admitted")
        self._leg.tell(blocks=len(self.block_ids), cached_tokens=self.sequence.cached_tokens)
        self._change()

    def advanced(self, token_id: int | None) -> None:
        """A step has computed more of the prompt, and chosen the token after it if that was all."""
        self._first_token = token_id
        if token_id is not None:
            self._leg.mark("first_token")
        self._change()

    def adopted(self) -> None:
        """Its blocks are filled: an answer has the sequence from now on."""
        self.forget_context()
        self._leg.finish("adopted")

    def finish(self, error: BaseException | None) -> None:
        """It is over; `error` says why if its owner did not end it."""
        self._leg.leave(error)
        self._is_over, self._error = True, error
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- what its owner asks ---

    async def wait_admitted(self) -> None:
        """Return once the sequence has its blocks; raises what ended it before."""
        self.check_alive()
        while self.sequence.state is not SequenceState.RUNNING:
            await self._wait_change()

    async def wait_filled(self, count: int) -> int:
        """See `KeptPrefill.wait_filled`."""
        await trio.lowlevel.checkpoint()
        self.check_alive()
        while not self.is_complete and self._filled <= count:
            await self._wait_change()
        return self._filled

    async def first_token(self) -> int:
        """See `KeptPrefill.first_token`."""
        await trio.lowlevel.checkpoint()
        self.check_alive()
        while self._first_token is None:
            await self._wait_change()
        return self._first_token

    @property
    def _filled(self) -> int:
        cached = self.sequence.cached_tokens
        if self.is_complete:
            return block_count_for(cached, self._block_tokens)
        return 0 if self._is_staged else cached // self._block_tokens

    async def _wait_change(self) -> None:
        await self._changed.wait()
        self.check_alive()

    def check_alive(self) -> None:
        """Raise what ended it."""
        if self._error is not None:
            raise self._error
        assert not self._is_over, "its block has been left"


@attrs.frozen(eq=False)
class Reserved:
    """A `Reservation`."""

    prompt: Prompt
    block_ids: Sequence[int]
    _adopt: Callable[[int, Sink[Delta]], Awaitable[None]]

    async def adopt(self, first_token: int, sink: Sink[Delta]) -> None:
        """See `Reservation.adopt`."""
        await self._adopt(first_token, sink)

"""One request's answer on its way out of the step loop: text, unsent tokens, and the sink they go to."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import msgspec

from ...context import Context, State
from ...protocol.openai.generate import Delta, FinishReason, TokenLogprob
from ...sinks import Sink
from ...traces.trace import Leg
from ..text import TextStream
from .scheduler import TokenSequence

Finish = Callable[[BaseException | None], None]


@attrs.define(eq=False)
class SequenceAnswer:
    """What one request gets of its sequence; `finish` is told its end, or its error, once."""

    sequence: TokenSequence
    text: TextStream
    _sink: Sink[Delta]
    _finish: Finish
    _context: Context
    _on_stop: Callable[[SequenceAnswer], None]
    tells_prompt_ids: bool = False
    """Whether the first delta has the prompt's tokens."""
    unsent_ids: list[int] = attrs.field(factory=list, init=False)
    unsent_logprobs: list[TokenLogprob] = attrs.field(factory=list, init=False)
    _unsent_prompt_tokens: int = attrs.field(init=False)
    _leg: Leg = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        prompt_tokens = self._unsent_prompt_tokens = self.sequence.prompt_tokens
        known_tokens = len(self.sequence.token_ids)
        self._leg = self._context.trace.begin(
            "engine", prompt_tokens=prompt_tokens, known_tokens=known_tokens
        )

    @property
    def is_killed(self) -> bool:
        """Nobody wants another delta, not even the last."""
        return self._context.is_killed

    def finish(self, error: BaseException | None) -> None:
        """No token more: with the whole answer, or with `error`."""
        sequence = self.sequence
        tokens = len(sequence.token_ids) - sequence.prompt_tokens
        if error is not None:
            self._leg.leave(error)
        else:
            outcome = "cancelled" if self._context.is_stopped else "success"
            self._leg.finish(outcome, output_tokens=tokens)
        self._finish(error)

    def computes(self) -> None:
        """A step has computed part of the prompt."""
        if not self._leg.marks:
            self._leg.mark("computing")

    def send(self, text: str, reason: FinishReason | None) -> None:
        """Hand the sink what is new; without room for more the sequence is paused.

        Raises what the sink raises.
        """
        logprobs = self.unsent_logprobs
        prompt_tokens = self._unsent_prompt_tokens
        delta = Delta(text, self.unsent_ids, reason, prompt_tokens, logprobs)
        self.unsent_ids = []
        if logprobs:
            self.unsent_logprobs = []
        if prompt_tokens:
            delta = self._first(delta)
            self._unsent_prompt_tokens = 0
            self._leg.mark("first_token")
        if self.text.stopped_by:
            delta = msgspec.structs.replace(delta, stop_string=self.text.stopped_by)
        if not self._sink.take([delta]):
            self.sequence.is_paused = True

    def _first(self, delta: Delta) -> Delta:
        """With what is told of the prompt."""
        sequence = self.sequence
        prompt_ids = sequence.token_ids[: sequence.prompt_tokens] if self.tells_prompt_ids else []
        told: list[TokenLogprob] | None = None
        if sequence.shaping is not None:
            told, sequence.shaping.prompt_told = sequence.shaping.prompt_told, None
        return msgspec.structs.replace(
            delta,
            cached_tokens=sequence.found_tokens or 0,
            prompt_token_ids=prompt_ids,
            prompt_logprobs=told or [],
        )

    def follow_context(self) -> None:
        """Have `on_stop` called when the request is stopped or killed, be it already."""
        self._context.on_change(self._context_changed)

    def forget_context(self) -> None:
        """Nobody asks any more whether the request is stopped."""
        self._context.off_change(self._context_changed)

    def _context_changed(self, _: State) -> None:
        self._on_stop(self)

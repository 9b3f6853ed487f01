"""From what a generator yields to the deltas of one answer: counts, bounds, stop strings, the end.

Synchronous, and knows nothing of time. `serving.py` asks the generator.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from ...errors import EngineError, RequestError
from ...protocol.openai.generate import Delta, FinishReason, GenerateRequest, TokenLogprob
from ...protocol.undecodable import UNDECODABLE
from ..prompts import check_prompt_fits
from ..text import StopMatcher

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Delta)
_NOT_OURS = "the answer does not begin with these tokens"
_NO_VOCABULARY = 0
"""The id of a token of which only the text is known."""


def count_words(request: GenerateRequest) -> int:
    """How many tokens the prompt counts as long as nobody says otherwise: a word is one."""
    if request.token_ids is not None:
        return len(request.token_ids)
    texts = [request.prompt or "", *(turn.content for turn in request.messages or ())]
    return max(1, sum(len(text.split()) for text in texts))


class AnswerItems:
    """One answer: what the generator yields goes into `take`, and its end into `finish`."""

    def __init__(
        self,
        engine: str,
        request: GenerateRequest,
        context_tokens_max: int,
        count: Callable[[GenerateRequest], int] = count_words,
    ) -> None:
        self._engine = engine
        self._tokens_max = request.max_tokens
        self._context_tokens_max = context_tokens_max
        self.prompt_tokens = count(request)
        check_prompt_fits(self.prompt_tokens, context_tokens_max, request)
        self._untold = self.prompt_tokens
        """Prompt tokens that no delta has told of yet."""
        self._matcher = StopMatcher(request.stop)
        self._delivered_count = len(request.delivered_ids)
        self._to_skip = list(request.delivered_ids)
        """What the client has, and the generator has not made again yet."""
        self._says_tokens = False
        """Whether the generator counts its tokens itself."""
        self._held_ids: list[int] = []
        """Of text that is held back."""
        self._held_logprobs: list[TokenLogprob] = []
        self._held_prompt = Delta()
        """What it told of the prompt, where that has not gone out yet."""
        self.completion_tokens = 0
        self.is_over = False
        """A delta with the finish reason was returned: nothing more is taken."""

    def take(self, item: object) -> Delta | None:
        """What the client gets for one item; None while its text is held back.

        Raises `EngineError` for an item that is neither `str` nor `Delta`, or no such as can be sent.
        """
        item = self._checked(item)
        if item.prompt_tokens not in (0, self.prompt_tokens):
            self.prompt_tokens = self._untold = item.prompt_tokens
        if item.cached_tokens or item.prompt_token_ids or item.prompt_logprobs:
            self._held_prompt = item
        if self._to_skip:
            return self._skip(item)
        token_ids = item.token_ids
        if token_ids:
            self._says_tokens = True
        elif item.text and not self._says_tokens:
            token_ids = [_NO_VOCABULARY]
        self.completion_tokens += len(token_ids)
        text = self._matcher.push(item.text)
        return self._delta(item, text, token_ids, self._reason(item))

    def _skip(self, item: Delta) -> Delta | None:
        """The client has this already; the end if a stop string is complete with it."""
        count = len(item.token_ids)
        if self._to_skip[:count] != item.token_ids:
            raise RequestError(_NOT_OURS, param="delivered_ids")
        del self._to_skip[:count]
        self._matcher.push(item.text)
        if not self._matcher.is_stopped:
            return None
        self.check_resumed()
        return self.finish()

    def check_resumed(self) -> None:
        """Raise `RequestError` if the whole answer is less than what the client has of it."""
        if self._to_skip:
            raise RequestError(_NOT_OURS, param="delivered_ids")

    def _checked(self, item: object) -> Delta:
        """The item as the frontend would read it, which would take what it cannot read for a broken link."""
        who = f"engine {self._engine} yielded"
        try:
            if isinstance(item, str):
                if not item.isascii():
                    item.encode()
                return Delta(item)
            if isinstance(item, Delta):
                return _DECODER.decode(_ENCODER.encode(item))
        except UnicodeEncodeError as error:
            raise EngineError(
                f"{who} text that is no Unicode: {error.object[error.start]!a}, half"
                " of a pair; decode bytes with errors='replace', and whole characters at a time"
            ) from None
        except (*UNDECODABLE, TypeError, OverflowError) as error:
            # Fields travel by their place.
            named = re.sub(
                r"\$\[(\d+)\]", lambda it: Delta.__struct_fields__[int(it[1])], str(error)
            )
            raise EngineError(f"{who} a Delta that cannot be sent: {named}") from None
        raise EngineError(
            f"{who} an item of type {type(item).__name__}; an engine yields str or trinamo.Delta"
        )

    def finish(self) -> Delta:
        """The last delta, after which the generator yields no more, or was stopped."""
        delta = self._delta(Delta(), "", [], FinishReason.STOP)
        assert delta is not None
        return delta

    def _reason(self, item: Delta) -> FinishReason | None:
        if self._matcher.is_stopped:
            return FinishReason.STOP
        if item.finish_reason is not None:
            return item.finish_reason
        room = self._context_tokens_max - self.prompt_tokens
        limit = room if self._tokens_max is None else min(self._tokens_max, room)
        count = self._delivered_count + self.completion_tokens
        return FinishReason.LENGTH if count >= limit else None

    def _delta(
        self, item: Delta, text: str, token_ids: list[int], reason: FinishReason | None
    ) -> Delta | None:
        self._held_ids += token_ids
        self._held_logprobs += item.logprobs
        if reason is not None:
            self.is_over = True
            text += self._matcher.flush()
        elif not text:
            return None
        told, self._untold = self._untold, 0
        held, self._held_ids = self._held_ids, []
        logprobs, self._held_logprobs = self._held_logprobs, []
        of_prompt, self._held_prompt = self._held_prompt, Delta()
        return Delta(
            text,
            held,
            reason,
            told,
            logprobs,
            cached_tokens=min(of_prompt.cached_tokens, self.prompt_tokens),
            prompt_token_ids=of_prompt.prompt_token_ids,
            prompt_logprobs=of_prompt.prompt_logprobs,
            stop_string=self._matcher.stopped_by,
        )

"""Answers that are passed on as they come: events and bodies of an upstream, unread.

As sinks, beside those of `streaming.py`, which make answers of text. A refusal of the upstream, such
as a 400 that names a parameter, is the answer, too: with its status and its words.
"""

from __future__ import annotations

from typing import Final

from ..errors import EngineError, RequestError
from ..protocol.openai.answers import DONE
from ..protocol.openai.generate import Delta
from .status import ErrorAnswer
from .streaming import DELTA_BYTES, AnswerSink, Recipient

_REFUSAL: Final = "the upstream refuses the request"


class PassedBody(AnswerSink):
    """Keeps the pieces of one body, which whoever sends them has bounded, and answers with all."""

    keeps_all = True

    def __init__(self, to: Recipient) -> None:
        super().__init__(to)
        self._pieces: list[bytes] = []
        self._status = 200

    def restart(self) -> None:
        super().restart()
        self._pieces.clear()
        self._status = 200

    def take(self, items: list[Delta]) -> bool:
        for delta in items:
            self._count(delta)
            self._status = delta.status or self._status
            self._bound(0, DELTA_BYTES + len(delta.raw))
            self._pieces.append(delta.raw)
        return True

    def _count(self, delta: Delta) -> None:
        super()._count(delta)
        self._bound(1 + delta.output_tokens)
        self._record.token(delta.output_tokens)

    def finish(self) -> None:
        self._check_complete()
        if self._status >= 400:
            raise RequestError(f"{_REFUSAL} with {self._status}")
        self._exchange.respond(200, b"".join(self._pieces), self._to.headers)

    def fail(self, answer: ErrorAnswer) -> None:
        if self._status >= 400 and self._is_complete:
            self._exchange.respond(self._status, b"".join(self._pieces), self._to.headers)
            return
        super().fail(answer)


class PassedEvents(PassedBody):
    """Writes events on as they come. `ends_with_done`: all but `/v1/responses` do."""

    keeps_all = False

    def __init__(self, to: Recipient, *, ends_with_done: bool) -> None:
        super().__init__(to)
        self._end = DONE if ends_with_done else b""
        to.exchange.on_room(self.resume)

    def take(self, items: list[Delta]) -> bool:
        if items[0].status:
            # A refusal is no stream: it is kept, and answered whole.
            return super().take(items)
        for delta in items:
            self._count(delta)
        return self._write(b"".join([delta.raw for delta in items]))

    def finish(self) -> None:
        if self._status >= 400:
            super().finish()
        if not self._is_started:
            raise EngineError("the upstream ended its answer without an event")
        self._check_complete()
        self._exchange.finish(self._end)

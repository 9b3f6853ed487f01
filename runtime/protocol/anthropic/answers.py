"""The answers of `/v1/messages`: blocks of content, and the events that tell how they grow. Sans-IO.

The text of an answer is one block, and each use of a tool another. A stream that is whole ends with
`message_stop`, and any other with `error`: https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Self

import attrs
import msgspec
from msgspec import Raw

from ..openai.answers import ErrorDetail, TextTemplate, Usage, encode_data
from ..openai.generate import Delta, FinishReason
from ..openai.tool_calls import CallPiece, PartedAnswer

_encode = msgspec.json.Encoder().encode
_object_decoder = msgspec.json.Decoder(dict[str, Any])
_DELTA: Final = "content_block_delta"
ERROR_EVENT: Final = b"error"
"""The name of the event that tells of one in a stream."""
_SERVERS: Final = 500
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """What the answer says."""

    text: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A use of one of the request's tools."""

    id: str
    name: str
    input: Raw
    """A JSON object; empty where the answer was cut in the middle of it."""


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens the request and its answer had: those of the prompt's that were cached apart."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0

    @classmethod
    def of(cls, prompt: int, cached: int, output: int) -> Self:
        cached = min(cached, prompt)
        return cls(
            input_tokens=prompt - cached, cache_read_input_tokens=cached, output_tokens=output
        )


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The whole answer of `/v1/messages`, and, empty, the beginning of a stream."""

    id: str
    role: str = "assistant"
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: str | None = None
    """`end_turn`, `max_tokens`, `stop_sequence` or `tool_use`."""
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


@attrs.define(eq=False)
class _Block:
    texts: list[str] = attrs.Factory(list)
    name: str = ""
    """Of the tool that is used; text has none."""
    use_id: str = ""

    def told(self) -> TextBlock | ToolUseBlock:
        text = "".join(self.texts)
        if not self.name:
            return TextBlock(text)
        try:
            _object_decoder.decode(text)
        except (msgspec.DecodeError, RecursionError):
            text = "{}"
        return ToolUseBlock(self.use_id, self.name, Raw(text.encode()))


class MessagesAnswer(PartedAnswer):
    """One answer of `/v1/messages`."""

    keeps_text: ClassVar = False

    def __init__(self, answer_id: str, model: str, *, calls_max: float) -> None:
        super().__init__(answer_id, model, calls_max=calls_max)
        self._content: list[TextBlock | ToolUseBlock] = []
        """The blocks that are complete, where the answer is wanted whole."""
        self._block: _Block | None = None
        self._count = 0
        """Of blocks that are complete."""
        self._stop_string = ""
        self._template: TextTemplate | None = None
        """Of text that goes on with the block that grows."""

    # --- in: deltas ---

    def add_event(self, delta: Delta) -> bytes:
        if self._template is not None and self._parser is None and delta.finish_reason is None:
            # Nearly all are: more of a text, and nothing else.
            return self._template.render(delta.text) if delta.text else b""
        if self._events is None:
            self._events = []
            usage = MessageUsage.of(delta.prompt_tokens, delta.cached_tokens, 0)
            self._say("message_start", message=self._message(usage))
        self.add_text(delta)
        return self._taken()

    def add_text(self, delta: Delta) -> None:
        super().add_text(delta)
        self._stop_string = delta.stop_string or self._stop_string

    def _add_call(self, piece: CallPiece) -> None:
        if piece.name:
            self._open(piece.name, f"toolu_{self._id}_{piece.index}")
        if piece.arguments and self._block is not None:
            if self._events is None:
                self._block.texts.append(piece.arguments)
            told = {"type": "input_json_delta", "partial_json": piece.arguments}
            self._say(_DELTA, index=self._count, delta=told)

    def _add(self, text: str) -> None:
        block = self._block
        if block is None or block.name:
            block = self._open()
        if self._events is None:
            block.texts.append(text)
            return
        if self._template is None:
            told = {"type": "text_delta", "text": TextTemplate.MARK}
            event = {"type": _DELTA, "index": self._count, "delta": told}
            self._template = TextTemplate(event, _DELTA.encode())
        self._events.append(self._template.render(text))

    # --- out: blocks and events ---

    def _open(self, name: str = "", use_id: str = "") -> _Block:
        self._close()
        block = self._block = _Block([], name, use_id)
        self._template = None
        if self._events is not None:
            self._say("content_block_start", index=self._count, content_block=block.told())
        return block

    def _close(self) -> None:
        if self._block is None:
            return
        if self._events is None:
            self._content.append(self._block.told())
        self._say("content_block_stop", index=self._count)
        self._block = None
        self._count += 1

    def _complete(self) -> tuple[str, str | None]:
        """The answer is over: why, and with which stop string."""
        if self._parser is not None:
            self._add_pieces(self._parser.finish())
        if self._block is None and not self._count:
            self._open()
        self._close()
        if self._reason is FinishReason.LENGTH:
            return "max_tokens", None
        if self._stop_string:
            return "stop_sequence", self._stop_string
        has_called = self._parser is not None and bool(self._parser.call_count)
        return ("tool_use" if has_called else "end_turn"), None

    def end_events(self, usage: Usage) -> bytes:
        reason, stop_string = self._complete()
        told = {"stop_reason": reason, "stop_sequence": stop_string}
        self._say("message_delta", delta=told, usage=_usage(usage))
        self._say("message_stop")
        return self._taken()

    def error_events(self, status: int, error: ErrorDetail) -> bytes:
        return encode_data(error_body(status, error, self._id), ERROR_EVENT)

    def to_body(self, usage: Usage, others: Sequence[Self] = ()) -> bytes:
        assert not others, "a message has no choices"
        return _encode(self._message(_usage(usage), *self._complete()))

    def _message(
        self, usage: MessageUsage, reason: str | None = None, stop_string: str | None = None
    ) -> MessageAnswer:
        return MessageAnswer(
            id=f"msg_{self._id}",
            model=self._model,
            content=self._content,
            stop_reason=reason,
            stop_sequence=stop_string,
            usage=usage,
        )


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage.of(usage.prompt_tokens, cached, usage.completion_tokens)


# --- errors ----------------------------------------------------------------------------------


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The body of an answer of `/v1/messages` that is an error, and the last event of a broken stream."""

    error: MessagesErrorDetail
    request_id: str


def error_body(status: int, error: ErrorDetail, request_id: str) -> bytes:
    """An error with `status` as JSON; which parameter is wrong, its message says."""
    kind = _TYPES.get(status, "api_error" if status >= _SERVERS else "invalid_request_error")
    return _encode(MessagesError(MessagesErrorDetail(kind, error.message), request_id))

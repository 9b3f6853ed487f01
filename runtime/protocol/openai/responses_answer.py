"""The answers of `/v1/responses`: items of output, and the events that tell how they grow. Sans-IO.

The text of an answer is one message, and each call of a function an item of its own. Events are
numbered from 0 without a gap; those that end a part repeat its text, so an answer keeps all of it. A
stream that is whole ends with `response.completed`, or `response.incomplete` where the tokens that
were allowed did not suffice, and any other with `response.failed` and `error`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Self

import attrs
import msgspec
from msgspec import Raw

from .answers import (
    ChatTokenLogprob,
    ErrorDetail,
    TextTemplate,
    Usage,
    encode_data,
    make_chat_logprobs,
)
from .generate import Delta, FinishReason, TokenLogprob
from .tool_calls import CallPiece, PartedAnswer

_encode = msgspec.json.Encoder().encode
_DELTA: Final = "response.output_text.delta"
_NUMBER: Final = b"0}"


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    """What a message says."""

    type: str = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The text of an answer, or what came of it before or after calls."""

    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText]


class FunctionCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """A call of one of the request's functions, whose arguments are JSON."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens the request and its answer had."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of `/v1/responses`, and what the events of a stream tell of it."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputMessage | FunctionCall]
    usage: ResponseUsage | None = None
    # What it repeats of the request.
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    # What there is none of here.
    background: bool = False
    previous_response_id: None = None
    service_tier: str = "default"
    store: bool = False
    truncation: str = "disabled"


@attrs.define(eq=False)
class _Item:
    id: str
    texts: list[str] = attrs.Factory(list)
    logprobs: list[ChatTokenLogprob] = attrs.Factory(list)
    name: str = ""
    """Of the function that is called; a message has none."""
    call_id: str = ""

    def told(self, status: str) -> OutputMessage | FunctionCall:
        if self.name:
            return FunctionCall(
                id=self.id,
                status=status,
                call_id=self.call_id,
                name=self.name,
                arguments="".join(self.texts),
            )
        parts = [self.part()] if self.texts else []
        return OutputMessage(id=self.id, status=status, content=parts)

    def part(self) -> OutputText:
        return OutputText(text="".join(self.texts), logprobs=self.logprobs)


class ResponsesAnswer(PartedAnswer):
    """One answer of `/v1/responses`, which repeats `echo`; `created` is in Unix seconds."""

    keeps_text: ClassVar = True

    def __init__(
        self, echo: dict[str, Any], answer_id: str, model: str, created: int, *, calls_max: float
    ) -> None:
        super().__init__(answer_id, model, calls_max=calls_max)
        self._created, self._echo = created, echo
        self._output: list[OutputMessage | FunctionCall] = []
        """The items that are complete."""
        self._item: _Item | None = None
        self._held: list[TokenLogprob] = []
        """Of tokens whose text has not come."""
        self._number = 0
        self._template: tuple[bytes, bytes, list[str]] | None = None
        """An event of text that goes on with the item that grows: what stands before the text, and
        between it and the event's number; and the texts so far."""

    # --- in: deltas ---

    def add_event(self, delta: Delta) -> bytes:
        template, text = self._template, delta.text
        is_text = bool(text) and delta.finish_reason is None and not delta.logprobs
        if is_text and template is not None and self._parser is None and not self._held:
            # Nearly all are so: more of a text, and nothing else.
            return self._more(template, text)
        self._open_events()
        self.add_text(delta)
        return self._taken()

    def _open_events(self) -> None:
        if self._events is None:
            self._events = []
            opened = Raw(_encode(self._response("in_progress")))
            self._say("response.created", response=opened)
            self._say("response.in_progress", response=opened)

    def _more(self, template: tuple[bytes, bytes, list[str]], text: str) -> bytes:
        head, tail, texts = template
        texts.append(text)
        self._number = number = self._number + 1
        return head + _encode(text) + tail + b"%d}\n\n" % (number - 1)

    def add_text(self, delta: Delta) -> None:
        self._held += delta.logprobs
        super().add_text(delta)

    def _add_call(self, piece: CallPiece) -> None:
        # Of what became a call nobody is told log probabilities.
        self._held = []
        if piece.name:
            self._close("completed")
            self._open(piece.name, f"call_{self._id}_{piece.index}")
        if piece.arguments and self._item is not None:
            self._item.texts.append(piece.arguments)
            self._say_of_item("response.function_call_arguments.delta", delta=piece.arguments)

    def _add(self, text: str) -> None:
        item = self._item
        if item is None or item.name:
            self._close("completed")
            item = self._open()
        if self._events is None:
            self._keep_logprobs(item)
        elif self._held:
            logprobs = self._keep_logprobs(item)
            self._say_of_item(_DELTA, content_index=0, delta=text, logprobs=logprobs)
        else:
            if self._template is None:
                event = {
                    "type": _DELTA,
                    "item_id": item.id,
                    "output_index": len(self._output),
                    "content_index": 0,
                    "delta": TextTemplate.MARK,
                    "logprobs": [],
                    "sequence_number": 0,
                }
                data = encode_data(_encode(event), _DELTA.encode()).rstrip().removesuffix(_NUMBER)
                head, tail = data.split(_encode(TextTemplate.MARK))
                self._template = head, tail, item.texts
            self._events.append(self._more(self._template, text))
            return
        item.texts.append(text)

    def _keep_logprobs(self, item: _Item) -> list[ChatTokenLogprob]:
        told = make_chat_logprobs(self._held).content
        item.logprobs += told
        self._held = []
        return told

    # --- out: items and events ---

    def _open(self, name: str = "", call_id: str = "") -> _Item:
        kind = "fc" if name else "msg"
        item = _Item(f"{kind}_{self._id}_{len(self._output)}", name=name, call_id=call_id)
        self._item, self._template = item, None
        if self._events is not None:
            index = len(self._output)
            self._say(
                "response.output_item.added", output_index=index, item=item.told("in_progress")
            )
            if not name:
                part = item.part()
                self._say_of_item("response.content_part.added", content_index=0, part=part)
        return item

    def _close(self, status: str) -> None:
        item = self._item
        if item is None:
            return
        if not item.name and not item.texts:
            item.texts.append("")
        told = item.told(status)
        if self._events is not None:
            if isinstance(told, FunctionCall):
                self._say_of_item(
                    "response.function_call_arguments.done",
                    name=told.name,
                    arguments=told.arguments,
                )
            else:
                part = told.content[0]
                self._say_of_item(
                    "response.output_text.done",
                    content_index=0,
                    text=part.text,
                    logprobs=part.logprobs,
                )
                self._say_of_item("response.content_part.done", content_index=0, part=part)
            self._say("response.output_item.done", output_index=len(self._output), item=told)
        self._output.append(told)
        self._item = None

    def _complete(self, usage: Usage) -> Response:
        if self._parser is not None:
            self._add_pieces(self._parser.finish())
        if self._item is None and not self._output:
            self._open()
        if self._held and self._item is not None and not self._item.name:
            # The last tokens had no text.
            self._add("")
        is_cut = self._reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        self._close(status)
        return self._response(
            status,
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
        )

    def end_events(self, usage: Usage) -> bytes:
        whole = self._complete(usage)
        self._say(f"response.{whole.status}", response=whole)
        return self._taken()

    def error_events(self, status: int, error: ErrorDetail) -> bytes:
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        self._open_events()
        failed = self._response("failed", error=ResponseError(code, error.message))
        self._say("response.failed", response=failed)
        # Of the two forms that an error event has had, each client reads one.
        told = {"code": error.code, "message": error.message, "param": error.param}
        self._say("error", **told, error=error)
        return self._taken()

    def to_body(self, usage: Usage, others: Sequence[Self] = ()) -> bytes:
        assert not others, "a response has no choices"
        return _encode(self._complete(usage))

    def _response(self, status: str, **more: Any) -> Response:
        return Response(
            id=f"resp_{self._id}",
            created_at=self._created,
            status=status,
            model=self._model,
            output=self._output,
            **more,
            **self._echo,
        )

    def _say(self, kind: str, **told: Any) -> None:
        super()._say(kind, **told, sequence_number=self._number)
        self._number += self._events is not None

    def _say_of_item(self, kind: str, **told: Any) -> None:
        if self._item is not None:
            self._say(kind, item_id=self._item.id, output_index=len(self._output), **told)

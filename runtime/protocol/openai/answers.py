"""OpenAI's answers as structs and events, and how they are built from an engine's deltas.

Clients may decode with the types the server encodes. One `ChatAnswer` or `CompletionAnswer` per
choice: feed it every delta in order, take either the bytes of the events or, at the end, the whole
answer; with tools `ToolAnswer` of `tool_calls.py` does. Sans-IO; who counts the tokens and sends what when is `runtime/http/streaming.py`.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Protocol, Self

import msgspec

from ...errors import LocalProtocolError
from .generate import Delta, SamplingDefaults, TokenLogprob

_encode = msgspec.json.Encoder().encode


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """One token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of all tokens of an answer, or of those of one event."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The same for `/v1/completions`: one item a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of an echoed prompt, which nothing comes before."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where the token's text begins in that of the answer, in characters."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int = 0
    """Those that were not computed for this request, as the engine says."""


class Usage(msgspec.Struct, frozen=True):
    """How many tokens the request and its answer had."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class FunctionDelta(msgspec.Struct, frozen=True):
    """The name of what is called, in the first event of a call, and more of its arguments' JSON."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionDelta
    type: str = "function"


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    index: Annotated[int, msgspec.Meta(ge=0)]
    function: FunctionDelta
    id: str | None = None
    """In the first event of a call, and so is the type."""
    type: str | None = None


class ChatReply(msgspec.Struct, frozen=True):
    role: str
    content: str | None
    """None where the answer only calls tools."""
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatReply
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Of the answer, for requests with `return_token_ids`."""


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of `/v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed chat answer.

    `usage` is left out unless the client asked for it; then it is null in all chunks but the last,
    which has no choices.
    """

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """In the first event of a choice, for requests with `return_token_ids`."""


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """With `return_token_ids`; of a stream in the first event of a choice."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of `/v1/completions`, and one event of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "trinamo"
    root: str = ""
    """The name of the model that answers: another one than `id` where that is an alias."""
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    """The tokens of its context, as vLLM calls it; not there where nobody tells it."""
    supported_parameters: list[str] | msgspec.UnsetType = msgspec.UNSET
    """What its requests may have (`fields.py`); not there where they go unread to another server."""
    default_parameters: SamplingDefaults | msgspec.UnsetType = msgspec.UNSET
    """What requests have where they leave it out; not there where the model has none of its own."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Model]


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is an error, and the last event of a broken stream."""

    error: ErrorDetail


# --- server-sent events ----------------------------------------------------------------------

# They are read by `transports/openai/events.py`.
# Format: https://html.spec.whatwg.org/multipage/server-sent-events.html

DONE_DATA = b"[DONE]"
"""The data of the event that ends a complete OpenAI stream."""

DONE = b"data: [DONE]\n\n"

_TEXT_MARK = "\x00trinamo-text\x00"


def encode_data(data: bytes, name: bytes = b"") -> bytes:
    """One event whose data is `data`, which must be a single line such as compact JSON.

    OpenAI's chats and completions have events without a name.
    """
    if b"\n" in data or b"\r" in data:
        raise LocalProtocolError("an event's data must be one line here; encode it as compact JSON")
    return _named(name) + data + b"\n\n"


def _named(name: bytes) -> bytes:
    return b"event: " + name + b"\ndata: " if name else b"data: "


def error_body(_status: int, error: ErrorDetail, _request_id: str) -> bytes:
    """An error as OpenAI's clients read it: as the whole answer, and as the data of an event."""
    return _encode(ErrorBody(error))


class TextTemplate:
    """One event per token at a third of the cost: everything but the text is encoded once.

    `chunk` is any value that msgspec can encode and that holds `TextTemplate.MARK` exactly once,
    as a whole string, where the text belongs. `name` is the event's.
    """

    MARK = _TEXT_MARK

    __slots__ = ("_head", "_tail")

    def __init__(self, chunk: object, name: bytes = b"") -> None:
        parts = _encode(chunk).split(_encode(_TEXT_MARK))
        if len(parts) != 2:
            raise LocalProtocolError(f"the template's mark occurs {len(parts) - 1} times, not once")
        self._head = _named(name) + parts[0]
        self._tail = parts[1] + b"\n\n"

    def render(self, text: str) -> bytes:
        """The whole event, with `text` escaped as a JSON string."""
        return self._head + _encode(text) + self._tail


# --- log probabilities, as the two endpoints write them ----------------------------------------


def make_chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                _text(each.token),
                each.logprob,
                list(each.token),
                [TopLogprob(_text(top), logprob, list(top)) for top, logprob in each.top],
            )
            for each in tokens
        ]
    )


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def _by_text(told: TokenLogprob) -> dict[str, float]:
    """Of each text the likeliest token, and of its own text the token itself: parts of characters look alike."""
    found: dict[str, float] = {}
    for token, logprob in [(told.token, told.logprob), *told.top]:
        found.setdefault(_text(token), logprob)
    return found


# --- from deltas to answers ------------------------------------------------------------------


_IdLists = tuple[list[int] | msgspec.UnsetType, list[int] | msgspec.UnsetType]
_NO_IDS: Final[_IdLists] = (msgspec.UNSET, msgspec.UNSET)


class _TokenIds:
    """The tokens of one choice, and of its prompt, for a client that wants them."""

    def __init__(self) -> None:
        self.answer: list[int] = []
        self.prompt: list[int] = []

    def keep(self, delta: Delta) -> None:
        """Keep those of `delta`; the prompt's once, however often they are said."""
        self.answer += delta.token_ids
        self.prompt = self.prompt or delta.prompt_token_ids

    def tell(self, delta: Delta) -> _IdLists:
        """Those of `delta`, and of the prompt where it is the first that has them."""
        is_first = not self.prompt and bool(delta.prompt_token_ids)
        self.prompt = self.prompt or delta.prompt_token_ids
        return delta.token_ids, (self.prompt if is_first else msgspec.UNSET)


class AnswerFormat(Protocol):
    """What every kind of answer offers. `add_*` takes each delta once, in order, in one form."""

    ends_itself: ClassVar[bool]
    """The events of the last delta say that the answer is whole; else `end_events` do, and no other."""
    keeps_text: ClassVar[bool]
    """Events that come later repeat the text: a stream of them keeps all of it."""

    def add_event(self, delta: Delta) -> bytes:
        """Take a delta and return its events; empty if there is nothing to send."""
        ...

    def end_events(self, usage: Usage) -> bytes:
        """What ends a whole stream, behind the events of its last delta."""
        ...

    def error_events(self, status: int, error: ErrorDetail) -> bytes:
        """What ends a stream that broke, which must not look whole."""
        ...

    def add_text(self, delta: Delta) -> None:
        """Take a delta for the whole answer."""
        ...

    def to_body(self, usage: Usage, others: Sequence[Self] = ()) -> bytes:
        """The whole answer as JSON: this choice, and `others` behind it."""
        ...


class _Answer(ABC):
    """One choice of an answer that is told as text: a chat's or a completion's."""

    ends_itself: ClassVar = True
    keeps_text: ClassVar = False
    _kind: ClassVar[str]
    """What its id begins with."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        created: int,
        *,
        wants_usage: bool,
        index: int = 0,
        tells_ids: bool = False,
    ) -> None:
        self._id, self._model, self._created = f"{self._kind}-{answer_id}", model, created
        self._wants_usage, self._index = wants_usage, index
        self._no_usage = None if wants_usage else msgspec.UNSET
        """What all events but the last say of it."""
        self._ids = _TokenIds() if tells_ids else None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: str | None = None
        self._template: TextTemplate | None = None

    @abstractmethod
    def _chunk(self, choices: Any, usage: Usage | msgspec.UnsetType | None) -> msgspec.Struct:
        """One event, with these choices."""

    def end_events(self, usage: Usage) -> bytes:
        if not self._wants_usage:
            return DONE
        return encode_data(_encode(self._chunk([], usage))) + DONE

    def error_events(self, status: int, error: ErrorDetail) -> bytes:
        return encode_data(error_body(status, error, ""))

    def add_text(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._logprobs += delta.logprobs
        if self._ids is not None:
            self._ids.keep(delta)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason


class ChatAnswer(_Answer):
    """One choice of an answer of `/v1/chat/completions`.

    `created` is in Unix seconds. The role travels in the first chunk, with the first text.
    """

    _kind = "chatcmpl"
    _is_begun = False

    def add_event(self, delta: Delta) -> bytes:
        if not self._is_begun:
            self._is_begun = True
            return self._event(ChatDelta(role="assistant", content=delta.text), delta)
        if delta.finish_reason is not None or delta.logprobs or self._ids is not None:
            return self._event(ChatDelta(content=delta.text or None), delta)
        if not delta.text:
            return b""
        if self._template is None:
            choice = ChatChunkChoice(self._index, ChatDelta(content=TextTemplate.MARK))
            self._template = TextTemplate(self._chunk([choice], self._no_usage))
        return self._template.render(delta.text)

    def to_body(self, usage: Usage, others: Sequence[ChatAnswer] = ()) -> bytes:
        return _encode(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[each.choice() for each in (self, *others)],
                usage=usage,
                prompt_token_ids=msgspec.UNSET if self._ids is None else self._ids.prompt,
            )
        )

    def choice(self) -> ChatChoice:
        return ChatChoice(
            self._index,
            self._reply("".join(self._texts)),
            self._finish_reason,
            make_chat_logprobs(self._logprobs) if self._logprobs else None,
            msgspec.UNSET if self._ids is None else self._ids.answer,
        )

    def _reply(self, text: str) -> ChatReply:
        return ChatReply("assistant", text)

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | msgspec.UnsetType | None,
        prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    def _event(self, said: ChatDelta, delta: Delta) -> bytes:
        logprobs = make_chat_logprobs(delta.logprobs) if delta.logprobs else None
        ids, prompt_ids = _NO_IDS if self._ids is None else self._ids.tell(delta)
        choice = ChatChunkChoice(self._index, said, delta.finish_reason, logprobs, ids)
        return encode_data(_encode(self._chunk([choice], self._no_usage, prompt_ids)))


class CompletionAnswer(_Answer):
    """One choice of an answer of `/v1/completions`; `created` is in Unix seconds.

    With `echo`, its text begins with the prompt: with `echo` itself, or as its tokens say where that
    is empty; so do its log probabilities, if `tells_logprobs`.
    """

    _kind = "cmpl"

    def __init__(
        self,
        *known: Any,
        echo: str | None = None,
        tells_logprobs: bool = True,
        **told: Any,
    ) -> None:
        super().__init__(*known, **told)
        self._echo, self._tells_logprobs = echo, tells_logprobs
        self._begins_prompt = False
        """Whether the first of its log probabilities is that of the prompt's first token."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._chars = 0
        """Where in the text its next token begins: in the middle of a character, where that does."""

    def add_event(self, delta: Delta) -> bytes:
        begins = False
        if self._echo is not None:
            delta, begins = self._behind_prompt(delta, self._echo)
        if delta.finish_reason is not None or delta.logprobs or self._ids is not None:
            logprobs = self._told(delta.logprobs, begins_prompt=begins)
            told = _NO_IDS if self._ids is None else self._ids.tell(delta)
            said = CompletionChoice(self._index, delta.text, delta.finish_reason, logprobs, *told)
            return encode_data(_encode(self._chunk([said], self._no_usage)))
        if not delta.text:
            return b""
        if self._template is None:
            said = CompletionChoice(self._index, TextTemplate.MARK)
            self._template = TextTemplate(self._chunk([said], self._no_usage))
        return self._template.render(delta.text)

    def add_text(self, delta: Delta) -> None:
        if self._echo is not None:
            delta, self._begins_prompt = self._behind_prompt(delta, self._echo)
        super().add_text(delta)

    def to_body(self, usage: Usage, others: Sequence[CompletionAnswer] = ()) -> bytes:
        return _encode(self._chunk([each.choice() for each in (self, *others)], usage))

    def _behind_prompt(self, delta: Delta, text: str) -> tuple[Delta, bool]:
        """The first delta behind the prompt, and whether log probabilities of that stand before its own."""
        self._echo = None
        prompt = delta.prompt_logprobs
        text = text or b"".join(each.token for each in prompt).decode("utf-8", "replace")
        before = prompt if self._tells_logprobs else []
        behind = msgspec.structs.replace(
            delta, text=text + delta.text, logprobs=[*before, *delta.logprobs]
        )
        return behind, bool(before)

    def choice(self) -> CompletionChoice:
        logprobs = self._told(self._logprobs, begins_prompt=self._begins_prompt)
        told = _NO_IDS if self._ids is None else (self._ids.answer, self._ids.prompt)
        text = "".join(self._texts)
        return CompletionChoice(self._index, text, self._finish_reason, logprobs, *told)

    def _chunk(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )

    def _told(
        self, tokens: Sequence[TokenLogprob], *, begins_prompt: bool
    ) -> CompletionLogprobs | None:
        """What is said of `tokens`, if there are any. Each is among its alternatives, however unlikely.

        `begins_prompt`: of the first of them nothing is said, since nothing comes before it.
        """
        if not tokens:
            return None
        told: list[float | None] = [each.logprob for each in tokens]
        top: list[dict[str, float] | None] = [_by_text(each) for each in tokens]
        if begins_prompt:
            told[0] = top[0] = None
        offsets = []
        for each in tokens:
            offsets.append(self._chars)
            self._chars += len(self._decoder.decode(each.token))
        return CompletionLogprobs([_text(each.token) for each in tokens], told, top, offsets)
